"""Peak memory and time of recurrent scans, over cells, backends and what is computed again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.measure import Variants, held_bytes, measure
from benchmarks.scans import PARTS, Case, Part, RecurrentBenchConfig, Way, make_case
from benchmarks.table import Row, compare, format_rows, write_rows
from funcrl.graph.capture import capture


class Refused(NamedTuple):
    """A variant that does not run, and why."""

    what: str
    shape: str  # in words
    variant: str
    refused: str


Found: TypeAlias = list[Row | Refused]


def bench_recurrent(config: RecurrentBenchConfig) -> Found:
    """Return a row for each cell, number of steps, part and variant, then those refused."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    found: Found = []
    with _float32_products(config.precision):
        for cell in config.cells:
            for steps in config.steps:
                case = make_case(config, cell, steps)
                for part in config.parts:
                    found += _measure(case, part)
    rows, refused = _apart(found)
    found = [*compare(rows), *refused]
    write_rows(config.json, found)
    return found


def format_recurrent(found: Sequence[Row | Refused]) -> str:
    """Return the rows as tables, and below them why variants are refused, with their names."""
    rows, refused = _apart(found)
    variants: dict[str, dict[str, None]] = {}
    for each in refused:
        variants.setdefault(each.refused, {})[each.variant] = None
    lines = [f"* {reason} ({'; '.join(names)})" for reason, names in variants.items()]
    text = format_rows(rows)
    return "\n".join([text, "", "Refused:", "", *lines]) if lines else text


def _apart(found: Sequence[Row | Refused]) -> tuple[list[Row], list[Refused]]:
    rows = [each for each in found if isinstance(each, Row)]
    return rows, [each for each in found if isinstance(each, Refused)]


def _measure(case: Case, part: Part) -> Found:
    """Return the rows of a part, and what is refused of it, which one step of it tells."""
    run, ways, refused = PARTS[part], [], []
    for way in case.ways(part):
        try:
            run(way, case.inputs.first_step())
        except ValueError as error:
            refused.append(Refused(part, case.shape, way.name, str(error)))
        else:
            ways.append(way)
    if case.config.cudagraph == "full":
        return [*(_recorded(case, part, way) for way in ways), *refused]
    variants: Variants = {way.name: partial(run, way, case.inputs) for way in ways}
    repeats, device = case.config.repeats, case.config.device
    return [*measure(part, case.shape, variants, repeats, device), *refused]


def _recorded(case: Case, part: Part, way: Way) -> Row:
    """Return the row of a CUDA graph, with what it holds as its peak."""
    device = case.config.device
    before = held_bytes(device)

    def program(x: Tensor) -> list[Tensor]:
        return PARTS[part](way, case.inputs._replace(x=x))

    replay = capture(program, [case.inputs.x], written=())
    held = held_bytes(device) - before
    call: Variants = {way.name: partial(replay, case.inputs.x)}
    (row,) = measure(part, case.shape, call, case.config.repeats, device)
    return row._replace(peak_bytes=held + (row.peak_bytes or 0))


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Let cuBLAS and cuDNN multiply float32 numbers so, and then as before."""
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.rnn)
    before = [each.fp32_precision for each in libraries]
    try:
        for each in libraries:
            each.fp32_precision = precision
        yield
    finally:
        for each, value in zip(libraries, before, strict=True):
            each.fp32_precision = value

"""What one way to compute gives: log-probabilities, and if asked for, each operation's result."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core.types import Params, Row
from funcrl.loop.parity.results import ParityRow
from funcrl.models import Transformer
from funcrl.models.logprobs import logprob_fn
from funcrl.models.recording import Operation, recording

LOGPROBS = "log-probabilities"
# (params, sample) -> [T, ...] by name, in the order of computation; the last is LOGPROBS
TokensFn: TypeAlias = Callable[[Params, Row], dict[str, Tensor]]


class Part(NamedTuple):
    """The values of consecutive tokens of one sample."""

    sample: int
    start: int  # the first of the tokens
    values: Tensor  # [n, ...]


Side: TypeAlias = dict[str, list[Part]]  # by name, in the order of computation


class Way(NamedTuple):
    """A way to compute log-probabilities of the same tokens."""

    name: str
    # (whether to record every operation) -> what it gives
    run: Callable[[bool], Side]
    records: bool = True  # whether it can


def tokens_fn(model: Transformer, recorded: bool) -> TokensFn:
    """Return `(params, sample) -> values`: the trainer's log-probabilities, and what led to them.

    Args:
        model: the network.
        recorded: whether the result of each operation is a value as well.
    """
    operations: list[Operation] = []
    model_fn = logprob_fn(recording(model, operations) if recorded else model)

    def values(params: Params, sample: Row) -> dict[str, Tensor]:
        operations.clear()
        logprobs = model_fn(params, sample).logprobs
        return dict(operations) | {LOGPROBS: logprobs}

    return values


def of_samples(values: dict[str, Tensor]) -> Side:
    """Return the side of values [B, T, ...] of whole samples; the first token is not predicted."""
    side = {name: [Part(n, 0, v) for n, v in enumerate(rows)] for name, rows in values.items()}
    side[LOGPROBS] = [Part(n, 1, row[1:]) for n, row in enumerate(values[LOGPROBS])]
    return side


def difference(name: str, reference: Side, side: Side, of: str = LOGPROBS) -> ParityRow:
    """Return the row of a way: how far its values are from those of whole samples.

    Args:
        name: of the way.
        reference: whole samples, in order.
        side: what the way gives.
        of: the values to compare.
    """
    whole = reference[of]
    gaps = []
    for sample, start, values in side[of]:
        skipped = start - whole[sample].start
        expected = whole[sample].values[skipped : skipped + len(values)]
        gap = (values.to(expected.device).double() - expected.double()).abs()
        gaps.append(gap.flatten(1).amax(dim=1) if gap.ndim > 1 else gap)
    largest = torch.cat(gaps)  # of each token
    return ParityRow(
        name=name,
        tokens=largest.numel(),
        different=int((largest != 0).sum()),
        max_abs_diff=largest.max().item(),
    )


def first_difference(reference: Side, side: Side) -> str:
    """Return the first operation whose results differ, with the largest difference, "" if none."""
    for name in side:
        if name not in reference:
            continue
        row = difference(name, reference, side, of=name)
        if row.different:
            return (
                f"{name}, {row.different:,} of {row.tokens:,} tokens, by at most "
                f"{row.max_abs_diff:.1e}"
            )
    return ""

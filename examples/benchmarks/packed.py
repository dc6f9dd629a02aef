"""Rows of one compiled step on the same samples in several layouts: padded, packed, prompts shared.

Each is a program of its own, of its layout's shape; rows are beside the padded one's.
"""

from benchmarks.compiled import compiled_row, whole_step
from benchmarks.inputs import Case
from benchmarks.table import Row
from funcrl.core.types import Rows
from funcrl.rl.metrics import padding_frac
from funcrl.rl.packing import pack_batch, pack_batch_groups

_LONGEST = 4  # as in `funcrl train`


def packed_rows(case: Case) -> list[Row]:
    """Return a row for each layout of `case.config.packings`, each with the state donated."""
    rows = []
    for name in case.config.packings:
        batch = _laid_out(case, name)
        step = whole_step(case, "donated")
        words = f"{name}, {len(batch.tokens)} x {batch.tokens.shape[1]}"
        row = compiled_row(case, batch, "step, packed", words, step, case.config.compile)
        numbers = {"computed_tokens": batch.tokens.numel(), "padding": padding_frac(batch).item()}
        rows.append(row._replace(numbers=row.numbers | numbers))
    return rows


def _laid_out(case: Case, packing: str) -> Rows:
    if packing == "none":
        return case.batch
    length = case.config.pack_length or _LONGEST * case.config.length
    pack = pack_batch if packing == "samples" else pack_batch_groups
    return pack(case.batch, length)

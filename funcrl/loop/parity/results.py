"""What a comparison finds: of the generator, of each way to compute, and as text."""

import math
from typing import NamedTuple

from funcrl.loop.parity.config import ParityConfig


class ParityRow(NamedTuple):
    """One way to compute log-probabilities, against the trainer's own of one sample at a time."""

    name: str
    tokens: int = 0
    different: int = 0  # of them, with another log-probability, by however little
    max_abs_diff: float = 0.0
    first_difference: str = ""  # the first operation that differs, where it was looked for
    skipped: str = ""  # why nothing was computed, "" where it was

    @property
    def equal(self) -> bool:
        """Whether all log-probabilities are equal to the last bit."""
        return not self.skipped and self.different == 0


class Parity(NamedTuple):
    """The result of a comparison: the generator's sampled tokens, and a row for each way."""

    tokens: int
    different: int  # of them, with another log-probability, by however little
    max_abs_diff: float
    mean_abs_diff: float
    bitwise: bool
    rows: tuple[ParityRow, ...] = ()

    @property
    def largest(self) -> float:
        """The largest difference of all rows; NaN where one is not a number."""
        found = [self.max_abs_diff, *(row.max_abs_diff for row in self.rows)]
        return math.nan if any(map(math.isnan, found)) else max(found)

    def as_json(self) -> dict[str, object]:
        """Return the fields as plain values."""
        rows = [{**row._asdict(), "equal": row.equal} for row in self.rows]
        return {**self._asdict(), "rows": rows}


def format_parity(config: ParityConfig, result: Parity) -> str:
    """Return a comparison as text: the generator in three lines, and the table."""
    lines = [
        f"{config.model}, {config.generator}, {config.numerics} numerics, {config.dtype}: "
        f"{result.tokens} tokens, {result.different} of them differ",
        f"largest difference {result.max_abs_diff:.2e}, mean {result.mean_abs_diff:.2e} "
        f"(tolerance {config.limit:.2e})",
        f"bitwise identical: {'yes' if result.bitwise else 'no'}",
        "",
        "Each way against the trainer's forward pass of one sample at a time:",
    ]
    width = max((len(row.name) for row in result.rows), default=0)
    for row in result.rows:
        tokens = "-" if row.skipped else f"{row.tokens:,}"
        lines.append(f"  {row.name:{width}}  {tokens:>7} tokens  {_verdict(row)}")
        if row.first_difference:
            lines.append(f"  {'':{width}}  first: {row.first_difference}")
    if config.bisect and all(row.equal or row.skipped for row in result.rows):
        lines += ["", "Nothing differs in any layer."]
    return "\n".join(lines)


def _verdict(row: ParityRow) -> str:
    if row.skipped:
        return f"not computed: {row.skipped}"
    if row.equal:
        return "equal"
    return f"{row.different:,} differ, by at most {row.max_abs_diff:.1e}"

"""What `funcrl parity` is asked, and what it finds."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from funcrl.config import VLLMConfig
from funcrl.core.arguments import Count, Natural, NotNegative, check_fields

# Far above rounding, far below what any mistake does to a model with structure.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


@dataclass(frozen=True)
class ParityConfig:
    """Compare log-probabilities of a generator and of a trainer, on tokens that are drawn."""

    model: str = "micro"
    """A shape, with random weights, or pretrained ones, as for `funcrl train`."""
    numerics: Literal["native", "exact"] = "native"
    """The operations of the model: torch's fastest, or those whose result for a token depends on
    that token's sample alone, so that all ways to compute it agree to the last bit."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """The generator that draws the tokens, and whose log-probabilities are checked."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    rows: Literal["all", "generator"] = "all"
    """The rows of the table: all ways to compute, or those of the generator that draws alone."""
    compiled: bool = False
    """Check the compiled training step as well, which takes a minute."""
    bisect: bool = False
    """Print the first layer and operation whose result differs. Every result of a batch is in
    memory at a time, so a large model needs few prompts."""
    num_prompts: Count = 8
    """The number of prompts, of random tokens."""
    num_samples: Count = 4
    """The number of completions of each prompt."""
    prompt_tokens: Count = 16
    """The number of tokens of each prompt."""
    max_tokens: Count = 32
    """The number of tokens of each completion."""
    seed: Natural = 0
    """The seed of the weights, the prompts and the draws."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    tolerance: NotNegative | None = None
    """The largest difference that passes, in any row; when left out 0 with exact numerics, else
    1e-3 in float32 and 0.5 in bfloat16."""
    json: bool = False
    """Print the result as one JSON object."""

    def __post_init__(self) -> None:
        check_fields(self, "parity")

    @property
    def limit(self) -> float:
        """The largest difference that passes."""
        if self.tolerance is not None:
            return self.tolerance
        return 0.0 if self.numerics == "exact" else _TOLERANCE[self.dtype]


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

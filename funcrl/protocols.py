"""What a loop is put together from: a task, its tokenizer, a generator. Any object will do."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from funcrl.config import Sampling
from funcrl.types import Params, Samples


class Prompt(NamedTuple):
    """What a task asks."""

    text: str
    answer: str = ""  # for the reward, and for a warm start; a generator never sees it
    data: Any = None  # what else a reward needs


class Tokenizer(Protocol):
    """Text to tokens and back."""

    vocab_size: int
    end: int  # the token that ends a completion

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; the end token has none."""


class Task(Protocol):
    """What a policy is trained on.

    Three more attributes are optional: `reward_weights`, name -> factor (1 each when left out);
    `accuracy`, the name of the reward that `eval/accuracy` is the mean of ("correct"); and
    `extract(completion)`, the answer that a completion votes for in majority@k (all of its text).
    """

    name: str
    tokenizer: Tokenizer

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return the training prompts number start, start + 1, ... of the seed's stream."""

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return named rewards of one completion."""

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out prompts, at most `count` and always the same; none if there are none."""


class Generator(Protocol):
    """What draws completions: the embedded sampler, or an engine."""

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""

    def close(self) -> None:
        """Free what the generator holds."""

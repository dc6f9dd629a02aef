"""Reference workloads of the whole loop: random weights, random prompts, completions of one length.

What a library does between two updates is timed, not what a model learns: nothing ends a
completion but its length, and the reward says nothing about it but differs within a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from funcrl import rng
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.tasks import Prompt, Task, Tokenizer

WARM_STEPS = 2  # the first step compiles; the second is the first that finds everything made


class Workload(NamedTuple):
    """The sizes of a run: its steps, and of each step the prompts, the samples and the tokens."""

    model: str = "qwen3-0.6b"  # a shape
    vocab_size: int = 151_936
    num_prompts: int = 16
    num_generations: int = 8
    prompt_tokens: int = 128
    max_tokens: int = 256  # of each completion, no fewer and no more
    temperature: float = 1.0
    steps: int = 10  # that are measured, after those that warm up

    @property
    def num_samples(self) -> int:
        """The number of completions of a step."""
        return self.num_prompts * self.num_generations

    def __str__(self) -> str:
        """Return the sizes in words."""
        return (
            f"{self.model}, vocabulary {self.vocab_size}, {self.num_prompts} prompts x "
            f"{self.num_generations} samples, {self.prompt_tokens} + {self.max_tokens} tokens"
        )


WORKLOADS = {
    "grpo-128x256": Workload(),
    "seed": Workload(num_prompts=5, max_tokens=100, temperature=0.8, steps=10 - WARM_STEPS),
}


class NumberTokenizer(Tokenizer):
    """A tokenizer whose text is the numbers of the tokens; no token ends a completion."""

    end = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the tokens that a text names."""
        return [int(number) for number in text.split()]

    def decode(self, tokens: list[int]) -> str:
        """Return the numbers of tokens."""
        return " ".join(map(str, tokens))


class RandomPrompts(Task):
    """A task of random prompts of one length, whose reward is the number of the first token."""

    name = "random_prompts"
    accuracy = "first_token"

    def __init__(self, workload: Workload) -> None:
        self.tokenizer: Tokenizer = NumberTokenizer(workload.vocab_size)
        self._workload = workload

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return prompts of which no two are alike, so that no cache knows them."""
        vocab_size, length = self._workload.vocab_size, self._workload.prompt_tokens
        drawn = [
            torch.randint(
                vocab_size, (length,), generator=rng.generator(seed, number), device="cpu"
            )
            for number in range(start, start + count)
        ]
        return [Prompt(self.tokenizer.decode(tokens.tolist())) for tokens in drawn]

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return the number of the first token, as a share of the vocabulary."""
        del prompt
        return {"first_token": int(completion.split(maxsplit=1)[0]) / self._workload.vocab_size}


def as_train_config(workload: Workload, given: TrainConfig) -> TrainConfig:
    """Return the configuration of a workload, with everything else as given."""
    return replace(given, **options_of(workload, given))


def options_of(workload: Workload, given: TrainConfig) -> dict[str, Any]:
    """Return the options that a workload says itself, by their names in `TrainConfig`.

    The loss is DAPO's without a KL penalty, parameters and moments are float32, products bfloat16.
    """
    samples = workload.num_samples
    return {
        "model": workload.model,
        "num_prompts": workload.num_prompts,
        "num_generations": workload.num_generations,
        "sampling": Sampling(max_tokens=workload.max_tokens, temperature=workload.temperature),
        "algorithm": AlgorithmConfig(name="dapo", kl=0.0, entropy=0.0),
        "optimizer": OptimizerConfig(learning_rate=1e-6, schedule="constant", warmup=0),
        "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=0),
        "checkpoint": CheckpointConfig(every=0),
        "log": LogConfig(completions_every=1_000_000),
        "dtype": "bfloat16",
        # Exact numerics have an attention of their own.
        "attend": "native" if given.numerics == "exact" else "flash",
        "logprob_chunk": "all",
        "slots": samples,
        "vllm": VLLMConfig(
            context_length=workload.prompt_tokens + workload.max_tokens,
            slots=samples,
            cache_bytes=1 << 40,  # as much as the samples can fill
        ),
    }

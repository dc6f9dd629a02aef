"""A network of your own: a stack of causal convolutions learns to repeat what it read.

    python examples/own_model.py                 # 60 steps of GRPO from random weights

Any `nn.Module` from tokens [T] to logits [T, V] will do. funcrl runs it as a function of its
parameters, row by row under `torch.vmap`, and draws completions from it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import funcrl
from funcrl.config import AlgorithmConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig


class Convolutions(torch.nn.Module):
    """Each token sees itself and the seven before it, in each of two layers."""

    def __init__(self, vocab_size: int, width: int = 64):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.layers = torch.nn.ModuleList(torch.nn.Conv1d(width, width, 8) for _ in range(2))
        self.out = torch.nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V] of tokens [T] of one sample: there is no batch axis here."""
        x = self.embed(tokens).T
        for layer in self.layers:
            x = x + layer(torch.nn.functional.pad(x, (7, 0))).relu()  # zeros before the first token
        return self.out(x.T)


def share_right(completion: str, answer: str) -> float:
    """Return the share of the answer's characters that are right."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


ROWS = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}"} for n in range(1000)]
WORDS = funcrl.tasks.CharTokenizer("0123456789>")
TASK = funcrl.tasks.from_rows(ROWS, share_right, tokenizer=WORDS, name="repeat")


@dataclass(frozen=True)
class Config:
    """Train a convolutional network to repeat three digits."""

    steps: int = 60
    """The number of rollouts, each with one update."""
    num_prompts: int = 32
    """The number of prompts in a rollout; each gets 8 completions."""
    seed: int = 0
    """The seed of the prompts and the samples."""
    run_dir: Path | None = None
    """The folder of the run, for `funcrl report`; the first free runs/repeat-1 when left out."""


def main(args: Config) -> list[dict[str, float]]:
    """Train, show the run, and return its metrics."""
    config = TrainConfig(
        **vars(args),
        sampling=Sampling(max_tokens=3),
        algorithm=AlgorithmConfig(kl=0.0),
        warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=20),
    )
    torch.manual_seed(args.seed)
    parts = funcrl.build(config, task=TASK, model=Convolutions(WORDS.vocab_size))
    trained = funcrl.train(config, parts=parts, view="live")
    print(trained)
    return trained.history


if __name__ == "__main__":
    main(tyro.cli(Config))

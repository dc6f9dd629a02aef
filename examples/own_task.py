"""A task of your own: a policy learns to sort three digits.

    python examples/own_task.py                  # 150 steps of GRPO from random weights
    python examples/own_task.py --steps 30 --num-prompts 16

A task says what is asked and what an answer is worth. This one pays for every digit that is in
its place, so that random weights already earn something, and no warm start is needed.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

import funcrl
from funcrl.config import AlgorithmConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig


class Sort(funcrl.tasks.Task):
    """The prompt "312>" wants the answer "123"."""

    name = "sort"
    tokenizer = funcrl.tasks.CharTokenizer("0123456789>")

    def prompts(self, seed, start, count):
        """Return `count` prompts from number `start` on, a function of the arguments alone."""
        draws = [funcrl.rng.fold_in(seed, index) for index in range(start, start + count)]
        digits = [f"{draw % 1000:03d}" for draw in draws]
        return [funcrl.tasks.Prompt(f"{text}>", answer="".join(sorted(text))) for text in digits]

    def eval_prompts(self, count):
        """Return the prompts of another seed, on which the accuracy is measured."""
        return self.prompts(2**32, 0, count)

    def reward(self, prompt, completion):
        """Return named rewards, which are added: digits in their places, and all of them."""
        right = sum(a == b for a, b in zip(completion, prompt.answer, strict=False))
        return {"digits": right / 3, "correct": float(completion == prompt.answer)}


@dataclass(frozen=True)
class Config:
    """Train a policy to sort three digits."""

    steps: int = 150
    """The number of rollouts, each with one update."""
    num_prompts: int = 64
    """The number of prompts in a rollout; each gets 8 completions."""
    seed: int = 0
    """The seed of the weights, the prompts and the samples."""
    run_dir: Path | None = None
    """The folder of the run, for `funcrl report`; the first free runs/sort-1 when left out."""


def main(args: Config) -> list[dict[str, float]]:
    """Train, show the run, and return its metrics."""
    config = TrainConfig(
        **vars(args),
        sampling=Sampling(max_tokens=3),
        algorithm=AlgorithmConfig(kl=0.0),
        warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=25),
    )
    trained = funcrl.train(config, task=Sort(), view="live")
    print(trained)
    return trained.history


if __name__ == "__main__":
    main(tyro.cli(Config))

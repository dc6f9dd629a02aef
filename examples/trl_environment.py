"""An environment as TRL's users write it: a policy learns to find a digit in four guesses.

    python examples/trl_environment.py           # 150 steps from random weights, half a minute

`reset`, `guess` and `get_reward` are what `GRPOTrainer(environment_factory=Guess)` takes. With a
chat model pass its tokenizer, and neither `read_calls` nor `stop`: its template tells of `guess`.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

import funcrl
from funcrl import config
from funcrl.tasks import ToolCall


class Guess:
    """Think of a digit; who guesses hears whether it is more or less."""

    def reset(self, secret: int, **_) -> str:
        """Begin with a digit, which a row of the data has, and return what a policy reads."""
        self.secret, self.guesses, self.found = secret, 0, False
        return "?"

    def guess(self, digit: int) -> str:
        """Guess the digit.

        Args:
            digit: from 0 to 9."""
        self.guesses += 1
        self.found = self.found or digit == self.secret
        return "=" if digit == self.secret else "+" if digit < self.secret else "-"

    def get_reward(self) -> float:
        """Return whether it was found."""
        return float(self.found)


def read_calls(text: str) -> list[ToolCall]:
    """Return the guess in an answer: a policy that begins with nothing writes one digit."""
    return [ToolCall("guess", {"digit": int(text)})] if text.isdigit() else []


def train(factory, rows: list[dict], **options):
    """Train a policy from random weights to guess in four turns."""
    task = funcrl.tasks.from_environment(
        factory, rows, tokenizer=funcrl.tasks.CharTokenizer("0123456789?+-="),
        read_calls=read_calls, stop=tuple("0123456789"), max_turns=4, name="guess")  # fmt: skip
    made = config.TrainConfig(
        **options, num_generations=8, num_minibatches=4, sampling=config.Sampling(max_tokens=2),
        algorithm=config.AlgorithmConfig(kl=0.0, entropy=0.0), warm_start=config.WarmStartConfig(0),
        optimizer=config.OptimizerConfig(learning_rate=4e-3),
        evaluation=config.EvaluationConfig(25, temperature=1.0))  # fmt: skip
    return funcrl.train(made, task=task, view="live")


@dataclass(frozen=True)
class Config:
    """Train a policy to guess."""

    steps: int = 150
    """The number of rollouts, each with one update."""
    num_prompts: int = 32
    """The number of digits in a rollout; each is guessed 8 times."""
    run_dir: Path | None = None
    """The folder of the run, for `funcrl report`; the first free runs/guess-1 when left out."""


def main(args: Config) -> list[dict[str, float]]:
    """Train, show the run, and return its metrics."""
    trained = train(Guess, [{"secret": n % 10, "n": n} for n in range(200)], **vars(args))
    print(trained)
    return trained.history


if __name__ == "__main__":
    main(tyro.cli(Config))

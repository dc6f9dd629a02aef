"""Runs a training run, kills it with SIGKILL at random moments, and takes it up again.

    python killer.py FOLDER KILLS [MAX_STALENESS [MODEL]]

KILLS are at most 3: each life does some steps of thirty.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import orbax.checkpoint  # noqa: F401 (imported once for all children)
from children import child_of

import funcrl
from funcrl.config import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.run import runs


def config(folder: Path, max_staleness: int = 0, model: str = "micro") -> TrainConfig:
    """A run of a few seconds that uses every part of the state."""
    return TrainConfig(
        run_dir=folder,
        model=model,
        steps=30,
        seed=7,
        threads=1,
        max_staleness=max_staleness,
        num_prompts=4,
        num_generations=4,
        num_minibatches=2,
        sampling=Sampling(max_tokens=3),
        algorithm=funcrl.config.AlgorithmConfig(
            kl=0.05, entropy=0.01, max_importance=2.0 if max_staleness else None
        ),
        warm_start=WarmStartConfig(steps=12, every=6, num_prompts=16),
        evaluation=EvaluationConfig(every=10, num_prompts=10),
        checkpoint=CheckpointConfig(every=2, keep_last=2),
        log=LogConfig(completions_every=5, num_completions=2),
    )


def life(folder: Path, max_staleness: int, model: str) -> None:
    """Start or take up the run."""
    run = config(folder, max_staleness, model)
    funcrl.train(run, resume=(folder / runs.CONFIG).exists())


def steps_written(folder: Path) -> int:
    """The lines of the run so far."""
    metrics = folder / runs.METRICS
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def raise_if_ended(child: int) -> None:
    """A life goes on until it is killed."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        raise SystemExit(f"a life ended by itself with {status}")


def main() -> None:
    """Kill so many times, then let it finish; fail when a life fails by itself."""
    folder, kills, *others = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    max_staleness, model = int(others[0]) if others else 0, "".join(others[1:]) or "micro"
    one_life = partial(life, folder, max_staleness, model)
    dice = random.Random(0)
    for killed in range(kills):
        before = steps_written(folder)
        child = child_of(one_life)
        # The first ends in the warm start or before it, the others in or between steps and saves.
        while killed and steps_written(folder) <= before:
            raise_if_ended(child)
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.5))
        raise_if_ended(child)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _, status = os.waitpid(child_of(one_life), 0)
    print(f"killed {kills}")
    raise SystemExit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()

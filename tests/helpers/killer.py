"""Runs a training run, kills it with SIGKILL at random moments, and takes it up again.

    python killer.py FOLDER KILLS [MAX_STALENESS [MODEL]]

Forks from one process that has imported everything, so that a life costs no start-up.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import orbax.checkpoint  # noqa: F401 (imported once for all children)

import funcrl
from funcrl.config import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)


def config(folder: Path, max_staleness: int = 0, model: str = "micro") -> TrainConfig:
    """A run of a few seconds that uses every part of the state."""
    return TrainConfig(
        run_dir=folder,
        model=model,
        steps=80,
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


def life(folder: Path, max_staleness: int, model: str) -> int:
    """Start or take up the run in a child; return the child's id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run = config(folder, max_staleness, model)
            funcrl.train(run, resume=(folder / "config.yaml").exists())
            status = 0
        finally:
            os._exit(status)
    return child


def main() -> None:
    """Kill so many times, then let it finish; fail when a life fails by itself."""
    folder, kills, *others = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    max_staleness, model = int(others[0]) if others else 0, "".join(others[1:]) or "micro"
    dice = random.Random(0)
    killed = 0
    while killed < kills:
        child = life(folder, max_staleness, model)
        # Short lives at first: the warm start and the first checkpoint are cut off, too.
        time.sleep(dice.uniform(0.0, 0.25 + 0.05 * killed))
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            raise SystemExit(f"a life ended by itself with {status} after {killed} kills")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
    _, status = os.waitpid(life(folder, max_staleness, model), 0)
    print(f"killed {killed}")
    raise SystemExit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()

"""Forks a run, kills the fork with SIGKILL at random moments, and takes it up again.

    python fork_killer.py FOLDER KILLS

Each fork must end as the one that nothing stops: in its parameters, its lines and its parent. Forks
from one process that has imported everything, so that a life costs no start-up.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orbax.checkpoint  # noqa: F401 (imported once for all children)
import torch
from cases import equal
from children import child_of

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.run import runs

PARENT = TrainConfig(
    steps=2, seed=3, threads=1, num_prompts=2, num_generations=2, sampling=Sampling(max_tokens=3),
    algorithm=AlgorithmConfig(kl=0.05), warm_start=WarmStartConfig(steps=2, num_prompts=4),
    evaluation=EvaluationConfig(every=0), checkpoint=CheckpointConfig(every=2, keep_last=1),
)  # fmt: skip
FORK = replace(PARENT, steps=6, optimizer=OptimizerConfig(learning_rate=5e-4))


def done(work: Callable[[], object]) -> None:
    """Do some work in a child, and raise if it fails."""
    assert os.waitpid(child_of(work), 0)[1] == 0


def life(config: TrainConfig, parent: Path) -> None:
    """Take the fork up, or begin it if it has not begun."""
    if (Path(str(config.run_dir)) / runs.CONFIG).exists():
        funcrl.train(config, resume=True)
    else:
        funcrl.train(config, fork=parent)


def rows(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without times."""
    lines = runs.read_lines(folder / runs.METRICS)
    return [{k: v for k, v in row.items() if "time" not in k} for row in lines]


def check(folder: Path, whole: Path) -> None:
    """Raise unless a fork that was killed ended as the whole one."""
    parts = funcrl.build(FORK)
    like = funcrl.loop.build.empty_state(parts)
    found, expected = (funcrl.restore(each / runs.CHECKPOINTS, like)[0] for each in (folder, whole))
    assert equal(found, expected)
    assert rows(folder) == rows(whole)
    mine, theirs = runs.read_facts(folder), runs.read_facts(whole)
    assert {mine[k] == theirs[k] for k in ("parent", "parent_step")} == {True}
    own = (folder, folder / runs.CHECKPOINTS, folder / runs.TOKENIZER)
    hidden = {path.name for each in own for path in each.glob(".*")}
    assert hidden == {".lock"}, hidden  # no draft of the process that was killed


def main() -> None:
    """Kill so many times; fail when one of them does not end right."""
    place, kills, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
    torch.set_num_threads(1)
    parent, whole = place / "parent", place / "whole"
    done(lambda: funcrl.train(replace(PARENT, run_dir=parent)))
    started = time.monotonic()
    done(lambda: funcrl.train(replace(FORK, run_dir=whole), fork=parent))
    seconds, early, killed = time.monotonic() - started, 0, 0
    for number in range(kills):
        config = replace(FORK, run_dir=place / f"fork-{number}")
        folder = Path(str(config.run_dir))
        child = child_of(lambda config=config: life(config, parent))
        if number % 3:  # soon after its first files: one in three before its first checkpoint
            while not (folder / runs.ENVIRONMENT).exists():
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.01 * seconds) if number % 3 > 1 else 0.0)
        else:
            time.sleep(dice.uniform(0, 1.1 * seconds))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        saved = list((folder / runs.CHECKPOINTS).glob("[0-9]*"))
        early += (folder / runs.CONFIG).exists() and not saved
        done(lambda config=config: life(config, parent))
        done(lambda folder=folder: check(folder, whole))
        shutil.rmtree(folder)
    print(f"killed {killed} of {kills}, {early} of them before the first checkpoint")


if __name__ == "__main__":
    main()

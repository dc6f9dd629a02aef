"""The task of a configuration, with its file of rows and its rewards."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from funcrl.config import TrainConfig
from funcrl.core.files import open_file
from funcrl.run import runs
from funcrl.tasks import RewardLimits, check_task, data_file, load, load_rewards, with_rewards
from funcrl.tasks.adapt import guard
from funcrl.tasks.contracts import Prompt, Task, TaskLike, Tokenizer
from funcrl.tasks.rewards import columns_of, form_of

# The key in a run's environment.json of the checksum of its file of rows.
RECORDED = "data_sha256"


def task_of(
    function: str, config: TrainConfig, tokenizer: Tokenizer | None, task: TaskLike | None
) -> Task:
    """Return the task of a configuration, or the one that is given, with the rewards of both."""
    rewards = load_rewards(config.reward)
    if task is None:
        return _checked(config, _load(config, tokenizer, rewards), rewards)
    given = check_task(function, task)
    return _checked(config, with_rewards(given, rewards), rewards) if rewards else given


def _load(
    config: TrainConfig, tokenizer: Tokenizer | None, rewards: Mapping[str, Callable[..., Any]]
) -> Task:
    return load(
        config.task,
        tokenizer,
        rewards=rewards,
        prompt_template=config.prompt_template,
        held_out=config.held_out,
    )


def plain_task(config: TrainConfig, tokenizer: Tokenizer | None) -> Task:
    """Return the task of a configuration without running the code of its rewards.

    They are 0: its prompts and its tokenizer are of use, for the memory that a run needs.
    """
    names = [each.rpartition(":")[2] for each in config.reward]
    return _load(config, tokenizer, dict.fromkeys(names, _nothing))


def _nothing(prompt: Prompt, outcome: object) -> float:
    del prompt, outcome
    return 0.0


def _checked(config: TrainConfig, task: Task, rewards: Mapping[str, Callable[..., Any]]) -> Task:
    """Return the task; raise if a reward takes what there is not, before the warm start."""
    first = guard(task).prompts(config.seed, 0, 1) if rewards else []
    for prompt in first:
        for name, function in rewards.items():
            form_of(name, function, columns_of(prompt))
    return task


def limits_of(config: TrainConfig) -> RewardLimits:
    """Return the limits of rewards that are `async def`."""
    return RewardLimits(config.reward_concurrency, config.reward_timeout)


def data_facts(task: str) -> dict[str, str]:
    """Return what a run records of its file of rows; nothing of another task."""
    file = data_file(task)
    return {} if file is None else {RECORDED: _digest(file)}


def check_data(function: str, task: str, run: Path) -> None:
    """Raise unless the rows of a run's task are those that it began with.

    Rows are no code, so they need no `--trust`; but with others a run would not be the same.
    """
    file = data_file(task)
    if file is None:
        return
    began, found = runs.read_facts(run, function).get(RECORDED), _digest(file)
    if began is None:
        raise ValueError(
            f"{function} expects {runs.ENVIRONMENT} in {run} to say which rows the run began "
            f"with, got no {RECORDED}."
        )
    if began != found:
        raise ValueError(
            f"{function} expects {file} to be as it was when {run} began (SHA-256 {began[:12]}), "
            f"got other rows (SHA-256 {found[:12]}). Put the file back, or start a new run."
        )


def is_data_of(task: str, run: Path, function: str) -> bool:
    """Return whether a task is the very file of rows that a run was trained on."""
    facts = runs.read_facts(run, function)
    return data_file(task) is not None and facts.get(RECORDED) == data_facts(task)[RECORDED]


def _digest(file: Path) -> str:
    with open_file("load", file) as opened:
        return hashlib.sha256(opened.read()).hexdigest()

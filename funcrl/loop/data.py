"""The task of a configuration, with its file of rows and its rewards."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from funcrl.config import TrainConfig
from funcrl.core.arguments import check_value
from funcrl.core.files import open_file
from funcrl.run import runs
from funcrl.tasks import (
    RewardLimits,
    check_task,
    data_file,
    load,
    load_rewards,
    reward_model,
    with_rewards,
)
from funcrl.tasks.adapt import guard
from funcrl.tasks.contracts import Prompt, Task, TaskLike, TaskOrRows, Tokenizer, is_task
from funcrl.tasks.load import is_rows, read_tables
from funcrl.tasks.named import check_name
from funcrl.tasks.rewards import columns_of, form_of
from funcrl.tasks.row_prompts import RowsOptions
from funcrl.tasks.rows import task_of_rows

_OF_A_MODEL = "reward_model"  # the reward of one
# The key in a run's environment.json of the checksum of its file of rows.
RECORDED = "data_sha256"


def task_of(
    function: str, config: TrainConfig, tokenizer: Tokenizer | None, task: TaskOrRows | None
) -> Task:
    """Return the task of a configuration, or the one that is given, with the rewards of both."""
    rewards = _rewards(config)
    if task is None:
        return _checked(config, _load(config, tokenizer, rewards), rewards)
    if not is_task(task):
        options = RowsOptions(**rows_options(config))
        if (options.split, options.test_split) != (RowsOptions.split, None):
            raise ValueError(
                f"{function} expects --split and --test-split with the name of a data set as "
                f"--task, got rows."
            )
        return _checked(config, task_of_rows(function, task, rewards, tokenizer, options), rewards)
    check_value(function, "task", TaskLike, task)
    given = check_task(function, task)
    return _checked(config, with_rewards(given, rewards), rewards) if rewards else given


def _rewards(config: TrainConfig) -> dict[str, Callable[..., Any]]:
    """Return the rewards of a configuration besides its task's, by their names."""
    found = load_rewards(config.reward)
    if config.reward_model is not None:
        if _OF_A_MODEL in found:
            raise ValueError(
                f"train expects another name than {_OF_A_MODEL} for a --reward beside "
                f"--reward-model, got {config.reward}."
            )
        dtype = getattr(torch, config.dtype)
        found[_OF_A_MODEL] = reward_model(config.reward_model, device=config.device, dtype=dtype)
    return found


def rows_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration that say how rows are read."""
    return {each.name: getattr(config, each.name) for each in fields(RowsOptions)}


def _load(
    config: TrainConfig, tokenizer: Tokenizer | None, rewards: Mapping[str, Callable[..., Any]]
) -> Task:
    return load(config.task, tokenizer, rewards=rewards, **rows_options(config))


def plain_task(config: TrainConfig, tokenizer: Tokenizer | None) -> Task:
    """Return the task of a configuration without running the code of its rewards.

    They are 0: its prompts and its tokenizer are of use, for the memory that a run needs.
    """
    for each in config.reward:
        check_name("--reward", each)
    names = [each.rpartition(":")[2] for each in config.reward]
    names += [_OF_A_MODEL] if config.reward_model is not None else []
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


def check_row_lengths(task: Task, context_length: int) -> None:
    """Raise for rows of data with a prompt that leaves a generator no room for a completion."""
    check = getattr(task, "check_row_lengths", None)  # other tasks make their prompts when asked
    if check is not None:
        check("train", context_length)


def num_left_out(task: Task) -> int:
    """Return how many rows of data have a longer prompt than they may have."""
    return getattr(task, "num_left_out", 0)


def limits_of(config: TrainConfig) -> RewardLimits:
    """Return the limits of rewards that are `async def`."""
    return RewardLimits(config.reward_concurrency, config.reward_timeout)


def data_facts(config: TrainConfig) -> dict[str, str]:
    """Return what a run records of its rows of data; nothing of another task."""
    return {RECORDED: _digest(config)} if is_rows(config.task) else {}


def check_data(function: str, config: TrainConfig, run: Path) -> None:
    """Raise unless the rows of a run's task are those that it began with.

    Rows are no code, so they need no `--trust`; but with others a run would not be the same.
    """
    if not is_rows(config.task):
        return
    began, found = runs.read_facts(run, function).get(RECORDED), _digest(config)
    if began is None:
        raise ValueError(
            f"{function} expects {runs.ENVIRONMENT} in {run} to say which rows the run began "
            f"with, got no {RECORDED}."
        )
    if began != found:
        raise ValueError(
            f"{function} expects {config.task} to be as it was when {run} began (SHA-256 "
            f"{began[:12]}), got other rows (SHA-256 {found[:12]}). Put them back, or start a new "
            f"run."
        )


def is_data_of(config: TrainConfig, run: Path, function: str) -> bool:
    """Return whether a configuration's rows are the very ones that a run was trained on."""
    facts = runs.read_facts(run, function)
    return is_rows(config.task) and facts.get(RECORDED) == data_facts(config)[RECORDED]


def _digest(config: TrainConfig) -> str:
    """Return the checksum of a file, or of the rows of a data set."""
    file = data_file(config.task)
    if file is not None:
        with open_file("load", file) as opened:
            return hashlib.sha256(opened.read()).hexdigest()
    tables = read_tables("load", config.task, RowsOptions(**rows_options(config)))
    digest = hashlib.sha256()
    for table in tables:
        for row in table.rows if table else ():
            digest.update(json.dumps(row, default=str).encode())
    return digest.hexdigest()

"""Loads what a run has trained."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from funcrl.core.arguments import checked
from funcrl.core.terminal import Note, warn_safely
from funcrl.core.types import Params
from funcrl.loop.parts import sources
from funcrl.loop.parts.build import Parts, trained_like
from funcrl.loop.parts.data import check_data, task_of
from funcrl.run import runs
from funcrl.run.trust import check_run
from funcrl.tasks.contracts import Task, TaskLike


class LoadedRun(NamedTuple):
    """What a run has trained, and on what."""

    model: nn.Module
    params: Params  # those of the newest checkpoint, adapters merged
    task: Task


@checked
def load_run(
    folder: Path | str,
    task: TaskLike | None = None,
    *,
    parts: Parts | None = None,
    device: sources.Device = "cpu",
    trust: bool = False,
    note: Note = warn_safely,
) -> LoadedRun:
    """Return the model, the parameters and the task of a run.

    Args:
        folder: the run's.
        task: that the run was given as an object.
        parts: that the run was given, with objects among them, its task too.
        device: of the parameters.
        trust: run the code that the run names, such as a task of one's own, even if this account
            has not run it before or it has changed (docs/security.md).
        note: is called with lines about the code that is run.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "run"
        >>> config = TrainConfig(
        ...     run_dir=folder, steps=1, num_prompts=2, num_generations=2,
        ...     warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0))
        >>> state = funcrl.train(config).state
        >>> model, params, task = funcrl.load_run(folder)
        >>> params["norm.weight"].equal(state.params["norm.weight"]), task.name
        (True, 'sum_digits')
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("load_run expects device cpu where torch sees no GPU, got cuda.")
    run = Path(folder)
    if parts is not None:
        _, trained = sources.trained_params(run, trained_like(parts))
        return LoadedRun(parts.model, parts.policy(trained), parts.task)
    options = sources.options_of_run("load_run", "folder", run)
    given = set() if task is None else {"task"}
    runs.check_given("load_run", run, {"task", *sources.parts_of_network(options)} - given)
    for line in check_run("load_run", options, run, given, trust):
        note(line)
    tokenizer = None
    if task is None:
        check_data("load_run", options.task, run)
        tokenizer = sources.tokenizer_of("load_run", options)
    loaded = task_of("load_run", options, tokenizer, task)
    model = sources.network_of_run("load_run", run, task, trust, loaded.tokenizer)
    _, params = sources.params_of_run("load_run", run, model, device)
    return LoadedRun(model, params, loaded)

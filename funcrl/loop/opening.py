"""Before a run begins: what it may begin with, what it goes on from, and what it records of it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from funcrl.config import TrainConfig
from funcrl.core.printing import Note
from funcrl.core.process import refuse_ranks
from funcrl.loop.build import REPLACEABLE, Parts
from funcrl.loop.data import check_data, data_facts
from funcrl.loop.ranks import of_first_rank
from funcrl.loop.sources import options_of_run, parts_of_network
from funcrl.loop.teachers import check_served, teacher_facts
from funcrl.parallel import Mesh
from funcrl.parallel.mesh import ALONE
from funcrl.run import runs
from funcrl.run.folder import (
    check_options_kept,
    free_folder,
    missing_folders,
    open_folder,
    remove_empty,
)
from funcrl.run.trust import check_run, named_code, remember
from funcrl.tasks.contracts import TaskOrRows
from funcrl.tasks.load import is_rows, rows_name

# Options that no part depends on: given parts may have been built with other values of these.
_OF_NO_PART = ("run_dir", "warm_start", "evaluation", "checkpoint", "log")


class Start(NamedTuple):
    """How a run begins."""

    folder: Path  # of the run, absolute
    parent: Path | None  # the run that it goes on from in a folder of its own
    resumes: bool  # whether it goes on with the run in its folder
    given: set[str]  # the parts that are given as objects

    def check_code(self, config: TrainConfig, trust: bool | Collection[str], note: Note) -> None:
        """Raise if the code that the run's folder names must not run; note which does."""
        source = self.folder if self.resumes else self.parent
        if source is not None:
            for line in check_run("train", config, source, self.given, trust):
                note(line)


@contextmanager
def with_folder(
    config: TrainConfig,
    task: TaskOrRows | None = None,
    parts: Parts | None = None,
    mesh: Mesh = ALONE,
) -> Iterator[TrainConfig]:
    """Give a configuration that names its folder: the first of runs/TASK-1, ... that is free.

    One that names a folder is given as it is. A folder that is made here goes again if nothing is
    in it at the end, because the start failed, wherever the working directory is by then.
    """
    if config.run_dir is not None:
        yield config
        return
    given = parts.task if parts else task
    name = rows_name(config.task if is_rows(config.task) else config.task.rpartition(":")[2])
    if given is not None:
        name = Path(str(getattr(given, "name", "rows"))).name or "run"
    if mesh.host.rank:  # the first rank makes it
        yield replace(config, run_dir=of_first_rank(None, mesh.host))
        return
    above = missing_folders(Path("runs").absolute())
    folder = of_first_rank(free_folder(Path("runs"), name), mesh.host)
    made = [folder.absolute(), *above]
    try:
        yield replace(config, run_dir=folder)
    finally:
        remove_empty(made)


def open_run(
    config: TrainConfig,
    objects: Collection[str],
    parts: Parts | None,
    resume: bool,
    fork: str | Path | None,
    mesh: Mesh,
) -> Start:
    """Return how a run begins; raise, before anything is made, if it cannot begin like that.

    The arguments are those of `train`, and the names of the parts that it was given by themselves.
    """
    if mesh == ALONE:
        refuse_ranks("train", " mesh=funcrl.parallel.make_mesh() shares it (docs/scaling.md).")
    if fork is not None and resume:
        raise ValueError(f"train expects resume or fork, got both ({fork}).")
    folder = open_folder(config.run_dir, resume)
    parent = None if fork is None else open_folder(Path(fork), resume=True)
    given = _given(config, objects, parts)
    if resume:
        runs.check_given("train", folder, {*REPLACEABLE} - given)
        check_options_kept("train", config, folder)
        if "task" not in given:
            check_data("train", config, folder)
    if parent is not None:
        needed = {"task", *parts_of_network(options_of_run("train", "--fork", parent))}
        runs.check_given("train", parent, needed - given)
    return Start(folder, parent, resume, given)


def _given(config: TrainConfig, objects: Collection[str], parts: Parts | None) -> set[str]:
    """Return the names of the parts that are given as objects; raise if they are of another run."""
    if parts is None:
        return {*objects}
    for name in objects:
        raise ValueError(
            f"train expects {name}= or parts=, which have {name} too, got both; "
            f"parts._replace({name}=...) replaces it."
        )
    same = {name: getattr(config, name) for name in _OF_NO_PART}
    if replace(parts.config, **same) != config:
        different = [
            each.name
            for each in fields(config)
            if each.name not in _OF_NO_PART
            and getattr(parts.config, each.name) != getattr(config, each.name)
        ]
        raise ValueError(
            f"train expects parts that were built of its config, got parts of another "
            f"{different[0]}; funcrl.build(config, ...) makes them of this one."
        )
    return {*parts.replaced}


def check_teacher(config: TrainConfig, parts: Parts) -> None:
    """Raise unless a teacher and an algorithm that learns from one come together.

    A teacher behind an address must answer, too.
    """
    check_served("train", parts.teacher, parts.task, config.seed)
    if {"step", "model_fn"} & parts.replaced:
        return  # which have a teacher of their own, or say what they lack
    options = config.algorithm
    if parts.teacher is None and (options.teacher, options.divergence) != (1.0, "reverse"):
        raise ValueError(
            f"train expects --teacher MODEL with --algorithm.teacher and --algorithm.divergence, "
            f"got {options.teacher} and {options.divergence} without one."
        )
    learns = parts.algorithm.teacher_weight != ()
    if parts.teacher is not None and not learns:
        raise ValueError(
            f"train expects an algorithm with a teacher_weight for a teacher, such as "
            f"funcrl.grpo(teacher=1.0), got {parts.algorithm!r}."
        )
    if learns and parts.teacher is None:
        raise ValueError(
            f"train expects --teacher MODEL, or teacher=funcrl.Teacher(model, params), with an "
            f"algorithm that learns from one, got none for {config.algorithm.name}."
        )


def _described(network: nn.Module) -> str:
    """Return what a network is, as a report says it."""
    count = sum(weight.numel() for weight in network.parameters())
    return f"{type(network).__name__}, {count:,} parameters"


def facts_of(config: TrainConfig, parts: Parts, given: Collection[str]) -> dict[str, str]:
    """Return facts of the parts for the run's record."""
    facts = {
        "task_object" if "task" in given else "task": parts.task.name,
        "network": _described(parts.model),
        "vocab_size": str(parts.task.tokenizer.vocab_size),
        "max_turns": str(parts.task.max_turns),
    }
    objects = [name for name in REPLACEABLE if name in given and name != "task"]
    if objects:
        facts[runs.OBJECTS] = " ".join(objects)
    facts |= {code.fact: code.digest for code in named_code(config, given)}
    if "task" not in given:
        facts |= data_facts(config)
    if config.teacher is not None and "teacher" not in given:
        facts |= teacher_facts(config.teacher)
    return facts


def remember_code(config: TrainConfig, given: Collection[str], note: Note) -> None:
    """Remember that the code of the parts has been run by this account."""
    try:
        remember(config, given)
    except OSError as error:
        note(f"This account cannot remember its task: {error}; --resume will ask for --trust.")

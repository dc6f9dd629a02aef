"""Opens a run's folder, which one process at a time may write to, and records what changed."""

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from funcrl import config as configs
from funcrl.config import Change, TrainConfig, changed_options, read_config
from funcrl.core.files import whole_file, write_whole
from funcrl.core.printing import escaped
from funcrl.core.process import VERSION, commit
from funcrl.run import runs
from funcrl.run.storage import clean_up

# Facts of a run's environment whose change is written down, too.
_FACTS = ("funcrl", "commit", "torch", "ranks", "teacher_step")


def check_options_kept(function: str, config: TrainConfig, folder: Path) -> None:
    """Raise if a configuration changes what a run was trained with.

    Nothing was, as long as it has no checkpoint.
    """
    places = folder / runs.CHECKPOINTS
    if not places.is_dir() or not any(each.name.isdigit() for each in places.iterdir()):
        return
    got = options_not_kept(config, folder)
    if got:
        raise ValueError(
            f"{function} expects the options that {folder} was trained with, got {got}; "
            f"--fork NEW_FOLDER (in Python fork=) starts a run with them from its newest "
            f"checkpoint."
        )


def options_not_kept(config: TrainConfig, folder: Path) -> str:
    """Return the options of a configuration that change what a run was trained with, as text."""
    changes = [each for each in changed_options(_recorded(folder), config) if not each.is_allowed]
    shown = [shown_change(*each) for each in changes]
    return ", ".join(f"--{option} {after} (was {before})" for option, before, after in shown)


def changes_since(
    folder: Path, config: TrainConfig, facts: Mapping[str, str], step: int
) -> list[dict[str, Any]]:
    """Return lines about what a run goes on with that is not what its folder has recorded."""
    was = runs.read_facts(folder, "train")
    changes = changed_options(_recorded(folder), config)
    changes += [
        Change(name, was.get(name), facts.get(name))
        for name in _FACTS
        if name in was and was[name] != facts.get(name)
    ]
    return [
        {"step": step, "option": each.option, "from": each.before, "to": each.after}
        for each in changes
    ]


def write_changes(folder: Path, earlier: Path, step: int, new: Sequence[Mapping[str, Any]]) -> None:
    """Write changes.jsonl: the changes that an earlier run of the folder recorded, and new ones.

    Args:
        folder: of the run.
        earlier: the folder with the earlier ones, `folder` itself or that of the run it began from.
        step: after which the run goes on. An earlier change of a later step holds from here on.
        new: as `changes_since` returns them.
    """
    path = earlier / runs.CHANGES
    rows = [
        {**row, "step": min(step, runs.step_of("train", path, number, row))}
        for number, row in runs.each_line("train", path)
    ]
    # A process that was killed here may have written some of them.
    rows = [row for row in rows if row not in new] + [dict(row) for row in new]
    if rows:
        write_whole(folder / runs.CHANGES, "".join(f"{json.dumps(row)}\n" for row in rows))


def describe_changes(config: TrainConfig, new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines for the screen about what changes in a run."""
    lines = []
    for row in new:
        option, before, after = shown_change(row["option"], row["from"], row["to"])
        lines.append(f"From step {row['step'] + 1} on: {option} {after} (was {before}).")
    longer = any(row["option"] == "steps" for row in new)
    if longer and config.optimizer.schedule != "constant":
        lines.append(
            f"The {config.optimizer.schedule} schedule of the learning rate ends at the new "
            f"--steps {config.steps}, so the next update's rate is not the last one's."
        )
    return lines


def shown_change(option: Any, before: Any, after: Any) -> list[str]:
    """Return the name of an option or fact, and its values before and after a change, as texts."""
    absent = "unknown" if option in _FACTS else "left out"
    return [absent if each is None else _shown(each) for each in (option, before, after)]


def _recorded(folder: Path) -> TrainConfig:
    return read_config(TrainConfig, folder / runs.CONFIG)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return escaped(text if len(text) <= 60 else f"{text[:60]}...")


# What a run writes into, or deletes from.
_WRITTEN = (runs.CHECKPOINTS, runs.REFERENCE, runs.TOKENIZER, "tensorboard", "wandb", ".tracked-as")
# Files that the process with the claim replaces whole: a draft of each has its process's number.
_REPLACED = "|".join(
    re.escape(name)
    for name in (runs.CONFIG, runs.ENVIRONMENT, runs.METRICS, runs.COMPLETIONS, runs.CHANGES)
)


def open_folder(folder: Path | None, resume: bool) -> Path:
    """Return a run's folder, which must hold a run to resume, and no run to begin one.

    It is absolute, so that a task that changes the working directory does not move it.
    """
    if folder is None:
        raise ValueError("train expects config.run_dir, got none.")
    holds_run = (folder / runs.CONFIG).exists()
    if resume and not holds_run:
        raise FileNotFoundError(
            f"train expects --resume to name the folder of a run, got {folder} without a "
            f"{runs.CONFIG}."
        )
    if not resume and (holds_run or (folder / runs.METRICS).exists()):
        raise FileExistsError(
            f"train expects a --run-dir without a run in it, got {folder}; go on with it by "
            f"--resume {folder}, or choose another."
        )
    return folder.absolute()


def free_folder(parent: Path, name: str) -> Path:
    """Make and return the first of `parent/name-1`, `parent/name-2`, ... that is not there."""
    number = 1
    while True:  # until making one succeeds: another run may be looking too
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def missing_folders(folder: Path) -> list[Path]:
    """Return a folder and those above it that are not there, the deepest first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the deepest first, up to one that holds something or is not there."""
    for each in folders:
        try:
            each.rmdir()
        except OSError:
            return


def refuse_links(folder: Path) -> None:
    """Raise if something that a run writes into, or deletes from, is a link."""
    for name in _WRITTEN:
        if (folder / name).is_symlink():
            raise OSError(
                f"train expects {folder / name} to be no link, got one to "
                f"{os.readlink(folder / name)}; a run on another disk has all of its folder there."
            )


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written; only who holds the claim may."""
    if (folder / runs.CHECKPOINTS).is_dir():
        clean_up(folder / runs.CHECKPOINTS)
    clean_up(folder, runs.REFERENCE)
    for place, names in ((folder, _REPLACED), (folder / runs.TOKENIZER, r".+")):
        drafts = re.compile(rf"\.({names})\.\d+")
        for path in place.iterdir() if place.is_dir() else ():
            if drafts.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)


class Traces:
    """What the start of a run changes in its folder, which is made as it was if the start fails.

    Make it before anything is written there.
    """

    _FOLDERS = (runs.CHECKPOINTS, runs.REFERENCE, runs.TOKENIZER)
    _FILES = (
        runs.CONFIG, runs.ENVIRONMENT, runs.METRICS, runs.COMPLETIONS, runs.CHANGES, ".lock",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._folder, self._missing = folder, missing_folders(folder)
        paths = [folder / name for name in (*self._FOLDERS, *self._FILES)]
        self._there = [each for each in paths if os.path.lexists(each)]
        # Files of lines, which may be long, are not kept: of them a start only drops or adds what
        # the next one would as well.
        small = [folder / name for name in (runs.CONFIG, runs.ENVIRONMENT)]
        self._contents = {
            each: each.read_bytes() for each in small if each.is_file() and not each.is_symlink()
        }

    def remove(self) -> None:
        """Take back what was written; only the process that holds the claim may."""
        for name in self._FOLDERS:
            if self._folder / name not in self._there:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        for name in self._FILES:
            path = self._folder / name
            if path not in self._there:
                path.unlink(missing_ok=True)
            elif path in self._contents and path.read_bytes() != self._contents[path]:
                with whole_file(path) as file:
                    file.write(self._contents[path])
        remove_empty(self._missing)

    def remove_folders(self) -> None:
        """Take back the folders that were made, as far as nothing is in them."""
        if self._folder / runs.CHECKPOINTS not in self._there:
            remove_empty([self._folder / runs.CHECKPOINTS])
        remove_empty(self._missing)


class Claim:
    """The right of one process to write to a run's folder, until it closes this or dies."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        try:  # not through a link, which could make a file anywhere
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise OSError(
                error.errno, f"train expects to open a file {path}, got: {error.strerror}."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise FileExistsError(
                f"train expects a --run-dir that no other run is writing to, got {folder}."
            ) from None

    def close(self) -> None:
        """Release the folder for other processes."""
        os.close(self._file)


def write_facts(
    folder: Path, config: TrainConfig, facts: Mapping[str, str], tokenizer: Mapping[str, bytes]
) -> None:
    """Write a run's configuration, the facts about its machine and task, and its tokenizer."""
    for name, content in tokenizer.items():
        place = folder / runs.TOKENIZER
        place.mkdir(exist_ok=True)
        with whole_file(place / name) as file:
            file.write(content)
    write_whole(folder / runs.ENVIRONMENT, json.dumps(facts, indent=1) + "\n")
    # Last, because it makes the folder that of a run, which goes on from what the facts say.
    plain = configs.to_plain(config)
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    write_whole(folder / runs.CONFIG, text)


def environment(command: Sequence[str]) -> dict[str, str]:
    """Return the versions, the machine and the command of a run, as texts."""
    facts = {
        "funcrl": VERSION,
        "commit": commit() or "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": f"{processor()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(command),
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    return {name: value for name, value in facts.items() if value}


def processor() -> str:
    """Return the model of the machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (*models, platform.processor() or platform.machine())[0]

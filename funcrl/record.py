"""What a run leaves behind: its folder, its metrics, its checkpoints; and how it is taken up."""

import fcntl
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from funcrl import config as configs
from funcrl import runs
from funcrl.checkpoint import Checkpoints, restore, save
from funcrl.config import TrainConfig
from funcrl.logging import View
from funcrl.reading import brief
from funcrl.runs import Completion
from funcrl.trackers import Tracker, tracker
from funcrl.types import Params, TrainState
from funcrl.watch import ForkedError

_REFERENCE = "reference"


class Progress(NamedTuple):
    """A whole number of steps: what a run goes on from, replaced as one."""

    step: int
    state: TrainState
    history: list[dict[str, Any]]  # the rows of metrics.jsonl, step 0 first


class Record:
    """The folder of a run and everything that is written to it.

    Args:
        config: the run's.
        folder: as `open_folder` gives it.
        title: shown above the run.
        view: shows the run.
        command: what started the run, for environment.json.
        facts: what else goes there.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, title: str, view: View,
        command: Sequence[str] = (), facts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.note = folder, view.note
        self._progress: Progress | None = None
        self._config, self._title, self._view = config, title, view
        self._facts = _environment(command) | dict(facts or {})
        kept = config.checkpoint.keep_last, config.checkpoint.keep_best
        self._checkpoints = Checkpoints(folder / runs.CHECKPOINTS, *kept)
        self._trackers: list[Tracker] = []
        # The last step saved; a run without a checkpoint; a state that an update is overwriting.
        self._saved, self._empty, self._given_up = -1, False, False
        self._process, self._lock = os.getpid(), _lock(folder)

    @property
    def progress(self) -> Progress:
        """The last finished step."""
        if self._progress is None:
            raise RuntimeError("Record expects begin or resumed first.")
        return self._progress

    def resumed(self, like: TrainState) -> int | None:
        """Take up the newest good checkpoint and return its step; None if there is none."""
        found = self._checkpoints.restore_latest(like, on_skip=self.note)
        if found is not None:
            _check_goes_on(self._config, self.folder, found.step)
        history = [] if found is None else _history(self.folder, found.extra)
        # From here on the folder holds a run, which `--resume` finds even before its first step.
        _write_facts(self.folder, self._config, self._facts)
        if found is None:
            self._empty = True
            return None
        self._saved = found.step
        progress = Progress(found.step, found.state, history)
        _write_again(self.folder, progress)
        self._start(progress)
        self.note(f"Resumed {self.folder} after step {found.step}.")
        return found.step

    def begin(self, state: TrainState, row: dict[str, Any]) -> None:
        """Write down the state before the first step."""
        for name in (runs.METRICS, runs.COMPLETIONS):  # of a life that never got to a checkpoint
            (self.folder / name).unlink(missing_ok=True)
        self._start(Progress(0, state, [row]))
        runs.append_lines(self.folder / runs.METRICS, [row])
        self.save()

    def advance(self, state: TrainState, row: dict[str, Any], seen: Sequence[Completion]) -> None:
        """Write down a finished step, and show it; `seen` are completions to keep."""
        self.check_process()
        runs.append_lines(self.folder / runs.METRICS, [row])
        runs.append_lines(self.folder / runs.COMPLETIONS, [each._asdict() for each in seen])
        # Only now: a step whose lines could not be written is one to do again.
        self._progress = Progress(row["step"], state, [*self.progress.history, row])
        self._given_up = False
        _log(self._trackers, row, seen)
        self._view.step(row, seen[0] if seen else None)
        if row["step"] == self._config.steps or not row["step"] % self._config.checkpoint.every:
            self.save()

    def check_process(self) -> None:
        """Raise in a child that something forked: it must not compute or write for its parent."""
        if os.getpid() != self._process:
            raise ForkedError(
                f"train expects one process to write to {self.folder}, its own {self._process}, "
                f"got a step of the task {self._title!r} from a forked child {os.getpid()}."
            )

    def give_up_state(self) -> None:
        """Let an update overwrite the last finished step's state, until the next `advance`."""
        if self.progress.state.step.is_cpu:  # where a checkpoint on its way reads its own memory
            self._checkpoints.wait()
        self._given_up = True

    def save(self) -> None:
        """Begin a checkpoint of the last finished step."""
        step, state, history = self.progress
        extra = {"step": step, "history": history}
        self._checkpoints.save(step, state, extra, history[-1].get("eval/accuracy"))
        self._saved = step

    def save_unsaved(self) -> None:
        """Save what an interruption would lose, and say where."""
        command = f"funcrl train --resume {shlex.quote(str(self.folder))}"
        if self._progress is None and self._empty:
            self.note(f"Stopped before the first step; begin again with: {command}")
        if self._progress is None:
            return
        try:
            if self._saved < self._progress.step and not self._given_up:
                self.save()
            self._checkpoints.wait()
        except OSError as error:
            self.note(str(error))
            return
        self.note(
            f"Saved step {self._saved} in {self.folder / runs.CHECKPOINTS}; go on with: {command}"
        )

    def close(self) -> None:
        """Wait for the last checkpoint, and let go of the screen and the trackers."""
        try:
            self._checkpoints.close()
        finally:
            for each in self._trackers:
                each.close()
            self._view.close()
            os.close(self._lock)

    def _start(self, progress: Progress) -> None:
        """Open what shows the run."""
        plain, step = configs.to_plain(self._config), progress.step
        for name in self._config.log.trackers:
            self._trackers.append(tracker(name, self.folder, plain, step, self.note))
        self._view.start(f"{self._title} in {self._config.run_dir}", self._config.steps, step)
        self._progress = progress


def reference_policy(folder: Path, step: int, params: Params) -> Params:
    """Return the policy of step 0, which a KL penalty holds on to: saved then, restored later.

    Args:
        folder: the run's.
        step: that `params` are of.
        params: of the policy.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from funcrl.record import reference_policy
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = reference_policy(folder, 0, {"w": torch.zeros(1)})
        >>> reference_policy(folder, 7, {"w": torch.ones(1)})
        {'w': tensor([0.])}
    """
    if step == 0:
        save(folder / _REFERENCE, params)
        return params
    found, _ = restore(folder / _REFERENCE, like=params)
    return dict(found)


def free_folder(parent: Path, name: str) -> Path:
    """Make and return the first of `parent/name-1`, `parent/name-2`, ... that is not there.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.record import free_folder
        >>> free_folder(pathlib.Path(tempfile.mkdtemp()), "sum_digits").name
        'sum_digits-1'
    """
    number = 1
    while True:  # until making one succeeds: another run may be looking too
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _lock(folder: Path) -> int:
    """Return an open file that keeps other runs out of the folder until it is closed, or we die."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:  # not through a link, which could make a file anywhere
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise OSError(
            error.errno, f"train expects to open a file {path}, got: {error.strerror}."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise FileExistsError(
            f"train expects a --run-dir that no other run is writing to, got {folder}."
        ) from None
    return file


def _history(folder: Path, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of metrics that a checkpoint of a run holds."""
    rows = extra.get("history")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise ValueError(
            f"train expects a run's checkpoint with its metrics in {folder / runs.CHECKPOINTS}, "
            f"got {brief(rows)}."
        )
    return rows


def _check_goes_on(config: TrainConfig, folder: Path, step: int) -> None:
    """Raise, before anything is written, if the configuration cannot go on from a step."""
    if step > config.steps:
        raise ValueError(
            f"train expects --steps of at least {step}, which {folder} has done, got "
            f"{config.steps}."
        )
    if step and config.algorithm.kl and not (folder / _REFERENCE).exists():
        raise ValueError(
            f"train expects --algorithm.kl 0 for {folder}, which began without a penalty and kept "
            f"no reference policy, got {config.algorithm.kl}."
        )


def _log(trackers: Sequence[Tracker], row: dict[str, Any], seen: Sequence[Completion]) -> None:
    for each in trackers:
        each.log(row)
        if seen:
            each.completions(seen)


def _write_again(folder: Path, progress: Progress) -> None:
    """Make the lines of a run's files those of what it goes on from."""
    lines = folder / runs.METRICS
    lines.unlink(missing_ok=True)
    runs.append_lines(lines, progress.history)
    runs.keep_until(folder / runs.COMPLETIONS, progress.step)


def _write_facts(folder: Path, config: TrainConfig, facts: Mapping[str, str]) -> None:
    plain = configs.to_plain(config)
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    runs.write_whole(folder / runs.CONFIG, text)
    runs.write_whole(folder / runs.ENVIRONMENT, json.dumps(facts, indent=1) + "\n")


def open_folder(folder: Path | None, resume: bool) -> Path:
    """Return a run's folder, which must hold a run to resume, and no run to begin one.

    It is absolute, so that a task that changes the working directory does not move it.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.record import open_folder
        >>> open_folder(pathlib.Path(tempfile.mkdtemp()) / "new", resume=False).name
        'new'
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


def _environment(command: Sequence[str]) -> dict[str, str]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": f"{model}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(command),
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    return {name: value for name, value in facts.items() if value}

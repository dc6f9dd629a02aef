"""Writes a run's folder: its metrics, completions and checkpoints; and resumes it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl import config as configs
from funcrl.config import TrainConfig
from funcrl.core.files import brief
from funcrl.core.printing import Note
from funcrl.core.types import Params, TrainState
from funcrl.run import runs
from funcrl.run.accuracy import held_out, score_of
from funcrl.run.checkpoint import (
    CheckpointError,
    Checkpoints,
    Restored,
    restore,
    restore_newest,
    save,
)
from funcrl.run.folder import (
    Claim,
    Traces,
    changes_since,
    describe_changes,
    environment,
    options_not_kept,
    refuse_links,
    sweep,
    write_changes,
    write_facts,
)
from funcrl.run.follower import Follower, Progress, WholeFn
from funcrl.run.runs import Completion
from funcrl.run.trackers import Tracker, tracker
from funcrl.run.views import View

_MOVED = "reference_has_moved"  # whether the last tree beside a checkpoint's state is the reference
_OF_A_FORK = ("parent", "parent_step")  # facts of a run that began as another one's checkpoint


class Record(Follower):
    """The folder of a run and everything that is written to it."""

    def __init__(
        self, config: TrainConfig, folder: Path, title: str, view: View,
        command: Sequence[str] = (), facts: Mapping[str, str] | None = None,
        tokenizer: Mapping[str, bytes] | None = None, whole: WholeFn | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, folder, whole)
        self._view = view
        self._display = _Display(view, f"{title} in {config.run_dir}")
        self._tokenizer = tokenizer or {}
        self._facts = environment(command) | dict(facts or {})
        kept = config.checkpoint.keep_last, config.checkpoint.keep_best
        self._traces = Traces(folder)
        try:
            refuse_links(folder)
            self._checkpoints = Checkpoints(folder / runs.CHECKPOINTS, *kept)
            self.claim = Claim(folder)
            sweep(folder)
        except OSError:
            self._traces.remove_folders()
            raise
        self._given_up = False  # whether an update is overwriting the state

    def note(self, text: str) -> None:
        """Show a line."""
        self._view.note(text)

    def resumed(self, like: TrainState, needs_reference: bool = False) -> int | None:
        """Resume from the newest good checkpoint and return its step; None if there is none.

        Args:
            like: a state of the run's structure.
            needs_reference: whether the policy of step 0 is needed, for a KL penalty.
        """
        found = self._checkpoints.restore_latest(like, on_skip=self.note, beside=like.params)
        holds_run = (self.folder / runs.CONFIG).exists()
        was = runs.read_facts(self.folder, "train") if holds_run else {}
        origin = {name: was[name] for name in _OF_A_FORK if name in was}
        if found is None and origin:  # a fork that was killed before its first checkpoint
            parent = Path(origin["parent"])
            return self.forked(parent, like, needs_reference, _step_of_parent(self.folder, was))
        if found is None:
            # From here on `--resume` finds a run in the folder, even before its first step.
            write_facts(self.folder, self._config, self._facts, self._tokenizer)
            return None
        self._facts |= origin
        self._go_on(self.folder, found, needs_reference)
        self._progress = _progress_of(found)
        self.note(f"Resumed {self.folder} after step {found.step}.")
        return found.step

    def forked(
        self,
        parent: Path,
        like: TrainState,
        needs_reference: bool = False,
        step: int | None = None,
    ) -> int:
        """Begin as another run's newest good checkpoint, and return its step."""
        try:
            found = restore_newest(parent / runs.CHECKPOINTS, like, like.params, step)
        except CheckpointError:
            raise
        except ValueError as error:
            got = options_not_kept(self._config, parent) or "the same options with other parts"
            raise ValueError(
                f"train expects a fork to have the parameters and the state of the optimizer of "
                f"{parent}, got {got}: {error}"
            ) from error
        # Written before all else, so that a fork that is killed goes on as one.
        self._facts |= dict(zip(_OF_A_FORK, (str(parent), str(found.step)), strict=True))
        # The seed is an option, which a fork may change.
        found = found._replace(state=found.state._replace(seed=like.seed))
        self._go_on(parent, found, needs_reference)
        if (parent / runs.REFERENCE).exists():
            params = dict(like.params)
            save(self.folder / runs.REFERENCE, reference_policy(parent, found.step or 1, params))
        progress = _progress_of(found)
        if self._config.checkpoint.every:
            score = score_of(progress.row)
            self._checkpoints.save(found.step, found.state, found.extra, score, found.beside)
            self._checkpoints.wait()
        self._progress = progress
        self.note(f"Began {self.folder} as {parent} was after step {found.step}.")
        return found.step

    def _go_on(self, source: Path, found: Restored, needs_reference: bool) -> None:
        """Write down what is known before the first step that follows a checkpoint in `source`."""
        _check_goes_on(self._config, source, found, needs_reference)
        changes = changes_since(source, self._config, self._facts, found.step)
        for line in describe_changes(self._config, changes):
            self.note(line)
        if source != self.folder:
            write_facts(self.folder, self._config, self._facts, self._tokenizer)
        _take_lines_until(self.folder, source, found.extra["row"], self.note)
        write_changes(self.folder, source, found.step, changes)
        # After its changes: until then the folder says what it was trained with before.
        if source == self.folder:
            write_facts(self.folder, self._config, self._facts, self._tokenizer)
        self._display.start(self.folder, self._config, found.step)

    def begin(self, state: TrainState, row: dict[str, Any]) -> None:
        """Write down the state before the first step."""
        self._display.start(self.folder, self._config, 0)
        for name in (runs.METRICS, runs.COMPLETIONS):  # of an earlier attempt without a checkpoint
            (self.folder / name).unlink(missing_ok=True)
        self._progress = Progress(0, state, row)  # which is saved also where its line cannot be
        runs.append_lines(self.folder / runs.METRICS, [row])
        self._display.begin(row)
        super().begin(state, row)

    def advance(
        self,
        state: TrainState,
        row: dict[str, Any],
        seen: Sequence[Completion],
        older: Sequence[Params] = (),
        reference: Sequence[Params] = (),
    ) -> None:
        """Write down a finished step, and show it."""
        metrics = self.folder / runs.METRICS
        if not metrics.exists():
            raise FileNotFoundError(
                f"train expects {metrics} with the steps before {row['step']}, got none: somebody "
                f"has removed it."
            )
        runs.append_lines(metrics, [row])
        runs.append_lines(self.folder / runs.COMPLETIONS, [each.to_row() for each in seen])
        # Only now, because a step whose lines could not be written must be run again.
        super().advance(state, row, seen, older, reference)

    def _show(self, seen: Sequence[Completion]) -> None:
        """Show a finished step, whose state is whole again."""
        self._given_up = False
        self._display.step(self.progress.row, seen)

    def give_up_state(self) -> None:
        """Let an update overwrite the last finished step's state, until the next `advance`."""
        if self.progress.state.step.is_cpu:  # where a checkpoint on its way reads its own memory
            self._checkpoints.wait()
        self._given_up = True

    def _write(self, whole: Progress) -> None:
        """Begin to write a checkpoint."""
        step, state, row, older, reference = whole
        runs.sync_lines(self.folder)  # before what goes on from them
        extra = {"step": step, "row": row, **({_MOVED: True} if reference else {})}
        self._checkpoints.save(step, state, extra, score_of(row), (*older, *reference))

    def save_unsaved(self, error: BaseException) -> None:
        """Save what an error or an interruption would lose, and report what is saved.

        The report becomes a note of an error, which is printed after it; else it is shown now.
        A start that an error ends leaves nothing.
        """
        if self._progress is None:
            if isinstance(error, Exception):
                self._traces.remove()
            elif (self.folder / runs.CONFIG).exists():
                again = f"begin again with: {_resume_command(self.folder)}"
                self.note(f"Stopped before the first step; {again}")
            return
        if not self._config.checkpoint.every:
            self._report(error, f"{self.folder} keeps no checkpoints (--checkpoint.every 0).")
            return
        lost = self._save_whole_step()
        # An error of the disk is the reason already why the last step is not saved.
        why = "" if lost is None or isinstance(error, OSError) else str(lost)
        saved, unsaved = self._checkpoints.newest, None if lost is None else self._progress.step
        self._report(error, _what_is_saved(self.folder, saved, unsaved, why))

    def _report(self, error: BaseException, text: str) -> None:
        """Show what is saved: after an error, or now where the run was interrupted."""
        if isinstance(error, Exception):
            error.add_note(text)
        else:
            self.note(text)

    def wait(self) -> None:
        """Return when the last checkpoint is on disk; raise if it could not be written."""
        self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the last checkpoint, and close the view, the trackers and the claim."""
        try:
            self._checkpoints.close()
        finally:
            self._display.close()
            self.claim.close()

    def _save_whole_step(self) -> OSError | None:
        """Save the last finished step, unless an update is overwriting it; return what failed."""
        try:
            self.wait()
            unsaved = self._progress is not None and self._progress.step != self._checkpoints.newest
            if unsaved and self._whole is not None:  # which the other ranks may not join
                return OSError("each rank has a part of it, and they did not end together.")
            if unsaved and not self._given_up:
                self.save()
                self.wait()
        except OSError as error:
            return error
        return None


def _progress_of(found: Restored) -> Progress:
    """Return the finished step that a checkpoint holds."""
    num_older = len(found.beside) - bool(found.extra.get(_MOVED))
    older, reference = found.beside[:num_older], found.beside[num_older:]
    return Progress(found.step, found.state, found.extra["row"], older, reference)


class _Display:
    """The view and the trackers that show a run."""

    def __init__(self, view: View, title: str) -> None:
        self._view, self._title = view, title
        self._trackers: list[Tracker] = []

    def start(self, folder: Path, config: TrainConfig, step: int) -> None:
        """Open the trackers and the view, after a number of steps."""
        plain = configs.to_plain(config)
        for name in config.log.trackers:
            self._trackers.append(tracker(name, folder, plain, step, self._view.note))
        self._view.start(self._title, config.steps, step)

    def begin(self, row: dict[str, Any]) -> None:
        """Show what is known before the first step, if the policy has been evaluated."""
        if held_out(row) is not None:
            self.step(row, ())

    def step(self, row: dict[str, Any], seen: Sequence[Completion]) -> None:
        """Show a finished step, and completions of it."""
        for each in self._trackers:
            each.log(row)
            if seen:
                each.completions(seen)
        self._view.step(row, seen[0] if seen else None)

    def close(self) -> None:
        """Close the trackers and the view."""
        for each in self._trackers:
            each.close()
        self._view.close()


def reference_policy(folder: Path, step: int, params: Params) -> Params:
    """Return the policy of step 0, a KL penalty's first reference: saved then, restored later.

    `params` are the policy's after `step` steps.
    """
    if step == 0:
        save(folder / runs.REFERENCE, params)
        return params
    found, _ = restore(folder / runs.REFERENCE, like=params)
    return dict(found)


def _check_goes_on(
    config: TrainConfig, folder: Path, found: Restored, needs_reference: bool
) -> None:
    """Raise, before anything is written, if the configuration cannot go on from a checkpoint."""
    step, row = found.step, found.extra.get("row")
    if not isinstance(row, dict) or row.get("step") != step:
        raise ValueError(
            f"train expects a run's checkpoint with the metrics of step {step} in "
            f"{folder / runs.CHECKPOINTS}, got {brief(row)}."
        )
    if step > config.steps:
        raise ValueError(
            f"train expects --steps of at least {step}, which {folder} has done, got "
            f"{config.steps}."
        )
    if step and needs_reference and not (folder / runs.REFERENCE).exists():
        raise ValueError(
            f"train expects --algorithm.kl 0 for {folder}, which began without a penalty and kept "
            f"no reference policy, got a KL penalty."
        )


def _step_of_parent(folder: Path, facts: Mapping[str, str]) -> int:
    """Return the step of the checkpoint that a fork began as."""
    text = facts.get(_OF_A_FORK[1], "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"train expects a step as {_OF_A_FORK[1]!r} in {folder / runs.ENVIRONMENT}, got "
            f"{brief(text)}."
        )
    return int(text)


def _resume_command(folder: Path) -> str:
    return f"funcrl train --resume {shlex.quote(str(folder))}"


def _what_is_saved(folder: Path, newest: int | None, unsaved: int | None, why: str) -> str:
    """Return which step of a run is on disk, why a later one is not, and how to go on."""
    place, command = folder / runs.CHECKPOINTS, _resume_command(folder)
    if unsaved is None:
        return f"Saved step {newest} in {place}; go on with: {command}"
    saved = "No step" if newest is None else f"Step {newest}"
    lost = f"Step {unsaved} is not saved: {why}\n" if why else ""
    return f"{lost}{saved} is saved in {place}; once this is fixed, go on with: {command}"


def _take_lines_until(folder: Path, source: Path, row: dict[str, Any], note: Note) -> None:
    """Keep the lines of `source` up to the step of `row`; those after it will be run again."""
    path, step = folder / runs.METRICS, row["step"]
    last = runs.keep_until(path, step, source / runs.METRICS)
    runs.keep_until(folder / runs.COMPLETIONS, step, source / runs.COMPLETIONS)
    if last != step:
        runs.append_lines(path, [row])
        note(
            f"{source / runs.METRICS} ended at step {last}, before the checkpoint of step {step}: "
            f"somebody has changed it. The steps between are missing there."
        )

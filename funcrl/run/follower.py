"""The last finished step of a run, and when it is saved; another rank writes the run's folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from funcrl.config import TrainConfig
from funcrl.core.types import Params, TrainState
from funcrl.run.runs import Completion

# A state of which each rank has a part -> the whole one; all ranks call it.
WholeFn: TypeAlias = Callable[[TrainState], TrainState]


class Progress(NamedTuple):
    """The last finished step, from which a run can be resumed."""

    step: int
    state: TrainState
    row: dict[str, Any]  # of metrics.jsonl; those before it are only there
    # What was trained after the steps before it, oldest first, as far as rollouts need it.
    older: tuple[Params, ...] = ()
    reference: tuple[Params, ...] = ()  # of a KL penalty: one, once it has moved


class Follower:
    """What a rank keeps of a run that another one records: nothing is written or shown."""

    def __init__(self, config: TrainConfig, folder: Path, whole: WholeFn | None = None) -> None:
        self.folder, self._config, self._whole = folder, config, whole
        self._progress: Progress | None = None
        self._began_to_save = -1  # the step that was to be saved last

    @property
    def progress(self) -> Progress:
        """The last finished step."""
        if self._progress is None:
            raise RuntimeError(f"{type(self).__name__} expects begin or go_on first.")
        return self._progress

    def note(self, text: str) -> None:
        """Say nothing: the rank that records does."""

    def go_on(self, progress: Progress) -> None:
        """Go on with this rank's part of the last finished step."""
        self._progress = progress

    def begin(self, state: TrainState, row: dict[str, Any]) -> None:
        """Take the state before the first step."""
        self._progress = Progress(0, state, row)
        if self._config.checkpoint.every:
            self.save()

    def advance(
        self,
        state: TrainState,
        row: dict[str, Any],
        seen: Sequence[Completion],
        # Trained after the steps before it, if a resumed run draws with that.
        older: Sequence[Params] = (),
        reference: Sequence[Params] = (),
    ) -> None:
        """Take a finished step."""
        self._progress = Progress(row["step"], state, row, tuple(older), tuple(reference))
        self._show(seen)
        every = self._config.checkpoint.every
        if every and (row["step"] == self._config.steps or not row["step"] % every):
            self.save()

    def _show(self, seen: Sequence[Completion]) -> None:
        """Show nothing."""

    def save(self) -> None:
        """Begin a checkpoint of the last finished step, with all ranks where they share it."""
        whole = self.progress
        self._began_to_save = whole.step
        if self._whole is not None:
            whole = whole._replace(state=self._whole(whole.state))
        self._write(whole)

    def _write(self, whole: Progress) -> None:
        """Write nothing."""

    def save_last(self) -> None:
        """Save the last finished step, if it has not been saved."""
        if self._began_to_save != self.progress.step and self._config.checkpoint.every:
            self.save()

    def save_together(self) -> None:
        """Save the last finished step if all ranks share it, and it has not been saved."""
        if self._whole is not None:
            self.save_last()

    def give_up_state(self) -> None:
        """Do nothing: no checkpoint reads the state."""

    def save_unsaved(self, error: BaseException) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Do nothing: nothing is being written."""

    def close(self) -> None:
        """Do nothing."""

"""What a rank has in place of a record where another one writes the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrl.config import TrainConfig
from funcrl.core.types import Params, TrainState
from funcrl.run.record import Progress, WholeFn
from funcrl.run.runs import Completion


class Follower:
    """The last finished step of a run that another rank records: nothing is written or shown."""

    def __init__(self, config: TrainConfig, folder: Path, whole: WholeFn | None = None) -> None:
        self.folder, self._config, self._whole = folder, config, whole
        self._progress: Progress | None = None
        self._began_to_save = -1  # the step that was to be saved last

    @property
    def progress(self) -> Progress:
        """The last finished step."""
        if self._progress is None:
            raise RuntimeError("Follower expects begin or go_on first.")
        return self._progress

    def note(self, text: str) -> None:
        """Say nothing: the rank that records does."""

    def go_on(self, progress: Progress) -> None:
        """Take the last finished step of the rank that records."""
        self._progress = progress

    def begin(self, state: TrainState, row: dict[str, Any]) -> None:
        """Take the state before the first step."""
        self._progress = Progress(0, state, row)
        if self._config.checkpoint.every:
            self.save()

    def save(self) -> None:
        """Give this rank's part to a checkpoint."""
        self._began_to_save = self.progress.step
        if self._whole is not None:
            self._whole(self.progress.state)

    def advance(
        self,
        state: TrainState,
        row: dict[str, Any],
        seen: Sequence[Completion],
        older: Sequence[Params] = (),
    ) -> None:
        """Take a finished step."""
        del seen
        self._progress = Progress(row["step"], state, row, tuple(older))
        every = self._config.checkpoint.every
        if every and (row["step"] == self._config.steps or not row["step"] % every):
            self.save()

    def save_together(self) -> None:
        """Give this rank's part of the last finished step, if it has not been saved."""
        is_new = self._began_to_save != self.progress.step
        if is_new and self._whole is not None and self._config.checkpoint.every:
            self.save()

    def give_up_state(self) -> None:
        """Do nothing: no checkpoint reads the state."""

    def save_unsaved(self, error: BaseException) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Do nothing: nothing is being written."""

    def close(self) -> None:
        """Do nothing."""

"""What a rank has in place of a record where another one writes the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrl.core.types import Params, TrainState
from funcrl.run.record import Progress
from funcrl.run.runs import Completion


class Follower:
    """The last finished step of a run that another rank records: nothing is written or shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._progress: Progress | None = None

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

    def give_up_state(self) -> None:
        """Do nothing: no checkpoint reads the state."""

    def save_unsaved(self, error: BaseException) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Do nothing: nothing is being written."""

    def close(self) -> None:
        """Do nothing."""

"""Sends metrics to TensorBoard, Weights & Biases and trackio."""

import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from funcrl.core import checks
from funcrl.core.files import write_whole
from funcrl.core.printing import print_safely
from funcrl.run.runs import Completion, Row

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class Tracker(Protocol):
    """A service that shows a run's metrics."""

    def log(self, row: Row) -> None:
        """Write a step's metrics."""

    def completions(self, rows: Sequence[Completion]) -> None:
        """Write a table of completions."""

    def close(self) -> None:
        """Finish the run there."""


def tracker(
    name: TrackerName,
    run: Path,
    config: Mapping[str, Any],
    first_step: int = 0,
    on_error: Callable[[str], None] = print_safely,
) -> Tracker:
    """Return a tracker; one that fails later is reported once and does not stop the run.

    Args:
        name: "tensorboard" (writes RUN/tensorboard), "wandb" or "trackio".
        run: the run's folder, which names it.
        config: the resolved configuration.
        first_step: of a resumed run; those before it are written already.
        on_error: is called with a line about the first failure.
    """
    check_trackers([name])
    kinds: dict[str, Callable[..., Tracker]] = {
        "tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio,
    }  # fmt: skip
    return _Careful(name, kinds[name](run, config, first_step), on_error)


def check_trackers(names: Sequence[str]) -> None:
    """Raise unless every tracker can be imported."""
    for name in names:
        checks.import_extra("train", name, f"for --log.trackers {name}", name)


def _tracked_name(run: Path) -> str:
    """Return a name for the run that is unique in an account and stays when it is resumed.

    The folder's name is not enough: every machine has a sum_digits-1.
    """
    path = run / ".tracked-as"
    if not path.exists():
        write_whole(path, f"{run.resolve().name}-{secrets.token_hex(3)}")
    return path.read_text()


class _Careful:
    """A tracker that reports its first failure and counts the others."""

    def __init__(self, name: str, inner: Tracker, on_error: Callable[[str], None]) -> None:
        self._name, self._inner, self._on_error = name, inner, on_error
        self.num_failures = 0

    def log(self, row: Row) -> None:
        self._try(lambda: self._inner.log(row))

    def completions(self, rows: Sequence[Completion]) -> None:
        self._try(lambda: self._inner.completions(rows))

    def close(self) -> None:
        self._try(self._inner.close)
        if self.num_failures > 1:
            self._on_error(f"{self._name} failed {self.num_failures} times.")

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                self._on_error(
                    f"{self._name} failed ({type(error).__name__}: {error}); training goes on, and "
                    f"metrics.jsonl has every number."
                )


class _TensorBoard:
    def __init__(self, run: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)
        self._writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in config.items()), 0)

    def log(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def completions(self, rows: Sequence[Completion]) -> None:
        for number, row in enumerate(rows):
            text = f"{row.prompt}{row.completion}\n\nreward {row.reward}"
            self._writer.add_text(f"completions/{number}", text, row.step)

    def close(self) -> None:
        self._writer.close()


# Fields of a completion that are lists, which a cell of a table does not hold.
_PER_TOKEN = ("tokens", "logprobs", "trainer_logprobs")


class _Wandb:
    def __init__(self, run: Path, config: Mapping[str, Any], first_step: int) -> None:
        del first_step  # wandb itself leaves out steps that it has
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project="funcrl", name=_tracked_name(run), id=_tracked_name(run), resume="allow",
            dir=str(run),
            config=dict(config),
        )  # fmt: skip

    def log(self, row: Row) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def completions(self, rows: Sequence[Completion]) -> None:
        columns = [name for name in Completion._fields if name not in _PER_TOKEN]
        values = [[getattr(row, name) for name in columns] for row in rows]
        data = [
            [str(value) if isinstance(value, dict) else value for value in row] for row in values
        ]
        table = self._wandb.Table(columns=columns, data=data)
        self._run.log({"completions": table}, step=rows[0].step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run: Path, config: Mapping[str, Any], first_step: int) -> None:
        del first_step
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(
            project="funcrl", name=_tracked_name(run), config=dict(config), resume="allow"
        )

    def log(self, row: Row) -> None:
        self._trackio.log(_numbers(row), step=row["step"])

    def completions(self, rows: Sequence[Completion]) -> None:
        texts = {f"completions/{n}": f"{r.prompt}{r.completion}" for n, r in enumerate(rows)}
        self._trackio.log(texts, step=rows[0].step)

    def close(self) -> None:
        self._trackio.finish()


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items()
            if name != "step" and isinstance(value, int | float)}  # fmt: skip

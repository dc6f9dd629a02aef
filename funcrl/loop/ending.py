"""What ends a run before its last step: a value that is reached, or what a callback says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from funcrl.config import TrainConfig
from funcrl.loop.ranks import of_first_rank
from funcrl.parallel import Mesh

Row: TypeAlias = dict[str, Any]
# (a step's row of metrics.jsonl) -> True to end the run
Callback: TypeAlias = Callable[[Row], bool | None]
# a step's row -> why the run ends with it, "" if it goes on
EndFn: TypeAlias = Callable[[Row], str]

_NAMES = {"accuracy": "eval/accuracy"}


def ends_with(config: TrainConfig, callbacks: Sequence[Callback], mesh: Mesh) -> EndFn:
    """Return what says whether a run ends with a step; all ranks say the same."""
    if config.stop_at is None and not callbacks:
        return lambda _: ""

    def why(row: Row) -> str:
        reached = _reached(config.stop_at, row)
        # All of them are called, whatever the others say.
        said = [_ends(callback, callback(dict(row))) for callback in callbacks]
        return reached or next(filter(None, said), "")

    # The first rank has the run's numbers, and the others follow it.
    return lambda row: str(of_first_rank(why(row) if mesh.host.rank == 0 else "", mesh.host))


def _reached(stop_at: str | None, row: Mapping[str, Any]) -> str:
    """Return a sentence if a step has the value that ends a run, "" if it does not."""
    if stop_at is None:
        return ""
    name, _, wanted = stop_at.partition("=")
    name = _NAMES.get(name, name)
    value = row.get(name)
    if value is None or not value >= float(wanted):
        return ""
    return f"{name} is {value:.4g}, which --stop-at {stop_at} waited for"


def _ends(callback: Callback, found: Any) -> str:
    """Return a sentence if a callback ends the run, "" if it does not."""
    name = getattr(callback, "__name__", type(callback).__name__)
    if found is None or isinstance(found, bool):
        return f"the callback {name} ended the run" if found else ""
    raise TypeError(
        f"train expects callbacks to return True to end the run, or False or None, got {found!r} "
        f"from {name}."
    )

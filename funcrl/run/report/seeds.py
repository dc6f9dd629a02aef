"""Runs that differ in their seed alone, as one: means, and a band of one deviation around them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from funcrl.run.report.plots import Run

# Options that runs of several seeds differ in.
_OWN = ("seed", "run_dir")


def of_seeds(runs: Sequence[Run]) -> list[Run]:
    """Return runs of one configuration and several seeds as one run; others as they are."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_without_seed(run), []).append(run)
    return [_mean_of(group) if _has_seeds(group) else run
            for group in groups.values()
            for run in (group[:1] if _has_seeds(group) else group)]  # fmt: skip


def _has_seeds(runs: Sequence[Run]) -> bool:
    return len({run.config.get("seed") for run in runs}) == len(runs) > 1


def _without_seed(run: Run) -> str:
    return repr({name: value for name, value in run.config.items() if name not in _OWN})


def _mean_of(runs: Sequence[Run]) -> Run:
    """Return the mean of runs, at the steps at which all of them have a metric."""
    metrics: dict[str, tuple[list[int], list[float]]] = {}
    bands: dict[str, tuple[list[float], list[float]]] = {}
    for name in runs[0].metrics:
        values = [dict(zip(*run.metrics.get(name, ((), ())), strict=True)) for run in runs]
        steps = [step for step in values[0] if all(step in each for each in values)]
        if not steps:
            continue
        columns = [[each[step] for each in values] for step in steps]
        means = [statistics.fmean(column) for column in columns]
        spread = [statistics.stdev(column) for column in columns]
        metrics[name] = steps, means
        bands[name] = (
            [mean - each for mean, each in zip(means, spread, strict=True)],
            [mean + each for mean, each in zip(means, spread, strict=True)],
        )
    parents = {run.folder.resolve().parent for run in runs}
    name = parents.pop().name if len(parents) == 1 else runs[0].name
    return runs[0]._replace(
        name=f"{name}, {len(runs)} seeds",
        rows=_last_row(runs), metrics=metrics, bands=bands, completions=[], num_completions=0,
    )  # fmt: skip


def _last_row(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the row that says how many steps all of the runs have."""
    steps = [run.rows[-1]["step"] for run in runs if run.rows]
    return [{"step": min(steps)}] if len(steps) == len(runs) else []


def spread_of(run: Run, name: str) -> str:
    """Return the last deviation of a metric over seeds, "" where a run is one."""
    band: Mapping[str, tuple[list[float], list[float]]] = run.bands
    if name not in band:
        return ""
    low, high = (ends[-1] for ends in band[name])
    return f" ± {(high - low) / 2:.2g}"

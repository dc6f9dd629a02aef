"""The result of a run, as people read it: a few lines, or a page in a notebook."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.core.types import TrainState
from funcrl.run import report
from funcrl.run.accuracy import held_out


class Trained(NamedTuple):
    """The result of a run."""

    state: TrainState
    history: list[dict[str, Any]]  # the rows of metrics.jsonl, NaN where they are null
    run_dir: Path  # the run's folder

    def __repr__(self) -> str:
        lines = [f"Trained({len(self.history) - 1} steps in {self.run_dir})"]
        evaluated = [found for row in self.history if (found := held_out(row)) is not None]
        rewards = [("reward", row.get("reward", math.nan)) for row in self.history]
        for kind, named in (("held-out ", evaluated), ("", rewards)):
            values = [(label, value) for label, value in named if math.isfinite(value)]
            if values:
                label, last = values[-1]
                lines.append(f"  {kind}{label} {values[0][1]:.3g} -> {last:.3g}")
        return "\n".join([*lines, f"  state: {self.state}"])

    def _repr_html_(self) -> str:
        """Return the run's curves and completions, which a notebook shows in place of the text."""
        return report.to_frame(self.run_dir)

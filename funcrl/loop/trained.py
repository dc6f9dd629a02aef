"""The result of a run, as people read it: a few lines, or a page in a notebook."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.core.types import TrainState
from funcrl.run import report


class Trained(NamedTuple):
    """The result of a run."""

    state: TrainState
    history: list[dict[str, Any]]  # the rows of metrics.jsonl, NaN where they are null
    run_dir: Path  # the run's folder

    def __repr__(self) -> str:
        lines = [f"Trained({len(self.history) - 1} steps in {self.run_dir})"]
        for label, name in (("held-out accuracy", "eval/accuracy"), ("reward", "reward")):
            values = [row[name] for row in self.history if math.isfinite(row.get(name, math.nan))]
            if values:
                lines.append(f"  {label} {values[0]:.3g} -> {values[-1]:.3g}")
        return "\n".join([*lines, f"  state: {self.state}"])

    def _repr_html_(self) -> str:
        """Return the run's curves and completions, which a notebook shows in place of the text."""
        return report.to_frame(self.run_dir)

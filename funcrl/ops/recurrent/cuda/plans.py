"""How the work of a scan is cut: tiles, and the steps that one launch of a kernel computes."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT
from funcrl.ops.recurrent.contract import Precision


class Tile(NamedTuple):
    """Sequences, numbers of a state and inner numbers of a program, and its resources."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def grid(self, num_rows: int, width: int) -> tuple[int, int]:
        """Return the number of tiles of rows and of columns."""
        return -(-num_rows // self.rows), -(-width // self.columns)

    @property
    def size(self) -> tuple[int, int, int]:
        """What a kernel calls BM, BH and BK."""
        return self[:3]

    @property
    def resources(self) -> dict[str, Any]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, **STRICT}


class Plan(NamedTuple):
    """How a scan is cut; a replay has the tile of `forward`, so that it has its bits.

    With `launch="step"` a launch is one step, and each tile has a program. With "piece" a program
    computes all columns of its rows for all steps of a piece: then no step waits for a launch.
    """

    forward: Tile
    backward: Tile
    launch: Literal["step", "piece"]

    def launches(self, tile: Tile, rows: int, width: int, steps: int) -> list["Launch"]:
        """Return the launches of `steps` steps, in order."""
        grid = tile.grid(rows, width)
        if self.launch == "piece":
            return [Launch((grid[0], 1), 0, steps)]
        return [Launch(grid, step, step + 1) for step in range(steps)]


class Launch(NamedTuple):
    """A launch of a kernel, which computes the steps first..last."""

    grid: tuple[int, int]
    first: int
    last: int


# (a tensor [N, H] of the inputs' dtype, precision) -> Plan
PlanFn: TypeAlias = Callable[[Tensor, Precision], Plan]

# The fastest on an H200 with a state of 256: of 4096 sequences, and of few.
_HALF = Plan(Tile(64, 64, 64, 8, 3), Tile(64, 64, 64, 8, 3), "step")
_HALF_OF_FEW = Plan(Tile(16, 32, 128, 4, 3), Tile(16, 32, 128, 4, 3), "step")
_TF32 = Plan(Tile(128, 64, 32, 8, 3), Tile(64, 64, 64, 8, 3), "step")
_TF32_OF_FEW = Plan(Tile(16, 32, 64, 4, 3), Tile(16, 32, 64, 4, 3), "step")
_IEEE = Plan(Tile(64, 64, 32, 4, 2), Tile(64, 32, 32, 4, 3), "step")
_IEEE_OF_FEW = Plan(Tile(16, 32, 64, 4, 3), Tile(16, 32, 64, 4, 3), "step")
_FEW = 512  # sequences


def plan_of(state: Tensor, precision: Precision) -> Plan:
    """Return a plan for a state [N, H], which depends on N, the dtype and the precision."""
    few = len(state) <= _FEW
    if state.dtype != torch.float32:
        return _HALF_OF_FEW if few else _HALF
    if precision == "tf32":
        return _TF32_OF_FEW if few else _TF32
    return _IEEE_OF_FEW if few else _IEEE

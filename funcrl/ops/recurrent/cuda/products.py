"""A product in tf32, whatever precision the process has chosen for torch's products."""

from torch import Tensor

from funcrl.ops.exact.cuda.layout import fresh
from funcrl.ops.recurrent.cuda.plans import Tile
from funcrl.ops.recurrent.cuda.product_kernels import linear_kernel

_TILE = Tile(128, 128, 32, 8, 3)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
    """Return rows W^T + bias [M, G], of rows [M, D] and a weight [G, D]."""
    out, weight = fresh(rows, len(rows), len(weight)), weight.contiguous()
    linear_kernel[_TILE.grid(*out.shape)](
        rows, weight, weight if bias is None else bias, out, len(rows), rows.stride(0),
        *weight.shape, *_TILE.size, bias is not None, **_TILE.resources,
    )  # fmt: skip
    return out

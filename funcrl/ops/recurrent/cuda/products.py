"""Products in tf32, whatever precision the process has chosen for torch's products."""

from torch import Tensor

from funcrl.ops.exact.cuda.layout import fresh
from funcrl.ops.recurrent.cuda.plans import Tile
from funcrl.ops.recurrent.cuda.product_kernels import linear_kernel, outer_kernel

_LINEAR = Tile(128, 128, 32, 8, 3)
_OUTER = Tile(128, 128, 32, 8, 3)
_PROGRAMS = 128  # that multiply at a time: about as many as a GPU has multiprocessors


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
    """Return rows W^T + bias [M, G], of rows [M, D] and a weight [G, D]."""
    out, weight = fresh(rows, len(rows), len(weight)), weight.contiguous()
    linear_kernel[_LINEAR.grid(*out.shape)](
        rows, weight, weight if bias is None else bias, out, len(rows), rows.stride(0),
        *weight.shape, *_LINEAR.size, bias is not None, **_LINEAR.resources,
    )  # fmt: skip
    return out


def add_outer(total: Tensor, left: Tensor, right: Tensor, /) -> None:
    """Add left^T right of each group to the total [groups, P, Q], in place.

    A group's M rows are cut into parts by M, P and Q alone, each of which has programs of its own;
    the parts are added in order.
    """
    groups, size, width = left.shape
    tiles = _OUTER.grid(width, right.shape[2])
    parts = max(1, min(_PROGRAMS // (tiles[0] * tiles[1]), size // _PROGRAMS))
    found = fresh(total, groups, parts, width, right.shape[2])
    outer_kernel[(tiles[0] * tiles[1], parts, groups)](
        left, right, found, size, -(-size // parts), *left.stride()[:2], *right.stride()[:2],
        width, right.shape[2], *_OUTER.size, **_OUTER.resources,
    )  # fmt: skip
    total += found.sum(dim=1) if parts > 1 else found[:, 0]

"""What the launches of all cells share."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT
from funcrl.ops.recurrent.cuda.plans import Tile
from funcrl.ops.recurrent.cuda.step_kernels import state_gradient_kernel
from funcrl.ops.recurrent.kernels import Precision


def strides(x: Tensor | None) -> tuple[int, int]:
    """Return the distances of two steps and of two rows of [k, N, ...]; zeros of what is not there."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def carried(state: Tensor) -> Tensor:
    """Return a copy of a state [N, H] that a kernel may overwrite step by step."""
    return state.clone(memory_format=torch.contiguous_format)


def switches(resets: Tensor | None, other: Tensor) -> Tensor:
    """Return `resets` as bytes; without any another tensor, which no kernel reads."""
    return other if resets is None else resets.view(torch.uint8)


def gradient_of_state(
    grads: Tensor,
    weight: Tensor,
    resets: Tensor | None,
    direct: Tensor | None,
    precision: Precision,
    tile: Tile,
) -> Tensor:
    """Return the gradient [N, H] in float32 of the state h before a piece.

    Args:
        grads: [k, N, 4 H] of the gates of a piece.
        weight: W_hh transposed, [H, G].
        resets: [k, N], or None.
        direct: [N, H], a part of the gradient that needs no product, or None.
        precision: of the product.
        tile: its tile.
    """
    rows, (width, num_rows) = grads.shape[1], weight.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=grads.device)
    state_gradient_kernel[tile.grid(rows, width)](
        grads, weight, switches(resets, grads), out if direct is None else direct, out, rows,
        grads.stride(1), strides(resets)[1], H=width, GATES=num_rows // width,
        RESETS=resets is not None, DIRECT=direct is not None, PRECISION=precision,
        **tile.options(), **STRICT,
    )  # fmt: skip
    return out

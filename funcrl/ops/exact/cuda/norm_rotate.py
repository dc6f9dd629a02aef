"""The norm of each head of queries and keys and its rotation at once, by Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.gate import unit
from funcrl.ops.exact.cuda.layout import STRICT, fresh, power_of_two
from funcrl.ops.exact.cuda.norm import add_parts, rows_of_gradients, rows_of_program
from funcrl.ops.exact.cuda.norm_rotate_kernels import (
    norm_rotate_gradient_kernel,
    norm_rotate_kernel,
)

_STEPS = 4  # times that a program of the backward pass takes as many rows


def norm_rotate(
    q: Tensor, k: Tensor, gains: Sequence[Tensor] | None, eps: float, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, C] and k [B, T, K, C] as [B, H, T, C]: normed, then rotated, at once.

    Args:
        q: queries of each token.
        k: keys of each token.
        gains: the weights [C] of the two norms, None for no norm.
        eps: of the norms.
        rotation: [2, B, T, C].
    """
    batch, length, heads, width = q.shape
    q, k, rotation = unit(q), unit(k), unit(rotation)
    outs = [fresh(part, batch, part.shape[2], length, width) for part in (q, k)]
    weights = [q, k] if gains is None else [gain.contiguous() for gain in gains]
    block = power_of_two(width)
    rows = rows_of_program(block)
    tiles = sum(-(-part.shape[2] // rows) for part in (q, k))
    if batch * length:
        norm_rotate_kernel[(batch * length, tiles)](
            q, k, *weights, rotation, *outs, eps, heads, k.shape[2], length, *q.stride()[:3],
            *k.stride()[:3], *rotation.stride()[:3], D=width, BLOCK=block, ROWS=rows,
            NORM=gains is not None, num_warps=4, **STRICT,
        )  # fmt: skip
    return outs[0], outs[1]


def norm_rotate_gradients(
    grad: Tensor, x: Tensor, gain: Tensor | None, eps: float, rotation: Tensor, blocks: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x [B, T, H, C] and, in float32, of the gain [C] if there is one.

    The gain's is summed for each block of rows, and then over blocks in pairs.

    Args:
        grad: [B, H, T, C].
        x: queries or keys of each token.
        gain: the weight of their norm, None for no norm.
        eps: of the norm.
        rotation: [2, B, T, C].
        blocks: one, two or four.
    """
    batch, length, heads, width = x.shape
    grad, x, rotation = unit(grad), unit(x), unit(rotation)
    size = batch * length * heads
    block = power_of_two(width)
    rows = rows_of_gradients(block)
    of_block = -(-size // blocks)
    programs = -(-of_block // (rows * _STEPS))
    grad_x = fresh(x, batch, length, heads, width)
    partial = fresh(x, blocks, programs, width, dtype=torch.float32)
    weight = x if gain is None else gain.contiguous()
    if size:
        norm_rotate_gradient_kernel[(programs, blocks)](
            grad, x, weight, rotation, grad_x, partial, size, of_block, eps, heads, length,
            *grad.stride()[:3], *x.stride()[:3], *rotation.stride()[:3], D=width, BLOCK=block,
            ROWS=rows, STEPS=_STEPS, NORM=gain is not None, num_warps=4, **STRICT,
        )  # fmt: skip
    return grad_x, None if gain is None else add_parts(partial)

"""RMSNorm by Triton (arXiv:1910.07467), with its residual sum, and the gradients."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two, row_stride
from funcrl.ops.exact.cuda.norm_kernels import norm_gradient_kernel, norm_kernel, part_sum_kernel

# Numbers that a program holds at a time; the rows of a program follow from the width alone.
_FORWARD, _BACKWARD = 2048, 4096
_STEPS = 4  # times that a program of the backward pass takes as many rows
_PARTS, _COLUMNS = 128, 16  # of the weight's gradient, that a program sums at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return `x / sqrt(mean(x^2) + eps) * (weight + offset)` [M, D] and the factors [M]."""
    _, out, scale = _normed(x, None, weight, eps, offset)
    return out, scale


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta in the dtype of x, and `rms_norm` of it."""
    return _normed(x, delta, weight, eps, offset)


def rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [M, D] and of the weight [D], this one in float32.

    A program sums the weight's gradient over a fixed number of rows of one block; these parts are
    summed in order, and then the blocks, of which there are one, two or four, in pairs.
    """
    size, width = x.shape
    grad, x, weight, scale = (
        aligned_rows(grad),
        aligned_rows(x),
        weight.contiguous(),
        scale.contiguous(),
    )
    block = power_of_two(width)
    rows = rows_of_gradients(block)
    of_block = -(-size // blocks)
    programs = -(-of_block // (rows * _STEPS))
    grad_x = fresh(x, size, width)
    if not size:
        return grad_x, fresh(x, width, dtype=torch.float32).zero_()
    partial = fresh(x, blocks, programs, width, dtype=torch.float32)
    norm_gradient_kernel[(programs, blocks)](
        grad, x, weight, scale, grad_x, partial, size, of_block, offset, row_stride(grad),
        row_stride(x), D=width, BLOCK=block, ROWS=rows, STEPS=_STEPS, num_warps=_warps(block),
        **STRICT,
    )  # fmt: skip
    return grad_x, add_parts(partial)


def add_parts(partial: Tensor) -> Tensor:
    """Return the sum over the parts of each block [blocks, parts, D] in order, then over blocks."""
    blocks, parts, width = partial.shape
    out = fresh(partial, width)
    if not parts:
        return out.zero_()
    part_sum_kernel[(-(-width // _COLUMNS),)](
        partial, out, parts, width, BLOCKS=blocks, ROWS=_PARTS, COLUMNS=_COLUMNS, num_warps=4,
        **STRICT,
    )  # fmt: skip
    return out


def _normed(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    size, width = x.shape
    x, weight = aligned_rows(x), weight.contiguous()
    added = x if delta is None else aligned_rows(delta)
    out, scale = fresh(x, size, width), fresh(x, size, dtype=torch.float32)
    total = out if delta is None else fresh(x, size, width)
    block = power_of_two(width)
    rows = rows_of_program(block)
    if size:
        norm_kernel[(-(-size // rows),)](
            x, added, weight, total, out, scale, size, eps, offset, row_stride(x),
            row_stride(added), D=width, BLOCK=block, ROWS=rows, ADD=delta is not None,
            num_warps=_warps(block), **STRICT,
        )  # fmt: skip
    return total, out, scale


def rows_of_program(block: int) -> int:
    """Return the rows that a program of the forward pass norms, of a width up to `block`."""
    return max(1, _FORWARD // block)


def rows_of_gradients(block: int) -> int:
    """Return the rows that a program of the backward pass takes at a time."""
    return max(1, _BACKWARD // block)


def _warps(block: int) -> int:
    return 4 if block <= 4096 else 8

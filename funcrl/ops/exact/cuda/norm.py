"""RMSNorm by Triton (arXiv:1910.07467), with its residual sum, and the gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two, row_stride

# Numbers that a program holds at a time; the rows of a program follow from the width alone.
_FORWARD, _BACKWARD = 2048, 4096
_STEPS = 4  # times that a program of the backward pass takes as many rows
_PARTS, _COLUMNS = 128, 16  # of the weight's gradient, that a program sums at a time


def rms_norm_impl(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return `x / sqrt(mean(x^2) + eps) * (weight + offset)` [M, D] and the factors [M]."""
    _, out, scale = _normed(x, None, weight, eps, offset)
    return out, scale


def add_rms_norm_impl(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + delta in the dtype of x, and `rms_norm` of it."""
    return _normed(x, delta, weight, eps, offset)


def rms_norm_gradients_impl(
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


@triton.jit
def shifted(weight, offset, dtype: tl.constexpr):
    """Return weight + offset in float32, the weight rounded to a dtype before."""
    return weight.to(dtype).to(tl.float32) + offset


@triton.jit(do_not_specialize=["M"])
def norm_kernel(
    x, delta, weight, total, out, scale, M, eps, offset, x_stride, delta_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the norm of each row, of x or of the rounded x + delta."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    seen = (rows < M)[:, None] & (columns < D)[None, :]
    value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=seen, other=0.0)
    at = rows[:, None] * D + columns[None, :]
    if ADD:
        added = tl.load(
            delta + rows[:, None] * delta_stride + columns[None, :], mask=seen, other=0.0
        )
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=seen)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(scale + rows, factor, mask=rows < M)
    gain = shifted(tl.load(weight + columns, mask=columns < D, other=0.0), offset, value.dtype)
    normed = (wide * factor[:, None]).to(value.dtype)
    tl.store(out + at, normed.to(tl.float32) * gain[None, :], mask=seen)


@triton.jit(do_not_specialize=["M", "of_block"])
def norm_gradient_kernel(
    grad, x, weight, scale, grad_x, partial, M, of_block, offset, grad_stride, x_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each row, and this program's part of the weight's gradient.

    A program is of one block, a number of rows whose parts are summed for themselves.
    """
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = block * of_block
    end = tl.minimum(start + of_block, M)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    rows_dtype: tl.constexpr = x.dtype.element_ty
    gain = shifted(tl.load(weight + columns, mask=inside, other=0.0), offset, rows_dtype)[None, :]
    summed = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(STEPS):
        rows = start + (program * STEPS + step) * ROWS + tl.arange(0, ROWS)
        seen = (rows < end)[:, None] & inside[None, :]
        value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=seen, other=0.0)
        given = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=seen, other=0.0)
        factor = tl.load(scale + rows, mask=rows < end, other=0.0)[:, None]
        normed = value.to(tl.float32) * factor
        given = given.to(tl.float32)
        summed += given * normed
        given = given * gain
        mean = tl.sum(given * normed, 1) / D
        result = factor * (given - normed * mean[:, None])
        tl.store(grad_x + rows[:, None] * D + columns[None, :], result, mask=seen)
    at = partial + (block * tl.num_programs(0) + program) * D
    tl.store(at + columns, tl.sum(summed, 0), mask=inside)


@triton.jit
def sum_of_block(partial, block, parts, columns, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of the parts of one block, in their order."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        seen = (rows < parts)[:, None] & (columns < D)[None, :]
        at = partial + (block * parts + rows)[:, None] * D + columns[None, :]
        total += tl.sum(tl.load(at, mask=seen, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["parts", "D"])
def part_sum_kernel(
    partial, out, parts, D, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write the sum over all parts: within a block, and then over one, two or four in pairs."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_of_block(partial, 0, parts, columns, D, ROWS, COLUMNS)
    if BLOCKS > 1:
        total += sum_of_block(partial, 1, parts, columns, D, ROWS, COLUMNS)
    if BLOCKS > 2:
        other = sum_of_block(partial, 2, parts, columns, D, ROWS, COLUMNS)
        other += sum_of_block(partial, 3, parts, columns, D, ROWS, COLUMNS)
        total += other
    tl.store(out + columns, total, mask=columns < D)

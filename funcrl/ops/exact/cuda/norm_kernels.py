"""Kernels of RMSNorm: a fixed number of rows a program, the same for each number of rows."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


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

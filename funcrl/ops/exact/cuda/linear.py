"""Batch-invariant products: a Triton kernel, and cuBLAS where it has the kernel's bits.

Nothing promises that the two agree: each shape is compared once, on random numbers, before a faster
way is used for it. A shape first met while a CUDA graph is captured is left to the kernel.

Gradients of weights are sums over all rows, by cuBLAS: a block of rows is summed as it is alone, so
that the same rows have the same sum in fewer and in more micro-batches; blocks are added in pairs.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from funcrl.core.numerics import pairwise_sum
from funcrl.ops.exact.cuda.layout import ALIGNMENT, STRICT, fresh


class SumShape(NamedTuple):
    """What the library's choice of a product depends on."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    device: torch.device


_NUMBERS = 1 << 21  # results that are compared: an order of additions may show in one of 10^5
_LARGE = 1 << 16  # results of a product from which on its sum with a total is worth a comparison
# Whether the library adds to a total as a sum of two tensors does: a function of GPU and library.
_ADDS: dict[SumShape, bool] = {}


def weight_gradient_impl(grad: Tensor, x: Tensor, blocks: int = 1) -> Tensor:
    """Return grad^T x [N, K] in float32, accumulated in it; equal shapes give equal bits."""
    parts = list(zip(grad.tensor_split(blocks), x.tensor_split(blocks), strict=True))
    totals = [_product(*part) for part in parts[::2]]
    for total, part in zip(totals, parts[1::2], strict=False):
        add_weight_gradient_impl(total, *part)
    return pairwise_sum(totals)


def add_weight_gradient_impl(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return total + grad^T x, in the memory of the total [N, K] of float32."""
    if not grad.numel() or not x.numel():
        return total
    grad, x = contiguous_aligned(grad), contiguous_aligned(x)
    shape = SumShape(len(x), grad.shape[1], x.shape[1], x.dtype, x.device)
    if total.numel() >= _LARGE and _adds_as_one(shape):
        return _added(total, grad, x)
    return total.add_(_product(grad, x))


def bias_gradient_impl(grad: Tensor, blocks: int = 1) -> Tensor:
    """Return the sum [N] over the rows in float32, by torch's reduction, whose order is fixed."""
    parts = grad.contiguous().tensor_split(blocks)
    return pairwise_sum([contiguous_aligned(part).sum(0, dtype=torch.float32) for part in parts])


def _product(grad: Tensor, x: Tensor) -> Tensor:
    if not grad.numel() or not x.numel():
        return fresh(x, grad.shape[1], x.shape[1], dtype=torch.float32).zero_()
    grad, x = contiguous_aligned(grad), contiguous_aligned(x)
    if x.dtype == torch.float32:
        return torch.mm(grad.t(), x)
    return torch.mm(grad.t(), x, out_dtype=torch.float32)


def _added(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum that the library makes while it writes the product."""
    if x.dtype == torch.float32:
        return total.addmm_(grad.t(), x)
    return torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)


def _adds_as_one(shape: SumShape) -> bool:
    """Return whether `_added` is known to have the bits of a product that is then added."""
    if shape not in _ADDS and not (shape.device.type == "cuda" and is_current_stream_capturing()):
        _ADDS[shape] = _compared(shape)
    return _ADDS.get(shape, False)


def _compared(shape: SumShape) -> bool:
    """Return whether the two have equal bits, of at least `_NUMBERS` random numbers."""
    # A caller's random numbers stay as they are.
    generator = torch.Generator(device=shape.device).manual_seed(0)

    def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=dtype, device=shape.device)

    for _ in range(-(-_NUMBERS // (shape.columns * shape.inner))):
        grad, x = (randn(shape.rows, width, dtype=shape.dtype) for width in shape[1:3])
        total = randn(shape.columns, shape.inner)
        expected = total + _product(grad, x)
        if not torch.equal(_added(total, grad, x), expected):
            return False
    return True


class Tile(NamedTuple):
    """Rows, columns and inner numbers that a program multiplies at a time, and its resources."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# The definition. Float32 is multiplied without tensor cores, and has no other tile.
DEFINITION = Tile(64, 128, 64, 4, 3)
FLOAT32 = Tile(64, 64, 32, 4, 3)
# Tiles for few rows: for up to so many rows, those for up to so many columns.
FEW_ROWS = {
    16: {2048: Tile(16, 16, 256, 4, 4), 1 << 31: Tile(16, 32, 128, 4, 5)},
    32: {2048: Tile(32, 16, 256, 4, 3), 1 << 31: Tile(32, 32, 128, 4, 4)},
    64: {
        2048: Tile(64, 16, 128, 4, 4),
        4096: Tile(64, 32, 128, 4, 4),
        1 << 31: Tile(64, 64, 64, 4, 5),
    },
}


def few_rows_tile(rows: int, columns: int) -> Tile:
    """Return the tile for a number of rows that is a key of `FEW_ROWS`."""
    return next(tile for most, tile in FEW_ROWS[rows].items() if columns <= most)


def tiled(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return x W^T + bias [M, N] by tiles of one size; the bias is added before rounding."""
    (size, inner), columns = x.shape, weight.shape[0]
    out = fresh(x, size, columns)
    if not out.numel():
        return out
    programs = -(-size // tile.rows) * -(-columns // tile.columns)
    _kernel[(programs,)](
        x, weight, x if bias is None else bias, out, size, columns, inner, *x.stride(),
        *weight.stride(), BM=tile.rows, BN=tile.columns, BK=tile.inner,
        EVEN_N=columns % tile.columns == 0, EVEN_K=inner % tile.inner == 0, BIAS=bias is not None,
        IEEE=x.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages, **STRICT,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, weight, bias, out, M, N, K, x_m, x_k, w_n, w_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    # Programs that run together share columns of the weight, for up to 8 tiles of rows.
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    group = program // (8 * column_tiles)
    rows_of_group = tl.minimum(row_tiles - group * 8, 8)
    within = program % (8 * column_tiles)
    rows = (group * 8 + within % rows_of_group) * BM + tl.arange(0, BM)
    columns = (within // rows_of_group) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None].to(tl.int64) * x_m + inner[None, :] * x_k
    w_at = weight + columns[None, :].to(tl.int64) * w_n + inner[:, None] * w_k
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x_seen = (rows < M)[:, None]
        if not EVEN_K:
            x_seen = x_seen & (k + inner < K)[None, :]
        left = tl.load(x_at, mask=x_seen, other=0.0)
        if EVEN_N and EVEN_K:
            right = tl.load(w_at)
        else:
            w_seen = (columns < N)[None, :] & (k + inner < K)[:, None]
            right = tl.load(w_at, mask=w_seen, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee" if IEEE else "tf32")
        x_at += BK * x_k
        w_at += BK * w_k
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    seen = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * N + columns[None, :], total, mask=seen)


_PAD = 128  # cuBLAS gets a multiple of so many rows
_COMPARED = 4096  # rows that are compared at a time
_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Shape(NamedTuple):
    """What a choice of a product depends on."""

    rows: int
    columns: int
    inner: int
    transposed: bool
    bias: bool
    dtype: torch.dtype
    device: int


# The choices made so far: a function of the GPU and the library, which do not change in a process.
_CHOICES: dict[Shape, str] = {}


def linear_impl(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias [M, N], each row a function of itself and the weight alone."""
    size, inner = x.shape
    columns = weight.shape[0]
    if not size or not columns or not inner:
        out = fresh(x, size, columns).zero_()
        return out if bias is None else out + bias
    x, bias = contiguous_aligned(x), None if bias is None else contiguous_aligned(bias)
    if x.dtype == torch.float32:
        return tiled(x, weight, bias, FLOAT32)
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        return tiled(x, weight, bias, DEFINITION)
    rows = _padded_rows(size)
    transposed = not weight.is_contiguous()
    shape = Shape(rows, columns, inner, transposed, bias is not None, x.dtype, x.device.index or 0)
    product = _WAYS[_choice(shape) if _is_contiguous_aligned(weight) else "definition"]
    if product is _definition or size == rows or rows < _PAD:
        return product(x, weight, bias)
    # The rows that are added hold anything: no row reads another.
    padded = fresh(x, rows, inner)
    padded[:size].copy_(x)
    return product(padded, weight, bias)[:size]


def describe_products() -> dict[str, str]:
    """Return, for each shape of half precision met so far, the way that multiplies it.

    "definition" is the Triton kernel where neither cuBLAS nor a smaller tile had its bits.
    """
    return {
        f"[{shape.rows}, {shape.inner}] x [{shape.inner}, {shape.columns}]"
        f"{' transposed' * shape.transposed}{' + bias' * shape.bias} {shape.dtype}": way
        for shape, way in _CHOICES.items()
    }


def _choice(shape: Shape) -> str:
    if shape not in _CHOICES:
        if torch.cuda.is_current_stream_capturing():
            return "definition"
        _CHOICES[shape] = _verified(shape)
    return _CHOICES[shape]


def _verified(shape: Shape) -> str:
    """Return the first way that has the bits of the definition, on random numbers."""
    device = torch.device("cuda", shape.device)
    # One of its own: a caller's random numbers stay as they are.
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=shape.dtype, device=device)

    def agrees(way: str) -> bool:
        """Return whether a way has the definition's bits, of at least `_NUMBERS` numbers."""
        for _ in range(-(-_NUMBERS // (shape.rows * shape.columns))):
            x, bias = randn(shape.rows, shape.inner), randn(shape.columns) if shape.bias else None
            weight = (
                randn(shape.inner, shape.columns).t()
                if shape.transposed
                else randn(shape.columns, shape.inner)
            )
            out = _WAYS[way](x, weight, bias)
            pairs = zip(x.split(_COMPARED), out.split(_COMPARED), strict=True)
            if not all(torch.equal(_definition(part, weight, bias), own) for part, own in pairs):
                return False
        return True

    return next((way for way in _candidates(shape.rows) if agrees(way)), "definition")


def _candidates(rows: int) -> tuple[str, ...]:
    return (f"tile {rows}",) if rows < _PAD else ("cublas", "cublasLt")


def _padded_rows(size: int) -> int:
    return next((rows for rows in FEW_ROWS if size <= rows < _PAD), -(-size // _PAD) * _PAD)


def _definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return tiled(x, weight, bias, DEFINITION)


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _cublaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a bias: torch hands it to cublasLt, which chooses otherwise."""
    if bias is None:
        bias = _zeros(weight.shape[0], x.dtype, x.device)
    return torch.addmm(bias, x, weight.t())


@lru_cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that live on: they are first asked for when a shape is verified."""
    return torch.zeros(size, dtype=dtype, device=device)


def _few_rows(rows: int) -> _Product:
    return lambda x, weight, bias: tiled(x, weight, bias, few_rows_tile(rows, weight.shape[0]))


_WAYS: dict[str, _Product] = {
    "definition": _definition,
    "cublas": _cublas,
    "cublasLt": _cublaslt,
    **{f"tile {rows}": _few_rows(rows) for rows in FEW_ROWS},
}


def contiguous_aligned(x: Tensor) -> Tensor:
    """Return `x`, copied where it is not contiguous or not aligned."""
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _is_contiguous_aligned(weight: Tensor) -> bool:
    return weight.data_ptr() % ALIGNMENT == 0

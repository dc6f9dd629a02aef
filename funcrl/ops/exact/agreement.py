"""Whether a large call of the library has the bits of calls of one small shape.

The library chooses its kernel by the shape of a product, so that an element's bits may depend on
the number of rows beside it. A small fixed shape is always safe and often slow. Most libraries add
up an element in the same order for nearly all shapes: a larger shape is used if, on numbers drawn
once, all of its bits are those of the small one.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

_TILE_ROWS = 16
_TILE_COLUMNS = 64


class Product(NamedTuple):
    """What the library's choice of a kernel depends on, beside the number of rows."""

    weight_shape: tuple[int, int]  # (N, K)
    transposed: bool  # whether the weight lies in memory as [K, N]
    dtype: torch.dtype  # of both factors
    threads: int  # of the library: the present number


@functools.cache
def rows_agree(call: str, rows: int, tile: int, product: Product) -> bool:
    """Return whether `rows` rows times a weight have the bits of tiles of `tile` rows.

    Args:
        call: the form of the larger call, "rows" or "columns"; see `multiply`.
        rows: those of the larger call.
        tile: the rows of the small calls.
        product: with the weight.
    """
    (num_columns, depth), transposed, dtype, _ = product
    total = -(-rows // tile) * tile
    for seed in range(_num_draws(product)):
        x, weight = _drawn((rows, depth), (num_columns, depth), dtype, seed)
        weight = weight.mT.contiguous().mT if transposed else weight
        padded = torch.nn.functional.pad(x, (0, 0, 0, total - rows))
        small = torch.cat([multiply("rows", part, weight) for part in padded.split(tile)])
        if not torch.equal(multiply(call, x, weight), small[:rows]):
            return False
    return True


@functools.cache
def places_agree(tile: int, product: Product) -> bool:
    """Return whether a row has the same bits at every place of a tile, and anywhere in memory.

    Some libraries begin a sum at the next aligned address: an AMD EPYC's products with a weight of
    up to 11 rows in float32, and all of an odd depth in float64.
    """
    (num_columns, depth), transposed, dtype, _ = product
    for seed in range(_num_draws(product)):
        row, weight = _drawn((1, depth), (num_columns, depth), dtype, seed)
        x, weight = row.repeat(tile, 1), weight.mT.contiguous().mT if transposed else weight
        moved = _at_odd_address(weight.mT).mT if transposed else _at_odd_address(weight)
        expected = multiply("rows", x, weight)[:1].expand(tile, -1)
        for each, other in ((x, weight), (_at_odd_address(x), weight), (x, moved)):
            if not torch.equal(multiply("rows", each, other), expected):
                return False
    return True


def _num_draws(product: Product) -> int:
    """Return how many products are compared: by chance a few may agree, most of all of short sums.

    A sum in float64 shows its order in its last digits alone.
    """
    num_columns, depth = product.weight_shape
    least = 16 if product.dtype == torch.float64 else 1
    return max(least, 64 // max(depth, 1), 256 // max(num_columns, 1))


def _at_odd_address(x: Tensor) -> Tensor:
    """Return a copy that begins one number after an aligned address."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


def multiply(call: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return what `multiply_into` writes."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply_into(out, call, x, weight)
    return out


def multiply_into(out: Tensor, call: str, x: Tensor, weight: Tensor) -> None:
    """Write `x W^T` into `out`, computed as it stands or (`call` "columns") as W x^T.

    Sums of over 640 products are made in pieces: the library would split them, too, but at places
    that depend on the number of rows. A piece is no use where its result is rounded.
    """
    depth = x.shape[1]
    whole = depth <= 640 or x.dtype not in (torch.float32, torch.float64)
    step = depth if whole else -(-depth // -(-depth // 512))
    left, right = (x, weight) if call == "rows" else (weight, x)
    target = out if call == "rows" else out.new_empty(weight.shape[0], x.shape[0])
    torch.mm(left[:, :step], right[:, :step].mT, out=target)
    for start in range(step, depth, step):
        target.addmm_(left[:, start : start + step], right[:, start : start + step].mT)
    if target is not out:
        out.copy_(target.mT)


def batched_product(left: Tensor, right: Tensor, depth: int) -> Tensor:
    """Return left [P, R, X] times right [P, X, Y]: an element's bits do not depend on P, R and Y.

    A contraction shorter than `depth` has the bits of one that is filled up with zeros. The rows of
    `right`, or its columns, are contiguous.
    """
    (count, rows, _), columns = left.shape, right.shape[2]
    if not count:
        return left.new_zeros(count, rows, columns)
    transposed = right.stride(2) != 1
    shape = (rows, left.shape[2], columns)
    if not _batch_agrees(shape, depth, transposed, left.dtype, torch.get_num_threads()):
        return _in_tiles(left, right, depth)
    if count == 1:  # a batch of one is multiplied by another function of the library
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)


@functools.cache
def _batch_agrees(
    shape: tuple[int, int, int], depth: int, transposed: bool, dtype: torch.dtype, threads: int
) -> bool:
    del threads
    rows, inner, columns = shape
    for seed in range(max(1, 64 // inner)):
        left, right = _drawn((2, rows, inner), (2, columns, inner), dtype, seed)
        right = right.mT if transposed else right.mT.contiguous()
        if not torch.equal(torch.bmm(left, right), _in_tiles(left, right, depth)):
            return False
    return True


def _in_tiles(left: Tensor, right: Tensor, depth: int) -> Tensor:
    """Return the products, each by calls of one shape, two matrices at a time or more."""
    (count, rows, inner), columns = left.shape, right.shape[2]
    pad = torch.nn.functional.pad
    left = pad(left, (0, depth - inner, 0, -rows % _TILE_ROWS))
    right = pad(right.mT, (0, depth - inner, 0, -columns % _TILE_COLUMNS))
    left = left.unflatten(1, (-1, 1, _TILE_ROWS))
    right = right.unflatten(1, (1, -1, _TILE_COLUMNS))
    tiles = (left.shape[1], right.shape[2])
    left = left.expand(-1, -1, tiles[1], -1, -1).flatten(0, 2)
    right = right.expand(-1, tiles[0], -1, -1, -1).flatten(0, 2)
    if left.shape[0] == 1:
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    out = torch.bmm(left, right.mT)[: count * tiles[0] * tiles[1]]
    out = out.view(count, *tiles, _TILE_ROWS, _TILE_COLUMNS).transpose(2, 3)
    return out.reshape(count, tiles[0] * _TILE_ROWS, -1)[:, :rows, :columns].contiguous()


def _drawn(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return factors whose products, summed over the last axis, cancel.

    The second half of each sum is the negative of the first, in another order. What is left is the
    error of the order in which the library adds, which a result rounded to few digits would hide.
    """
    draw = torch.Generator(device="cpu").manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    half = left[-1] // 2
    order = torch.randperm(half, generator=draw, device="cpu")
    factors = []
    for shape, sign in ((left, 1), (right, -1)):
        x = torch.randn(shape, generator=draw, dtype=wide, device="cpu").to(dtype)
        x[..., half : 2 * half] = sign * x[..., order]
        x[..., 2 * half :] = 0
        if seed % 2:
            x = torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu").to(dtype)
        factors.append(x)
    return factors[0], factors[1]

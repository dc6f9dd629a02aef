"""Rotary positions by Triton: each number depends on a pair of numbers alone."""

import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh, power_of_two

_BLOCK = 1024


_HEADS = 32  # of one token, that a program rotates


def rotate_impl(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return `x` [B, H, T, C] turned by `rotation` [2, B, T, C], or turned back (arXiv:2104.09864).

    The inverse is the transpose, which the backward pass needs.
    """
    batch, heads, length, width = x.shape
    x, rotation = unit(x), unit(rotation)
    out = fresh(x, batch, heads, length, width)
    block = power_of_two(width // 2)
    group = min(_HEADS, power_of_two(heads))
    if out.numel():
        rotation_kernel[(batch * length, -(-heads // group))](
            x, rotation, out, heads, length, *x.stride()[:3], *rotation.stride()[:3],
            HALF=width // 2, BLOCK=block, HEADS=group, INVERSE=inverse, **STRICT,
        )  # fmt: skip
    return out


def unit(x: Tensor) -> Tensor:
    """Return `x`, copied where the numbers of a row do not lie one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def rotation_kernel(
    x, rotation, out, H, T, x_b, x_h, x_t, r_two, r_b, r_t,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token, each pair (i, i + C/2) turned by its angle."""
    token = tl.program_id(0)
    batch, time = (token // T).to(tl.int64), (token % T).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    seen = (heads < H)[:, None] & inside[None, :]
    factors = rotation + batch * r_b + time * r_t + columns
    cos_low = tl.load(factors, mask=inside, other=0.0)[None, :]
    cos_high = tl.load(factors + HALF, mask=inside, other=0.0)[None, :]
    sin_low = tl.load(factors + r_two, mask=inside, other=0.0)[None, :]
    sin_high = tl.load(factors + r_two + HALF, mask=inside, other=0.0)[None, :]
    source = x + batch * x_b + time * x_t + heads[:, None].to(tl.int64) * x_h + columns[None, :]
    low = tl.load(source, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=seen, other=0.0).to(tl.float32)
    if INVERSE:
        new_low = tl.fma(high, sin_high, low * cos_low)
        new_high = tl.fma(low, sin_low, high * cos_high)
    else:
        new_low = tl.fma(high, sin_low, low * cos_low)
        new_high = tl.fma(low, sin_high, high * cos_high)
    target = ((batch * H + heads[:, None]) * T + time) * (2 * HALF) + columns[None, :]
    tl.store(out + target, new_low, mask=seen)
    tl.store(out + target + HALF, new_high, mask=seen)

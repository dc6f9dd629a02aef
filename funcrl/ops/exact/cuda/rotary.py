"""Rotary positions by Triton, alone and with the norm of each head before them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh, power_of_two
from funcrl.ops.exact.cuda.norm import add_parts, rows_of_gradients, rows_of_program

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


_STEPS = 4  # times that a program of the backward pass takes as many rows


def norm_rotate_impl(
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


def norm_rotate_gradients_impl(
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


@triton.jit
def norm_rotate_kernel(
    q, k, q_gain, k_gain, rotation, q_out, k_out, eps, H, K, T,
    q_b, q_t, q_h, k_b, k_t, k_h, r_two, r_b, r_t,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write ROWS heads of one token, of q or of k: each one's norm, turned by the token's angles.

    A tile is one of `norm_kernel`'s, so that the mean square is summed as there.
    """
    token = tl.program_id(0)
    batch, time = (token // T).to(tl.int64), (token % T).to(tl.int64)
    tile = tl.program_id(1)
    tiles_of_q = tl.cdiv(H, ROWS)
    heads = tile * ROWS + tl.arange(0, ROWS)
    number = H
    source, target, gain_at = q + batch * q_b + time * q_t, q_out, q_gain
    stride = q_h
    if tile >= tiles_of_q:
        heads = (tile - tiles_of_q) * ROWS + tl.arange(0, ROWS)
        number = K
        source, target, gain_at = k + batch * k_b + time * k_t, k_out, k_gain
        stride = k_h
    columns = tl.arange(0, BLOCK)
    partners = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    inside = columns < D
    seen = (heads < number)[:, None] & inside[None, :]
    rows = source + heads[:, None].to(tl.int64) * stride
    value = tl.load(rows + columns[None, :], mask=seen, other=0.0)
    partner = tl.load(rows + partners[None, :], mask=seen, other=0.0)
    if NORM:
        wide = value.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        gain = tl.load(gain_at + columns, mask=inside, other=0.0).to(value.dtype)
        other_gain = tl.load(gain_at + partners, mask=inside, other=0.0).to(value.dtype)
        value = (wide * factor).to(value.dtype).to(tl.float32) * gain.to(tl.float32)[None, :]
        value = value.to(partner.dtype)
        normed = (partner.to(tl.float32) * factor).to(partner.dtype)
        partner = (normed.to(tl.float32) * other_gain.to(tl.float32)[None, :]).to(partner.dtype)
    factors = rotation + batch * r_b + time * r_t + columns
    cos = tl.load(factors, mask=inside, other=0.0)[None, :]
    sin = tl.load(factors + r_two, mask=inside, other=0.0)[None, :]
    turned = tl.fma(partner.to(tl.float32), sin, value.to(tl.float32) * cos)
    at = ((batch * number + heads[:, None]) * T + time) * D + columns[None, :]
    tl.store(target + at, turned, mask=seen)


@triton.jit(do_not_specialize=["M", "of_block"])
def norm_rotate_gradient_kernel(
    grad, x, gain, rotation, grad_x, partial, M, of_block, eps, H, T,
    g_b, g_h, g_t, x_b, x_t, x_h, r_two, r_b, r_t,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each row, a head of a token, and this program's part of the gain's.

    A program is of one block, a number of rows whose parts are summed for themselves.
    """
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = block * of_block
    end = tl.minimum(start + of_block, M)
    columns = tl.arange(0, BLOCK)
    partners = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    inside = columns < D
    if NORM:
        gains = tl.load(gain + columns, mask=inside, other=0.0).to(x.dtype.element_ty)
        gains = gains.to(tl.float32)[None, :]
    summed = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(STEPS):
        rows = start + (program * STEPS + step) * ROWS + tl.arange(0, ROWS)
        token, head = rows // H, rows % H
        batch, time = token // T, token % T
        seen = (rows < end)[:, None] & inside[None, :]
        grads = grad + (batch * g_b + head * g_h + time * g_t)[:, None]
        own = tl.load(grads + columns[None, :], mask=seen, other=0.0).to(tl.float32)
        other = tl.load(grads + partners[None, :], mask=seen, other=0.0).to(tl.float32)
        factors = rotation + (batch * r_b + time * r_t)[:, None]
        cos = tl.load(factors + columns[None, :], mask=seen, other=0.0)
        sin = tl.load(factors + r_two + partners[None, :], mask=seen, other=0.0)
        given = tl.fma(other, sin, own * cos).to(x.dtype.element_ty).to(tl.float32)
        at = rows[:, None] * D + columns[None, :]
        if NORM:
            place = x + (batch * x_b + time * x_t + head * x_h)[:, None] + columns[None, :]
            value = tl.load(place, mask=seen, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
            normed = value * factor
            summed += given * normed
            given = given * gains
            mean = tl.sum(given * normed, 1) / D
            given = factor * (given - normed * mean[:, None])
        tl.store(grad_x + at, given, mask=seen)
    if NORM:
        at = partial + (block * tl.num_programs(0) + program) * D
        tl.store(at + columns, tl.sum(summed, 0), mask=inside)

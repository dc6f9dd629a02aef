"""Rotary positions: factors that no compiler computes anew, and the rotation by them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core.custom_op import differentiable, operator
from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.device import per_device
from funcrl.ops.rotary import rotary_angles, rotary_factors


def rotation_forward(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return the factors [..., T, 2, C]: cosines, and sines with their signs."""
    # Each position's cosines are elementwise; flat, so that their place in a vector is alike.
    factors = rotary_factors(rotary_angles(positions.reshape(-1), head_width, theta))
    return factors.transpose(0, 1).reshape(*positions.shape, 2, head_width)


def _like_factors(positions: Tensor, head_width: int, _theta: float) -> Tensor:
    return positions.new_empty(*positions.shape, 2, head_width, dtype=torch.float32)


@operator("rotation", _like_factors, rows=(0,))
def rotation_op(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return `rotation_forward` as an operator."""
    return rotation_forward(positions, head_width, theta).contiguous()


def rotation(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return the factors [..., T, 2, C] of positions [..., T]."""
    factors: Tensor = rotation_op(positions, head_width, theta)
    return factors


def _turn(x: Tensor, factors: Tensor, inverse: bool) -> Tensor:
    """Return [..., heads, T, C] rotated by factors [..., T, 2, C], or back."""
    rows = x.reshape(-1, *x.shape[-3:])
    each = factors.expand(*x.shape[:-3], *factors.shape[-3:]).reshape(-1, *factors.shape[-3:])
    return rotate_impl(rows, each.permute(2, 0, 1, 3), inverse).view(x.shape)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("rotate", _like, rows=(0, 1))
def rotate_op(x: Tensor, factors: Tensor, inverse: bool) -> Tensor:
    """Return `x` rotated, as an operator."""
    return _turn(x, factors, inverse)


def _forward(x: Tensor, factors: Tensor) -> tuple[Tensor]:
    return (rotate_op(x, factors, False),)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    return [rotate_op(grads[0], inputs[1], True)]


_rotate = differentiable("rotate", _forward, _backward, rows=(0, 1))


def rotate(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return each of several [..., heads, T, C] rotated by the factors of `rotation`."""
    return [_rotate(part, factors) for part in parts]


def rotate_forward(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return `rotate`, without a derivative."""
    return [_turn(part, factors, False) for part in parts]


@per_device
def rotate_impl(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return x [B, H, T, C] with each pair (i, i + C/2) turned by its angle, or turned back.

    Args:
        x: [B, H, T, C].
        rotation: [2, B, T, C], the factors of an element and of its partner.
        inverse: apply the transpose.
    """
    cos, sin = rotation[:, :, None]
    wide, half = x.to(at_least_float32(x.dtype)), x.shape[-1] // 2
    partner = (wide * sin).roll(half, -1) if inverse else wide.roll(half, -1) * sin
    return (wide * cos).add_(partner).to(x.dtype).contiguous()

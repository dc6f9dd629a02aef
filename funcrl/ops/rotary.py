"""Rotary positions (arXiv:2104.09864): angles, factors, and the rotation of queries and keys."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.arguments import checked


@checked
def rotary_angles(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return `position * theta^(-2 i / C)` for each pair i, in float32: [..., T, C / 2].

    Example:
        >>> import torch, funcrl
        >>> funcrl.models.rotary_angles(torch.tensor([0, 3]), head_width=2, theta=10.0)
        tensor([[0.],
                [3.]])
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(pairs * (-math.log(theta) / head_width))
    return positions[..., None].to(torch.float32) * frequencies


@checked
def rotary_factors(angles: Tensor) -> Tensor:
    """Return the factors of `rotate`, [2, ..., C]: cosines, and sines with their signs.

    Args:
        angles: [..., C / 2], one for each pair.

    Example:
        >>> import torch, funcrl
        >>> funcrl.models.rotary_factors(torch.zeros(1))
        tensor([[1., 1.],
                [-0., 0.]])
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


@checked
def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return `x` [..., T, C] with each pair (i, i + C/2) turned by its angle (arXiv:2104.09864).

    Args:
        x: [..., T, C].
        rotation: [2, ..., T, C], as `rotary_factors` makes it.

    Example:
        >>> import torch, funcrl
        >>> quarter_turn = torch.tensor([[[0.0, 0.0]], [[-1.0, 1.0]]])
        >>> funcrl.models.rotate(torch.tensor([[1.0, 2.0]]), quarter_turn)
        tensor([[-2.,  1.]])
    """
    cos, sin = rotation
    wide = x.to(numerics.at_least_float32(x.dtype))
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


@checked
def rotation(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return the factors [2, ..., 1, T, C] of positions [..., T]: the same for all heads."""
    return rotary_factors(rotary_angles(positions, head_width, theta)).unsqueeze(-3)


@checked
def rotate_heads(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return each of several [..., heads, T, C] rotated, all in one pass."""
    turned = rotate(torch.cat(list(parts), dim=-3), factors)
    return turned.split([part.shape[-3] for part in parts], dim=-3)

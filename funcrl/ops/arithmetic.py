"""Elementwise and linear operations of a network, and rotary positions (arXiv:2104.09864)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.ops.contract import Weights


@checked
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * (offset + weight)`, the mean in at least float32.

    With an offset the product is in at least float32, too: the sum of a weight near 0 and 1 has
    more digits than half precision.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
        tensor([0.8485, 2.2627])
    """
    wide = x.to(numerics.at_least_float32(x.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if offset:
        return (scaled * (offset + weight.to(wide.dtype))).to(x.dtype)
    return scaled.to(x.dtype) * weight


@checked
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` (arXiv:2002.05202).

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
        tensor([0.0000, 1.7616])
    """
    return nn.functional.silu(gate) * up


@checked
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, by the GELU with tanh (arXiv:2002.05202).

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.geglu(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0]))
        tensor([0.0000, 1.9546])
    """
    return nn.functional.gelu(gate, approximate="tanh") * up


@checked
def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`: as much of `x` as the gate lets through.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.sigmoid_gate(torch.tensor([0.0, 9.0]), torch.tensor([4.0, 4.0]))
        tensor([2.0000, 3.9995])
    """
    return torch.sigmoid(gate) * x


@checked
def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Return several linear maps of one input, one for each (weight, bias).

    Example:
        >>> import torch, funcrl
        >>> double, negate = 2 * torch.eye(2), -torch.eye(2)
        >>> funcrl.ops.project(torch.tensor([1.0, 2.0]), [(double, None), (negate, None)])
        [tensor([2., 4.]), tensor([-1., -2.])]
    """
    return [nn.functional.linear(x, weight, bias) for weight, bias in weights]


@checked
def embed(tokens: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the rows of `weight` that the tokens name, in `dtype` or its own."""
    rows = nn.functional.embedding(tokens, weight)
    return rows if dtype is None else rows.to(dtype)


@checked
def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities over the last axis, in at least float32."""
    wide = logits.to(numerics.at_least_float32(logits.dtype))
    # Widened before it is divided, or a bfloat16 quotient would be rounded to eight bits.
    return torch.log_softmax(wide if temperature == 1 else wide / temperature, dim=-1)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(logits / cap)`, rounded once, or the logits themselves without a cap."""
    if cap is None:
        return logits
    wide = logits.to(numerics.at_least_float32(logits.dtype))
    return (torch.tanh(wide / cap) * cap).to(logits.dtype)


def cap_gradient(grad: Tensor, capped: Tensor, cap: float | None) -> Tensor:
    """Return the gradient of logits, given that of `cap_logits`, whose result is `capped`."""
    if cap is None:
        return grad
    ratio = capped.to(numerics.at_least_float32(capped.dtype)) / cap
    return (grad * (1 - ratio * ratio)).to(grad.dtype)


@checked
def rotary_angles(
    positions: Tensor, head_width: int, theta: float, scaling: Sequence[float] = ()
) -> Tensor:
    """Return `position * theta^(-2 i / C)` for each pair i, in float32: [..., T, C / 2].

    Llama 3 divides the frequency f of a pair by a factor where its wavelength, 2 pi / f, is above
    the context that it was trained on first over `low`, leaves it where that is below the context
    over `high`, and goes evenly from one to the other between.

    Args:
        positions: [..., T].
        head_width: C.
        theta: the base.
        scaling: Llama 3's factor, low, high and first context; none when left out.

    Example:
        >>> import torch, funcrl
        >>> funcrl.models.rotary_angles(torch.tensor([0, 3]), head_width=2, theta=10.0)
        tensor([[0.],
                [3.]])
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(pairs * (-math.log(theta) / head_width))
    if scaling:
        factor, low, high, context = scaling
        # The number of turns in the first context, which is what the two bounds compare with.
        turns = frequencies * (context / (2 * math.pi))
        kept = ((turns - low) * (1 / (high - low))).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) * (1 / factor))
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
def rotation(
    positions: Tensor, head_width: int, theta: float, scaling: Sequence[float] = ()
) -> Tensor:
    """Return the factors [2, ..., 1, T, C] of positions [..., T]: the same for all heads."""
    return rotary_factors(rotary_angles(positions, head_width, theta, scaling)).unsqueeze(-3)


@checked
def rotate_heads(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return each of several [..., heads, T, C] rotated, all in one pass."""
    turned = rotate(torch.cat(list(parts), dim=-3), factors)
    return turned.split([part.shape[-3] for part in parts], dim=-3)

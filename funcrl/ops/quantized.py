"""Matrices in four or eight bits, and products of matrices that adapters change."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.custom_op import Tensors, as_rows, differentiable, operator
from funcrl.core.numerics import at_least_float32, in_blocks, of_levels

Bits: TypeAlias = Literal["int8", "nf4"]
BLOCK = 64  # numbers of a row that share a scale
# Quantiles of a normal distribution, scaled to [-1, 1], with a 0 among them (arXiv:2305.14314, E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class Quantized(NamedTuple):
    """A matrix [O, I] as a level for each number and a scale for each block of a row."""

    codes: Tensor  # uint8, which level: [O, I], or two in a number, [O, I / 2], where there are 16
    scales: Tensor  # [O, I / block] float32, the largest absolute value of each block
    levels: Tensor  # [256] or [16] float32 in [-1, 1], in rising order


@checked
def quantize(weight: Tensor, bits: Bits = "nf4") -> Quantized:
    """Return a matrix in few bits: of each number the nearest level times its block's scale.

    "nf4" has 16 levels at a normal distribution's quantiles (QLoRA, arXiv:2305.14314), 4.5 bits a
    number with its scale; "int8" has 255 of equal distance, 8.5 bits. A block is 64 numbers of a
    row, or fewer where 64 does not divide the row.

    Args:
        weight: [O, I], finite.
        bits: "nf4", of an even I, or "int8".

    Example:
        >>> import torch, funcrl
        >>> found = funcrl.ops.quantize(torch.tensor([[0.6, -2.0, 0.0, 0.7]]), "int8")
        >>> funcrl.ops.dequantize(found)
        tensor([[ 0.5984, -2.0000,  0.0000,  0.6929]])
    """
    checks.check_rank("quantize", "weight", weight, "OI")
    if not weight.is_floating_point():
        raise ValueError(f"quantize expects floating-point numbers, got {weight.dtype}.")
    if not bool(weight.isfinite().all()):
        raise ValueError("quantize expects finite numbers, got a NaN or an infinity.")
    width = weight.shape[1]
    if bits == "nf4" and width % 2:
        raise ValueError(f"quantize expects an even number of columns for nf4, got {width}.")
    levels = _levels(bits, weight.device)
    shares, scales = in_blocks(weight.detach().float(), math.gcd(BLOCK, width))
    bounds = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(shares, bounds, out_int32=True).to(torch.uint8)
    if bits == "nf4":
        codes = codes[:, ::2] << 4 | codes[:, 1::2]
    return Quantized(codes, scales, levels)


@checked
def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix [O, I] that `quantize` made few bits of, rounded as these are.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.dequantize(funcrl.ops.quantize(torch.tensor([[1.0, -2.0, 0.0, 0.7]])))
        tensor([[ 0.8814, -2.0000,  0.0000,  0.6758]])
    """
    return _matrix(*quantized).to(dtype)


@checked
def adapted_linear(
    x: Tensor, frozen: Tensor | Quantized, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Return `x (W + scale up down)^T` for a constant W and a trained change, [..., I] -> [..., O].

    The sum is written out for the product, rounded to the dtype of `x`, and again for the gradient
    of `x`: neither pass leaves more of it in memory than what W is kept in. No gradient as large as
    W is made. It has a first derivative only, in `x`, `down` and `up`.

    Args:
        x: [..., I].
        frozen: W [O, I], or few bits of it.
        down: [R, I].
        up: [O, R].
        scale: of the change.

    Example:
        >>> import torch, funcrl
        >>> small = funcrl.ops.quantize(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
        >>> down, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
        >>> funcrl.ops.adapted_linear(torch.tensor([1.0, 2.0]), small, down, up, 0.5)
        tensor([-1.0000,  4.5000])
    """
    found: Tensor = _linear(x, down, up, scale, *_parts(frozen))
    return found


@checked
def adapted(frozen: Tensor | Quantized, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return `W + scale up down` in float32, whose product `adapted_linear` is.

    Example:
        >>> import torch, funcrl
        >>> down, up = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
        >>> funcrl.ops.adapted(torch.zeros(2, 2), down, up, 0.5)
        tensor([[0.0000, 0.0000],
                [0.5000, 0.0000]])
    """
    return _sum(_parts(frozen), down, up, scale)


def _parts(frozen: Tensor | Quantized) -> tuple[Tensor, ...]:
    return (frozen,) if isinstance(frozen, Tensor) else tuple(frozen)


def _levels(bits: Bits, device: torch.device) -> Tensor:
    if bits == "nf4":
        return torch.tensor(_NF4, dtype=torch.float32, device=device)
    return torch.arange(-128, 128, dtype=torch.float32, device=device).clamp(min=-127) / 127


def _matrix(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    places = codes
    if levels.shape[0] == len(_NF4):
        places = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)
    return of_levels(places, scales, levels)


def _sum(parts: Sequence[Tensor], down: Tensor, up: Tensor, scale: float) -> Tensor:
    frozen = parts[0] if len(parts) == 1 else _matrix(*parts)
    # In the dtype of the change, or float32 if that has fewer bits.
    return frozen.to(at_least_float32(down.dtype)) + scale * (up @ down)


def _forward(x: Tensor, down: Tensor, up: Tensor, scale: float, *parts: Tensor) -> Tensors:
    return (nn.functional.linear(x, _sum(parts, down, up, scale).to(x.dtype)),)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> Tensors:
    """dx = g W', d up = scale g^T (x down^T), d down = scale (g up)^T x."""
    if any(wanted[3:]):
        raise ValueError("adapted_linear expects a constant matrix, got one to differentiate.")
    (grad,), (x, down, up, scale, first, *others) = grads, inputs
    found = []
    if wanted[0]:
        late = [_copy_after(part, grad) for part in (first, down)]
        whole = _sum((late[0], *others), late[1], up, scale)
        found.append(grad @ whole.to(grad.dtype))
    rows, columns = as_rows(grad), as_rows(x)
    if wanted[1]:
        change = (rows @ up.to(grad.dtype)).mT @ columns
        found.append(scale * change.to(down.dtype))
    if wanted[2]:
        change = rows.mT @ (columns @ down.to(grad.dtype).mT)
        found.append(scale * change.to(up.dtype))
    return tuple(found)


def _of_batch(_info: Any, in_dims: Any, part: Tensor, grad: Tensor) -> tuple[Tensor, int | None]:
    return _copy_after(part, grad), in_dims[0]


@operator("copy_after", lambda part, _: torch.empty_like(part), rows=(1,), over_batch=_of_batch)
def _copy_after(part: Tensor, grad: Tensor) -> Tensor:
    """Return a copy of what a matrix is made of that cannot be made before the gradient: a compiler
    would else write out the matrix once for both passes, and keep it in between."""
    del grad
    return part.clone()


_linear = differentiable(
    "adapted_linear",
    _forward,
    _backward,
    rows=(0,),
    instead="the product with funcrl.ops.adapted has them all",
    keeps_results=False,
)

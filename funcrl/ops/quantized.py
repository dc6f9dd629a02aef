"""Matrices in four or eight bits, and a product that reads them as they are."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.custom_op import Tensors, differentiable, operator

Bits: TypeAlias = Literal["int8", "nf4"]
_BLOCK = 64  # numbers of a row that share a scale
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
    checks.check_choice("quantize", "bits", bits, get_args(Bits))
    if not weight.is_floating_point():
        raise ValueError(f"quantize expects floating-point numbers, got {weight.dtype}.")
    if not bool(weight.isfinite().all()):
        raise ValueError("quantize expects finite numbers, got a NaN or an infinity.")
    width = weight.shape[1]
    if bits == "nf4" and width % 2:
        raise ValueError(f"quantize expects an even number of columns for nf4, got {width}.")
    levels = _levels(bits, weight.device)
    blocks = weight.detach().float().unflatten(1, (-1, math.gcd(_BLOCK, width)))
    scales = blocks.abs().amax(-1)
    # A block of zeros has the scale 0, and any level is right there.
    shares = blocks / scales.where(scales > 0, 1.0).unsqueeze(-1)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(shares, between, out_int32=True).flatten(1).to(torch.uint8)
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
    return _matrix(*quantized, dtype)


@checked
def quantized_linear(x: Tensor, quantized: Quantized) -> Tensor:
    """Return `x W^T` of a constant matrix in few bits, [..., I] -> [..., O].

    The matrix is written out for the product, in the dtype of `x`, and again for the gradient of
    `x`, so that neither pass leaves more of it in memory than its bits. It has a first derivative
    only, in `x`.

    Example:
        >>> import torch, funcrl
        >>> small = funcrl.ops.quantize(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
        >>> funcrl.ops.quantized_linear(torch.tensor([1.0, 2.0]), small)
        tensor([-1.,  4.])
    """
    found: Tensor = _linear(x, *quantized)
    return found


def _levels(bits: Bits, device: torch.device) -> Tensor:
    if bits == "nf4":
        return torch.tensor(_NF4, dtype=torch.float32, device=device)
    return torch.arange(-128, 128, dtype=torch.float32, device=device).clamp(min=-127) / 127


def _matrix(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    places = codes
    if levels.shape[0] == len(_NF4):
        places = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)
    blocks = levels[places.int()].unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _forward(x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor) -> Tensors:
    return (nn.functional.linear(x, _matrix(codes, scales, levels, x.dtype)),)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> Tensors:
    if any(wanted[1:]):
        raise ValueError("quantized_linear expects a constant matrix, got one to differentiate.")
    (grad,), (_, codes, scales, levels) = grads, inputs
    return (grad @ _matrix(_copy_after(codes, grad), scales, levels, grad.dtype),)


def _unbatched(_info: Any, _in_dims: Any, codes: Tensor, grad: Tensor) -> tuple[Tensor, None]:
    return _copy_after(codes, grad), None


@operator("copy_after", lambda codes, _: torch.empty_like(codes), rows=(1,), over_batch=_unbatched)
def _copy_after(codes: Tensor, grad: Tensor) -> Tensor:
    """Return a copy of the codes that cannot be made before the gradient: a compiler would else
    write out the matrix once for both passes, and keep it in between."""
    del grad
    return codes.clone()


_linear = differentiable(
    "quantized_linear",
    _forward,
    _backward,
    rows=(0,),
    instead="a dequantized matrix has them all",
    keeps_results=False,
)

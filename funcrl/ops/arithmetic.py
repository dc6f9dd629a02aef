"""The arithmetic of a network, as an argument of a model: products, norm and activation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks, numerics
from funcrl.core.arguments import checked

LinearFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Weights: TypeAlias = Sequence[tuple[Tensor, Tensor | None]]


class Ops(NamedTuple):
    """The operations of a `Transformer`; each takes any leading axes."""

    linear: LinearFn  # (x, weight, bias) -> x W^T + b
    project: Callable[[Tensor, Weights], Sequence[Tensor]]  # (x, [(weight, bias), ...]) -> linears
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # (x, weight, eps)
    swiglu: Callable[[Tensor, Tensor], Tensor]  # (gate, up) -> silu(gate) * up


@checked
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight`, the mean in at least float32.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
        tensor([0.8485, 2.2627])
    """
    wide = x.to(numerics.at_least_float32(x.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
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
def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Return several linear maps of one input, one for each (weight, bias).

    Example:
        >>> import torch, funcrl
        >>> double, negate = 2 * torch.eye(2), -torch.eye(2)
        >>> funcrl.ops.project(torch.tensor([1.0, 2.0]), [(double, None), (negate, None)])
        [tensor([2., 4.]), tensor([-1., -2.])]
    """
    return [nn.functional.linear(x, weight, bias) for weight, bias in weights]


NATIVE = Ops(linear=nn.functional.linear, project=project, rms_norm=rms_norm, swiglu=swiglu)


@checked
def choose_ops(function: str, ops: str | Ops) -> Ops:
    """Return the named operations, or `ops` itself if it is an `Ops`.

    Example:
        >>> import funcrl
        >>> funcrl.ops.choose_ops("Transformer", "native") is funcrl.ops.NATIVE
        True
    """
    if isinstance(ops, Ops):
        return ops
    checks.check_choice(function, "ops", ops, ("native",))
    return NATIVE

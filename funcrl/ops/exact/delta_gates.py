"""The gates of a gated delta layer, number by number: by torch's elementwise operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.custom_op import differentiable, operator
from funcrl.ops.exact.linear_gradients import bias_gradient_op

Pair = tuple[Tensor, Tensor]


def delta_gates_forward(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor) -> Pair:
    """Return `-exp(log_rate) softplus(a + step_bias)` and `sigmoid(b)`, without a derivative."""
    decay = _softplus(_shifted(a, step_bias)).mul_(_rate(a, log_rate)).neg_()
    return decay, _sigmoid(_wide(b)).to(b.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(numerics.at_least_float32(x.dtype)).contiguous()


def _shifted(a: Tensor, step_bias: Tensor) -> Tensor:
    wide = _wide(a)
    return wide + step_bias.to(a.dtype).to(wide.dtype)  # as a generator, which casts weights


def _rate(a: Tensor, log_rate: Tensor) -> Tensor:
    return _wide(log_rate.to(a.dtype)).exp()


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) = max(x, 0) + log(1 + e), with e = e^-|x|.

    Torch's log1p may differ between SIMD lanes and the rest. Here the rounding of u = 1 + e is made
    good: log(1 + e) is log(u) e / (u - 1), up to the rounding of these three.
    """
    e = x.abs().neg_().exp_()
    u = e + 1
    corrected = u.log().mul_(e).div_(u - 1)
    return torch.where(u == 1, e, corrected).add_(x.clamp(min=0))


def _like(a: Tensor, b: Tensor, *_: Tensor) -> Pair:
    wide = numerics.at_least_float32(a.dtype)
    return a.new_empty(a.shape, dtype=wide), b.new_empty(b.shape)


@operator("delta_gates", _like, rows=(0, 1))
def delta_gates_op(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor) -> Pair:
    """Return `delta_gates_forward` as an operator."""
    return delta_gates_forward(a, b, log_rate, step_bias)


def _like_gradients(_grad: Tensor, grad_beta: Tensor, a: Tensor, *_: Tensor) -> Any:
    wide = a.new_empty(a.shape, dtype=numerics.at_least_float32(a.dtype))
    return wide, torch.empty_like(wide), grad_beta.new_empty(grad_beta.shape)


@operator("delta_gates_gradients", _like_gradients, rows=(0, 1, 2, 3))
def delta_gates_gradients_op(
    grad_decay: Tensor, grad_beta: Tensor, a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a + step_bias and, of each number, of log_rate; and of b."""
    shifted, rate = _shifted(a, step_bias), _rate(a, log_rate)
    grad_shifted = _sigmoid(shifted).mul_(rate).mul_(grad_decay).neg_()
    grad_rate = _softplus(shifted).mul_(rate).mul_(grad_decay).neg_()
    sigmoid = _sigmoid(_wide(b))
    grad_b = (1 - sigmoid).mul_(sigmoid).mul_(grad_beta)
    return grad_shifted, grad_rate, grad_b.to(b.dtype)


def _forward(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor, _blocks: int) -> Pair:
    decay, beta = delta_gates_op(a, b, log_rate, step_bias)
    return decay, beta


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    a, b, log_rate, step_bias, blocks = inputs
    shifted, rate, grad_b = delta_gates_gradients_op(*grads, a, b, log_rate, step_bias)
    found = [
        part for part, want in zip((shifted.to(a.dtype), grad_b), wanted, strict=False) if want
    ]
    if wanted[2]:
        found.append(bias_gradient_op(rate, blocks).to(log_rate.dtype))
    if wanted[3]:
        found.append(bias_gradient_op(shifted, blocks).to(step_bias.dtype))
    return found


_delta_gates = differentiable("delta_gates", _forward, _backward, rows=(0, 1), returned=2)


def delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor, blocks: int = 1) -> Pair:
    """Return what `funcrl.ops.delta_gates` returns.

    The gradients of the last two sum each of so many blocks of rows for itself.
    """
    decay, beta = _delta_gates(a, b, log_rate, step_bias, blocks)
    return decay, beta

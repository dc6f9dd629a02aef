"""The gated delta rule from token to token, as an operator whose rows stand alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.ops.exact import cpu
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator
from funcrl.ops.streams import complete_scan

Shape: TypeAlias = Sequence[int]
Pair: TypeAlias = tuple[Tensor, Tensor]


def as_heads(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> list[Tensor]:
    """Return the inputs of a scan with one leading axis N of all heads of all samples."""
    resets = resets[..., None, :].expand(decay.shape)
    ends = (2, 2, 2, 1, 1, 2, 1)
    parts = (q, k, v, decay, beta, state, resets)
    return [part.reshape(-1, *part.shape[-end:]) for part, end in zip(parts, ends, strict=True)]


def like_scan(
    q: Tensor, _k: Tensor, v: Tensor, _decay: Tensor, _beta: Tensor, state: Tensor, *_: Any
) -> Pair:
    """Return results of a scan's shapes."""
    return v.new_empty(v.shape), state.new_empty(state.shape)


def like_gradients(_grad: Tensor, _grad_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return gradients of a scan's shapes."""
    return tuple(part.new_empty(part.shape) for part in inputs[:6])


def _count(q: Shape, _k: Shape, v: Shape, *_: Shape) -> int:
    return 6 * math.prod(q) * v[-1]  # what is found, what is written, and what is read


def _count_gradients(_grad: Shape, _grad_state: Shape, *inputs: Shape) -> int:
    return 3 * _count(*inputs)  # the replay, and two gradients of each product


def _kernels(q: Tensor) -> Any:
    return cpu if q.dtype == torch.float64 else kernels_of(q)  # which any device can run


@operator("gated_delta", like_scan, rows=range(7), flops=_count)
def gated_delta_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> Pair:
    """Return the outputs and the last state."""
    heads = as_heads(q, k, v, decay, beta, state, resets)
    outputs, last = _kernels(q).gated_delta(*heads)
    return outputs.view(v.shape), last.view(state.shape)


@operator("gated_delta_gradients", like_gradients, rows=range(9), flops=_count_gradients)
def gated_delta_gradients_op(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of all but the resets."""
    given = (q, k, v, decay, beta, state)
    grads = (part.reshape(-1, *part.shape[-2:]) for part in (grad_outputs, grad_state))
    found = _kernels(q).gated_delta_gradients(*grads, *as_heads(*given, resets))
    g_q, g_k, g_v, g_decay, g_beta, g_state = (
        grad.view(part.shape) for grad, part in zip(found, given, strict=True)
    )
    return g_q, g_k, g_v, g_decay, g_beta, g_state


def backward_of(gradients: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return the backward pass, for `differentiable`, of a scan with this operator of gradients."""

    def backward(
        wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
    ) -> list[Tensor]:
        found = gradients(*grads, *inputs)
        return [each for each, want in zip(found, wanted, strict=False) if want]

    return backward


def _forward(*inputs: Tensor) -> Pair:
    outputs, last = gated_delta_op(*inputs)
    return outputs, last


recurrent_scan = differentiable(
    "gated_delta_scan",
    _forward,
    backward_of(gated_delta_gradients_op),
    rows=range(7),
    returned=2,
    instead='backend="loop" has them all',
)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None,
    resets: Tensor | None,
) -> Pair:  # fmt: skip
    """Return the outputs and the last state of `gated_delta_scan`."""
    state, resets = complete_scan(q, k, v, decay, beta, state, resets)
    outputs, last = recurrent_scan(q, k, v, decay, beta, state, resets)
    return outputs, last


def plain_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None,
    resets: Tensor | None,
) -> Pair:  # fmt: skip
    """Return `gated_delta`, without a derivative."""
    state, resets = complete_scan(q, k, v, decay, beta, state, resets)
    outputs, last = _kernels(q).gated_delta(*as_heads(q, k, v, decay, beta, state, resets))
    return outputs.view(v.shape), last.view(state.shape)

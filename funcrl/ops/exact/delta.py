"""The gated delta rule from token to token, as an operator whose rows stand alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.ops.exact import cpu
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator
from funcrl.ops.streams import as_samples, complete_scan, flat, token_major

Shape: TypeAlias = Sequence[int]
Pair: TypeAlias = tuple[Tensor, Tensor]
Six: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# What the kernels of a GPU take: the numbers of a key or a value, and their dtypes.
LARGEST = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def like_scan(
    _q: Tensor, _k: Tensor, v: Tensor, _decay: Tensor, _beta: Tensor, state: Tensor, *_: Any
) -> Pair:
    """Return results of a scan's shapes."""
    return token_major(v.new_empty(v.shape), -2), state.new_empty(state.shape)


def like_gradients(_grad: Tensor, _grad_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return gradients of a scan's shapes."""
    return in_order([part.new_empty(part.shape) for part in inputs[:6]], inputs)


def _count(q: Shape, _k: Shape, v: Shape, *_: Shape) -> int:
    return 6 * math.prod(q) * v[-1]  # what is found, what is written, and what is read


def _count_gradients(_grad: Shape, _grad_state: Shape, *inputs: Shape) -> int:
    return 3 * _count(*inputs)  # the replay, and two gradients of each product


def in_order(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Six:
    """Return gradients in the shapes of the inputs, those of tokens as `token_major` has them."""
    q, k, v, decay, beta, state = (
        grad if tokens is None else token_major(grad, tokens)
        for grad, tokens in zip(grads, (-2, -2, -2, -1, -1, None), strict=True)
    )
    shaped = zip((q, k, v, decay, beta, state), inputs, strict=False)
    q, k, v, decay, beta, state = (grad.view(part.shape) for grad, part in shaped)
    return q, k, v, decay, beta, state


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> Pair:
    """Return the outputs, in memory as `token_major` has them, and the last state."""
    samples = as_samples(q, k, v, decay, beta, state, resets)
    outputs, last = _kernels(q, v).gated_delta(*samples)
    return token_major(outputs, -2).view(v.shape), last.view(state.shape)


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """Return whether Triton's kernels take inputs of this kind."""
    small = max(q.shape[-1], v.shape[-1]) <= LARGEST
    return q.device.type == "cuda" and q.dtype in _DTYPES and small


def _kernels(q: Tensor, v: Tensor) -> Any:
    return kernels_of(q) if has_kernels(q, v) else cpu  # whose operations any device has


@operator("gated_delta", like_scan, rows=range(7), flops=_count)
def gated_delta_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> Pair:
    """Return the outputs and the last state."""
    return plain_scan(q, k, v, decay, beta, state, resets)


@operator("gated_delta_gradients", like_gradients, rows=range(9), flops=_count_gradients)
def gated_delta_gradients_op(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor,
) -> Six:  # fmt: skip
    """Return the gradients of all but the resets."""
    given = (q, k, v, decay, beta, state)
    samples = flat(grad_outputs, 3), flat(grad_state, 3), *as_samples(*given, resets)
    found = _kernels(q, v).gated_delta_gradients(*samples)
    return in_order(found, given)


def scan_of(scan: Callable[..., Pair], gradients: Callable[..., Six]) -> Callable[..., Pair]:
    """Return a scan with a derivative, of its operator and that of its gradients."""

    def forward(*inputs: Any) -> Pair:
        outputs, last = scan(*inputs)
        return outputs, last

    def backward(
        wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
    ) -> list[Tensor]:
        found = gradients(*grads, *inputs)
        return [each for each, want in zip(found, wanted, strict=False) if want]

    return differentiable(
        "gated_delta_scan",
        forward,
        backward,
        rows=range(7),
        returned=2,
        instead='backend="loop" has them all',
    )


recurrent_scan = scan_of(gated_delta_op, gated_delta_gradients_op)


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
    return plain_scan(q, k, v, decay, beta, state, resets)

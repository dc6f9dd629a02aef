"""The gated delta rule from token to token, exact (batch-invariant)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core.custom_op import differentiable, operator
from funcrl.ops.exact.device import per_device
from funcrl.ops.exact.sums import halving_sum
from funcrl.ops.sequence_args import as_samples, complete_scan, flat, token_major

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
    outputs, last = _choose(gated_delta_impl, q, v)(*samples)
    return token_major(outputs, -2).view(v.shape), last.view(state.shape)


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """Return whether Triton's kernels take inputs of this kind."""
    small = max(q.shape[-1], v.shape[-1]) <= LARGEST
    return q.device.type == "cuda" and q.dtype in _DTYPES and small


def _choose(impl: Callable[..., Any], q: Tensor, v: Tensor) -> Callable[..., Any]:
    """Return the kernels' form, or else these operations, which any device has."""
    return per_device(impl) if has_kernels(q, v) else impl


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
    found = _choose(gated_delta_gradients_impl, q, v)(*samples)
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


def gated_delta_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None,
    resets: Tensor | None,
) -> Pair:  # fmt: skip
    """Return `gated_delta`, without a derivative."""
    state, resets = complete_scan(q, k, v, decay, beta, state, resets)
    return plain_scan(q, k, v, decay, beta, state, resets)


# Tokens whose states are alive at a time in the backward pass, beside those at each piece's start.
_PIECE = 16


class _Token(NamedTuple):
    """One token of each sample, of the shapes that multiply a state [B, H, Ck, Cv]."""

    q: Tensor  # [B, H, Ck, 1]
    k: Tensor  # [B, H, Ck, 1]
    v: Tensor  # [B, H, 1, Cv]
    kept: Tensor  # [B, H, 1, 1], the exponential of the decay
    beta: Tensor  # [B, H, 1, 1]
    fresh: Tensor  # [B, 1, 1, 1] bool, whether the state before is 0


def gated_delta_impl(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T, Cv] and the last state [B, H, Ck, Cv].

    Args:
        q: [B, H, T, Ck].
        k: [B, H, T, Ck].
        v: [B, H, T, Cv].
        decay: [B, H, T].
        beta: [B, H, T].
        state: [B, H, Ck, Cv], in the dtype of the arithmetic.
        resets: [B, T] bool.
    """
    outputs = v.new_empty(v.shape)
    for place, token in enumerate(_tokens(q, k, v, decay, beta, resets, state.dtype)):
        _, _, state = _step(token, state)
        outputs[:, :, place] = halving_sum(state * token.q, -2)
    return outputs, state


def gated_delta_gradients_impl(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k, v, decay, beta and the state; pieces of tokens are replayed."""
    tokens = _tokens(q, k, v, decay, beta, resets, state.dtype)
    starts = list(range(0, len(tokens), _PIECE))
    states = []
    for start in starts:
        states.append(state)
        for token in tokens[start : start + _PIECE]:
            _, _, state = _step(token, state)
    grads = [torch.empty_like(part, dtype=state.dtype) for part in (q, k, v, decay, beta)]
    for start, before in zip(reversed(starts), reversed(states), strict=True):
        piece = tokens[start : start + _PIECE]
        steps = []
        for token in piece:
            steps.append(_step(token, before))
            before = steps[-1][-1]
        for place in reversed(range(len(piece))):
            given = grad_outputs[:, :, start + place, None].to(state.dtype)
            *found, grad_state = _step_gradients(given, grad_state, piece[place], *steps[place])
            for whole, part in zip(grads, found, strict=True):
                whole[:, :, start + place] = part
    pairs = zip(grads, (q, k, v, decay, beta), strict=True)
    return *(whole.to(part.dtype) for whole, part in pairs), grad_state


def _tokens(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, resets: Tensor, dtype: torch.dtype
) -> list[_Token]:
    numbers = (part[..., None, None] for part in (decay.to(dtype).exp(), beta))
    parts = (q[..., None], k[..., None], v[..., None, :], *numbers)
    wide = (part.to(dtype).unbind(2) for part in parts)
    fresh = resets[:, None, :, None, None].unbind(2)
    return [_Token(*token) for token in zip(*wide, fresh, strict=True)]


def _step(token: _Token, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state that the token finds, what it lacks of the value, and the state after."""
    found = (state * token.kept).masked_fill_(token.fresh, 0.0)
    missing = token.v - halving_sum(found * token.k, -2)[..., None, :]
    return found, missing, found + token.k * (missing * token.beta)


def _step_gradients(
    grad_output: Tensor, grad_state: Tensor, token: _Token, found: Tensor, missing: Tensor,
    state: Tensor,
) -> Sequence[Tensor]:  # fmt: skip
    """Return the gradients of the token's q, k, v, decay and beta, and of the state before it."""
    grad_q = halving_sum(state * grad_output, -1)
    grad_state = grad_state + token.q * grad_output
    grad_learned = halving_sum(grad_state * token.k, -2)
    grad_beta = halving_sum(grad_learned * missing[..., 0, :], -1)
    grad_missing = grad_learned * token.beta[..., 0]
    grad_k = halving_sum(grad_state * (missing * token.beta), -1)
    grad_k = grad_k - halving_sum(found * grad_missing[..., None, :], -1)
    grad_found = grad_state - token.k * grad_missing[..., None, :]
    grad_decay = halving_sum(halving_sum(grad_found * found, -1), -1)
    before = (grad_found * token.kept).masked_fill_(token.fresh, 0.0)
    return grad_q, grad_k, grad_missing, grad_decay, grad_beta, before

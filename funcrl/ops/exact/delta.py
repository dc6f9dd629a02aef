"""The gated delta rule from token to token, exact (batch-invariant), and its gates."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.custom_op import differentiable, operator, per_device
from funcrl.ops.exact.linear import bias_gradient_op
from funcrl.ops.exact.segments import halving_sum
from funcrl.ops.sequence_args import as_samples, complete_scan, flat, token_major

Pair: TypeAlias = tuple[Tensor, Tensor]


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


Shape: TypeAlias = Sequence[int]
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
    """Return the implementation by Triton's kernels if they take these inputs, else torch's."""
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

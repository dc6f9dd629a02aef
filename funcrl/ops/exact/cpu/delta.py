"""The gated delta rule from token to token: elementwise operations, and sums by halves.

A product and a sum of two numbers have one rounding wherever they stand, so that a row's bits do
not depend on other rows, nor on how its tokens are cut into calls.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.ops.exact.cpu.sums import halving_sum

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


def gated_delta(
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


def gated_delta_gradients(
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

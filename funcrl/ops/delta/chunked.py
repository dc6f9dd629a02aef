"""The gated delta rule on chunks of tokens, by products of matrices (arXiv:2412.06464).

Within a chunk that begins with the state S, with G[i, j] what token i still has of what token j
wrote, and s[i] what it has of S, what the tokens learn, U, solves a triangular system:
`(1 + A) U = beta (V - s K S)`, where `A = beta (K K^T) G` below the diagonal. The outputs are
`s Q S + ((Q K^T) G) U`, and the state after the chunk is `s[-1] S + (G[-1] K)^T U`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Some tokens of each sample."""

    q: Tensor  # [B, H, T, Ck]
    k: Tensor  # [B, H, T, Ck]
    v: Tensor  # [B, H, T, Cv]
    decay: Tensor  # [B, H, T]
    beta: Tensor  # [B, H, T]
    resets: Tensor  # [B, T] bool


class _Learned(NamedTuple):
    """What the tokens of a chunk learn, and what it is made of."""

    alike: Tensor  # [B, 1, C, C] bool, where a token and one before it are of one sample
    kept: Tensor  # G [B, H, C, C]
    start: Tensor  # s [B, H, C, 1]
    missing: Tensor  # V - s K S [B, H, C, Cv]
    system: Tensor  # A, of which only what is below the diagonal counts [B, H, C, C]
    learned: Tensor  # U [B, H, C, Cv]


def scan(tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T, Cv] and the last state [B, H, Ck, Cv]."""
    dtype, tokens = tokens.v.dtype, _widened(tokens, state.dtype)
    outputs = []
    for part in _split(tokens, chunk):
        found = _learn(part, state)
        scores = (part.q @ part.k.mT) * found.kept
        outputs.append(found.start * (part.q @ state) + scores @ found.learned)
        state = _next_state(part, found, state)
    return torch.cat(outputs, dim=2).to(dtype), state


def scan_gradients(
    grad_outputs: Tensor, grad_state: Tensor, tokens: Tokens, state: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, decay, beta, and of the state before the first token.

    The states at the chunks' starts are found again, and each chunk's work is done again.
    """
    parts, grad_outputs = _split(_widened(tokens, state.dtype), chunk), grad_outputs.to(state.dtype)
    states = [state]
    for part in parts[:-1]:
        states.append(_next_state(part, _learn(part, states[-1]), states[-1]))
    found = []
    for part, before, grads in zip(
        reversed(parts), reversed(states), reversed(grad_outputs.split(chunk, dim=2)), strict=True
    ):
        *of_tokens, grad_state = _chunk_gradients(grads, grad_state, part, before)
        found.append(of_tokens)
    whole = [torch.cat(each[::-1], dim=2) for each in zip(*found, strict=True)]
    return *(grad.to(part.dtype) for grad, part in zip(whole, tokens, strict=False)), grad_state


def _widened(tokens: Tokens, dtype: torch.dtype) -> Tokens:
    return Tokens._make([*(part.to(dtype) for part in tokens[:-1]), tokens.resets])


def _split(tokens: Tokens, chunk: int) -> list[Tokens]:
    columns = [part.split(chunk, dim=2) for part in tokens[:-1]]
    columns.append(tokens.resets.split(chunk, dim=1))
    return [Tokens(*parts) for parts in zip(*columns, strict=True)]


def _learn(part: Tokens, state: Tensor) -> _Learned:
    alike, kept, start = _decays(part.decay, part.resets)
    missing = part.v - start * (part.k @ state)
    beta = part.beta[..., None]
    system = beta * (part.k @ part.k.mT) * kept
    learned = torch.linalg.solve_triangular(system, beta * missing, upper=False, unitriangular=True)
    return _Learned(alike, kept, start, missing, system, learned)


def _next_state(part: Tokens, found: _Learned, state: Tensor) -> Tensor:
    written = part.k * found.kept[..., -1, :, None]
    return found.start[..., -1:, :] * state + written.mT @ found.learned


def _decays(decay: Tensor, resets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens are of one sample, and what each still has of what others wrote, and of
    the state before the chunk.

    The last two are [B, H, C, C] and [B, H, C, 1], and 0 for all that was before a reset.
    """
    sequence = resets.cumsum(dim=-1)[:, None]
    alike = (sequence[..., :, None] == sequence[..., None, :]).tril()
    total = _sums(alike, decay.masked_fill(resets[:, None], 0.0))
    kept = (total[..., :, None] - total[..., None, :]).masked_fill(~alike, -torch.inf).exp()
    start = total.exp().masked_fill(sequence > 0, 0.0)
    return alike, kept, start[..., None]


def _sums(alike: Tensor, x: Tensor) -> Tensor:
    """Return the sum of x [B, H, C] up to each token, since the last reset.

    A sum over a reset would have the size, and the rounding, of other samples.
    """
    return (alike.to(x.dtype) @ x[..., None]).squeeze(-1)


def _chunk_gradients(
    grad_outputs: Tensor, grad_state: Tensor, part: Tokens, state: Tensor
) -> Sequence[Tensor]:
    """Return the gradients of q, k, v, decay and beta of a chunk, and of the state before it."""
    found = _learn(part, state)
    kept, start, beta = found.kept, found.start, part.beta[..., None]
    similar, scores = part.k @ part.k.mT, part.q @ part.k.mT
    last = kept[..., -1, :, None]
    # What is learned is read by the outputs and written into the state.
    grad_learned = (scores * kept).mT @ grad_outputs + last * (part.k @ grad_state)
    grad_right = torch.linalg.solve_triangular(
        found.system.mT, grad_learned, upper=True, unitriangular=True
    )
    grad_missing = beta * grad_right
    grad_scores = (grad_outputs @ found.learned.mT) * kept
    grad_similar = (-grad_right @ found.learned.mT).tril(-1) * kept
    grad_beta = (grad_right * found.missing).sum(-1) + (grad_similar * similar).sum(-1)
    grad_similar = beta * grad_similar
    # Products with the state: s Q S, and s K S with a minus.
    grad_read_q, grad_read_k = start * grad_outputs, -start * grad_missing
    written = found.learned @ grad_state.mT
    grad_q = grad_scores @ part.k + grad_read_q @ state.mT
    grad_k = (grad_similar + grad_similar.mT) @ part.k + grad_scores.mT @ part.q
    grad_k = grad_k + grad_read_k @ state.mT + last * written
    before = start[..., -1:, :] * grad_state
    grad_before = before + part.q.mT @ grad_read_q + part.k.mT @ grad_read_k
    # Of sums of decays: each factor is an exponential of one, or of a difference of two.
    pairs = grad_scores * scores + grad_similar * similar
    of_writes = (last * part.k * written).sum(-1)
    grad_total = pairs.sum(-1) - pairs.sum(-2) - of_writes
    grad_total = grad_total + (grad_read_q * (part.q @ state)).sum(-1)
    grad_total = grad_total + (grad_read_k * (part.k @ state)).sum(-1)
    grad_total[..., -1] += of_writes.sum(-1) + (before * state).sum((-2, -1))
    grad_decay = _sums(found.alike.mT, grad_total).masked_fill(part.resets[:, None], 0.0)
    return grad_q, grad_k, grad_missing, grad_decay, grad_beta, grad_before

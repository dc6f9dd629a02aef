"""Normaliser, log-probabilities and entropies of rows of logits by Triton, and the gradients."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.draw_kernels import draw_kernel
from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two, row_stride
from funcrl.ops.exact.cuda.score_kernels import (
    log_softmax_kernel,
    piece_kernel,
    score_gradient_kernel,
    score_kernel,
)

_PIECE = 8192  # logits that one program sums
_BLOCK = 4096  # logits that one program writes


def logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """Return the log of the sum of exp(logits / temperature) over each row, float32 [M]."""
    return _scores(logits, None, temperature)[2]


def scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of targets, entropies and normalisers, each float32 [M].

    A target outside of [0, V) has the log-probability NaN.
    """
    return _scores(logits, targets, temperature)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature - logsumexp, float32 [M, V]."""
    size, width = logits.shape
    logits = aligned_rows(logits)
    normaliser = logsumexp(logits, temperature)
    out = fresh(logits, size, width, dtype=torch.float32)
    if size:
        log_softmax_kernel[(size, -(-width // _BLOCK))](
            logits, normaliser, out, row_stride(logits), width, temperature,
            BLOCK=_BLOCK, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return out


def scores_gradients(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """Return the gradient of logits [M, V], given those of log-probabilities and entropies [M]."""
    size, width = logits.shape
    logits = aligned_rows(logits)
    rows = (targets, entropy, normaliser, grad_logprob, grad_entropy)
    out = fresh(logits, size, width)
    if size:
        score_gradient_kernel[(size, -(-width // _BLOCK))](
            logits, *[part.contiguous() for part in rows], out, row_stride(logits), width,
            temperature, BLOCK=_BLOCK, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return out


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a token of each row [M] by inverting its cumulative distribution, and its `scores`.

    The log-probability is that of logits / temperature. A token depends on its row and on its
    number in [0, 1), float64, alone.
    """
    size, width = logits.shape
    logits = aligned_rows(logits)
    tokens = fresh(logits, size, dtype=torch.int64)
    parts = _parts(logits, temperature)
    pieces = parts.shape[1]
    if size:
        draw_kernel[(size,)](
            parts, logits, uniforms.contiguous(), tokens, row_stride(logits), width, temperature,
            pieces,
            BLOCK=power_of_two(pieces), PIECE=_PIECE, DIVIDE=temperature != 1.0, num_warps=8,
            **STRICT,
        )  # fmt: skip
    return tokens, _scores_of_parts(parts, logits, tokens, temperature)[0]


def _scores(
    logits: Tensor, targets: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `scores`, or only the normaliser where there are no targets; its bits are the same."""
    logits = aligned_rows(logits)
    return _scores_of_parts(_parts(logits, temperature), logits, targets, temperature)


def _parts(logits: Tensor, temperature: float) -> Tensor:
    """Return what is known of each piece of each row [M, pieces, 3]."""
    size, width = logits.shape
    pieces = -(-width // _PIECE)
    parts = fresh(logits, size, pieces, 3, dtype=torch.float32)
    if size:
        piece_kernel[(size, pieces)](
            logits, parts, row_stride(logits), width, temperature,
            BLOCK=_PIECE, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return parts


def _scores_of_parts(
    parts: Tensor, logits: Tensor, targets: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    size, width = logits.shape
    logprob, entropy, normaliser = (fresh(logits, size, dtype=torch.float32) for _ in range(3))
    pieces = parts.shape[1]
    chosen = logits if targets is None else targets.contiguous()
    if size:
        score_kernel[(size,)](
            parts, logits, chosen, logprob, entropy, normaliser, row_stride(logits), width,
            temperature, pieces, BLOCK=power_of_two(pieces), DIVIDE=temperature != 1.0,
            TARGETS=targets is not None, num_warps=1, **STRICT,
        )  # fmt: skip
    return logprob, entropy, normaliser

"""The chunked scan by Triton, on memory in which the heads of a token lie together."""

from typing import Any

import torch
from torch import Tensor

from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.delta.cuda.gradient_kernels import gradient_kernel
from funcrl.ops.delta.cuda.scan_kernels import reverse_kernel, scan_kernel
from funcrl.ops.delta.cuda.solve_kernels import solve_kernel
from funcrl.ops.exact.cuda.layout import STRICT, fresh
from funcrl.ops.streams import token_major

__all__ = ["scan", "scan_gradients"]

# What a program holds: rows of keys, filled up with zeros, and columns of a state by the bytes of a
# value's number. Triton 3.6 made an illegal access of 32 columns in half precision, so that there
# is one size for all widths, which the tests cover.
_WIDTH = 128
_COLUMNS = {2: 64, 4: 32}
# One stage leaves memory for two programs at a time.
_ONE_HEAD = {"num_warps": 4, "num_stages": 1}
_ONE_CHUNK = {"num_warps": 8, "num_stages": 1}


def scan(tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T, Cv] and the last state [B, H, Ck, Cv].

    Args:
        tokens: [B, H, T, ...], the resets [B, T].
        state: [B, H, Ck, Cv].
        chunk: the number of tokens that are treated at a time.
    """
    tokens = _laid_out(tokens)
    q, k, v, decay, beta, resets = tokens
    outputs, last = torch.empty_like(v), fresh(state, *state.shape)
    sizes = _sizes(tokens, chunk)
    scan_kernel[_columns(sizes, v)](
        q, k, v, decay, beta, resets, _solve(tokens, sizes), state.contiguous(), outputs, last,
        None, None, REPLAY=False, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    return outputs, last


def scan_gradients(
    grad_outputs: Tensor, grad_state: Tensor, tokens: Tokens, state: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, decay, beta, and of the state before the first token.

    Three passes: the states at the chunks' starts and what the tokens learn are found again, the
    gradients of the states go back from chunk to chunk, and then each chunk stands by itself.
    """
    tokens, grad_outputs = _laid_out(tokens), token_major(grad_outputs, -2)
    q, k, v, decay, beta, resets = tokens
    sizes = _sizes(tokens, chunk)
    inverse = _solve(tokens, sizes)
    learned, right, grad_v = (torch.empty_like(v) for _ in range(3))
    states = fresh(v, *inverse.shape[:2], *state.shape[-2:])
    scan_kernel[_columns(sizes, v)](
        q, k, v, decay, beta, resets, inverse, state.contiguous(), None, None, states, learned,
        REPLAY=True, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    grad_states, grad_before = torch.empty_like(states), fresh(state, *state.shape)
    reverse_kernel[_columns(sizes, v)](
        q, k, decay, beta, resets, inverse, grad_outputs, grad_state.contiguous(), right, grad_v,
        grad_states, grad_before, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    grad_q, grad_k, grad_decay, grad_beta = (torch.empty_like(x) for x in (q, k, decay, beta))
    gradient_kernel[(len(inverse), sizes["CHUNKS"])](
        q, k, v, decay, beta, resets, states, learned, grad_outputs, right, grad_states, grad_q,
        grad_k, grad_decay, grad_beta, **sizes, **_ONE_CHUNK, **STRICT,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_decay, grad_beta, grad_before


def _solve(tokens: Tokens, sizes: dict[str, int]) -> Tensor:
    """Return the inverses [N, chunks, C, C] of the chunks' systems, in the dtype of the keys."""
    _, k, _, decay, beta, resets = tokens
    chunks, chunk, rows = sizes["CHUNKS"], sizes["C"], len(k) * sizes["H"]
    inverse = fresh(k, rows, chunks, chunk, chunk)
    own: dict[str, Any] = {name: sizes[name] for name in ("T", "H", "CHUNKS", "CK", "BK", "C")}
    own["PRECISION"] = "tf32x3" if k.dtype == torch.float32 else "tf32"
    solve_kernel[(rows, chunks)](
        k, decay, beta, resets, inverse, num_warps=2, num_stages=1, **own, **STRICT
    )  # fmt: skip
    return inverse


def _laid_out(tokens: Tokens) -> Tokens:
    q, k, v = (token_major(part, -2) for part in tokens[:3])
    decay, beta = (token_major(part, -1) for part in tokens[3:5])
    resets = tokens.resets[:, None].expand(decay.shape)
    return Tokens(q, k, v, decay, beta, token_major(resets, -1))


def _sizes(tokens: Tokens, chunk: int) -> dict[str, int]:
    """Return the sizes that the kernels take, by name."""
    _, heads, length, key_width = tokens.k.shape
    return {
        "T": length, "H": heads, "CHUNKS": -(-length // chunk), "CK": key_width,
        "CV": tokens.v.shape[-1], "BK": _WIDTH, "BV": _COLUMNS[tokens.v.element_size()], "C": chunk,
    }  # fmt: skip


def _columns(sizes: dict[str, int], v: Tensor) -> tuple[int, int]:
    """Return the grid of a kernel whose programs each go along a head, for columns of its state."""
    return len(v) * sizes["H"], -(-sizes["CV"] // sizes["BV"])

"""The gated delta rule by Triton: from token to token forward, in chunks of a row backward."""

import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.delta import cuda as in_chunks
from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two
from funcrl.ops.sequence_args import token_major

_COLUMNS = 32  # of a state, that a program holds
_CHUNK = 64  # tokens, in the backward pass


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
        state: [B, H, Ck, Cv] float32.
        resets: [B, T] bool.
    """
    size, heads, length, key_width = q.shape
    width = v.shape[-1]
    resets = resets[:, None].expand(decay.shape)
    rows = [aligned_rows(part.transpose(1, 2).contiguous().flatten(0, 2)) for part in (q, k, v)]
    numbers = [token_major(part, -1) for part in (decay, beta, resets)]
    before, last = aligned_rows(state.contiguous().flatten(0, 2)), fresh(state, *state.shape)
    outputs = fresh(v, size, length, heads, width)
    block = min(_COLUMNS, power_of_two(width))
    recurrent_kernel[(size * heads, -(-width // block))](
        *rows, *numbers, before, outputs, last, length, heads, CK=key_width, CV=width,
        BK=power_of_two(key_width), BV=block, num_warps=4, **STRICT,
    )  # fmt: skip
    return outputs.transpose(1, 2), last


def gated_delta_gradients_impl(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of all but the resets.

    By the kernels for chunks: a head of a sample is a program of its own there, too, and its chunks
    begin at its first token. So a sample's gradients do not depend on the others of a batch.
    """
    tokens = Tokens(q, k, v, decay, beta, resets)
    return in_chunks.scan_gradients(grad_outputs, grad_state, tokens, state, _CHUNK)


@triton.jit(do_not_specialize=["T", "H"])
def recurrent_kernel(
    q, k, v, decay, beta, resets, state, outputs, last, T, H,
    CK: tl.constexpr, CV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write what each token reads, and the last state; a token's heads lie together in memory."""
    n = tl.program_id(0).to(tl.int64)
    wide, columns = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    narrow, filled = wide < CK, columns < CV
    within = narrow[:, None] & filled[None, :]
    at = n * (CK * CV) + wide[:, None] * CV + columns[None, :]
    memory = tl.load(state + at, mask=within, other=0.0)
    row = (n // H) * T * H + n % H
    for _ in range(T):
        key = tl.load(k + row * CK + wide, mask=narrow, other=0.0).to(tl.float32)
        query = tl.load(q + row * CK + wide, mask=narrow, other=0.0).to(tl.float32)
        value = tl.load(v + row * CV + columns, mask=filled, other=0.0).to(tl.float32)
        share = tl.load(beta + row).to(tl.float32)
        memory *= tl.exp(tl.load(decay + row).to(tl.float32))
        memory = tl.where(tl.load(resets + row) != 0, 0.0, memory)
        missing = value - tl.sum(memory * key[:, None], 0)
        memory += key[:, None] * (missing * share)[None, :]
        tl.store(outputs + row * CV + columns, tl.sum(memory * query[:, None], 0), mask=filled)
        row += H
    tl.store(last + at, memory, mask=within)

"""The gated delta rule by Triton: from token to token forward, in chunks of a row backward."""

from torch import Tensor

from funcrl.ops.delta import cuda as in_chunks
from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.exact.cuda.delta_kernels import recurrent_kernel
from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two
from funcrl.ops.streams import token_major

_COLUMNS = 32  # of a state, that a program holds
_CHUNK = 64  # tokens, in the backward pass


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


def gated_delta_gradients(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of all but the resets.

    By the kernels for chunks: a head of a sample is a program of its own there, too, and its chunks
    begin at its first token. So a sample's gradients do not depend on the others of a batch.
    """
    tokens = Tokens(q, k, v, decay, beta, resets)
    return in_chunks.scan_gradients(grad_outputs, grad_state, tokens, state, _CHUNK)

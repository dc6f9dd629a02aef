"""The gated delta rule over a sequence, by one of several backends."""

from typing import Literal

from torch import Tensor

from funcrl.core.arguments import Count, checked
from funcrl.ops.delta import loop
from funcrl.ops.delta.operators import chunked_scan
from funcrl.ops.exact.delta import LARGEST, has_kernels, recurrent_scan
from funcrl.ops.streams import complete_scan

Backend = Literal["auto", "loop", "recurrent", "chunked", "triton"]
_CHUNK = 64  # tokens that the kernels of a GPU treat at a time


@checked
def gated_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    resets: Tensor | None = None,
    *,
    backend: Backend = "auto",
    chunk: Count = 64,
) -> tuple[Tensor, Tensor]:
    """Return what each token reads of a state that learns by the gated delta rule, and the state.

    For each token t (arXiv:2412.06464), with a state S [Ck, Cv] of each head: `S = exp(decay_t) S`,
    then `S = S + k_t (beta_t (v_t - S^T k_t))^T`, and the output is `S^T q_t`.
    The state is in at least float32.

    Args:
        q: queries [..., H, T, Ck], already normalised and scaled.
        k: keys [..., H, T, Ck], already normalised.
        v: values [..., H, T, Cv].
        decay: [..., H, T], the logarithm of what is kept of the state, at most 0.
        beta: [..., H, T], the share of the error that is learned.
        state: [..., H, Ck, Cv], the state before the first token; zeros when left out.
        resets: [..., T] bool, True where a sequence begins: the state before that token is 0.
        backend: "loop" is the definition in torch's operations, and has all derivatives.
            "recurrent" is one operator that goes from token to token, whose bits for a sample do
            not depend on what stands beside or before it. "chunked" is one operator that treats
            some tokens at a time by products of matrices, and "triton" is the same by kernels of a
            GPU. "auto" takes the fastest one.
        chunk: the number of tokens that "chunked" treats at a time; "triton" takes 64.

    Example:
        >>> import torch, funcrl
        >>> one = torch.ones(1, 2, 1)  # one head, two tokens, states of one number
        >>> half, decay = torch.full((1, 2), 0.5), torch.zeros(1, 2)
        >>> funcrl.ops.gated_delta_scan(one, one, 4 * one, decay, beta=half)
        (tensor([[[2.],
                 [3.]]]), tensor([[[3.]]]))
    """
    state, resets = complete_scan(q, k, v, decay, beta, state, resets)
    given = (q, k, v, decay, beta, state, resets)
    if backend == "auto":
        backend = _fastest(q, v, chunk)
    if backend == "triton":
        _check_kernels(q, v, chunk)
    if backend == "loop":
        return loop.scan(*given)
    if backend == "recurrent":
        outputs, last = recurrent_scan(*given)
    else:
        outputs, last = chunked_scan(*given, chunk, "triton" if backend == "triton" else "torch")
    return outputs, last


def _fastest(q: Tensor, v: Tensor, chunk: int) -> Backend:
    """Return the backend for these inputs; a single token, as of a generator, needs no chunk."""
    if q.shape[-2] == 1:
        return "recurrent"
    return "triton" if has_kernels(q, v) and chunk == _CHUNK else "chunked"


def _check_kernels(q: Tensor, v: Tensor, chunk: int) -> None:
    """Raise, in the name of `gated_delta_scan`, for inputs that the kernels do not take."""
    if has_kernels(q, v) and chunk == _CHUNK:
        return
    raise ValueError(
        f'gated_delta_scan expects for backend="triton" bfloat16, float16 or float32 on cuda and '
        f"heads of at most {LARGEST} numbers, in chunks of {_CHUNK} tokens, got {q.dtype} on "
        f"{q.device.type}, heads of {q.shape[-1]} and {v.shape[-1]}, and chunks of {chunk}; "
        'backend="chunked" takes all.'
    )

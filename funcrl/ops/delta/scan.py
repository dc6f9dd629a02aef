"""The gated delta rule over a sequence, by one of several backends."""

from typing import Literal

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import Count, checked
from funcrl.ops.delta import loop

Backend = Literal["auto", "loop", "recurrent", "chunked", "triton"]


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
        chunk: the number of tokens that "chunked" and "triton" treat at a time.

    Example:
        >>> import torch, funcrl
        >>> one = torch.ones(1, 2, 1)  # one head, two tokens, states of one number
        >>> half, decay = torch.full((1, 2), 0.5), torch.zeros(1, 2)
        >>> funcrl.ops.gated_delta_scan(one, one, 4 * one, decay, beta=half)
        (tensor([[[2.],
                 [3.]]]), tensor([[[3.]]]))
    """
    state, resets = _complete(q, k, v, decay, beta, state, resets)
    return loop.scan(q, k, v, decay, beta, state, resets)


def _complete(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the state and the resets, zeros and False where left out, once all are checked."""
    function = "gated_delta_scan"
    if q.ndim < 3 or v.ndim < 3 or not q.shape[-2]:
        raise ValueError(
            f"{function} expects q [..., H, T, Ck] and v [..., H, T, Cv] with T > 0, got "
            f"{list(q.shape)} and {list(v.shape)}."
        )
    checks.check_floating(function, "q", q)
    wide, leading = numerics.at_least_float32(q.dtype), q.shape[:-3]
    learned = torch.Size((*q.shape[:-2], q.shape[-1], v.shape[-1]))
    if state is None:
        state = q.new_zeros(learned, dtype=wide)
    if resets is None:
        resets = torch.zeros((*leading, q.shape[-2]), dtype=torch.bool, device=q.device)
    expected = torch.Size((*q.shape[:-1], v.shape[-1]))
    checks.check_shape(function, "k", k, "q", q.shape)
    checks.check_shape(function, "v", v, "q (with Cv numbers)", expected)
    checks.check_shape(function, "decay", decay, "q (without Ck)", q.shape[:-1])
    checks.check_shape(function, "beta", beta, "q (without Ck)", q.shape[:-1])
    checks.check_shape(function, "state", state, "q and v [..., H, Ck, Cv]", learned)
    checks.check_shape(
        function, "resets", resets, "q [..., T]", torch.Size((*leading, q.shape[-2]))
    )
    checks.check_dtype(function, "k", k, q.dtype)
    checks.check_dtype(function, "v", v, q.dtype)
    checks.check_dtype(function, "state", state, wide)
    checks.check_dtype(function, "resets", resets, torch.bool)
    return state, resets

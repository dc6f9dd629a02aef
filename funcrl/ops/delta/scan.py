"""The gated delta rule over a sequence, by one of several backends.

Its gates and the short convolution before it come first.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import Count, checked
from funcrl.core.custom_op import operator
from funcrl.ops.delta import chunked
from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.exact.delta import (
    LARGEST,
    Pair,
    Six,
    has_kernels,
    in_order,
    like_gradients,
    like_scan,
    recurrent_scan,
    scan_of,
)
from funcrl.ops.sequence_args import (
    as_samples,
    complete_conv,
    complete_scan,
    conv_reads,
    flat,
    last_tokens,
    token_major,
)


@checked
def delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay `-exp(log_rate) softplus(a + step_bias)`, and `sigmoid(b)`.

    The decay is in at least float32, as its sums over many tokens are exponents (arXiv:2412.06464).

    Args:
        a: [..., T, H].
        b: [..., T, H].
        log_rate: [H], the logarithm of each head's rate of forgetting.
        step_bias: [H], added to `a`.

    Example:
        >>> import torch, funcrl
        >>> zero = torch.zeros(1)
        >>> funcrl.ops.delta_gates(zero, zero, log_rate=zero, step_bias=zero)
        (tensor([-0.6931]), tensor([0.5000]))
    """
    wide = numerics.at_least_float32(a.dtype)
    steps = nn.functional.softplus(a.to(wide) + step_bias.to(wide))
    return -log_rate.to(wide).exp() * steps, torch.sigmoid(b)


@checked
def short_conv(
    x: Tensor, weight: Tensor, history: Tensor | None = None, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `silu(sum_j weight[:, j] x[t - K + 1 + j])` [..., T, E], and the new history.

    The sum is in at least float32, and is rounded to the dtype of `x` once, after the activation.

    Args:
        x: [..., T, E].
        weight: [E, K], the last column for the token itself.
        history: [..., K - 1, E], the tokens before the first one; zeros when left out.
        resets: [..., T] bool, True where a sequence begins: no token reads one before it. The
            history that is returned is 0 before the last reset.

    Example:
        >>> import torch, funcrl
        >>> x, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 1.0]])
        >>> out, history = funcrl.ops.short_conv(x, weight)
        >>> out.squeeze(-1), history  # silu(1) and silu(1 + 2)
        (tensor([0.7311, 2.8577]), tensor([[2.]]))
    """
    history, resets = complete_conv(x, weight, history, resets)
    columns = weight.to(x.dtype).to(numerics.at_least_float32(x.dtype)).unbind(-1)
    reads = conv_reads(x, len(columns), history, resets)
    total, *others = (read * column for read, column in zip(reads, columns, strict=True))
    for product in others:
        total = total + product
    return nn.functional.silu(total).to(x.dtype), last_tokens(x, history, resets)


Shape: TypeAlias = Sequence[int]


def _count(q: Shape, _k: Shape, v: Shape, *rest: Any) -> int:
    """Three products with the state for each token, and with the other tokens of its chunk."""
    chunk = min(rest[-2], q[-2])
    return 2 * math.prod(q[:-1]) * (3 * q[-1] * v[-1] + 2 * chunk * (q[-1] + v[-1]))


def _count_gradients(_grad: Shape, _grad_state: Shape, *inputs: Any) -> int:
    return 3 * _count(*inputs)  # the replay, and two gradients of each product


@operator("gated_delta_chunked", like_scan, rows=range(7), flops=_count)
def chunked_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor,
    chunk: int, kernels: str,
) -> Pair:  # fmt: skip
    """Return the outputs and the last state, by the kernels of that name."""
    *parts, before, begins = as_samples(q, k, v, decay, beta, state, resets)
    outputs, last = _kernels(kernels).scan(Tokens._make([*parts, begins]), before, chunk)
    return token_major(outputs, -2).view(v.shape), last.view(state.shape)


@operator("gated_delta_chunked_gradients", like_gradients, rows=range(9), flops=_count_gradients)
def chunked_gradients_op(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor, chunk: int, kernels: str,
) -> Six:  # fmt: skip
    """Return the gradients of all but the resets."""
    given = (q, k, v, decay, beta, state)
    grads = flat(grad_outputs, 3), flat(grad_state, 3)
    *parts, before, begins = as_samples(*given, resets)
    tokens = Tokens._make([*parts, begins])
    return in_order(_kernels(kernels).scan_gradients(*grads, tokens, before, chunk), given)


def _kernels(name: str) -> ModuleType:
    if name == "torch":
        return chunked
    # Imported here, because it needs triton.
    from funcrl.ops.delta import cuda as on_gpu

    return on_gpu


chunked_scan = scan_of(chunked_op, chunked_gradients_op)


def _loop(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [..., H, T, Cv] and the last state: the definition, with all derivatives."""
    wide = state.dtype
    outputs = []
    for token in range(q.shape[-2]):
        query, key, value = (part[..., token, :].to(wide) for part in (q, k, v))
        kept = decay[..., token, None, None].to(wide).exp()
        state = torch.where(resets[..., None, token, None, None], 0, kept * state)
        missing = value - torch.einsum("...kv,...k->...v", state, key)
        learned = beta[..., token, None].to(wide) * missing
        state = state + key[..., :, None] * learned[..., None, :]
        outputs.append(torch.einsum("...kv,...k->...v", state, query))
    return torch.stack(outputs, dim=-2).to(v.dtype), state


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
        return _loop(*given)
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

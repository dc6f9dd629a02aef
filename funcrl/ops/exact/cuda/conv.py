"""The short causal convolution by Triton: each number depends on a few of its own channel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh
from funcrl.ops.sequence_args import tokens_since

_ROWS, _BLOCK = 8, 256  # tokens and channels of a program


def short_conv_impl(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return silu of the convolution [B, T, E], rounded once.

    Args:
        x: [B, T, E].
        weight: [E, K].
        history: [B, K - 1, E].
        resets: [B, T] bool.
    """
    x, out = x.contiguous(), fresh(x, *x.shape)
    _launch(x, weight, history, resets, x, out, gradient=False)
    return out


def short_conv_gradients_impl(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the history, and of the sums before the activation."""
    size, length, width = x.shape
    taps = weight.shape[-1]
    grad_total = fresh(x, *x.shape, dtype=torch.float32)
    _launch(x.contiguous(), weight, history, resets, grad.contiguous(), grad_total, gradient=True)
    grad_x, grad_history = fresh(x, *x.shape), fresh(x, *history.shape)
    conv_gradient_kernel[(-(-(length + taps - 1) // _ROWS), -(-width // _BLOCK), size)](
        grad_total, weight.contiguous(), _since(resets), grad_x, grad_history, length, E=width,
        TAPS=taps, ROWS=_ROWS, BLOCK=_BLOCK, **STRICT,
    )  # fmt: skip
    return grad_x, grad_history, grad_total


def _launch(
    x: Tensor, weight: Tensor, history: Tensor, resets: Tensor, grad: Tensor, out: Tensor,
    gradient: bool,
) -> None:  # fmt: skip
    size, length, width = x.shape
    conv_kernel[(-(-length // _ROWS), -(-width // _BLOCK), size)](
        x, weight.contiguous(), history.contiguous(), _since(resets), grad, out, length, E=width,
        TAPS=weight.shape[-1], ROWS=_ROWS, BLOCK=_BLOCK, GRADIENT=gradient, **STRICT,
    )  # fmt: skip


def _since(resets: Tensor) -> Tensor:
    return tokens_since(resets).to(torch.int32).contiguous()


@triton.jit(do_not_specialize=["T"])
def conv_kernel(
    x, weight, history, since, grad, out, T,
    E: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write silu of the convolution of some tokens, or the gradient of the convolution itself."""
    sample = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (tokens < T)[:, None] & (columns < E)[None, :]
    begun = tl.load(since + sample * T + tokens, mask=tokens < T, other=0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        places = tokens - (TAPS - 1 - tap)
        seen = inside & (begun >= TAPS - 1 - tap)[:, None]
        at = (sample * T + places)[:, None] * E + columns[None, :]
        read = tl.load(x + at, mask=seen & (places >= 0)[:, None], other=0.0)
        at = (sample * (TAPS - 1) + places + TAPS - 1)[:, None] * E + columns[None, :]
        past = tl.load(history + at, mask=seen & (places < 0)[:, None], other=0.0)
        column = tl.load(weight + columns * TAPS + tap, mask=columns < E, other=0.0)
        column = column.to(read.dtype).to(tl.float32)
        # One of the two is 0.
        total += (read.to(tl.float32) + past.to(tl.float32)) * column[None, :]
    at = (sample * T + tokens)[:, None] * E + columns[None, :]
    sigmoid = 1.0 / (1.0 + tl.exp(-total))
    if GRADIENT:
        given = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        slope = sigmoid * (1.0 + total * (1.0 - sigmoid))
        tl.store(out + at, given * slope, mask=inside)
    else:
        tl.store(out + at, total / (1.0 + tl.exp(-total)), mask=inside)


@triton.jit(do_not_specialize=["T"])
def conv_gradient_kernel(
    grad_total, weight, since, grad_x, grad_history, T,
    E: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of what the taps of some tokens read, in x and before it."""
    sample = tl.program_id(2).to(tl.int64)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS) - (TAPS - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        tokens = places + (TAPS - 1 - tap)  # whose tap reads this place
        real = (tokens >= 0) & (tokens < T)
        begun = tl.load(since + sample * T + tokens, mask=real, other=0)
        seen = (real & (begun >= TAPS - 1 - tap))[:, None] & (columns < E)[None, :]
        at = (sample * T + tokens)[:, None] * E + columns[None, :]
        column = tl.load(weight + columns * TAPS + tap, mask=columns < E, other=0.0)
        column = column.to(grad_x.dtype.element_ty).to(tl.float32)
        total += tl.load(grad_total + at, mask=seen, other=0.0) * column[None, :]
    inside = (places < T)[:, None] & (columns < E)[None, :]
    at = (sample * T + places)[:, None] * E + columns[None, :]
    tl.store(grad_x + at, total, mask=inside & (places >= 0)[:, None])
    at = (sample * (TAPS - 1) + places + TAPS - 1)[:, None] * E + columns[None, :]
    tl.store(grad_history + at, total, mask=inside & (places < 0)[:, None])

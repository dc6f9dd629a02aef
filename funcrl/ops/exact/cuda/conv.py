"""The short causal convolution by Triton: each number depends on a few of its own channel."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.conv_kernels import conv_gradient_kernel, conv_kernel
from funcrl.ops.exact.cuda.layout import STRICT, fresh
from funcrl.ops.streams import tokens_since

_ROWS, _BLOCK = 8, 256  # tokens and channels of a program


def short_conv(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
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


def short_conv_gradients(
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

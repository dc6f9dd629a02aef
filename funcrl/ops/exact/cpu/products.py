"""Products with weights, in calls of one shape."""

import torch
from torch import Tensor, nn

from funcrl.ops.exact.cpu.sums import wide_dtype

# The rows of one call of the library, whose choice of a kernel depends on their number.
_TILE = 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` [M, N] of rows x [M, K] and weight [N, K]."""
    num_rows = x.shape[0]
    out = x.new_empty(num_rows, weight.shape[0])
    whole = num_rows - num_rows % _TILE
    x, turned = x.contiguous(), weight.mT
    for start in range(0, whole, _TILE):
        torch.mm(x[start : start + _TILE], turned, out=out[start : start + _TILE])
    if whole < num_rows:
        padded = nn.functional.pad(x[whole:], (0, 0, 0, _TILE - num_rows + whole))
        out[whole:] = torch.mm(padded, turned)[: num_rows - whole]
    return out if bias is None else out.add_(bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return `grad^T x` [N, K] of grad [M, N] and x [M, K], in at least float32."""
    wide = wide_dtype(x)
    return torch.mm(grad.to(wide).contiguous().mT, x.to(wide).contiguous())


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the sum [N] of the rows of grad [M, N], in at least float32."""
    return grad.to(wide_dtype(grad)).contiguous().sum(dim=0)


def embedding_gradient(grad: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return [V, D]: for each token the sum of its rows of grad [M, D], in at least float32."""
    wide = grad.to(wide_dtype(grad))
    # On a CPU rows are added one after the other, in order.
    return wide.new_zeros(vocab_size, grad.shape[1]).index_add_(0, tokens, wide)

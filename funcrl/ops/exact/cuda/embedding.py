"""The gradient of an embedding table by Triton, summed in the order of the tokens."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, row_stride

_ROWS = 32  # rows of one token that are added at a time
_BLOCK = 256  # columns of one program


def embedding_gradient(grad: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the sums [V, D] of the rows of grad [M, D] with each token, in float32.

    Places are sorted by token, equal ones in their order; one program sums the rows of one token.
    """
    size, width = grad.shape
    out = torch.zeros(vocab_size, width, dtype=torch.float32, device=grad.device)
    if not size:
        return out
    grad = aligned_rows(grad)
    ordered, places = torch.sort(tokens, stable=True)
    _sum_kernel[(size, -(-width // _BLOCK))](
        grad,
        ordered,
        places,
        out,
        size,
        width,
        row_stride(grad),
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        **STRICT,
    )
    return out


@triton.jit
def _sum_kernel(grad, ordered, places, out, M, D, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0)
    token = tl.load(ordered + start)
    before = tl.load(ordered + start - 1, mask=start > 0, other=-1)
    if token != before:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        more = True
        while more:
            rows = start + tl.arange(0, ROWS)
            own = tl.load(ordered + rows, mask=rows < M, other=-1) == token
            place = tl.load(places + rows, mask=own, other=0)
            seen = own[:, None] & (columns < D)[None, :]
            values = tl.load(
                grad + place[:, None] * stride + columns[None, :], mask=seen, other=0.0
            )
            total += tl.sum(values.to(tl.float32), 0)
            start += ROWS
            more = tl.sum(own.to(tl.int32), 0) == ROWS
        tl.store(out + token * D + columns, total, mask=columns < D)

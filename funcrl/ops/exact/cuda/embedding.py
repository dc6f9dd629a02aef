"""The gradient of an embedding table by Triton, summed in the order of the tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, row_stride

_ROWS = 32  # rows of one token that are added at a time
_BLOCK = 256  # columns of one program


def embedding_gradient_impl(
    grad: Tensor, tokens: Tensor, vocab_size: int, blocks: int = 1
) -> Tensor:
    """Return the sums [V, D] of the rows of grad [M, D] with each token, in float32.

    Places are sorted by token, equal ones in their order; one program sums the rows of one token,
    those of each block for themselves, and then the blocks, one, two or four, in pairs.
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
        -(-size // blocks),
        row_stride(grad),
        BLOCKS=blocks,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        **STRICT,
    )
    return out


@triton.jit
def _sum_of_block(
    grad, ordered, places, token, start, end, M, D, stride, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of a token's rows from `start` on whose places are below `end`, and the next.

    Rows are added in groups, which begin anew in each block: it has the sum that it has alone.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    more = True
    while more:
        rows = start + tl.arange(0, ROWS)
        own = tl.load(ordered + rows, mask=rows < M, other=-1) == token
        place = tl.load(places + rows, mask=own, other=0)
        own = own & (place < end)
        seen = own[:, None] & (columns < D)[None, :]
        values = tl.load(grad + place[:, None] * stride + columns[None, :], mask=seen, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
        found = tl.sum(own.to(tl.int32), 0)
        start += found
        more = found == ROWS
    return total, start


@triton.jit(do_not_specialize=["M", "of_block"])
def _sum_kernel(
    grad, ordered, places, out, M, D, of_block, stride,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0)
    token = tl.load(ordered + start)
    before = tl.load(ordered + start - 1, mask=start > 0, other=-1)
    if token != before:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total, start = _sum_of_block(
            grad, ordered, places, token, start, of_block, M, D, stride, columns, ROWS, BLOCK
        )
        if BLOCKS > 1:
            part, start = _sum_of_block(
                grad, ordered, places, token, start, 2 * of_block, M, D, stride, columns, ROWS,
                BLOCK,
            )  # fmt: skip
            total += part
        if BLOCKS > 2:
            other, start = _sum_of_block(
                grad, ordered, places, token, start, 3 * of_block, M, D, stride, columns, ROWS,
                BLOCK,
            )  # fmt: skip
            part, start = _sum_of_block(
                grad, ordered, places, token, start, M, M, D, stride, columns, ROWS, BLOCK
            )
            total += other + part
        tl.store(out + token * D + columns, total, mask=columns < D)

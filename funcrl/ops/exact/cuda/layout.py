"""How the kernels see a tensor: rows whose memory a kernel reads in one way, whatever their number.

Triton compiles a kernel anew for an argument that is 1 or no multiple of 16, and for memory that is
not aligned to 16 bytes; the order of a sum within a row may then be another. So rows come to a
kernel in a form that depends on their width alone.
"""

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest load, and the divisor that Triton looks for

# An option of each launch: a compiler that joins products and sums as it likes may do so in one
# variant of a kernel and not in another. Where one rounding is meant, a kernel says `fma`.
STRICT = {"enable_fp_fusion": False}


def power_of_two(size: int) -> int:
    """Return the least power of two that is no less than `size`."""
    return 1 << max(size - 1, 0).bit_length()


def aligned_rows(x: Tensor) -> Tensor:
    """Return `x` [M, D], copied where its memory is not what `row_stride` promises."""
    width = x.shape[1]
    if x.is_contiguous():
        return x if _is_aligned(x) else x.clone()
    regular = x.stride(1) == 1 and width % ALIGNMENT == 0 and x.stride(0) % ALIGNMENT == 0
    return x if regular and _is_aligned(x) else x.contiguous()


def row_stride(x: Tensor) -> int:
    """Return the distance of two rows, a multiple of 16 for each `x` of a width that is one."""
    return x.shape[1] if x.is_contiguous() else x.stride(0)


def aligned_heads(x: Tensor) -> Tensor:
    """Return `x` [..., C], copied where a row of C numbers cannot be read by loads of 16 bytes."""
    step = ALIGNMENT // x.element_size()
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    regular = x.stride(-1) == 1 and all(size < 2 or stride % step == 0 for size, stride in pairs)
    if regular and _is_aligned(x):
        return x
    return x.clone() if x.is_contiguous() else x.contiguous()


def fresh(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor of the given shape, on the device of `x`, with undefined values."""
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0

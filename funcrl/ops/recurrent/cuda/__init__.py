"""Kernels of recurrent layers on a GPU, by Triton; they have the seam of `recurrent/kernels.py`."""

import torch
import triton
from torch import Tensor

from funcrl.ops.recurrent.cuda.piece_kernels import forward_kernel
from funcrl.ops.recurrent.cuda.scan import scan_kernels
from funcrl.ops.recurrent.kernels import Cell

__all__ = ["scan_kernels", "why_not"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(_cell: Cell, x: Tensor, _width: int) -> str:
    """Return what the kernels expect and do not get, as the end of a sentence, or "".

    Args:
        _cell: "lstm" or "gru", which take the same.
        x: [..., T, D].
        _width: H, the numbers of a state; all are taken.
    """
    if x.dtype not in _DTYPES:
        return f"x of float32, bfloat16 or float16, got {x.dtype}"
    if not x.is_cuda and isinstance(forward_kernel, triton.JITFunction):  # not interpreted
        return f"x on a GPU, got {x.device}"
    return ""

"""Kernels of recurrent layers on a GPU, by Triton; they have the seam of `recurrent/kernels.py`."""

import torch
import triton
from torch import Tensor

from funcrl.ops.recurrent.cuda import gru, lstm
from funcrl.ops.recurrent.cuda.lstm_kernels import forward_kernel
from funcrl.ops.recurrent.cuda.plans import PlanFn, plan_of
from funcrl.ops.recurrent.kernels import Cell, Precision, ScanKernels

__all__ = ["scan_kernels", "why_not"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scan_kernels(cell: Cell, precision: Precision, plan_fn: PlanFn = plan_of) -> ScanKernels:
    """Return the kernels of a cell.

    Args:
        cell: "lstm" or "gru".
        precision: of float32 products.
        plan_fn: how the work is cut.
    """
    return (lstm if cell == "lstm" else gru).kernels(precision, plan_fn)


def why_not(cell: Cell, x: Tensor, width: int) -> str:
    """Return what the kernels expect and do not get, as the end of a sentence, or "".

    Args:
        cell: "lstm" or "gru", which take the same.
        x: [..., T, D].
        width: H, the numbers of a state.
    """
    if x.dtype not in _DTYPES:
        return f"x of float32, bfloat16 or float16, got {x.dtype}"
    if not x.is_cuda and isinstance(forward_kernel, triton.JITFunction):  # not interpreted
        return f"x on a GPU, got {x.device}"
    return ""

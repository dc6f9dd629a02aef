"""The launches of GRU's kernels on one piece of a sequence; the seam is `recurrent/kernels.py`."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT
from funcrl.ops.recurrent.cuda.gru_kernels import backward_kernel, forward_kernel, replay_kernel
from funcrl.ops.recurrent.cuda.plans import PlanFn
from funcrl.ops.recurrent.cuda.step import gradient_of_state, strides, switches
from funcrl.ops.recurrent.kernels import Precision, ScanKernels


def kernels(precision: Precision, plan_fn: PlanFn) -> ScanKernels:
    """Return the kernels of GRU with products of one precision, cut by `plan_fn`.

    A GRU has no cell state: what the seam calls `c0`, `cells` and their like is empty.
    """

    def forward(
        pre: Tensor,
        weight_hh: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor,
        resets: Tensor | None,
        outputs: Tensor,
        gates: Tensor | None,
        cells: Tensor | None,
    ) -> Tensor:
        steps, rows, width = outputs.shape
        plan = plan_fn(h0, precision)
        for grid, first, last in plan.launches(plan.forward, rows, width, steps):
            forward_kernel[grid](
                pre, weight_hh.contiguous(), pre if bias_n is None else bias_n, h0.contiguous(),
                switches(resets, pre), outputs, pre if gates is None else gates, rows, first, last,
                *strides(outputs), *strides(gates), *strides(resets), H=width,
                BIAS=bias_n is not None, KEEP=gates is not None, RESETS=resets is not None,
                PRECISION=precision, **plan.forward.options(), **STRICT,
            )  # fmt: skip
        return c0.clone()

    def replay(
        pre: Tensor,
        weight_hh: Tensor,
        bias_n: Tensor | None,
        before: Tensor,
        c0: Tensor,
        resets: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
    ) -> Tensor:
        steps, rows, width = before.shape
        tile = plan_fn(before[0], precision).forward
        if gates is not None:  # else there is nothing to find
            replay_kernel[(*tile.grid(rows, width), steps)](
                pre, weight_hh.contiguous(), pre if bias_n is None else bias_n, before,
                switches(resets, pre), gates, rows, *strides(gates), *strides(resets), H=width,
                BIAS=bias_n is not None, RESETS=resets is not None, PRECISION=precision,
                **tile.options(), **STRICT,
            )  # fmt: skip
        return c0.clone()

    def backward(
        grad_outputs: Tensor,
        gates: Tensor,
        cells: Tensor,
        before: Tensor,
        c0: Tensor,
        weight_hh: Tensor,
        resets: Tensor | None,
        grad_h: Tensor,
        grad_c: Tensor,
        grads: Tensor,
    ) -> tuple[Tensor, Tensor]:
        steps, rows, width = before.shape
        plan, transposed = plan_fn(before[0], precision), weight_hh.t().contiguous()
        direct = torch.empty_like(grad_h, memory_format=torch.contiguous_format)
        for grid, first, last in plan.launches(plan.backward, rows, width, steps):
            backward_kernel[grid](
                grad_outputs, gates, before, transposed, switches(resets, gates),
                grad_h.contiguous(), direct, grads, rows, steps, steps - last, steps - first,
                *strides(grad_outputs), *strides(gates), *strides(resets), *strides(grads),
                H=width, RESETS=resets is not None, PRECISION=precision,
                **plan.backward.options(), **STRICT,
            )  # fmt: skip
        grad_h0 = gradient_of_state(grads, transposed, resets, direct, precision, plan.backward)
        return grad_h0, grad_c.clone()

    return ScanKernels(forward, replay, backward)

"""The launches of LSTM's kernels on one piece of a sequence; the seam is `recurrent/kernels.py`."""

from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT
from funcrl.ops.recurrent.cuda.lstm_kernels import backward_kernel, forward_kernel, replay_kernel
from funcrl.ops.recurrent.cuda.plans import PlanFn
from funcrl.ops.recurrent.cuda.step import carried, gradient_of_state, strides, switches
from funcrl.ops.recurrent.kernels import Precision, ScanKernels


def kernels(precision: Precision, plan_fn: PlanFn) -> ScanKernels:
    """Return the kernels of LSTM with products of one precision, cut by `plan_fn`."""

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
        plan, cell = plan_fn(h0, precision), carried(c0)
        for grid, first, last in plan.launches(plan.forward, rows, width, steps):
            forward_kernel[grid](
                pre, weight_hh.contiguous(), h0.contiguous(), cell, switches(resets, pre), outputs,
                pre if gates is None else gates, cell if cells is None else cells, rows, first,
                last, *strides(outputs), *strides(gates), *strides(cells), *strides(resets),
                H=width, KEEP=gates is not None, RESETS=resets is not None, PRECISION=precision,
                **plan.forward.options(), **STRICT,
            )  # fmt: skip
        return cell

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
        tile, cell = plan_fn(before[0], precision).forward, carried(c0)
        replay_kernel[tile.grid(rows, width)](
            pre, weight_hh.contiguous(), before, cell, switches(resets, pre),
            pre if gates is None else gates, cell if cells is None else cells, rows, steps,
            *strides(gates), *strides(cells), *strides(resets),
            H=width, KEEP=gates is not None, RESETS=resets is not None, PRECISION=precision,
            **tile.options(), **STRICT,
        )  # fmt: skip
        return cell

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
        plan, cell = plan_fn(before[0], precision), carried(grad_c)
        transposed = weight_hh.t().contiguous()
        for grid, first, last in plan.launches(plan.backward, rows, width, steps):
            backward_kernel[grid](
                grad_outputs, gates, cells, c0.contiguous(), transposed, switches(resets, gates),
                grad_h.contiguous(), cell, grads, rows, steps, steps - last, steps - first,
                *strides(grad_outputs), *strides(gates), *strides(cells), *strides(resets),
                *strides(grads), H=width, RESETS=resets is not None, PRECISION=precision,
                **plan.backward.options(), **STRICT,
            )  # fmt: skip
        grad_h0 = gradient_of_state(grads, transposed, resets, None, precision, plan.backward)
        return grad_h0, cell

    return ScanKernels(forward, replay, backward)

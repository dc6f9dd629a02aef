"""The launches of a scan's kernels on one piece of a sequence; the seam is `recurrent/kernels.py`."""

from typing import Any

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT
from funcrl.ops.recurrent.cuda.plans import PlanFn, Tile, plan_of
from funcrl.ops.recurrent.cuda.piece_kernels import (
    backward_kernel,
    forward_kernel,
    replay_kernel,
    state_gradient_kernel,
)
from funcrl.ops.recurrent.kernels import Cell, Precision, ScanKernels


def scan_kernels(cell: Cell, precision: Precision, plan_fn: PlanFn = plan_of) -> ScanKernels:
    """Return the kernels of a cell.

    Args:
        cell: "lstm" or "gru".
        precision: of float32 products.
        plan_fn: how the work is cut.
    """

    def options(tile: Tile, resets: Tensor | None) -> dict[str, Any]:
        """Return what each kernel is told about the work."""
        return {
            "CELL": cell,
            "PRECISION": precision,
            "RESETS": resets is not None,
            **tile.options(),
            **STRICT,
        }

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
        plan, c = plan_fn(h0, precision), _overwritable(c0)
        weight_hh, h0 = weight_hh.contiguous(), h0.contiguous()
        for grid, first, last in plan.launches(plan.forward, rows, width, steps):
            forward_kernel[grid](
                pre, weight_hh, _or(bias_n, pre), h0, c, _bytes(resets, pre), outputs,
                _or(gates, pre), _or(cells, c), rows, first, last, *_strides(outputs),
                *_strides(gates), *_strides(cells), *_strides(resets), H=width,
                BIAS=bias_n is not None, KEEP=gates is not None, **options(plan.forward, resets),
            )  # fmt: skip
        return c

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
        tile, c = plan_fn(before[0], precision).forward, _overwritable(c0)
        replay_kernel[tile.grid(rows, width)](
            pre, weight_hh.contiguous(), _or(bias_n, pre), before, c, _bytes(resets, pre),
            _or(gates, pre), _or(cells, c), rows, steps, *_strides(gates), *_strides(cells),
            *_strides(resets), H=width, BIAS=bias_n is not None, KEEP=gates is not None,
            **options(tile, resets),
        )  # fmt: skip
        return c

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
        plan, weight = plan_fn(before[0], precision), weight_hh.t().contiguous()
        grad_h0 = torch.empty_like(grad_h, memory_format=torch.contiguous_format)
        carry = _overwritable(grad_c) if cell == "lstm" else torch.zeros_like(grad_h0)
        switches, told = _bytes(resets, gates), options(plan.backward, resets)
        c0, grad_h = c0.contiguous(), grad_h.contiguous()
        for grid, first, last in plan.launches(plan.backward, rows, width, steps):
            backward_kernel[grid](
                grad_outputs, gates, cells, before, c0, weight, switches, grad_h, carry, grads,
                rows, steps, steps - last, steps - first, *_strides(grad_outputs),
                *_strides(gates), *_strides(cells), *_strides(resets), *_strides(grads), H=width,
                **told,
            )  # fmt: skip
        state_gradient_kernel[plan.backward.grid(rows, width)](
            grads, weight, switches, carry, grad_h0, rows, grads.stride(1), _strides(resets)[1],
            H=width, **told,
        )  # fmt: skip
        return grad_h0, carry if cell == "lstm" else grad_c.clone()

    return ScanKernels(forward, replay, backward)


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Return the distances of two steps and of two rows of [k, N, ...], zero of what is missing."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _overwritable(state: Tensor) -> Tensor:
    """Return a copy of a state [N, H], which a kernel overwrites step by step."""
    return state.clone(memory_format=torch.contiguous_format)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return `x`; if there is none another tensor, as a pointer that no kernel follows."""
    return other if x is None else x


def _bytes(resets: Tensor | None, other: Tensor) -> Tensor:
    """Return `resets` as bytes; if there are none another tensor."""
    return other if resets is None else resets.view(torch.uint8)

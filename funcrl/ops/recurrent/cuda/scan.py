"""The launches of the kernels on one piece of a sequence, as `recurrent/kernels.py` wants them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from funcrl.ops.recurrent.contract import Cell, Precision, ScanKernels
from funcrl.ops.recurrent.cuda import linear
from funcrl.ops.recurrent.cuda.pieces import (
    backward_kernel,
    forward_kernel,
    replay_kernel,
    state_gradient_kernel,
)
from funcrl.ops.recurrent.cuda.plans import Launch, PlanFn, plan_of

# What Triton calls a precision. Three products of tf32 have the errors of one in float32.
_PRODUCTS: dict[Precision, str] = {"ieee": "tf32x3", "tf32": "tf32"}


class Source(NamedTuple):
    """The factors of a product with W_ih, which the kernels compute with the product with W_hh."""

    x: Tensor  # [k, N, D]
    weight: Tensor  # [G, D]
    bias: Tensor | None  # [G]


def scan_kernels(cell: Cell, precision: Precision, plan_fn: PlanFn = plan_of) -> ScanKernels:
    """Return the kernels of a cell.

    Args:
        cell: "lstm" or "gru".
        precision: of float32 linear.
        plan_fn: how the work is cut.
    """

    def forward(
        source: Source,
        weight_hh: Tensor,
        bias_n: Tensor | None,
        h0: Tensor,
        c0: Tensor,
        resets: Tensor | None,
        outputs: Tensor,
        gates: Tensor | None,
        cells: Tensor | None,
        /,
    ) -> Tensor:
        steps, rows, width = outputs.shape
        plan, c = plan_fn(h0, precision), _overwritable(c0)
        arguments = (
            *source[:2], _or(source.bias, c), weight_hh.contiguous(), _or(bias_n, c),
            h0.contiguous(), c, _bytes(resets, c), outputs, _or(gates, c), _or(cells, c), rows,
            *_strides(source.x, outputs, gates, cells, resets), source.x.shape[2], width,
            *plan.forward.size, cell, source.bias is not None, gates is not None,
            resets is not None, _PRODUCTS[precision],
        )  # fmt: skip
        launches = plan.launches(plan.forward, rows, width, steps)
        _launch_each(forward_kernel, launches, arguments, plan.forward.resources)
        return c

    def replay(
        source: Source,
        weight_hh: Tensor,
        bias_n: Tensor | None,
        before: Tensor,
        c0: Tensor,
        resets: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
        /,
    ) -> Tensor:
        steps, rows, width = before.shape
        tile, c = plan_fn(before[0], precision).forward, _overwritable(c0)
        replay_kernel[tile.grid(rows, width)](
            *source[:2], _or(source.bias, c), weight_hh.contiguous(), _or(bias_n, c), before, c,
            _bytes(resets, c), _or(gates, c), _or(cells, c), rows, steps,
            *_strides(source.x, gates, cells, resets), source.x.shape[2], width, *tile.size, cell,
            source.bias is not None, gates is not None, resets is not None, _PRODUCTS[precision],
            **tile.resources,
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
        /,
    ) -> tuple[Tensor, Tensor]:
        steps, rows, width = before.shape
        plan, weight = plan_fn(before[0], precision), weight_hh.t().contiguous()
        grad_h0 = torch.empty_like(grad_h, memory_format=torch.contiguous_format)
        carry = _overwritable(grad_c) if cell == "lstm" else torch.zeros_like(grad_h0)
        switches, grad_outputs = _bytes(resets, gates), _with_whole_rows(grad_outputs)
        told = width, *plan.backward.size, cell, resets is not None, _PRODUCTS[precision]
        arguments = (
            grad_outputs, gates, cells, before, c0.contiguous(), weight, switches,
            grad_h.contiguous(), carry, grads, rows, steps,
            *_strides(grad_outputs, gates, cells, resets, grads), *told,
        )  # fmt: skip
        launches = plan.launches(plan.backward, rows, width, steps)
        _launch_each(backward_kernel, reversed(launches), arguments, plan.backward.resources)
        state_gradient_kernel[plan.backward.grid(rows, width)](
            grads, weight, switches, carry, grad_h0, rows, grads.stride(1), _strides(resets)[1],
            *told, **plan.backward.resources,
        )  # fmt: skip
        return grad_h0, carry if cell == "lstm" else grad_c.clone()

    found = ScanKernels(_project, forward, replay, backward)
    return found._replace(linear=linear.linear) if precision == "tf32" else found


def _project(x: Tensor, weight_ih: Tensor, bias: Tensor | None, /) -> Source:
    return Source(_with_whole_rows(x), weight_ih.contiguous(), bias)


def _launch_each(
    kernel: Any, launches: Iterable[Launch], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Launch a kernel for several ranges of steps, with the same arguments.

    Only the first launch goes through Triton's search for a compiled kernel, which takes the host
    longer than the GPU computes. The interpreter compiles nothing.
    """
    compiled = None
    for grid, first, last in launches:
        if compiled is None:
            compiled = kernel[grid](first, last, *arguments, **options)
        else:
            compiled[(*grid, 1)](first, last, *arguments)


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return of each [k, N, ...] the distances of steps and of rows, zeros of a missing one."""
    return tuple(
        stride for each in tensors for stride in ((0, 0) if each is None else each.stride()[:2])
    )


def _with_whole_rows(x: Tensor) -> Tensor:
    """Return [k, N, ...], copied where the numbers of a row do not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _overwritable(state: Tensor) -> Tensor:
    """Return a copy of a state [N, H], which a kernel overwrites step by step."""
    return state.clone(memory_format=torch.contiguous_format)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return `x`; if there is none another tensor, as a pointer that no kernel follows."""
    return other if x is None else x


def _bytes(resets: Tensor | None, other: Tensor) -> Tensor:
    """Return `resets` as bytes; if there are none another tensor."""
    return other if resets is None else resets.view(torch.uint8)


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

"""Launches of the kernels on a piece of a sequence, and how the work is cut into tiles."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh
from funcrl.ops.recurrent.contract import Cell, Precision, ScanKernels
from funcrl.ops.recurrent.cuda.pieces import (
    backward_kernel,
    forward_kernel,
    replay_kernel,
    state_gradient_kernel,
)


class Tile(NamedTuple):
    """Sequences, numbers of a state and inner numbers of a program, and its resources."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def grid(self, num_rows: int, width: int) -> tuple[int, int]:
        """Return the number of tiles of rows and of columns."""
        return -(-num_rows // self.rows), -(-width // self.columns)

    @property
    def size(self) -> tuple[int, int, int]:
        """What a kernel calls BM, BH and BK."""
        return self[:3]

    @property
    def resources(self) -> dict[str, Any]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, **STRICT}


class Plan(NamedTuple):
    """How a scan is cut; a replay has the tile of `forward`, so that it has its bits.

    With `launch="step"` a launch is one step, and each tile has a program. With "piece" a program
    computes all columns of its rows for all steps of a piece: then no step waits for a launch.
    """

    forward: Tile
    backward: Tile
    launch: Literal["step", "piece"]

    def launches(self, tile: Tile, rows: int, width: int, steps: int) -> list["Launch"]:
        """Return the launches of `steps` steps, in order."""
        grid = tile.grid(rows, width)
        if self.launch == "piece":
            return [Launch((grid[0], 1), 0, steps)]
        return [Launch(grid, step, step + 1) for step in range(steps)]


class Launch(NamedTuple):
    """A launch of a kernel, which computes the steps first..last."""

    grid: tuple[int, int]
    first: int
    last: int


# (a tensor [N, H] of the inputs' dtype, precision) -> Plan
PlanFn: TypeAlias = Callable[[Tensor, Precision], Plan]

# The fastest on an H200 with a state of 256: of 4096 sequences, and of few.
_HALF = Plan(Tile(64, 64, 64, 8, 3), Tile(64, 64, 64, 8, 3), "step")
_HALF_OF_FEW = Plan(Tile(16, 32, 128, 4, 3), Tile(16, 32, 128, 4, 3), "step")
_TF32 = Plan(Tile(128, 64, 32, 8, 3), Tile(64, 64, 64, 8, 3), "step")
_TF32_OF_FEW = Plan(Tile(16, 32, 64, 4, 3), Tile(16, 32, 64, 4, 3), "step")
_IEEE = Plan(Tile(64, 64, 32, 4, 2), Tile(64, 32, 32, 4, 3), "step")
_IEEE_OF_FEW = Plan(Tile(16, 32, 64, 4, 3), Tile(16, 32, 64, 4, 3), "step")
_FEW = 512  # sequences


def plan_of(state: Tensor, precision: Precision) -> Plan:
    """Return a plan for a state [N, H], which depends on N, the dtype and the precision."""
    few = len(state) <= _FEW
    if state.dtype != torch.float32:
        return _HALF_OF_FEW if few else _HALF
    if precision == "tf32":
        return _TF32_OF_FEW if few else _TF32
    return _IEEE_OF_FEW if few else _IEEE


_TILE = Tile(128, 128, 32, 8, 3)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
    """Return rows W^T + bias [M, G], of rows [M, D] and a weight [G, D]."""
    out, weight = fresh(rows, len(rows), len(weight)), weight.contiguous()
    linear_kernel[_TILE.grid(*out.shape)](
        rows, weight, weight if bias is None else bias, out, len(rows), rows.stride(0),
        *weight.shape, *_TILE.size, bias is not None, **_TILE.resources,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, weight, bias, out, M, x_row, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write x W^T + bias [M, N]; `weight` is [N, K]."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None] * x_row + inner[None, :]
    w_at = weight + columns[None, :] * K + inner[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left_seen, right_seen = (rows < M)[:, None], (columns < N)[None, :]
        if K % BK != 0:
            left_seen = left_seen & (k + inner < K)[None, :]
            right_seen = right_seen & (k + inner < K)[:, None]
        left = tl.load(x_at, mask=left_seen, other=0.0)
        right = tl.load(w_at, mask=right_seen, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")
        x_at += BK
        w_at += BK
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    seen = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=seen)


# What Triton calls a precision. Three products of tf32 have the errors of one in float32.
_PRODUCTS: dict[Precision, str] = {"ieee": "tf32x3", "tf32": "tf32"}


class Source(NamedTuple):
    """The factors of a product with W_ih, which the kernels compute with the product with W_hh."""

    x: Tensor  # [k, N, D]
    weight: Tensor  # [G, D]
    bias: Tensor | None  # [G]


def scan_kernels(cell: Cell, precision: Precision, plan_fn: PlanFn = plan_of) -> ScanKernels:
    """Return the kernels of a cell."""

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
    return found._replace(linear=linear) if precision == "tf32" else found


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

"""What a recurrent layer computes with: the kernels of one cell for a few steps in a row.

The operator of a layer (`layer.py`) cuts a sequence into pieces of k steps, and calls these on one
piece after the other. Inside a piece the steps are the first axis: a tensor is [k, N, ...] for N
sequences. One that a kernel is given may be a view with any strides of the first two axes, such as
some steps of [N, T, H]; its last axis is contiguous. What an argument calls "written" is allocated
by the caller.

| cell | G, width of `pre` | `gates`, 4 H wide | C, width of a cell state | `grads`, 4 H wide |
|---|---|---|---|---|
| lstm | 4 H: i f g o | i f g o after sigmoid, sigmoid, tanh, sigmoid | H | of `pre` |
| gru | 3 H: r z n | r z n after sigmoid (r z), tanh; m = W_hn h + b_hn | 0 | of `pre`, then of m |

With `pre` = x W_ih^T + b_ih + b_hh (gru: without b_hn, which is `bias_n`), and h the state before
a step, which is zero if a new episode begins at it:

    lstm: i f g o = pre + W_hh h;  c' = f c + i g;  h' = o tanh(c')
    gru:  r z = pre + W_h(r,z) h;  n = tanh(pre + r m);  h' = n + z (h - n)

`pre`, `gates`, `grads`, h and the outputs have the dtype of x. Cell states and their gradients have
at least float32, and so has the gradient of h that goes from one piece to the one before it.
"""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from funcrl.ops.contract import LinearFn

Cell = Literal["lstm", "gru"]
Precision = Literal["ieee", "tf32"]


class ProjectFn(Protocol):
    """The product of a piece's x with W_ih."""

    def __call__(
        self,
        x: Tensor,  # [k, N, D]
        weight_ih: Tensor,  # [G, D]
        bias: Tensor | None,  # [G], all that is added
        /,
    ) -> Any:
        """Return what the kernels take as `pre`: the product, or what they compute it from."""
        ...


class ForwardFn(Protocol):
    """The forward pass of k steps."""

    def __call__(
        self,
        pre: Any,  # what `project` returned
        weight_hh: Tensor,  # [G, H]
        bias_n: Tensor | None,  # [H], of a GRU
        h0: Tensor,  # [N, H], the state before the first step
        c0: Tensor,  # [N, C]
        resets: Tensor | None,  # [k, N] bool, True where a new episode begins
        outputs: Tensor,  # [k, N, H], written: the state h after each step
        gates: Tensor | None,  # [k, N, 4 H], written, or None: nobody wants them
        cells: Tensor | None,  # [k, N, C], written: the cell state after each step; None with gates
        /,
    ) -> Tensor:
        """Run k steps; return the cell state after the last one, [N, C]."""
        ...


class ReplayFn(Protocol):
    """The gates and cell states of k steps once more.

    The state h of every step is known, so that the product with W_hh need not wait for the step
    before. The results have the bits that the forward pass gives.
    """

    def __call__(
        self,
        pre: Any,  # what `project` returned
        weight_hh: Tensor,
        bias_n: Tensor | None,
        before: Tensor,  # [k, N, H], contiguous: the state h before each step, zero at a reset
        c0: Tensor,  # [N, C]
        resets: Tensor | None,  # [k, N]
        gates: Tensor | None,  # [k, N, 4 H], written, or None; it may be `pre` itself
        cells: Tensor | None,  # [k, N, C], written; None with gates
        /,
    ) -> Tensor:
        """Find gates and cell states; return the cell state after the last step, [N, C]."""
        ...


class BackwardFn(Protocol):
    """The backward pass of k steps."""

    def __call__(
        self,
        grad_outputs: Tensor,  # [k, N, H], without what comes from later steps; any strides
        gates: Tensor,  # [k, N, 4 H]
        cells: Tensor,  # [k, N, C]
        before: Tensor,  # [k, N, H], contiguous: the state h before each step, zero at a reset
        c0: Tensor,  # [N, C]
        weight_hh: Tensor,
        resets: Tensor | None,  # [k, N]
        grad_h: Tensor,  # [N, H], at least float32: of the state after the last step
        grad_c: Tensor,  # [N, C]
        grads: Tensor,  # [k, N, 4 H], written; it may be `gates` itself
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states before the piece, [N, H] and [N, C]."""
        ...


class ScanKernels(NamedTuple):
    """The kernels of one cell on one kind of device; plain functions of tensors."""

    project: ProjectFn
    forward: ForwardFn
    replay: ReplayFn
    backward: BackwardFn
    # Of all rows [M, D] of a piece, for the gradient of x; the weight may be a transposed view.
    linear: LinearFn = torch.nn.functional.linear


def unless_reset(state: Tensor, resets: Tensor | None, step: int) -> Tensor:
    """Return a state [N, ...] before a step, zero where a new episode begins."""
    return state if resets is None else state.masked_fill(resets[step][:, None], 0.0)


def steps_of_piece(num_sequences: int) -> int:
    """Return k, how many steps a piece has: the same whatever is recomputed."""
    return min(max(16384 // max(num_sequences, 1), 4), 64)

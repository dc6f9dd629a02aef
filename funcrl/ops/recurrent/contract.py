"""What a recurrent layer computes with: a cell's kernels for some steps, and their arithmetic."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.ops.contract import LinearFn
from funcrl.ops.exact import linear

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


class Arithmetic(NamedTuple):
    """The operations of a step that torch may compute in more than one way."""

    linear: LinearFn
    # (y, x, W) -> y + x W^T, in at least float32
    add_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    sigmoid_: Callable[[Tensor], Tensor]  # in place
    addcmul: Callable[..., Tensor]  # (x, y, z, out=None) -> x + y z


def _add_linear(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(y, x, weight.mT).to(at_least_float32(y.dtype))


def _exact_add_linear(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return linear.linear_impl(x, weight, None).to(at_least_float32(y.dtype)).add_(y)


def _exact_sigmoid_(x: Tensor) -> Tensor:
    return x.neg_().exp_().add_(1).reciprocal_()


def _exact_addcmul(x: Tensor, y: Tensor, z: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.add(x, y * z, out=out)


NATIVE = Arithmetic(
    linear=torch.nn.functional.linear,
    add_linear=_add_linear,
    sigmoid_=torch.Tensor.sigmoid_,
    addcmul=torch.addcmul,
)
EXACT = Arithmetic(
    linear=linear.linear_impl,
    add_linear=_exact_add_linear,
    sigmoid_=_exact_sigmoid_,
    addcmul=_exact_addcmul,
)


def kernels_by_backend(
    forward: Callable[..., Tensor], replay: Callable[..., Tensor], backward: BackwardFn
) -> dict[str, ScanKernels]:
    """Return a cell's kernels for the backends "op" and "exact".

    Args:
        forward: a `ForwardFn` with an `Arithmetic` before its other arguments.
        replay: a `ReplayFn` with one.
        backward: of both, in torch's order of summation.
    """
    return {
        name: ScanKernels(
            partial(_project, arithmetic),
            partial(forward, arithmetic),
            partial(replay, arithmetic),
            backward,
        )
        for name, arithmetic in (("op", NATIVE), ("exact", EXACT))
    }


def _project(arithmetic: Arithmetic, x: Tensor, weight_ih: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W_ih^T and the bias, [k, N, G]."""
    return arithmetic.linear(x.flatten(0, 1), weight_ih, bias).unflatten(0, x.shape[:2])

"""What the CPU kernels of an LSTM and a GRU compute a step with: native or exact arithmetic.

`NATIVE` is torch's fastest. By `EXACT`, on a CPU, a row's numbers are a function of that row alone:
products are those of exact numerics, and torch's `sigmoid` and `addcmul`, which differ between the
lanes of a SIMD register and what is left over, are written as operations that do not. `tanh` has
one value wherever a number stands, as `exp` has.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.ops.contract import LinearFn
from funcrl.ops.exact import linear
from funcrl.ops.recurrent.contract import BackwardFn, ScanKernels


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

"""Collectives of tensors as pure functions, and of Python objects; along one rank the identity.

Those of tensors are right in eager mode, in `torch.func` transforms, in a trace and in what is
compiled of it: torch's own functional collectives raise under `func.grad`, and its `all_reduce` is
silently wrong under `vmap`, so each is an `autograd.Function` around the raw operator and its wait.

A sum over ranks within what is differentiated has two transposes, for a loss that each rank has
whole and for one of which each has a part, and the wrong one makes gradients too large by the
number of ranks: `psum` and `pmax` refuse to be differentiated. Sum gradients, and not losses. What
a gather is differentiated to is not open: parts of the sum of all ranks' gradients, and back.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import distributed_c10d

from funcrl.core.arguments import checked
from funcrl.parallel.mesh import Axis

_OPS = torch.ops._c10d_functional
_C10D: Any = distributed_c10d


def _reduce(x: Tensor, op: str, axis: Axis) -> Tensor:
    reduced: Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), op, axis.group))
    return reduced


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Reduce(Function):
    """The sum or the maximum over ranks, of which there is no derivative."""

    @staticmethod
    def forward(x: Tensor, op: str, axis: Axis) -> Tensor:
        return _reduce(x, op, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        ctx.name = "psum" if inputs[1] == "sum" else "pmax"

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name} expects to be outside of what is differentiated, got a gradient through "
            f"it, which would be too large by the number of ranks or more; take the gradient of "
            f"this rank's rows and sum the gradients."
        )

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, op: str, axis: Axis) -> tuple[Tensor, int]:
        return _apply(_Reduce, x.movedim(in_dims[0], 0), op, axis), 0


class _Gather(Function):
    """The parts of all ranks, one after the other along a dimension."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        gathered = _OPS.all_gather_into_tensor(x.contiguous(), axis.size, axis.group)
        whole: Tensor = _OPS.wait_tensor(gathered)
        return whole if dim == 0 else torch.cat(whole.chunk(axis.size, 0), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        ctx.axis, ctx.dim = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Scatter, grads[0], ctx.axis, ctx.dim), None, None

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, axis: Axis, dim: int) -> tuple[Tensor, int]:
        return _apply(_Gather, x.movedim(in_dims[0], 0), axis, dim + 1), 0


class _Scatter(Function):
    """This rank's part of the sum over ranks."""

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        parts = torch.cat(x.chunk(axis.size, dim), 0) if dim else x
        scattered = _OPS.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group)
        part: Tensor = _OPS.wait_tensor(scattered)
        return part

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        ctx.axis, ctx.dim = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _apply(_Gather, grads[0], ctx.axis, ctx.dim), None, None

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, axis: Axis, dim: int) -> tuple[Tensor, int]:
        return _apply(_Scatter, x.movedim(in_dims[0], 0), axis, dim + 1), 0


@checked
def psum(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of a tensor over the ranks of an axis; differentiating it raises.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.psum(torch.tensor([1.0, 2.0]), mesh.all)
        tensor([1., 2.])
    """
    summed: Tensor = x if axis.size == 1 else _apply(_Reduce, x, "sum", axis)
    return summed


@checked
def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Return the maximum of a tensor over the ranks of an axis; differentiating it raises.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.pmax(torch.tensor([1.0, 2.0]), mesh.all)
        tensor([1., 2.])
    """
    largest: Tensor = x if axis.size == 1 else _apply(_Reduce, x, "max", axis)
    return largest


@checked
def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return the tensors of all ranks of an axis, of equal shapes, joined along a dimension.

    Its derivative is `psum_scatter`: each rank's part of the sum of all ranks' gradients.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.all_gather(torch.tensor([1.0, 2.0]), mesh.all)
        tensor([1., 2.])
    """
    whole: Tensor = x if axis.size == 1 else _apply(_Gather, x, axis, _dim("all_gather", x, dim))
    return whole


@checked
def psum_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's part, along a dimension, of the sum over the ranks of an axis.

    Its derivative is `all_gather`.

    Args:
        x: of the same shape on all ranks.
        axis: whose size divides that of the dimension.
        dim: that is divided.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.psum_scatter(torch.tensor([1.0, 2.0]), mesh.all)
        tensor([1., 2.])
    """
    if axis.size == 1:
        return x
    place = _dim("psum_scatter", x, dim)
    if x.shape[place] % axis.size:
        raise ValueError(
            f"psum_scatter expects a dimension that {axis.size} ranks divide, got {x.shape[place]} "
            f"in dimension {dim} of {list(x.shape)}."
        )
    part: Tensor = _apply(_Scatter, x, axis, place)
    return part


@checked
def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor of the first rank of an axis; that of others says its shape and dtype.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.broadcast(torch.tensor([1.0, 2.0]), mesh.all)
        tensor([1., 2.])
    """
    if axis.size == 1:
        return x
    with torch.no_grad():
        first: Tensor = _OPS.wait_tensor(_OPS.broadcast(x.detach().contiguous(), 0, axis.group))
    return first


@checked
def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return what each rank of an axis gives, in their order.

    Values travel as pickles between the ranks of one run, which trust each other.

    Args:
        value: anything that can be pickled.
        axis: `mesh.host`, or `mesh.rollouts` in the thread that draws.

    Example:
        >>> import funcrl
        >>> funcrl.parallel.gather_objects("mine", funcrl.parallel.Mesh().host)
        ['mine']
    """
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    distributed.all_gather_object(found, value, group=_C10D._resolve_process_group(axis.group))
    return found


def _dim(function: str, x: Tensor, dim: int) -> int:
    """Return a dimension as a number from 0 on."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function} expects a dimension of {list(x.shape)}, got {dim}.")
    return dim % x.ndim

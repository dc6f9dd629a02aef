"""How an exact operation is made: custom operators for its two passes, joined for autograd.

A tracer and a compiler see each operator as one opaque node, so that neither can change its order
of additions. Under `vmap` the batch becomes one more leading axis of the rows.

`per_device` chooses an implementation by the device: a function for a CPU, and its twin for a GPU.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
# (which gradients are wanted, gradients of the results, inputs, results) -> the gradients wanted
BackwardFn: TypeAlias = Callable[
    [Sequence[bool], Sequence[Tensor], Sequence[Any], Sequence[Tensor]], Sequence[Tensor]
]

# (shapes of the inputs) -> the operations of an operator's products. Not in torch's registry, whose
# module imports Triton: a third of the time of `import funcrl`.
FLOPS: dict[Any, Callable[..., int]] = {}


def operator(
    name: str,
    fake: Callable[..., Any],
    rows: Sequence[int],
    *,
    summed: bool = False,
    flops: Callable[..., int] | None = None,
    over_batch: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that makes a function of tensors the operator `funcrl::name`.

    Args:
        name: of the operator.
        fake: returns results of the right shapes and dtypes, of any values.
        rows: the places of the arguments that have rows, along any leading axes.
        summed: whether a result is a sum over rows: then each sample of a batch is a call of its
            own, which gives it the bits that it has alone.
        flops: the operations of its products, of the shapes of the inputs; none are left out.
        over_batch: what `vmap` does, if not this: rows get one more leading axis.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        op: Any = torch.library.custom_op(f"funcrl::{name}", kernel, mutates_args=())
        op.register_fake(fake)

        def more_rows(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
            # Of an argument that is a list of numbers it is a list: these have no rows.
            in_dims = [None if isinstance(each, list | tuple) else each for each in in_dims]
            if summed or not only_rows(in_dims, rows):
                return each_sample(op, info.batch_size, in_dims, inputs)
            found = op(*leading(info.batch_size, in_dims, inputs, rows))
            return found, (0,) * len(found) if isinstance(found, tuple) else 0

        op.register_vmap(over_batch or more_rows)
        packet = getattr(torch.ops.funcrl, name)
        if flops is not None:
            FLOPS[packet] = lambda *shapes, **_: flops(*shapes)
        overload: Callable[..., Any] = packet.default
        return overload

    return decorate


def differentiable(
    function: str,
    forward: Callable[..., Tensors],
    backward: BackwardFn,
    rows: Sequence[int],
    returned: int = 1,
    instead: str = "native numerics have them all",
    plain: Callable[..., Tensors] | None = None,
    keeps_results: bool = True,
) -> Callable[..., Any]:
    """Return an operation with a first derivative, for any nesting of `grad` and `vmap`.

    Args:
        function: its name, for errors.
        forward: of the inputs; the first `returned` results are the operation's, the rest are for
            the backward pass alone.
        backward: the gradients.
        rows: the places of the inputs that have rows, along any leading axes.
        returned: the number of results that the operation returns.
        instead: what has a second derivative, for the error of asking for one.
        plain: the forward pass where nobody asks for a gradient, if it is another one: its results
            are the operation's alone.
        keeps_results: whether the backward pass is given the results; without, there is one, and
            it is not in memory until then.
    """
    once = _without_derivative(function, backward, returned, instead)

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Tensors:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            ctx.mark_non_differentiable(*output[returned:])
            # Else the results for the backward pass alone get gradients: zeros, as large as they.
            ctx.set_materialize_grads(False)
            ctx.constants = [None if isinstance(each, Tensor) else each for each in inputs]
            ctx.places = [n for n, each in enumerate(inputs) if isinstance(each, Tensor)]
            results = output if keeps_results else ()
            ctx.save_for_backward(*(inputs[place] for place in ctx.places), *results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            inputs, saved = list(ctx.constants), list(ctx.saved_tensors)
            for place in ctx.places:
                inputs[place] = saved.pop(0)
            wanted = tuple(ctx.needs_input_grad)
            given = [
                torch.zeros_like(result) if grad is None else grad
                for grad, result in zip(grads[:returned], saved or grads, strict=False)
            ]
            found = iter(once(wanted, *given, *inputs, *saved))
            return tuple(next(found) if each else None for each in wanted)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
            return _over_rows(Operation.apply, rows, info, in_dims, inputs)

    class Plain(torch.autograd.Function):
        """What `plain` computes. A value that `vmap` batches hides that it needs a gradient."""

        @staticmethod
        def forward(*inputs: Any) -> Tensors:
            return (plain or forward)(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            """Keep nothing: there is no backward pass."""

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
            return _over_rows(run, rows, info, in_dims, inputs)

    def run(*inputs: Any) -> Tensors:
        keeps = plain is None or (
            torch.is_grad_enabled()
            and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        )
        found: Tensors = _apply(Operation if keeps else Plain, *inputs)
        return found

    def call(*inputs: Any) -> Any:
        found = run(*inputs)
        return found[0] if returned == 1 else found[:returned]

    # By these a copy of a network in another process finds it.
    call.__module__, call.__qualname__ = forward.__module__, function
    return call


def _without_derivative(
    function: str, backward: BackwardFn, returned: int, instead: str
) -> Callable[..., Any]:
    """Return a backward pass whose own derivative is an error, where torch would take it for 0."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(wanted: tuple[bool, ...], *tensors: Any) -> Tensors:
            end = returned + len(wanted)
            parts = tensors[:returned], tensors[returned:end], tensors[end:]
            return tuple(backward(wanted, *parts))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            """Keep nothing: there is no backward pass."""

        @staticmethod
        def backward(*_: Any) -> Any:
            raise RuntimeError(
                f"{function} has a first derivative only, got a second one to compute; {instead}."
            )

        @staticmethod
        def vmap(_info: Any, in_dims: Sequence[Any], wanted: Any, *tensors: Any) -> Any:
            def of_sample(*tensors: Any) -> Tensors:
                return Once.forward(wanted, *tensors)

            # Torch's own rule, generate_vmap_rule, costs several times this one's time.
            found = torch.vmap(of_sample, in_dims=tuple(in_dims[1:]))(*tensors)
            return found, (0,) * len(found)

    return lambda *inputs: _apply(Once, *inputs)


def as_rows(x: Tensor) -> Tensor:
    """Return [..., D] as [M, D], which the kernels take."""
    return x.reshape(-1, x.shape[-1])


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


def _over_rows(
    apply: Callable[..., Tensors], rows: Sequence[int], info: Any, in_dims: Any, inputs: Any
) -> tuple[Tensors, tuple[int, ...]]:
    """Return the results for a batch, and their batch axes."""
    if not only_rows(in_dims, rows):
        found: tuple[Tensors, tuple[int, ...]] = each_sample(
            apply, info.batch_size, in_dims, inputs
        )
        return found
    results = apply(*leading(info.batch_size, in_dims, inputs, rows))
    return results, (0,) * len(results)


def only_rows(in_dims: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether nothing but rows is batched: no weight is."""
    return all(at is None or place in rows for place, at in enumerate(in_dims))


def leading(
    size: int, in_dims: Sequence[int | None], inputs: Sequence[Any], rows: Sequence[int]
) -> list[Any]:
    """Return the inputs with the batch as the first axis of all that has rows."""
    lead = list(inputs)
    for place in rows:
        part, at = inputs[place], in_dims[place]
        if isinstance(part, Tensor):
            lead[place] = part.expand(size, *part.shape) if at is None else part.movedim(at, 0)
    return lead


def each_sample(
    op: Callable[..., Any], size: int, in_dims: Sequence[int | None], inputs: Sequence[Any]
) -> Any:
    """Return the results of each sample, one call after the other, and their batch axes."""
    calls = [
        op(*(
            part if at is None else part.select(at, index)
            for part, at in zip(inputs, in_dims, strict=True)
        ))
        for index in range(size)
    ]  # fmt: skip
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    found = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return found, (0,) * len(found)


Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def per_device(on_cpu: Implementation) -> Implementation:
    """Return the implementation on the device of the first argument: this function on a CPU.

    On a GPU it is the function of the same name and signature in the file of the same name in
    `cuda/`, which is imported when it is first called, as it needs triton.
    """
    package, _, file = on_cpu.__module__.rpartition(".")

    @functools.cache
    def on_gpu() -> Callable[..., Any]:
        twin: Callable[..., Any] = getattr(
            importlib.import_module(f"{package}.cuda.{file}"), on_cpu.__name__
        )
        return twin

    @functools.wraps(on_cpu)
    def call(first: Tensor, *others: Any, **options: Any) -> Any:
        implementation = on_gpu() if first.device.type == "cuda" else on_cpu
        return implementation(first, *others, **options)

    return cast(Implementation, call)

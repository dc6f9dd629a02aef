"""One backward pass over a batch: value and gradient, the reports of its rows, and their sums."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp

from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import TensorTree
from funcrl.core.rows import num_rows, split_rows
from funcrl.core.types import Metrics, Params, Tree
from funcrl.rl.metrics import merge

# The function that a step differentiates: (params, sample) -> (loss, metrics).
AuxLossFn: TypeAlias = Callable[[Params, Any], tuple[Tensor, Metrics]]
NO_METRICS = Metrics(sums={}, means={}, maxes={}, last={})


class Gradient(NamedTuple):
    """A summed gradient, and the summed loss and metrics of the samples it came from."""

    grads: TensorTree
    loss: Tensor
    metrics: Metrics  # of the samples' losses
    per_sample: Metrics = NO_METRICS  # of the transform of per-sample gradients


def value_and_grad(
    fn: Callable[[Params], tuple[Tensor, Any]], params: Params
) -> tuple[Tensor, Tree, Any]:
    """Return the value of `fn`, its gradient, and its second result.

    `torch.func.grad` records its own backward pass, to be differentiated again, and so keeps every
    activation to its end: 2.5 times the memory. This frees them as it goes, unless grad mode is
    on, which says that somebody may differentiate the gradient.
    """
    value, pullback, aux = vjp(fn, params, has_aux=True)  # type: ignore[misc]  # (three, with aux)
    record = torch.is_grad_enabled()
    (grads,) = pullback(torch.ones_like(value), retain_graph=record, create_graph=record)
    return value, grads, aux


def one_number(function: str, loss_fn: AuxLossFn) -> AuxLossFn:
    """Return the loss function with a check that it returns one number, not several."""

    def scalar_loss(params: Params, sample: Any) -> tuple[Tensor, Metrics]:
        loss, metrics = loss_fn(params, sample)
        checks.check_rank(function, "the loss of a sample", loss, "")
        return loss, metrics

    return scalar_loss


def reduce_rows(metrics: Metrics) -> Metrics:
    """Return one report of those of all rows, [B] each."""
    return Metrics(
        sums=tree.map(lambda values: values.sum(dim=0), metrics.sums),
        means=tree.map(lambda values: values.mean(dim=0), metrics.means),
        maxes=tree.map(lambda values: values.amax(dim=0), metrics.maxes),
        last=tree.map(lambda values: values[-1], metrics.last),
    )


def sum_over_microbatches(
    gradient_of: Callable[[Params, Any], Gradient],
    params: Params,
    batch: Any,
    microbatch: int | None,
    function: str,
) -> Gradient:
    """Return the gradient of a batch, of which `gradient_of` gets at most `microbatch` rows."""
    chunks = split_rows(function, batch, microbatch)
    return _sum_gradients((gradient_of(params, rows), num_rows(function, rows)) for rows in chunks)


def _sum_gradients(parts: Iterator[tuple[Gradient, int]]) -> Gradient:
    """Return the sum of all parts, each with its number of rows.

    They are added in at least float32 and kept in the gradients' dtype.
    """
    (grads, loss, metrics, of_transform), rows = next(parts)
    totals, unflatten = tree.flatten(grads)
    dtypes = [leaf.dtype for leaf in totals]
    del grads
    for part, more in parts:
        loss = loss + part.loss
        metrics = merge([metrics, part.metrics], weights=[rows, more])
        of_transform = merge([of_transform, part.per_sample], weights=[rows, more])
        rows += more
        added = tree.leaves(part.grads)
        del part
        # Each leaf is freed as soon as it is added: two gradients are in memory, not three.
        for index in range(len(totals)):
            wide = numerics.at_least_float32(dtypes[index])
            totals[index] = totals[index].to(wide) + added[index]
            added[index] = None
    totals = [total.to(dtype) for total, dtype in zip(totals, dtypes, strict=True)]
    return Gradient(unflatten(totals), loss, metrics, of_transform)

"""One backward pass over a batch: value and gradient, and the reports of its rows."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp

from funcrl.core import checks, tree
from funcrl.core.types import Metrics, Params, Tree

# The function that a step differentiates: (params, sample) -> (loss, metrics).
AuxLossFn: TypeAlias = Callable[[Params, Any], tuple[Tensor, Metrics]]


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

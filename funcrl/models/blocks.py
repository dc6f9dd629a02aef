"""A network of exact operations whose gradients of weights are summed block by block of rows."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from funcrl.core import numerics
from funcrl.core.rows import over_rows
from funcrl.core.types import ExactModelFn, ModelFn, Params, TokenScores
from funcrl.models.logits import forward_takes
from funcrl.models.transformer import Transformer
from funcrl.ops import Ops, ops_of
from funcrl.ops.choice import replace_ops
from funcrl.ops.exact import sum_in_blocks

RowsFn = Callable[[Params, Any], TokenScores]  # (parameters, rows [B, T]) -> scores [B, T]


def summing_in_blocks(
    of_sample: ModelFn,
    network: nn.Module,
    dtype: torch.dtype | None,
    model_fn_of: Callable[[nn.Module, torch.dtype], ModelFn],
) -> ExactModelFn | None:
    """Return a model function whose gradients sum in blocks, None if its operations do not.

    Args:
        of_sample: the model function of the network.
        network: that it calls. Its structure is copied, not its weights.
        dtype: to compute in, that of the parameters if it is None.
        model_fn_of: makes such a function of a network and a dtype to compute in; that of a
            `Transformer` takes rows [B, T], too.
    """
    if sum_in_blocks(ops_of(network), 1) is None or not forward_takes(network, "dtype"):
        return None
    uses = _second_uses(network)
    structure = _untied(network, uses)

    def split(params: Params) -> Params:
        wide = {
            name: leaf.to(numerics.at_least_float32(leaf.dtype)) for name, leaf in params.items()
        }
        return {**wide, **{use: wide[name] for use, name in uses.items()}}

    def join(grads: Params) -> Params:
        joined = {name: leaf for name, leaf in grads.items() if name not in uses}
        for use, name in uses.items():
            joined[name] = joined[name] + grads[use]
        return joined

    @functools.cache
    def computing_in(dtype: torch.dtype, blocks: int) -> RowsFn:
        def summing(_path: str, ops: Ops) -> Ops:
            return sum_in_blocks(ops, blocks) or ops

        network = copy.deepcopy(structure)
        replace_ops(network, summing)
        of_one_or_all = model_fn_of(network, dtype)
        if type(network) is Transformer:
            return of_one_or_all  # without `vmap`
        mapped: RowsFn = over_rows("logprob_fn", of_one_or_all)
        return mapped

    def of_rows(params: Params, blocks: int) -> RowsFn:
        return computing_in(_one_dtype(params) if dtype is None else dtype, blocks)

    return ExactModelFn(of_sample, split, of_rows, join)


def _one_dtype(params: Params) -> torch.dtype:
    first, *_ = params
    for name, leaf in params.items():
        if leaf.dtype != params[first].dtype:
            raise ValueError(
                f"logprob_fn expects parameters of one dtype, or dtype= to compute in, for exact "
                f"numerics, got {params[first].dtype} for {first!r} and {leaf.dtype} for {name!r}."
            )
    return params[first].dtype


def _second_uses(network: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that have several, each with the first one."""
    first = {id(leaf): name for name, leaf in network.named_parameters()}
    every = network.named_parameters(remove_duplicate=False)
    return {name: first[id(leaf)] for name, leaf in every if name != first[id(leaf)]}


def _untied(network: nn.Module, uses: dict[str, str]) -> nn.Module:
    """Return a copy without weights, in which each use of a parameter is a parameter."""
    memo: dict[int, Any] = {id(leaf): _without_values(leaf) for leaf in network.parameters()}
    copied = copy.deepcopy(network, memo)  # which takes what it finds there for an id
    for use in uses:
        parent, _, attribute = use.rpartition(".")
        leaf = copied.get_parameter(use)
        setattr(copied.get_submodule(parent), attribute, _without_values(leaf))
    return copied


def _without_values(leaf: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(leaf, device="meta"), leaf.requires_grad)

"""A network of exact operations whose gradients of weights are summed block by block of rows."""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from funcrl.core import tree
from funcrl.core.numerics import at_least_float32
from funcrl.core.rows import over_rows
from funcrl.core.types import ExactModelFn, ModelFn, Params, TokenScores
from funcrl.models.functional import without_weights
from funcrl.models.networks import forward_takes
from funcrl.models.transformer import Transformer
from funcrl.ops import Ops, ops_of
from funcrl.ops.choice import replace_ops
from funcrl.ops.exact import sum_in_blocks

# (parameters, a sample, dtype to compute in) -> scores
ScoresFn: TypeAlias = Callable[[Params, Any, torch.dtype | None], TokenScores]
_BLOCKS = (1, 2, 4)


def summing_in_blocks(
    of_sample: ModelFn,
    network: nn.Module,
    dtype: torch.dtype | None,
    scores_fn_of: Callable[[nn.Module], ScoresFn],
    *,
    takes_rows: bool,
) -> ExactModelFn | None:
    """Return a model function whose gradients sum in blocks, None if its operations do not.

    Args:
        of_sample: the model function of the network.
        network: that it calls. Its structure is copied, not its weights.
        dtype: to compute in, that of the parameters if it is None.
        scores_fn_of: makes the function of a network that gives scores.
        takes_rows: whether such a function takes all rows [B, T] of a batch, as its network and
            its attention must: that is faster than `vmap`. Its parameters may be of float32 where
            `dtype` says what to compute in.
    """
    if sum_in_blocks(ops_of(network), 1) is None or not forward_takes(network, "dtype"):
        return None
    second = _second_names(network)
    structure = _untied(network, second)

    def split(params: Params) -> Params:
        for name, first in second.items():
            if name in params:
                raise ValueError(
                    f"functional expects tied parameters once, as {first!r}, got {name!r} too."
                )
        if takes_rows:
            params = tree.map(lambda leaf: leaf.to(at_least_float32(leaf.dtype)), params)
        copies = {name: params[first] for name, first in second.items() if first in params}
        return {**params, **copies}

    def join(grads: Params) -> Params:
        joined = {name: leaf for name, leaf in grads.items() if name not in second}
        for name, first in second.items():
            joined[first] = joined[first] + grads[name]
        return joined

    # Now, because within a trace the copies of buffers would be traced.
    scores_fns = {blocks: scores_fn_of(_summing(structure, blocks)) for blocks in _BLOCKS}

    def of_rows(params: Params, blocks: int) -> ModelFn:
        computed = dtype
        if takes_rows and dtype is None and "embed.weight" in params:
            computed = params["embed.weight"].dtype  # before it was split, and so made wide
        scores_fn = scores_fns[blocks]

        def of_one_or_all(params: Params, rows: Any) -> TokenScores:
            return scores_fn(params, rows, computed)

        if takes_rows:
            return of_one_or_all
        mapped: ModelFn = over_rows("logprob_fn", of_one_or_all)
        return mapped

    return ExactModelFn(of_sample, split, of_rows, join)


def network_takes_rows(network: nn.Module) -> bool:
    """Return whether a network is known to take any leading axes, and to cast its weights."""
    return type(network) is Transformer


def _second_names(network: nn.Module) -> dict[str, str]:
    """Return a second name of each parameter that two modules have, with its first one.

    A module that stands at two places has its parameters once.
    """
    first: dict[int, str] = {}
    owners: dict[int, set[int]] = {}
    second: dict[str, str] = {}
    for name, leaf in network.named_parameters(remove_duplicate=False):
        owner = id(network.get_submodule(name.rpartition(".")[0]))
        if id(leaf) not in first:
            first[id(leaf)] = name
        elif owner not in owners[id(leaf)]:
            second[name] = first[id(leaf)]
        owners.setdefault(id(leaf), set()).add(owner)
    return second


def _untied(network: nn.Module, second: dict[str, str]) -> nn.Module:
    """Return a copy without weights, in which a second name is a parameter of its own."""
    copied = without_weights(network)
    for name in second:
        parent, _, attribute = name.rpartition(".")
        own = nn.Parameter(copied.get_parameter(name).detach(), False)
        setattr(copied.get_submodule(parent), attribute, own)
    return copied


def _summing(structure: nn.Module, blocks: int) -> nn.Module:
    """Return a copy of a network whose operations sum so many blocks of rows."""

    def summing(_path: str, ops: Ops) -> Ops:
        return sum_in_blocks(ops, blocks) or ops

    copied = copy.deepcopy(structure)
    replace_ops(copied, summing)
    return copied

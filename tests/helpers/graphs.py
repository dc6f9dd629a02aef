"""Flat graphs of a tiny step, shared by the tests of the graph passes."""

from typing import NamedTuple

import optree
import torch
from cases import tiny_batch, tiny_model
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

import funcrl


class Flat(NamedTuple):
    """A flat graph and the leaves that it takes."""

    gm: fx.GraphModule
    leaves: list[Tensor]

    def run(self, gm: fx.GraphModule | None = None) -> list[Tensor]:
        with torch.no_grad():
            return (self.gm if gm is None else gm)(*self.leaves)

    @property
    def input_bytes(self) -> int:
        return sum(leaf.untyped_storage().nbytes() for leaf in self.leaves)


def flatten(fn, *args) -> Flat:
    """Trace a function of trees, as a graph of leaves."""
    gm = funcrl.trace(fn, *args)
    gm.graph.set_codegen(CodeGen())
    gm.recompile()
    return Flat(gm, optree.tree_leaves(args))


def flatten_as_written(fn, *args) -> Flat:
    """Trace a function of trees as one of leaves, with what it writes in place."""
    leaves, spec = optree.tree_flatten(args)

    def flat(*inputs):
        return optree.tree_leaves(fn(*optree.tree_unflatten(spec, inputs)))

    with torch.no_grad():
        return Flat(make_fx(flat)(*leaves), leaves)


def flat_step(**options) -> Flat:
    """Trace one step of a transformer whose activations outweigh its parameters."""
    return flatten(*_step(**options))


def flat_step_as_written(**options) -> Flat:
    """Trace the same step with what it writes in place."""
    return flatten_as_written(*_step(**options))


def _step(dtype=None, rows=4, length=32, num_layers=3, chunk=None, **options):
    model = tiny_model(num_layers=num_layers)
    step = funcrl.grpo_step(funcrl.logprob_fn(model, dtype=dtype, chunk=chunk), **options)
    state = step.init(funcrl.init_params(model, seed=0))
    return step.update, state, tiny_batch(rows=rows, length=length, dtype=torch.float32)

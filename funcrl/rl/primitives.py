"""The two halves of a step as functions of their own: gradients of a batch, and an update of them.

Between them a loop of one's own may add gradients of several batches, or look at them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl import optim
from funcrl.core import tree
from funcrl.core.arguments import Count, TensorTree, checked
from funcrl.core.rows import over_rows
from funcrl.core.types import (
    Algorithm,
    GradientTransformation,
    Metrics,
    ModelFn,
    Params,
    Rows,
    TrainState,
    Tree,
)
from funcrl.rl.algorithms import grpo
from funcrl.rl.backward import Gradient, reduce_rows, sum_over_microbatches, value_and_grad
from funcrl.rl.losses import policy_loss
from funcrl.rl.metrics import token_means
from funcrl.rl.mixing import mixing_parts
from funcrl.rl.step import counted_rows, first_state, guarded, of_optimizer, scoring


class Backward(NamedTuple):
    """A batch's gradient, and what was computed on the way to it."""

    grads: TensorTree
    logprobs: Tensor  # [B, T], of each token under the parameters
    loss: Tensor  # the sum whose gradient it is
    metrics: Metrics


@checked
def forward_backward(
    model_fn: ModelFn, *, algorithm: Algorithm | None = None, microbatch: Count | None = None
) -> Callable[[Params, Rows], Backward]:
    """Return `(params, batch) -> Backward`: the gradient of the loss, which changes nothing.

    The weights of a batch hold its normalisation, so that gradients of several batches add up:
    `funcrl.tree.map(torch.add, first.grads, second.grads)`. `grpo_step` is this and `optim_step`.

    Args:
        model_fn: `(params, sample) -> TokenScores`, such as `funcrl.logprob_fn(model)`.
        algorithm: the loss; `funcrl.grpo()` when left out, `funcrl.sft()` for given answers.
        microbatch: rows differentiated at a time, all of them when left out.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> gradient = funcrl.forward_backward(funcrl.logprob_fn(model))
        >>> optim = funcrl.optim_step(funcrl.optim.adamw(1e-3))
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[1, 2, 3], [1, 4, 5]]), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, True, True], [False, True, True]]),
        ...     behavior_logprobs=torch.full((2, 3), -2.0), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> batch = funcrl.collate(rollout, funcrl.grpo())
        >>> state = optim.init(funcrl.init_params(model, seed=0))
        >>> found = gradient(state.params, batch)
        >>> found.logprobs.shape
        torch.Size([2, 3])
        >>> state, metrics = optim(state, found.grads)
        >>> state.step
        tensor(1)
    """
    function = "forward_backward"
    model_fn = scoring(function, model_fn)
    algorithm = grpo() if algorithm is None else algorithm
    mixing = mixing_parts(algorithm)
    loss_fn = partial(policy_loss, algorithm)

    def of_row(params: Params, row: Any) -> tuple[Tensor, tuple[Metrics, Tensor]]:
        scores = model_fn(params, row)
        loss, metrics = loss_fn(scores, row)
        return loss, (metrics, scores.logprobs)

    of_rows = over_rows(function, of_row)

    def of_chunk(params: Params, chunk: Rows) -> tuple[Gradient, Tensor]:
        def total(params: Params) -> tuple[Tensor, tuple[Metrics, Tensor]]:
            losses, (metrics, logprobs) = of_rows(params, chunk)
            return losses.sum(), (reduce_rows(metrics), logprobs)

        loss, grads, (metrics, logprobs) = value_and_grad(total, params)
        return Gradient(grads, loss, metrics), logprobs

    @checked
    @torch.no_grad()
    def gradient(params: Params, batch: Rows) -> Backward:
        batch = counted_rows(function, batch, None, mixing)
        logprobs: list[Tensor] = []

        def keeping_logprobs(params: Params, chunk: Rows) -> Gradient:
            found, of_tokens = of_chunk(params, chunk)
            logprobs.append(of_tokens)
            return found

        total = sum_over_microbatches(keeping_logprobs, params, batch, microbatch, function)
        metrics = token_means(total.metrics, batch.mask.sum())
        return Backward(total.grads, torch.cat(logprobs), total.loss, metrics)

    return gradient


class OptimStep(NamedTuple):
    """An update: `state = optim.init(params)`, then `state, metrics = optim(state, grads)`."""

    init: Callable[..., TrainState]  # of the parameters and an optional `seed`
    update: Callable[[TrainState, Tree], tuple[TrainState, Metrics]]

    def __call__(self, state: TrainState, grads: Tree) -> tuple[TrainState, Metrics]:
        """Return `self.update(state, grads)`."""
        return self.update(state, grads)


@checked
def optim_step(optimizer: GradientTransformation | None = None) -> OptimStep:
    """Return the update `state, metrics = optim(state, grads)`, with the states of `grpo_step`.

    An update whose gradient is not finite is skipped and counted.

    Args:
        optimizer: a `GradientTransformation`, such as `funcrl.optim.adamw(1e-6)`, which is what it
            is when left out, after clipping to a global norm of 1.

    Example:
        >>> import torch, funcrl
        >>> optim = funcrl.optim_step(funcrl.optim.sgd(0.5))
        >>> state = optim.init({"w": torch.tensor([1.0, 2.0])})
        >>> state, metrics = optim(state, {"w": torch.tensor([3.0, 4.0])})
        >>> state.params, metrics.maxes["grad_norm"]
        ({'w': tensor([-0.5000,  0.0000])}, tensor(5.))
    """
    transformation = guarded("optim_step", optimizer)

    @checked
    def init(params: Params, seed: int = 0) -> TrainState:
        return first_state("optim_step", transformation, params, seed)

    @checked
    @torch.no_grad()
    def update(state: TrainState, grads: Tree) -> tuple[TrainState, Metrics]:
        tree.check_same_shapes("optim_step", "grads", grads, "the parameters", state.params)
        grad_norm = tree.global_norm(grads)
        updates, opt_state = transformation.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        last = of_optimizer(opt_state)
        metrics = Metrics(sums={}, means={}, maxes={"grad_norm": grad_norm}, last=last)
        return TrainState(params, opt_state, state.step + 1, state.seed), metrics

    return OptimStep(init, update)

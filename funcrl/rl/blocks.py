"""The gradient of a loss of a policy's scores.

With exact numerics it is summed in a fixed order, so that micro-batches of a half or a quarter have
the bits of the whole: each quarter of a batch is a block, which is summed for itself; then blocks
are added in pairs. A micro-batch of several blocks sums them within its operations; the rest is
done here.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.core.numerics import pairwise, pairwise_sum
from funcrl.core.rows import num_rows, over_rows, split_rows
from funcrl.core.types import ExactModelFn, Metrics, ModelFn, Params, Rows, TokenScores
from funcrl.parallel import (
    Axis,
    Mesh,
    pairwise_psum_tree,
    psum_scatter_tree,
    psum_tree,
    shard,
)
from funcrl.parallel.mesh import ALONE
from funcrl.parallel.rows import num_own_rows
from funcrl.rl.backward import (
    Gradient,
    one_number,
    reduce_rows,
    sum_over_microbatches,
    value_and_grad,
)
from funcrl.rl.grads import PerSampleTransform, summed_gradient
from funcrl.rl.metrics import merge, merge_ranks, num_samples

_LOSS = "loss"  # a key for the loss itself among its metrics, none of which has this name
# (scores of one sample, the sample) -> (loss, metrics)
ScoreLossFn: TypeAlias = Callable[[TokenScores, Any], tuple[Tensor, Metrics]]


def score_gradient(
    model_fn: ModelFn,
    loss_fn: ScoreLossFn,
    per_sample: PerSampleTransform | None = None,
    microbatch: int | None = None,
    function: str = "score_gradient",
    mesh: Mesh = ALONE,
) -> Callable[[Params, Rows], Gradient]:
    """Return `(params, batch) -> Gradient` of a loss of scores, summed over the batch.

    Args:
        model_fn: of one sample.
        loss_fn: of its scores.
        per_sample: a transform of the gradients of samples.
        microbatch: rows differentiated at a time.
        function: for errors.
        mesh: of ranks that have rows of their own, over which to sum; where they share a state,
            each gets its shards of the gradients.
    """
    if mesh.data.size * mesh.shard.size != mesh.all.size:
        raise ValueError(
            f"{function} expects a mesh whose ranks are data.size * shard.size, as make_mesh "
            f"returns it, got {mesh}."
        )
    if isinstance(model_fn, ExactModelFn) and per_sample is None:
        return _gradient_in_blocks(model_fn, loss_fn, microbatch, function, mesh)

    def sample_loss(params: Params, sample: Any) -> tuple[Tensor, Metrics]:
        return loss_fn(model_fn(params, sample), sample)

    of_rows = summed_gradient(sample_loss, per_sample, function=function)

    def of_chunk(params: Params, chunk: Rows) -> Gradient:
        found = of_rows(params, chunk)
        # Ranks that share a state add up their shards, and never whole gradients.
        return found._replace(grads=psum_scatter_tree(found.grads, mesh.shard))

    def gradient(params: Params, batch: Rows) -> Gradient:
        found = sum_over_microbatches(of_chunk, params, batch, microbatch, function)
        grads = psum_tree(found.grads, mesh.data)
        return _metrics_of_ranks(found._replace(grads=grads), batch, mesh.all)

    return gradient


def _gradient_in_blocks(
    model_fn: ExactModelFn,
    loss_fn: ScoreLossFn,
    microbatch: int | None,
    function: str,
    mesh: Mesh,
) -> Callable[[Params, Rows], Gradient]:
    def score_loss(_: Params, scored: tuple[TokenScores, Any]) -> tuple[Tensor, Metrics]:
        return loss_fn(*scored)

    losses_of = over_rows(function, one_number(function, score_loss))

    def of_chunk(params: Params, chunk: Rows, scores_of: Callable[..., TokenScores]) -> Gradient:
        def total_loss(params: Params) -> tuple[Tensor, Metrics]:
            losses, metrics = losses_of({}, (scores_of(params, chunk), chunk))
            return losses.sum(), reduce_rows(metrics)

        loss, grads, metrics = value_and_grad(total_loss, params)
        return Gradient(grads, loss, metrics)

    def gradient(params: Params, batch: Rows) -> Gradient:
        split, block = model_fn.split(params), _block_size(num_rows(function, batch), mesh.all.size)

        def parts() -> Iterator[tuple[Gradient, int]]:
            for chunk in split_rows(function, batch, microbatch):
                rows = num_rows(function, chunk)
                scores_of = model_fn.of_rows(params, _num_blocks(rows, block))
                yield of_chunk(split, chunk, scores_of), rows

        total, _ = pairwise(parts(), _sum_of_two)
        joined = model_fn.join(pairwise_psum_tree(total.grads, mesh.all))
        # The sums were in at least float32.
        grads = {name: joined[name].to(leaf.dtype) for name, leaf in params.items()}
        found = total._replace(grads=shard(grads, mesh.shard))
        return _metrics_of_ranks(found, batch, mesh.all)

    return gradient


def _metrics_of_ranks(found: Gradient, batch: Rows, axis: Axis) -> Gradient:
    """Return a rank's gradient, which is summed over ranks already, with the metrics of all."""
    if axis.size == 1:
        return found
    own = found.metrics._replace(sums={**found.metrics.sums, _LOSS: found.loss})
    rows = num_samples(batch)
    merged = merge_ranks(own, rows, axis)
    loss = merged.sums.pop(_LOSS)
    real = num_own_rows(batch)
    per_sample = merge_ranks(_of_real_rows(found.per_sample, real, len(batch.mask)), real, axis)
    return found._replace(loss=loss, metrics=merged, per_sample=per_sample)


def _of_real_rows(metrics: Metrics, rows: Tensor, count: int) -> Metrics:
    """Return metrics with each mean taken over the rows of the whole batch.

    A row that only fills a rank's share has a gradient of zero, and should not count.
    """
    scale = count / rows.clamp(min=1).to(torch.float64)
    means = {name: value * scale.to(value.dtype) for name, value in metrics.means.items()}
    return metrics._replace(means=means)


def _block_size(rows: int, ranks: int) -> int:
    """Return the rows of a block: a quarter of the batch, a half, or all, whichever is whole.

    A rank has a half of the batch's blocks, or a quarter, or the only one.
    """
    most = max(1, 4 // ranks)
    return rows // next(parts for parts in (4, 2, 1) if parts <= most and rows % parts == 0)


def _num_blocks(rows: int, block: int) -> int:
    """Return the blocks of a micro-batch: one if it is not cut in two or four."""
    return rows // block if rows in (2 * block, 4 * block) else 1


def _sum_of_two(left: tuple[Gradient, int], right: tuple[Gradient, int]) -> tuple[Gradient, int]:
    (first, rows), (second, more) = left, right
    metrics = merge([first.metrics, second.metrics], weights=[rows, more])
    grads = tree.map(lambda a, b: pairwise_sum([a, b]), first.grads, second.grads)
    return Gradient(grads, first.loss + second.loss, metrics), rows + more

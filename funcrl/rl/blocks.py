"""The gradient of a loss of a policy's scores.

With exact numerics it is summed in a fixed order, so that micro-batches of a half or a quarter have
the bits of the whole: each quarter of a batch is a block, which is summed for itself; then blocks
are added in pairs. A micro-batch of several blocks sums them within its operations; the rest is
done here.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

from funcrl.core import tree
from funcrl.core.numerics import pairwise, pairwise_sum
from funcrl.core.rows import num_rows, over_rows, split_rows
from funcrl.core.types import ExactModelFn, Metrics, ModelFn, Params, Rows, TokenScores
from funcrl.rl.backward import one_number, reduce_rows, value_and_grad
from funcrl.rl.grads import Gradient, PerSampleTransform, summed_gradient
from funcrl.rl.metrics import merge

# (scores of one sample, the sample) -> (loss, metrics)
ScoreLossFn: TypeAlias = Callable[[TokenScores, Any], tuple[Tensor, Metrics]]


def score_gradient(
    model_fn: ModelFn,
    loss_fn: ScoreLossFn,
    per_sample: PerSampleTransform | None = None,
    microbatch: int | None = None,
    function: str = "score_gradient",
) -> Callable[[Params, Rows], Gradient]:
    """Return `(params, batch) -> Gradient` of a loss of scores, summed over the batch."""
    if isinstance(model_fn, ExactModelFn) and per_sample is None:
        return _gradient_in_blocks(model_fn, loss_fn, microbatch, function)

    def sample_loss(params: Params, sample: Any) -> tuple[Tensor, Metrics]:
        return loss_fn(model_fn(params, sample), sample)

    return summed_gradient(sample_loss, per_sample, microbatch, function=function)


def _gradient_in_blocks(
    model_fn: ExactModelFn, loss_fn: ScoreLossFn, microbatch: int | None, function: str
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
        split, block = model_fn.split(params), _block_size(num_rows(function, batch))

        def parts() -> Iterator[tuple[Gradient, int]]:
            for chunk in split_rows(function, batch, microbatch):
                rows = num_rows(function, chunk)
                scores_of = model_fn.of_rows(params, _num_blocks(rows, block))
                yield of_chunk(split, chunk, scores_of), rows

        total, _ = pairwise(parts(), _sum_of_two)
        joined = model_fn.join(total.grads)
        # The sums were in at least float32.
        grads = {name: joined[name].to(leaf.dtype) for name, leaf in params.items()}
        return total._replace(grads=grads)

    return gradient


def _block_size(rows: int) -> int:
    """Return the rows of a block: a quarter of the batch, a half, or all, whichever is whole."""
    return rows // next(parts for parts in (4, 2, 1) if rows % parts == 0)


def _num_blocks(rows: int, block: int) -> int:
    """Return the blocks of a micro-batch: one if it is not cut in two or four."""
    return rows // block if rows in (2 * block, 4 * block) else 1


def _sum_of_two(left: tuple[Gradient, int], right: tuple[Gradient, int]) -> tuple[Gradient, int]:
    (first, rows), (second, more) = left, right
    metrics = merge([first.metrics, second.metrics], weights=[rows, more])
    grads = tree.map(lambda a, b: pairwise_sum([a, b]), first.grads, second.grads)
    return Gradient(grads, first.loss + second.loss, metrics), rows + more

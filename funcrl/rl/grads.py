"""Gradients as function transforms: summed, per sample, in micro-batches; the noise scale.

A loss function is `loss_fn(params, sample) -> scalar` for one sample; a batch is a tree of tensors
with a leading axis B. Losses are sums (their weights hold the normalisation), so gradients of
parts add up exactly to the gradient of the whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from funcrl.core import tree
from funcrl.core.arguments import Count, Positive, TensorTree, checked
from funcrl.core.rows import num_rows, over_rows
from funcrl.core.types import LossFn, Metrics, Params, Tree
from funcrl.rl.backward import (
    NO_METRICS,
    AuxLossFn,
    Gradient,
    one_number,
    reduce_rows,
    sum_over_microbatches,
    value_and_grad,
)

# Gradients with a leading axis B -> the same, transformed row by row, and metrics if there are any.
PerSampleTransform: TypeAlias = Callable[[Tree], Tree | tuple[Tree, Metrics]]
SQUARE_NORMS = "per_sample/square_norms"  # a sum that a step makes the noise scale of


class GradientMoments(NamedTuple):
    """First and second moments of per-sample gradients, enough for `noise_scale`."""

    sum: Tree  # the sum of the gradients
    sum_square_norms: Tensor  # [] the sum of their squared norms
    num_samples: int | Tensor


class NoiseScale(NamedTuple):
    """Estimates from one batch; over steps, average `noise` and `signal` before dividing."""

    noise: Tensor  # [] tr(Sigma), the variance of one sample's gradient
    signal: Tensor  # [] |G|^2, the squared norm of the true gradient
    scale: Tensor  # [] noise / signal, infinite where the signal is not positive


@checked
def per_sample_grad(loss_fn: LossFn, chunk: Count | None = None) -> Callable[[Params, Tree], Tree]:
    """Return `(params, batch) -> grads` with a leading axis B on every leaf: `vmap(grad(loss_fn))`.

    Args:
        loss_fn: the loss of one sample, `(params, sample) -> scalar`.
        chunk: how many samples are differentiated at a time; bounds the activations, not the
            result, which holds B gradients.

    Example:
        >>> import torch, funcrl
        >>> loss_fn = lambda params, x: (params["w"] * x).sum() ** 2 / 2
        >>> params, batch = {"w": torch.tensor([1.0, 2.0])}, torch.eye(2)
        >>> funcrl.per_sample_grad(loss_fn)(params, batch)
        {'w': tensor([[1., 0.],
                [0., 2.]])}
    """
    scalar_loss = one_number("per_sample_grad", _without_metrics(loss_fn))

    def gradient(params: TensorTree, sample: Any) -> Tree:
        return value_and_grad(lambda p: scalar_loss(p, sample), params)[1]

    mapped = over_rows("per_sample_grad", gradient, chunk)

    @checked
    def per_sample(params: TensorTree, batch: Tree) -> Tree:
        return mapped(params, batch)

    return per_sample


@checked
def summed_gradient(
    loss_fn: AuxLossFn,
    per_sample: PerSampleTransform | None = None,
    microbatch: Count | None = None,
    *,
    function: str = "summed_gradient",
) -> Callable[[Params, Tree], Gradient]:
    """Return `(params, batch) -> Gradient`, summed over the batch.

    With `per_sample=None` it is the gradient of the summed vmap and costs no per-sample memory;
    otherwise each micro-batch's per-sample gradients go through the transform before they are
    summed. Only one micro-batch's activations (and per-sample gradients) are alive at a time.

    Args:
        loss_fn: `(params, sample) -> (loss, metrics)` of one sample.
        per_sample: a function of gradients with a leading B, such as `clip_per_sample(1.0)`,
            that returns such gradients, or a pair of them and `Metrics`.
        microbatch: rows differentiated at a time, all of them when left out.
        function: for errors.

    Example:
        >>> import torch, funcrl
        >>> def loss_fn(params, x):
        ...     loss = (params["w"] * x).sum()
        ...     return loss, funcrl.Metrics(sums={}, means={}, maxes={"largest": loss}, last={})
        >>> gradient = funcrl.grads.summed_gradient(loss_fn, microbatch=1)
        >>> gradient({"w": torch.ones(2)}, torch.eye(2)).grads
        {'w': tensor([1., 1.])}
    """
    loss_fn = one_number(function, loss_fn)
    if per_sample is None:
        of_chunk = _batched(loss_fn)
    else:
        of_chunk = _transformed(loss_fn, _checked(function, per_sample))

    @checked
    def gradient(params: TensorTree, batch: Tree) -> Gradient:
        return sum_over_microbatches(of_chunk, params, batch, microbatch, function)

    return gradient


@checked
def clip_per_sample(max_norm: Positive) -> PerSampleTransform:
    """Return the transform that scales each sample's gradient down to at most `max_norm`.

        g_i * min(1, max_norm / |g_i|)

    The norm is that of the sample's contribution to the batch's gradient, token weights included,
    so `max_norm` compares with the `grad_norm` of a step. It returns the gradients and metrics:
    mean and largest norm before, the share of samples that were clipped, and the sum of the squared
    norms after, of which a step makes the noise scale.

    Args:
        max_norm: the largest norm of one sample's gradient, over all leaves.

    Example:
        >>> import torch, funcrl
        >>> clip = funcrl.clip_per_sample(1.0)
        >>> grads, metrics = clip({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])})
        >>> grads
        {'w': tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])}
        >>> metrics.maxes["per_sample/grad_norm/max"], metrics.means["per_sample/clipped_frac"]
        (tensor(5.), tensor(0.5000))
    """

    @checked
    def clip(grads: TensorTree) -> tuple[Tree, Metrics]:
        norms = per_sample_norms(grads)
        # A zero gradient has no direction to keep: the quotient is infinite and the factor 1.
        factors = (max_norm / norms).clamp(max=1.0)
        # Multiplied in the wider dtype: a factor rounded to bfloat16 would miss the norm.
        clipped = tree.map(lambda leaf: (leaf * _along_rows(factors, leaf)).to(leaf.dtype), grads)
        metrics = Metrics(
            sums={SQUARE_NORMS: norms.clamp(max=max_norm).square().sum()},
            means={
                "per_sample/grad_norm/mean": norms.mean(),
                "per_sample/clipped_frac": (norms > max_norm).to(norms.dtype).mean(),
            },
            maxes={"per_sample/grad_norm/max": norms.amax()},
            last={},
        )
        return clipped, metrics

    return clip


@checked
def per_sample_norms(grads: TensorTree) -> Tensor:
    """Return [B], the norm of each sample's gradient over all leaves, in at least float32.

    Args:
        grads: a tree with a leading axis B on every leaf, from `per_sample_grad`.

    Example:
        >>> import torch, funcrl
        >>> grads = {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[4.0], [2.0]])}
        >>> funcrl.per_sample_norms(grads)
        tensor([5., 2.])
    """
    num_rows("per_sample_norms", grads)
    return vmap(tree.global_norm)(grads)


@checked
def gradient_moments(
    loss_fn: LossFn, chunk: Count | None = None
) -> Callable[[Params, Tree], GradientMoments]:
    """Return `(params, batch) -> GradientMoments`, which holds `chunk` gradients at a time.

    Args:
        loss_fn: the loss of one sample, `(params, sample) -> scalar`.
        chunk: how many samples are differentiated at a time, all of them when left out.

    Example:
        >>> import torch, funcrl
        >>> loss_fn = lambda params, x: (params["w"] * x).sum()
        >>> moments = funcrl.gradient_moments(loss_fn, chunk=1)
        >>> moments({"w": torch.zeros(2)}, torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
        GradientMoments(sum={'w': tensor([4., 4.])}, sum_square_norms=tensor(26.), num_samples=2)
    """
    aux_loss_fn = _without_metrics(loss_fn)

    @checked
    def moments(params: TensorTree, batch: Tree) -> GradientMoments:
        def measure(grads: TensorTree) -> tuple[Tree, Metrics]:
            square_norms = per_sample_norms(grads).square().sum()
            return grads, NO_METRICS._replace(sums={SQUARE_NORMS: square_norms})

        total = summed_gradient(aux_loss_fn, measure, chunk, function="gradient_moments")(
            params, batch
        )
        count = num_rows("gradient_moments", batch)
        return GradientMoments(total.grads, total.per_sample.sums[SQUARE_NORMS], count)

    return moments


@checked
def noise_scale(moments: GradientMoments) -> NoiseScale:
    """Return the simple gradient noise scale, the batch size beyond which returns diminish.

    With n gradients, S1 the sum of their squared norms and S2 the squared norm of their sum, the
    unbiased estimates of McCandlish et al. (arXiv:1812.06162, appendix A.1, batches of 1 and n):

        noise  = (S1 - S2 / n) / (n - 1)         tr(Sigma)
        signal = (S2 - S1) / (n (n - 1))         |G|^2
        scale  = noise / signal                  in samples

    Args:
        moments: from `gradient_moments`, of at least two samples.

    Example:
        >>> import torch, funcrl
        >>> grads = {"w": torch.tensor([4.0, 4.0])}  # of [3, 4] and [1, 0]
        >>> funcrl.noise_scale(funcrl.GradientMoments(grads, torch.tensor(26.0), 2)).scale
        tensor(3.3333)
    """
    count = moments.num_samples
    if isinstance(count, int) and count < 2:
        raise ValueError(f"noise_scale expects the moments of at least 2 samples, got {count}.")
    square_of_sum = tree.global_norm(moments.sum).square()
    noise = (moments.sum_square_norms - square_of_sum / count) / (count - 1)
    signal = (square_of_sum - moments.sum_square_norms) / (count * (count - 1))
    infinite = torch.full_like(noise, float("inf"))
    return NoiseScale(noise, signal, torch.where(signal > 0, noise / signal, infinite))


def _without_metrics(loss_fn: LossFn) -> AuxLossFn:
    return lambda params, sample: (loss_fn(params, sample), NO_METRICS)


def _checked(
    function: str, per_sample: PerSampleTransform
) -> Callable[[Tree], tuple[Tree, Metrics]]:
    """Return the transform with a check that its gradients keep their axis of samples."""
    name = f"{function}'s per_sample"

    def transform(grads: TensorTree) -> tuple[Tree, Metrics]:
        transformed, metrics = per_sample(grads), NO_METRICS
        if isinstance(transformed, tuple) and isinstance(transformed[-1], Metrics):
            transformed, metrics = transformed
        tree.check_same_structure(name, grads, transformed)
        pairs = zip(tree.leaves(grads), tree.leaves(transformed), strict=True)
        for index, (leaf, result) in enumerate(pairs):
            if result.ndim != leaf.ndim or result.shape[1:] != leaf.shape[1:]:
                wanted = ", ".join(["B", *map(str, leaf.shape[1:])])
                raise ValueError(
                    f"{name} expects to return gradients with an axis of samples, [{wanted}] at "
                    f"{tree.paths(grads)[index]!r}, got {list(result.shape)}."
                )
        return transformed, metrics

    return transform


def _batched(loss_fn: AuxLossFn) -> Callable[[Params, Tree], Gradient]:
    """Return the gradient of the sum of the vmapped losses: one backward pass for all samples."""
    mapped = over_rows("summed_gradient", loss_fn)

    def gradient(params: TensorTree, batch: Tree) -> Gradient:
        def total_loss(params: Params) -> tuple[Tensor, Metrics]:
            losses, metrics = mapped(params, batch)
            return losses.sum(), reduce_rows(metrics)

        loss, grads, metrics = value_and_grad(total_loss, params)
        return Gradient(grads, loss, metrics)

    return gradient


def _transformed(
    loss_fn: AuxLossFn, per_sample: Callable[[Tree], tuple[Tree, Metrics]]
) -> Callable[[Params, Tree], Gradient]:
    """Return the gradient that is the sum of the transformed gradients of the samples."""

    def of_sample(params: Params, sample: Any) -> tuple[Tensor, Tree, Metrics]:
        return value_and_grad(lambda p: loss_fn(p, sample), params)

    mapped = over_rows("summed_gradient", of_sample)

    def gradient(params: TensorTree, batch: Tree) -> Gradient:
        losses, grads, metrics = mapped(params, batch)
        transformed, of_transform = per_sample(grads)
        summed = tree.map(lambda leaf: leaf.sum(dim=0), transformed)
        return Gradient(summed, losses.sum(), reduce_rows(metrics), of_transform)

    return gradient


def _along_rows(factors: Tensor, leaf: Tensor) -> Tensor:
    return factors.reshape(-1, *[1] * (leaf.ndim - 1))

"""One GRPO step as a pure function of state and batch; it imports no model."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcrl import optim
from funcrl.core import checks, tree
from funcrl.core.arguments import Count, checked
from funcrl.core.types import (
    Absent,
    Algorithm,
    Batch,
    ExactModelFn,
    GradientTransformation,
    Metrics,
    ModelFn,
    PackedBatch,
    Params,
    PrepareFn,
    Rows,
    Step,
    TokenScores,
    TrainState,
    Tree,
)
from funcrl.models.logprobs import reading_segments, score
from funcrl.optim.base import refuse_writes
from funcrl.parallel import (
    Axis,
    Layout,
    Mesh,
    all_gather,
    global_norm,
    layout_of,
    psum,
    shard,
    unshard,
)
from funcrl.parallel.mesh import ALONE
from funcrl.parallel.rows import num_own_rows
from funcrl.rl import grads
from funcrl.rl.algorithms import grpo
from funcrl.rl.backward import Gradient
from funcrl.rl.batching import counted_tokens
from funcrl.rl.blocks import score_gradient
from funcrl.rl.losses import LOSS_PART, policy_loss
from funcrl.rl.metrics import merge_ranks, padding_frac, token_means
from funcrl.rl.mixing import mixing_parts


@checked
def grpo_step(
    model_fn: ModelFn,
    *,
    algorithm: Algorithm | None = None,
    optimizer: GradientTransformation | None = None,
    per_sample: grads.PerSampleTransform | None = None,
    microbatch: Count | None = None,
    prepare: PrepareFn | None = None,
    mesh: Mesh = ALONE,
    layout: Layout | Absent = (),
) -> Step:
    """Return the step `state, metrics = step(state, batch)` that trains `model_fn`.

        grads = sum over samples of per_sample(grad(policy_loss))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = params + updates

    Nothing is mutated and nothing is remembered: the same state and batch give the same bits.
    An update whose gradient is not finite is skipped and counted. The step runs without recording
    gradients, so one cannot differentiate through it.

    Args:
        model_fn: `(params, sample) -> TokenScores` of one sample: `funcrl.logprob_fn(model)`, or
            any function; one that does not read `sample.segment_ids` takes no `PackedBatch`.
        algorithm: such as `funcrl.dapo()`; `funcrl.grpo()` when left out. Its functions are run
            on a few small rows: where they mix samples, a `PackedBatch` is an error.
        optimizer: a `GradientTransformation`; `funcrl.optim.adamw(1e-6)` after clipping to a
            global norm of 1 when left out.
        per_sample: a function of gradients with a leading axis B, such as
            `funcrl.clip_per_sample(1.0)`, whose metrics are among the step's; without it no
            per-sample gradient is ever made.
        microbatch: rows differentiated at a time; any value gives the same step up to rounding.
            With a `model_fn` of exact numerics, 1, 2 and 4 micro-batches give the same bits.
        prepare: `(scores, batch) -> batch`, such as `funcrl.top_entropy(0.2)`; costs one forward
            pass.
        mesh: of the ranks that take the step together, from `funcrl.parallel.make_mesh()`. Each is
            given rows of its own, `funcrl.parallel.own_rows(batch, mesh)`, and all get the
            state and the metrics of one rank with the whole batch. Where `mesh.shard` has several
            ranks, each holds some rows of each leaf of the optimizer's state, which must then be of
            each number by itself; `clip_by_global_norm(max_norm, mesh.shard)` is the norm of all.
        layout: of the whole parameters, from `funcrl.parallel.layout_of(params)`: the parameters of
            the state are shards too, and are put together for each step. `init` takes whole ones.

    Returns:
        A `Step`: `step.init(params, seed=0)` makes the first state, `step(state, batch)` the next
        one and its `Metrics`.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> step = funcrl.grpo_step(funcrl.logprob_fn(model))
        >>> state = step.init(funcrl.init_params(model, seed=0))
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[1, 2, 3], [1, 4, 5]]), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, True, True], [False, True, True]]),
        ...     behavior_logprobs=torch.full((2, 3), -2.0), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> state, metrics = step(state, funcrl.collate(rollout, funcrl.grpo()))
        >>> state.step, metrics.sums["num_tokens"]
        (tensor(1), tensor(4))
    """
    model_fn = scoring("grpo_step", model_fn)
    algorithm = grpo() if algorithm is None else algorithm
    mixing = mixing_parts(algorithm)
    transformation = guarded("grpo_step", optimizer, mesh.shard)

    gradient = score_gradient(
        model_fn, partial(policy_loss, algorithm), per_sample, microbatch, "grpo_step", mesh
    )

    @checked
    def init(params: Params, seed: int = 0) -> TrainState:
        state = first_state("grpo_step", transformation, params, seed, mesh.shard)
        return state._replace(params=shard(state.params, mesh.shard)) if layout else state

    @checked
    @torch.no_grad()
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        batch = counted_rows("grpo_step", batch, per_sample, mixing)
        params = unshard(state.params, layout, mesh.shard) if layout else state.params
        if prepare is not None:
            scores = score(model_fn, params, batch, microbatch)
            prepared = _of_all_ranks(prepare, scores, batch, mesh.all)
            batch = counted_rows("grpo_step(prepare=...)", prepared, per_sample, mixing)
        found = gradient(params, batch)
        grad_norm = global_norm(found.grads, mesh.shard)
        own = state.params if layout else shard(params, mesh.shard)
        updates, opt_state = transformation.update(found.grads, state.opt_state, own)
        found = found._replace(grads={})  # so that it is not in memory beside the new parameters
        own = optim.apply_updates(own, updates)
        params = own if layout else unshard(own, layout_of(params), mesh.shard)
        metrics = _report(found, batch, grad_norm, opt_state, mesh.all)
        return TrainState(params, opt_state, state.step + 1, state.seed), metrics

    return Step(init, update)


def first_state(
    function: str,
    transformation: GradientTransformation,
    params: Params,
    seed: int,
    axis: Axis = ALONE.shard,
) -> TrainState:
    """Return the state before the first update, of whole parameters and this rank's moments."""
    _check_params(function, params)
    # A copy, so that nobody else's update of a module changes the state; detached, because
    # a state of leaves that require grad would keep every past step alive.
    params = tree.map(lambda leaf: leaf.detach().clone(), params)
    device = tree.leaves(params)[0].device
    opt_state = transformation.init(shard(params, axis))
    tree.check_tensors(f"{function}'s init", "the optimizer's state", opt_state.inner)
    return TrainState(
        params=params,
        opt_state=opt_state,
        step=torch.zeros((), dtype=torch.int64, device=device),
        seed=torch.full((), seed, dtype=torch.int64, device=device),
    )


def guarded(
    function: str, optimizer: GradientTransformation | None, axis: Axis = ALONE.shard
) -> GradientTransformation:
    """Return an optimizer that is checked, and skips gradients that are not finite."""
    if optimizer is None:
        optimizer = optim.chain(optim.clip_by_global_norm(1.0, axis), optim.adamw(1e-6))
    return optim.skip_nonfinite(_checked(function, refuse_writes(function, optimizer)), axis)


def _of_all_ranks(prepare: PrepareFn, scores: TokenScores, batch: Rows, axis: Axis) -> Rows:
    """Return this rank's rows of what is prepared of the rows of all ranks."""
    if axis.size == 1:
        return prepare(scores, batch)
    gathered = tree.map(lambda leaf: all_gather(leaf, axis), (scores, batch))
    prepared = prepare(*gathered)
    first = axis.rank * len(batch.mask)
    return tree.map(lambda leaf: leaf[first : first + len(batch.mask)], prepared)


def _report(found: Gradient, batch: Rows, grad_norm: Tensor, opt_state: Any, axis: Axis) -> Metrics:
    """Return the metrics of an update, with means over the tokens that it was trained on."""
    counts = Metrics(
        sums={
            "num_tokens": batch.mask.sum(),
            "num_nonfinite_logprobs": (~batch.behavior_logprobs.isfinite()).sum(),
        },
        means={"padding_frac": padding_frac(batch)},
        maxes={},
        last={},
    )
    rows: int | Tensor = len(batch.mask)
    if axis.size > 1:
        rows = psum(num_own_rows(batch), axis)
        counts = merge_ranks(counts, torch.ones_like(rows), axis)
    sums = dict(found.metrics.sums)
    of_loss = {name: sums.pop(name) for name in tuple(sums) if name.startswith(LOSS_PART)}
    of_tokens = token_means(found.metrics._replace(sums=sums), counts.sums["num_tokens"])
    of_samples = _of_samples(found.per_sample, grad_norm, rows)
    return Metrics(
        sums=counts.sums | of_samples.sums,
        means={"loss": found.loss} | of_loss | counts.means | of_tokens.means | of_samples.means,
        maxes={"grad_norm": grad_norm} | of_tokens.maxes | of_samples.maxes,
        last=of_optimizer(opt_state) | of_samples.last,
    )


def of_optimizer(opt_state: Any) -> dict[str, Tensor]:
    """Return what the state of a guarded optimizer says: skipped updates, and its rate."""
    learning_rate = optim.current_learning_rate(opt_state)
    rate = {} if isinstance(learning_rate, tuple) else {"learning_rate": learning_rate}
    return {"num_skipped_updates": opt_state.num_skipped, **rate}


def _of_samples(metrics: Metrics, grad_norm: Tensor, count: int | Tensor) -> Metrics:
    """Return the metrics of a transform of per-sample gradients, with the noise that follows."""
    sums = dict(metrics.sums)
    square_norms = sums.pop(grads.SQUARE_NORMS, None)
    if square_norms is None:
        return metrics._replace(sums=sums)
    if isinstance(count, int) and count < 2:  # all updates have the same metrics
        found = grads.NoiseScale(*[torch.full_like(square_norms, torch.nan)] * 3)
    else:
        found = grads.noise_scale(grads.GradientMoments(grad_norm, square_norms, count))
    noise = {"per_sample/noise": found.noise, "per_sample/signal": found.signal}
    last = {**metrics.last, "per_sample/noise_scale": found.scale}
    return metrics._replace(sums=sums, means={**metrics.means, **noise}, last=last)


def scoring(function: str, model_fn: ModelFn) -> ModelFn:
    """Return the model function with a check that it returns `TokenScores`; refuse a module."""
    if isinstance(model_fn, torch.nn.Module):  # callable, but it would fail in the first step
        raise TypeError(
            f"{function} expects model_fn to be a function (params, sample) -> TokenScores, got "
            f"the module {type(model_fn).__name__}; make one by funcrl.logprob_fn(module)."
        )
    if isinstance(model_fn, ExactModelFn):
        return model_fn

    def scores_of(params: Params, sample: Any) -> TokenScores:
        scores = model_fn(params, sample)
        if not isinstance(scores, TokenScores):
            raise TypeError(
                f"{function} expects model_fn to return TokenScores(logprobs, entropy), "
                f"got {type(scores).__name__}."
            )
        return scores

    return reading_segments(function, scores_of)


def _checked(function: str, optimizer: GradientTransformation) -> GradientTransformation:
    """Return the optimizer with a check that its updates have the shapes of the parameters."""

    def update(grads: Tree, state: Any, params: Params) -> tuple[Tree, Any]:
        updates, state = optimizer.update(grads, state, params)
        what = "the optimizer's updates"
        tree.check_same_shapes(function, what, updates, "the parameters", params)
        return updates, state

    return optimizer._replace(update=update)


def _check_params(function: str, params: Params) -> None:
    if not params:
        raise ValueError(f"{function}'s init expects a non-empty dict of tensors, got {{}}.")
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not leaf.is_floating_point() or leaf.is_meta:
            advice = "; funcrl.init_params(model, seed=0) draws them" if leaf.is_meta else ""
            raise TypeError(
                f"{function}'s init expects floating-point parameters with values, got {path!r} of "
                f"{leaf.dtype} on {leaf.device}{advice}."
            )


_MAY_BE_ABSENT = {"token_weights", *PackedBatch._field_defaults}


def counted_rows(
    function: str, batch: Rows, per_sample: grads.PerSampleTransform | None, mixing: str
) -> Rows:
    """Return the checked batch, its mask without tokens that `counted_tokens` leaves out."""
    if not isinstance(batch, Batch | PackedBatch):
        raise TypeError(f"{function} expects a Batch or PackedBatch, got {type(batch).__name__}.")
    if per_sample is not None and isinstance(batch, PackedBatch):
        raise TypeError(
            "grpo_step(per_sample=...) expects a Batch, one sample a row, got a "
            "PackedBatch, many a row."
        )
    if mixing and isinstance(batch, PackedBatch):
        raise TypeError(
            f"{function} expects a Batch, one sample a row, for an algorithm whose {mixing} "
            f"depends on the other samples of a packed row, got a PackedBatch; funcrl.collate "
            f"makes a Batch, and so does --packing none."
        )
    checks.check_rank(function, "batch.tokens", batch.tokens, "BT")
    shape = batch.tokens.shape
    if 0 in shape:
        raise ValueError(
            f"{function} expects at least one row and one token, got an empty batch of shape "
            f"{list(shape)}."
        )
    for name, value in batch._asdict().items():
        if not (name in _MAY_BE_ABSENT and isinstance(value, tuple)):
            checks.check_shape(function, f"batch.{name}", value, "batch.tokens", shape)
    checks.check_dtype(function, "batch.mask", batch.mask, torch.bool)
    return batch._replace(mask=counted_tokens(batch.mask, batch.behavior_logprobs))

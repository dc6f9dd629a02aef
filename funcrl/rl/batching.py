"""Batches from rollouts: filters, token weights, and mini-batches."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcrl.core import checks, numerics, rng, tree
from funcrl.core.arguments import Count, checked
from funcrl.core.types import (
    STREAMS,
    Absent,
    Algorithm,
    Batch,
    PackedBatch,
    Rollout,
    Rows,
    WeightFn,
)

_RowsT = TypeVar("_RowsT", Batch, PackedBatch)


@checked
def counted_tokens(mask: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return the mask of the tokens that count: sampled, and of a finite behaviour log-probability.

    `collate` makes a batch's mask by it; whatever comes after reads that mask.

    Args:
        mask: True where the policy sampled the token.
        behavior_logprobs: the generator's log-probabilities, of the same shape.

    Example:
        >>> import torch, funcrl
        >>> funcrl.batching.counted_tokens(
        ...     torch.tensor([False, True, True]), torch.tensor([0.0, -1.0, float("nan")]))
        tensor([False,  True, False])
    """
    checks.check_shape("counted_tokens", "behavior_logprobs", behavior_logprobs, "mask", mask.shape)
    return mask & behavior_logprobs.isfinite()


@checked
def sampled_tokens(batch: Rows) -> Tensor:
    """Return where a batch has a sampled token, those that `counted_tokens` left out included.

    `collate` leaves the behaviour log-probability of such a token as it was, not finite.

    Args:
        batch: of samples in rows of their own, or packed.

    Example:
        >>> import torch, funcrl
        >>> batch = funcrl.Batch(
        ...     tokens=torch.ones(1, 3, dtype=torch.int64), positions=torch.arange(3)[None],
        ...     mask=torch.tensor([[False, True, False]]), advantages=torch.zeros(1, 3),
        ...     behavior_logprobs=torch.tensor([[0.0, -1.0, float("nan")]]),
        ...     token_weights=torch.zeros(1, 3))
        >>> funcrl.batching.sampled_tokens(batch)
        tensor([[False,  True,  True]])
    """
    return batch.mask | ~batch.behavior_logprobs.isfinite()


@checked
def collate(
    rollout: Rollout,
    algorithm: Algorithm,
    ref_logprobs: Tensor | Absent = (),
    teacher_logprobs: Tensor | Absent = (),
) -> Batch:
    """Return the batch of a rollout: advantages from its rewards, token weights from its mask.

    Sampled tokens whose behaviour log-probability is not finite leave the mask before weights are
    made, so they are in no numerator and no denominator. Their value stays in the batch, where a
    step counts it as `num_nonfinite_logprobs`. A rollout in which no sampled token has a finite one
    is refused. Numbers are kept in at least float32.

    Args:
        rollout: B = N prompts x G samples, padded on the right. `logprob_fn` cannot score a row's
            first token; only a `model_fn` that can (a bandit's, say) may have it in the mask.
        algorithm: whose `advantage`, and `weight`, `ce_weight` and `teacher_weight` to use.
        ref_logprobs: [B, T] of the reference model, for a KL penalty; finite inside the mask.
        teacher_logprobs: [B, T] of the teacher, where the `model_fn` does not score its divergence
            from one; finite inside the mask.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[5, 6, 7], [5, 8, 0]]), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, True, True], [False, True, False]]),
        ...     behavior_logprobs=torch.zeros(2, 3), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> funcrl.collate(rollout, funcrl.dr_grpo(length=2)).advantages
        tensor([[ 0.0000, -0.5000, -0.5000],
                [ 0.0000,  0.5000,  0.0000]])
    """
    _check_rollout("collate", rollout)
    for name, scored in (("ref_logprobs", ref_logprobs), ("teacher_logprobs", teacher_logprobs)):
        if not isinstance(scored, tuple):
            _check_scored(rollout, name, scored)
    dtype = numerics.at_least_float32(rollout.behavior_logprobs.dtype)
    behavior = torch.where(rollout.mask, rollout.behavior_logprobs, 0.0).to(dtype)
    mask = counted_tokens(rollout.mask, behavior)
    if rollout.mask.any() and not mask.any():
        raise ValueError(
            f"collate expects a finite rollout.behavior_logprobs for at least one sampled token, "
            f"got none for {int(rollout.mask.sum())}; take Samples.policy_logprobs where "
            f"Samples.logprobs is NaN, as funcrl.rollouts.to_rollout does, or funcrl.score."
        )
    rewards = rollout.rewards.to(numerics.at_least_float32(rollout.rewards.dtype))
    advantages = algorithm.advantage(rewards, rollout.group).to(dtype)
    checks.check_shape(
        "collate", "algorithm.advantage(...)", advantages, "rewards", rollout.rewards.shape
    )
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return Batch(
        tokens=rollout.tokens,
        positions=positions.contiguous(),
        mask=mask,
        behavior_logprobs=behavior,
        advantages=torch.where(mask, advantages[:, None], 0.0),
        **_made_weights(algorithm, mask, dtype),
        ref_logprobs=ref_logprobs,
        teacher_logprobs=teacher_logprobs,
    )


@checked
def pad_rows(
    rows: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return rows of numbers as one tensor, padded on the right with zeros.

    Args:
        rows: of any lengths.
        dtype: of the tensor.
        device: of the tensor.

    Example:
        >>> import torch, funcrl
        >>> funcrl.batching.pad_rows([[1, 2], [3]], torch.int64)
        tensor([[1, 2],
                [3, 0]])
    """
    width = max(map(len, rows))
    return torch.tensor(
        [[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device
    )


@checked
def minibatches(batch: _RowsT, algorithm: Algorithm, count: int, seed: int) -> list[_RowsT]:
    """Return the batch's rows in `count` mini-batches, in an order drawn from the seed.

    Advantages stay those of the whole batch; weights are made anew, so that each mini-batch's loss
    is normalised over that mini-batch, each stream's over the samples that had a weight in it. A
    packed row goes whole into one of them, and the weights are those of its samples, as if each had
    a row of its own.

    Args:
        batch: of B rows; of a `PackedBatch` with the positions that `pack` and `pack_groups` make.
        algorithm: whose weight of each of the batch's streams to use.
        count: the number of mini-batches, at most B; one is the batch itself.
        seed: of the order.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(4, 2, dtype=torch.int64), group=torch.zeros(4).long(),
        ...     mask=torch.ones(4, 2, dtype=torch.bool), behavior_logprobs=torch.zeros(4, 2),
        ...     rewards=torch.arange(4.0), policy_version=torch.zeros(4, dtype=torch.int64))
        >>> batch = funcrl.collate(rollout, funcrl.grpo())
        >>> [part.token_weights.sum() for part in funcrl.minibatches(batch, funcrl.grpo(), 2, 0)]
        [tensor(1.), tensor(1.)]
    """
    rows = batch.tokens.shape[0]
    checks.check_range("minibatches", "count", count, 1, rows)
    if count == 1:
        return [batch]
    order = torch.randperm(rows, generator=rng.generator(seed), device="cpu")
    parts = []
    for share in order.to(batch.tokens.device).tensor_split(count):
        part: _RowsT = tree.map(operator.itemgetter(share), batch)
        parts.append(_share_weights(algorithm, part))
    return parts


@checked
def join(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches as one, each with the weights that it has.

    Rows of demonstrations beside rows that the policy drew, for example: each stream's loss stays
    normalised over the batches that it came from. Where a batch lacks a field that another has, it
    gets zeros.

    Args:
        batches: of one sample a row, of any lengths.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(1, 2, dtype=torch.int64), group=torch.tensor([0]),
        ...     mask=torch.tensor([[False, True]]), behavior_logprobs=torch.zeros(1, 2),
        ...     rewards=torch.ones(1), policy_version=torch.zeros(1, dtype=torch.int64))
        >>> drawn = funcrl.collate(rollout, funcrl.reinforce())
        >>> shown = funcrl.collate(rollout, funcrl.sft())
        >>> funcrl.batching.join([drawn, shown]).ce_weights
        tensor([[0., 0.],
                [0., 1.]])
    """
    if not batches:
        raise ValueError("join expects at least one batch, got none.")
    width = max(batch.mask.shape[1] for batch in batches)
    columns: dict[str, Any] = {}
    for name in Batch._fields:
        found = [getattr(batch, name) for batch in batches]
        given = [each for each in found if isinstance(each, Tensor)]
        if not given:
            columns[name] = ()
            continue
        filled = [
            batch.mask.new_zeros(batch.mask.shape, dtype=given[0].dtype)
            if isinstance(each, tuple)
            else each
            for each, batch in zip(found, batches, strict=True)
        ]
        columns[name] = torch.cat([pad(each, (0, width - each.shape[1])) for each in filled])
    return Batch(**columns)


@checked
def in_order(batch: _RowsT, numbers: Tensor) -> _RowsT:
    """Return the batch with its rows sorted by their numbers.

    A sum over rows depends on their order in its last bits. Workers that finish in any order give
    the same batch, and with exact numerics the same update, once its rows are in order.

    Args:
        batch: of B rows.
        numbers: [B] int64, all different.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[7, 7], [5, 5]]), group=torch.zeros(2).long(),
        ...     mask=torch.ones(2, 2, dtype=torch.bool), behavior_logprobs=torch.zeros(2, 2),
        ...     rewards=torch.arange(2.0), policy_version=torch.zeros(2, dtype=torch.int64))
        >>> batch = funcrl.collate(rollout, funcrl.grpo())
        >>> funcrl.batching.in_order(batch, torch.tensor([1, 0])).tokens
        tensor([[5, 5],
                [7, 7]])
    """
    rows = batch.tokens.shape[:1]
    checks.check_shape("in_order", "numbers", numbers, "batch's first axis", rows)
    checks.check_dtype("in_order", "numbers", numbers, torch.int64)
    if len(numbers.unique()) < len(numbers):
        raise ValueError(f"in_order expects numbers that all differ, got {numbers.tolist()}.")
    ordered: _RowsT = tree.map(operator.itemgetter(numbers.argsort()), batch)
    return ordered


@checked
def pad_length(rollout: Rollout, multiple: Count) -> Rollout:
    """Return the rollout padded, outside the mask, to a length that is a multiple of `multiple`.

    Padding has no weight and changes no score before it; a compiled step then meets few shapes.

    Args:
        rollout: of rows of T tokens.
        multiple: the new length is its smallest multiple that is at least T.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(2, 3, dtype=torch.int64), group=torch.tensor([0, 0]),
        ...     mask=torch.ones(2, 3, dtype=torch.bool), behavior_logprobs=torch.zeros(2, 3),
        ...     rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> funcrl.batching.pad_length(rollout, 4).mask[0]
        tensor([ True,  True,  True, False])
    """
    _check_rollout("pad_length", rollout)
    missing = -rollout.tokens.shape[1] % multiple
    padded = {
        name: pad(getattr(rollout, name), (0, missing))
        for name in ("tokens", "mask", "behavior_logprobs")
    }
    return rollout._replace(**padded)


@checked
def drop_zero_variance(rollout: Rollout) -> Rollout:
    """Return the rollout without groups in which all rewards are equal: they teach nothing.

    Their number is `frac_reward_zero_std` of `metrics.describe_rollout`. The result can be empty,
    which `collate` refuses.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(4, 2, dtype=torch.int64), group=torch.tensor([0, 0, 1, 1]),
        ...     mask=torch.ones(4, 2, dtype=torch.bool), behavior_logprobs=torch.zeros(4, 2),
        ...     rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        ...     policy_version=torch.zeros(4, dtype=torch.int64))
        >>> funcrl.drop_zero_variance(rollout).group
        tensor([1, 1])
    """
    _check_rollout("drop_zero_variance", rollout)
    same_group = rollout.group[:, None] == rollout.group[None, :]
    differs = rollout.rewards[:, None] != rollout.rewards[None, :]
    keep = (same_group & differs).any(dim=1)
    return Rollout(*(field[keep] for field in rollout))


@checked
def mask_truncated(rollout: Rollout, truncated: Tensor) -> Rollout:
    """Return the rollout with truncated completions out of the mask: they are not trained on.

    DAPO's overlong filtering (arXiv:2503.14476). Their rewards still count in their group.

    Args:
        rollout: of B rows.
        truncated: [B] bool, True where the completion hit the length limit.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(2, 2, dtype=torch.int64), group=torch.tensor([0, 0]),
        ...     mask=torch.ones(2, 2, dtype=torch.bool), behavior_logprobs=torch.zeros(2, 2),
        ...     rewards=torch.tensor([1.0, 0.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> funcrl.mask_truncated(rollout, torch.tensor([False, True])).mask
        tensor([[ True,  True],
                [False, False]])
    """
    rows = torch.Size(rollout.mask.shape[:1])
    checks.check_shape("mask_truncated", "truncated", truncated, "rollout's rows", rows)
    checks.check_dtype("mask_truncated", "truncated", truncated, torch.bool)
    return rollout._replace(mask=rollout.mask & ~truncated[:, None])


def _made_weights(
    algorithm: Algorithm, mask: Tensor, dtype: torch.dtype
) -> dict[str, Tensor | Absent]:
    """Return the weights [B, T] of each stream, absent where the algorithm has no rule."""
    rules = {name: getattr(algorithm, of) for name, of in STREAMS.items()}
    return {
        name: rule if isinstance(rule, tuple) else _weights("collate", rule, mask, dtype)
        for name, rule in rules.items()
    }


def _share_weights(algorithm: Algorithm, part: _RowsT) -> _RowsT:
    """Return some rows of a batch with the weights of a batch of their own."""
    apart, together = _by_samples(part)
    weights = {name: getattr(part, name) for name in STREAMS}
    weights = {name: each for name, each in weights.items() if isinstance(each, Tensor)}
    for name, before in weights.items():
        rule = getattr(algorithm, STREAMS[name])
        if isinstance(rule, tuple):
            raise ValueError(
                f"minibatches expects an algorithm with a {STREAMS[name]} to make the {name} of a "
                f"mini-batch, got {algorithm!r}."
            )
        mask = apart(part.mask)
        if len(weights) > 1:  # of the samples that are in this stream
            mask = mask & (apart(before) != 0).any(dim=1, keepdim=True)
        weights[name] = together(_weights("minibatches", rule, mask, before.dtype))
    return part._replace(**weights)


_Moving: TypeAlias = Callable[[Tensor], Tensor]


def _by_samples(part: Rows) -> tuple[_Moving, _Moving]:
    """Return what gives each sample of some rows a row of its own, and what puts them back.

    A weight rule expects one sample a row. A shared prefix is no sample.
    """
    if isinstance(part, Batch):
        return (lambda values: values), (lambda values: values)
    num_rows, length = part.segment_ids.shape
    first_id = torch.arange(num_rows, device=part.mask.device)[:, None] * length
    filled = part.segment_ids >= 0
    if not isinstance(part.prefix_ids, tuple):
        prefixes = (first_id + part.prefix_ids)[part.prefix_ids >= 0]
        filled = filled & ~torch.isin(first_id + part.segment_ids, prefixes)
    ids, row = torch.unique((first_id + part.segment_ids)[filled], return_inverse=True)
    place = (row, part.positions[filled])

    def apart(values: Tensor) -> Tensor:
        samples = values.new_zeros(len(ids), length)
        samples[place] = values[filled]
        return samples

    def together(samples: Tensor) -> Tensor:
        values = samples.new_zeros(num_rows, length)
        values[filled] = samples[place]
        return values

    return apart, together


def _weights(function: str, rule: WeightFn, mask: Tensor, dtype: torch.dtype) -> Tensor:
    weights = rule(mask, dtype=dtype)
    checks.check_shape(function, "algorithm.weight(...)", weights, "the mask", mask.shape)
    return weights


def _check_rollout(function: str, rollout: Rollout) -> None:
    checks.check_rank(function, "rollout.tokens", rollout.tokens, "BT")
    shape = rollout.tokens.shape
    if 0 in shape:
        raise ValueError(
            f"{function} expects at least one row and one token, got rollout.tokens of shape "
            f"{list(shape)}."
        )
    checks.check_dtype(function, "rollout.mask", rollout.mask, torch.bool)
    for name in ("tokens", "group", "policy_version"):
        checks.check_dtype(function, f"rollout.{name}", getattr(rollout, name), torch.int64)
    for name, value in rollout._asdict().items():
        of_tokens = name in ("tokens", "mask", "behavior_logprobs")
        like, expected = ("rollout.tokens", shape) if of_tokens else ("rollout's rows", shape[:1])
        checks.check_shape(function, f"rollout.{name}", value, like, expected)
    if not rollout.rewards.isfinite().all():
        row = int((~rollout.rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"{function} expects finite rewards, got {rollout.rewards[row].item()} in row {row}."
        )


def _check_scored(rollout: Rollout, name: str, logprobs: Tensor) -> None:
    shape = rollout.tokens.shape
    checks.check_shape("collate", name, logprobs, "rollout.tokens", shape)
    bad = rollout.mask & ~logprobs.isfinite()
    if bad.any():
        row, token = (int(place) for place in bad.nonzero()[0])
        raise ValueError(
            f"collate expects finite {name} inside the mask, got "
            f"{logprobs[row, token].item()} in row {row} at {token}."
        )

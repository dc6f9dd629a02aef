"""The types that flow: NamedTuples, which optree, torch and jax all treat as nodes of a tree.

Axes: B rows, G samples of one prompt, R packed rows, T tokens. Everything of length T is aligned
to the token that it describes. An absent field is the empty tuple, a node without leaves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from funcrl.core.printing import described, of_fields

Params: TypeAlias = dict[str, Tensor]  # weights by name
Tree: TypeAlias = Any  # a tensor, or a nest of dicts, lists and tuples of tensors
Absent: TypeAlias = tuple[()]  # a field that is left out


class TokenScores(NamedTuple):
    """The scores of one sample's tokens, as a `model_fn` returns them.

    `logprobs[t]` scores `tokens[t]` given `tokens[:t]`, and `entropy[t]` is that of the
    distribution it was drawn from; a language model has no prediction for position 0, which
    therefore stays out of the mask. `divergence[t]` is that of the distribution from a teacher's,
    over the whole vocabulary, where a `model_fn` knows a teacher; `values[t]` what a critic expects
    of `tokens[t:]`, given `tokens[:t]`, where it has one.
    """

    logprobs: Tensor  # [T]
    entropy: Tensor  # [T]
    divergence: Tensor | Absent = ()  # [T]
    values: Tensor | Absent = ()  # [T]


class Sample(NamedTuple):
    """The part of a row that a `model_fn` reads; any NamedTuple with these two fields will do."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64


class Row(Protocol):
    """The argument of a `logprob_fn`: a `Sample`, a row of a `Batch`, or a type of your own."""

    @property
    def tokens(self) -> Tensor:
        """Return the tokens, [T] int64."""

    @property
    def positions(self) -> Tensor:
        """Return the position of each, [T] int64."""


class Samples(NamedTuple):
    """The completions of a generator: B = N prompts x G samples, group-major, padded right.

    A generator that has only one of the two log-probabilities leaves NaN in the other.
    """

    tokens: Tensor  # [B, S] int64, the sampled tokens alone, a stop token included
    mask: Tensor  # [B, S] bool, True on a sampled token
    logprobs: Tensor  # [B, S] under the distribution that was sampled from
    policy_logprobs: Tensor  # [B, S] under the policy itself: temperature 1, nothing truncated
    finish_reasons: tuple[str, ...]  # [B] "stop" or "length"
    policy_version: int  # as given to `push`

    def __repr__(self) -> str:
        return of_fields(self)


class Rollout(NamedTuple):
    """Rewarded completions: B = N prompts x G samples, group-major, padded on the right."""

    tokens: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True where the policy sampled the token
    behavior_logprobs: Tensor  # [B, T] the generator's log-probability of each sampled token
    rewards: Tensor  # [B]
    group: Tensor  # [B] int64, equal for samples of one prompt
    policy_version: Tensor  # [B] int64, the step whose parameters sampled the row

    def __repr__(self) -> str:
        return of_fields(self)


class Batch(NamedTuple):
    """The input of a step, with one sample a row, so that per-sample gradients are legal.

    The loss has streams, each with weights of its own: the policy gradient, cross-entropy on the
    tokens as they are, the divergence from a teacher, and a critic's error. One without weights is
    left out.
    """

    tokens: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True where the token is trained on
    behavior_logprobs: Tensor  # [B, T]
    advantages: Tensor  # [B, T]
    token_weights: Tensor | Absent  # [B, T] of the policy gradient, with every normalisation
    ref_logprobs: Tensor | Absent = ()  # [B, T]
    ce_weights: Tensor | Absent = ()  # [B, T] of the cross-entropy
    teacher_weights: Tensor | Absent = ()  # [B, T] of the divergence from a teacher
    teacher_logprobs: Tensor | Absent = ()  # [B, T] of the teacher, where no divergence is scored
    value_weights: Tensor | Absent = ()  # [B, T] of the critic's error
    old_values: Tensor | Absent = ()  # [B, T] what the critic expected before the first update
    returns: Tensor | Absent = ()  # [B, T] what it should have expected

    def __repr__(self) -> str:
        return of_fields(self)


class PackedBatch(NamedTuple):
    """`Batch` with many samples in a row of length T, for summed gradients only.

    A token sees the tokens of its segment up to itself, and all tokens of its prefix: a segment
    that several samples share, such as the prompt of a group.
    """

    tokens: Tensor  # [R, T] int64
    positions: Tensor  # [R, T] int64, counted from 0 in each sample, its prefix included
    mask: Tensor  # [R, T] bool
    behavior_logprobs: Tensor  # [R, T]
    advantages: Tensor  # [R, T]
    token_weights: Tensor | Absent  # [R, T]
    segment_ids: Tensor  # [R, T] int64, 0, 1, ... within a row, -1 on padding
    ref_logprobs: Tensor | Absent = ()  # [R, T]
    prefix_ids: Tensor | Absent = ()  # [R, T] int64, the segment that a token sees too, -1 for none
    ce_weights: Tensor | Absent = ()  # [R, T]
    teacher_weights: Tensor | Absent = ()  # [R, T]
    teacher_logprobs: Tensor | Absent = ()  # [R, T]
    value_weights: Tensor | Absent = ()  # [R, T]
    old_values: Tensor | Absent = ()  # [R, T]
    returns: Tensor | Absent = ()  # [R, T]

    def __repr__(self) -> str:
        return of_fields(self)


# The weights of each stream of the loss in a batch, and what makes them in an `Algorithm`.
STREAMS = {
    "token_weights": "weight",
    "ce_weights": "ce_weight",
    "teacher_weights": "teacher_weight",
    "value_weights": "value_weight",
}


class TrainState(NamedTuple):
    """The values that a step carries to the next one."""

    params: Params
    opt_state: Any
    step: Tensor  # [] int64, the number of steps done
    seed: Tensor  # [] int64

    def __repr__(self) -> str:
        return of_fields(self)


class Metrics(NamedTuple):
    """Numbers to report, each in the field that says how `metrics.merge` reduces it.

    Reports are merged over samples, over micro-batches, and over the updates of one rollout. What
    will be a mean over tokens stands in `sums` until `metrics.token_means` divides it by their
    number, which `merge` needs as its weight from then on. No name is in two fields.
    """

    sums: dict[str, Tensor]  # totals, such as num_tokens: they are added
    means: dict[str, Tensor]  # averages, such as entropy: they are averaged, with weights
    maxes: dict[str, Tensor]  # maxima, such as grad_norm: the largest is taken
    last: dict[str, Tensor]  # how things stand, such as learning_rate: the last report's is taken


class Ratio(NamedTuple):
    """Ratios of the policy to the one that sampled."""

    ratio: Tensor  # [T] differentiable; what the surrogate clips
    correction: Tensor  # [T] constant, non-negative; multiplies the advantages


class Surrogate(NamedTuple):
    """The objective that the policy maximises, and the tokens at which it is clipped, if any."""

    objective: Tensor  # [T]
    clipped_low: Tensor | Absent = ()  # [T] bool
    clipped_high: Tensor | Absent = ()  # [T] bool


class Penalty(NamedTuple):
    """The cost that the loss adds for each token, and the KL estimate to report."""

    cost: Tensor  # [T]
    kl: Tensor | Absent  # [T]


Rows: TypeAlias = Batch | PackedBatch  # what a step takes
# (rewards [B], group [B]) -> advantages [B]
AdvantageFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# (logprobs, behavior_logprobs, mask, segment_ids), all [T] -> Ratio
RatioFn: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | Absent"], Ratio]
# (log_ratio, mask, segment_ids), all [T] -> importance weights [T]
CorrectionFn: TypeAlias = Callable[[Tensor, Tensor, "Tensor | Absent"], Tensor]
# (logprobs, ratio, advantages), all [T] -> Surrogate; one that takes segment_ids= is given them
SurrogateFn: TypeAlias = Callable[..., Surrogate]
# (scores, behavior_logprobs, ref_logprobs), all [T] -> Penalty
PenaltyFn: TypeAlias = Callable[[TokenScores, Tensor, "Tensor | Absent"], Penalty]
# (values, old_values, returns), all [T] -> cost [T]
ValueCostFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
# (mask [B, T], dtype) -> token_weights [B, T]
WeightFn: TypeAlias = Callable[..., Tensor]


class Algorithm(NamedTuple):
    """An algorithm as five independent functions, and what more streams of the loss need.

    `weight` is that of the policy gradient, which is left out without one.
    """

    advantage: AdvantageFn  # (rewards [B], group [B]) -> [B]
    ratio: RatioFn  # (logprobs, behavior_logprobs, mask, segment_ids), all [T] -> Ratio
    surrogate: SurrogateFn  # (logprobs, ratio, advantages), all [T] -> Surrogate
    penalty: PenaltyFn  # (scores, behavior_logprobs, ref_logprobs), all [T] -> Penalty
    weight: WeightFn | Absent  # (mask [B, T], dtype) -> token_weights [B, T]
    ce_weight: WeightFn | Absent = ()  # the same for ce_weights
    teacher_weight: WeightFn | Absent = ()  # the same for teacher_weights
    value_weight: WeightFn | Absent = ()  # the same for value_weights
    value_cost: ValueCostFn | Absent = ()  # (values, old_values, returns), all [T] -> cost [T]

    def __repr__(self) -> str:
        given = {name: fn for name, fn in self._asdict().items() if fn != ()}
        shown = ", ".join(f"{name}={described(fn)}" for name, fn in given.items())
        return f"Algorithm({shown})"


class GradientTransformation(NamedTuple):
    """A pair of pure functions: `state = init(params)`, `updates, state = update(...)`."""

    init: Callable[[Params], Any]
    update: Callable[[Tree, Any, Params], tuple[Tree, Any]]

    def __repr__(self) -> str:
        name = described(self.update)
        made_by = name.partition("(")[0]
        return f"GradientTransformation({name})" if "<locals>" in made_by else name


class Step(NamedTuple):
    """One training step: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    `init` takes the parameters and an optional `seed`; `update` takes a state and a batch.
    """

    init: Callable[..., TrainState]
    update: Callable[[TrainState, Rows], tuple[TrainState, Metrics]]

    def __call__(self, state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        """Return `self.update(state, batch)`."""
        return self.update(state, batch)

    def __repr__(self) -> str:
        return f"Step({described(self.update).removesuffix('.<locals>.update')})"


PrepareFn: TypeAlias = Callable[[TokenScores, Any], Any]  # (scores [B, T], batch) -> batch
ModelFn: TypeAlias = Callable[[Params, Any], TokenScores]  # (params, sample) -> scores [T]
LossFn: TypeAlias = Callable[[Params, Any], Tensor]  # (params, sample) -> loss []
NamedRewards: TypeAlias = Mapping[str, Tensor]  # each reward [B] by its name


@dataclass(frozen=True)
class ExactModelFn:
    """A `ModelFn` with exact numerics, whose gradients can be summed block by block of rows.

    A parameter of two names, as a tied embedding is, has two gradients, which are added last: each
    is a sum over blocks, and sums of other blocks cannot be put between its terms.
    """

    of_sample: ModelFn  # what a call is
    # parameters -> the same in at least float32, so that their gradients are, under all names
    split: Callable[[Params], Params]
    # (parameters, number of blocks) -> ((what `split` returned, rows [B, T]) -> scores [B, T]);
    # the dtype of the parameters is that to compute in, if no other was asked for
    of_rows: Callable[[Params, int], ModelFn]
    # gradients of what `split` returned -> gradients of the parameters
    join: Callable[[Params], Params]

    def __call__(self, params: Params, sample: Any) -> TokenScores:
        """Return `self.of_sample(params, sample)`."""
        return self.of_sample(params, sample)

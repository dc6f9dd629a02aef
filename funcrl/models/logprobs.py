"""Scores of tokens from logits; predictions are shifted against tokens only here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from funcrl import ops
from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import Count, CountOrAll, Positive, checked
from funcrl.core.rows import over_rows, split_rows
from funcrl.core.types import Absent, ExactModelFn, ModelFn, PackedBatch, Params, Row, TokenScores
from funcrl.models.blocks import ScoresFn, network_takes_rows, summing_in_blocks
from funcrl.models.initial import CRITIC, without_critic
from funcrl.models.layers import RecurFn, recur_causal, recur_segments
from funcrl.models.networks import forward_takes, logits_fn
from funcrl.models.transformer import Transformer, has_delta
from funcrl.ops import attention
from funcrl.ops.divergences import Divergence


def reading_segments(function: str, model_fn: ModelFn) -> ModelFn:
    """Return the model function with a check that it reads where the samples of packed rows lie.

    One that reads tokens and positions alone takes a packed row for one sample, in which each token
    sees all tokens before it. It must read `segment_ids`, and `prefix_ids` where they are given.
    """
    if isinstance(model_fn, ExactModelFn | _ReadingSegments):  # those of `logprob_fn` read them
        return model_fn
    return _ReadingSegments(function, model_fn)


@dataclass(frozen=True)
class _ReadingSegments:
    function: str
    model_fn: ModelFn

    def __call__(self, params: Params, sample: Any) -> TokenScores:
        if not isinstance(sample, PackedBatch):
            return self.model_fn(params, sample)
        read: set[str] = set()
        scores = self.model_fn(params, _watched(sample, read))
        needed = ["segment_ids", *(["prefix_ids"] if isinstance(sample.prefix_ids, Tensor) else [])]
        unread = [name for name in needed if name not in read]
        if unread:
            raise ValueError(
                f"{self.function} expects one sample a row, a Batch, for a model_fn that does not "
                f"read sample.{unread[0]}, got a PackedBatch: it would let a sample see those "
                f"beside it. funcrl.collate makes a Batch, and so does --packing none."
            )
        return scores


def _watched(row: PackedBatch, read: set[str]) -> PackedBatch:
    """Return the row, which adds the names of the fields that are read of it to `read`.

    Rows that are made of it, by `_replace` or by a function over trees, add to it as well. To go
    through all fields, as these do, is to read none: what they mean is in their names.
    """

    class WatchedRow(PackedBatch):
        def __getattribute__(self, name: str) -> Any:
            if name in PackedBatch._fields:
                read.add(name)
            return super().__getattribute__(name)

        def __getitem__(self, place: Any) -> Any:
            found = PackedBatch._fields[place]
            read.update([found] if isinstance(found, str) else found)
            return super().__getitem__(place)

    return WatchedRow(*row)


class Teacher(NamedTuple):
    """A network whose distribution over the vocabulary another one is taught."""

    model: nn.Module  # with the vocabulary of the one that it teaches
    params: Params
    divergence: Divergence = "reverse"  # KL(pi, teacher); or "forward", KL(teacher, pi)

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"Teacher({kind}, {len(self.params)} parameters, {self.divergence!r})"


# Tokens whose logits exact numerics hold at a time when nothing is said; any number gives the same
# scores.
_CHUNK = 1024


@checked
def token_scores(
    logits: Tensor,
    tokens: Tensor,
    temperature: Positive = 1.0,
    truncation: ops.Truncation | None = None,
) -> TokenScores:
    """Return the log-probability of each token under the logits before it, and their entropy.

        logprobs[t] = log softmax(logits[t - 1] / temperature)[tokens[t]]

    Position 0 has no prediction and gets 0. Computed in at least float32.

    Args:
        logits: [T, V]; `logits[t]` predicts `tokens[t + 1]`.
        tokens: [T] int64.
        temperature: that of sampling, so that the scores are those of the sampling policy.
        truncation: that of sampling, likewise; nothing is left out when this is.

    Example:
        >>> import torch, funcrl
        >>> scores = funcrl.token_scores(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> scores.logprobs, scores.entropy
        (tensor([ 0.0000, -0.6931, -0.6931]), tensor([0.0000, 0.6931, 0.6931]))
    """
    checks.check_rank("token_scores", "logits", logits, "TV")
    checks.check_shape("token_scores", "tokens", tokens, "logits' first axis", logits.shape[:1])
    wide = numerics.at_least_float32(logits.dtype)
    # Widened before it is divided, or a bfloat16 quotient would be rounded to eight bits.
    if truncation:
        chosen_by = tokens.roll(-1)
        logits = ops.truncated_logits(logits, chosen_by, truncation, temperature)
    predictions = logits[:-1] if temperature == 1.0 else logits[:-1].to(wide) / temperature
    log_softmax = torch.log_softmax(predictions, dim=-1, dtype=wide)
    chosen = log_softmax.gather(-1, tokens[1:, None]).squeeze(-1)
    start = chosen.new_zeros(1)
    return TokenScores(torch.cat([start, chosen]), torch.cat([start, ops.entropy(log_softmax)]))


@checked
def logprob_fn(
    model: nn.Module,
    temperature: Positive = 1.0,
    *,
    chunk: CountOrAll | None = None,
    dtype: torch.dtype | None = None,
    attend: ops.AttendFn | None = None,
    attend_segments: ops.AttendSegmentsFn | None = None,
    teacher: Teacher | None = None,
    critic: bool = False,
    truncation: ops.Truncation | None = None,
) -> ModelFn:
    """Return `(params, sample) -> TokenScores` of a network, which gives logits.

    Args:
        model: an `nn.Module` from tokens [T], and positions [T] if it takes them, to logits [T, V],
            such as `funcrl.models.Transformer`, or a model of transformers; see
            `funcrl.models.logits_fn`. Only its structure is used, never its weights. For the rows
            of a `PackedBatch` it must take `attend`, as `Transformer` does, or `resets`, as
            `Recurrent` does: True where a sample begins.
        temperature: that of sampling.
        chunk: the number of tokens whose logits are in memory at a time, forward and backward, or
            "all": the backward pass then reads the logits instead of computing them anew. Such
            scores have a first derivative only, and the model must take `head`, as `Transformer`
            does. When left out, each operation on all logits is recorded, for any derivative.
        dtype: to compute in, that of the parameters when left out. They are cast once, and the
            gradient is in their own dtype.
        attend: which tokens see which, such as `funcrl.ops.attend_flash`; the model must take it,
            as `Transformer` does. The model's own when left out.
        attend_segments: the same for the rows of a `PackedBatch`, of their segments and prefixes,
            such as `funcrl.ops.attend_flash_segments`. The model's own when left out, unless
            `attend` is given alone: such rows are then refused.
        teacher: whose divergence from the policy, over the whole vocabulary, is scored as well. It
            is a constant; `chunk`, `dtype` and what attends are its own too, where it takes them.
        critic: score `values`, too, by a head on the last layer's output whose parameters
            `funcrl.models.with_critic` adds to the others; `chunk` must be given.
        truncation: top-k, top-p and min-p of sampling, so that the scores are of the distribution
            that tokens were drawn from, plus each row's own token; of the whole one when left out.
            A teacher's divergence is of the whole one always.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8)
        >>> model = funcrl.models.Transformer(config)
        >>> sample = funcrl.types.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
        >>> params = funcrl.init_params(model, seed=0)
        >>> funcrl.logprob_fn(model, chunk=2)(params, sample).logprobs.shape
        torch.Size([3])
    """
    for given, name, option in (
        (chunk, "head", "chunk"),
        (attend, "attend", "attend"),
        (attend_segments, "attend", "attend_segments"),
    ):
        if given is not None and not forward_takes(model, name):
            raise ValueError(
                f"logprob_fn expects no {option}= for a network whose forward does not take "
                f"{name}=, got {option}={getattr(given, '__name__', given)} for "
                f"{type(model).__name__}."
            )
    network_ops = ops.ops_of(model)
    needed = ["head", *(["dtype"] if dtype is not None else [])] if network_ops.exact else []
    for name in needed:
        if not forward_takes(model, name):
            raise ValueError(
                f"logprob_fn expects a network of exact operations to take {name}=, as "
                f"funcrl.models.Transformer does, got {type(model).__name__}, which does not."
            )
    if teacher is not None:
        teacher = _cast_teacher(teacher, model, chunk, dtype)
    if critic and (network_ops.exact or chunk is None):
        raise ValueError(
            f"logprob_fn expects chunk= and a network of native operations with critic=True, got "
            f"{'exact' if network_ops.exact else 'no chunk'}."
        )
    if truncation and network_ops.exact:
        raise ValueError(
            f"logprob_fn expects a network of native operations with truncation=, which exact "
            f"numerics do not have, got exact with {truncation}."
        )
    owns = attend is None and attend_segments is None
    if owns:
        attend_segments = network_ops.attend_segments
    scores_fn_of = partial(
        _scores_fn,
        temperature=temperature,
        chunk=chunk,
        attend=attend,
        attend_segments=attend_segments,
        teacher=teacher,
        critic=critic,
        truncation=truncation or None,
    )
    scores_fn = scores_fn_of(model)

    @checked
    def model_fn(params: Params, sample: Row) -> TokenScores:
        return scores_fn(params, sample, dtype)

    if network_ops.exact:
        # An attention that is given is one of a sample.
        rows = network_takes_rows(model) and owns
        exact = summing_in_blocks(model_fn, model, dtype, scores_fn_of, takes_rows=rows)
        if exact is not None:
            return exact
    return model_fn


def chunk_for(chunk: CountOrAll, networks: Iterable[nn.Module]) -> CountOrAll | None:
    """Return the `chunk` of `logprob_fn`: None where a network takes no `head`.

    All logits are in memory then.
    """
    return chunk if all(forward_takes(each, "head") for each in networks) else None


def _cast_teacher(
    teacher: Teacher, model: nn.Module, chunk: Any, dtype: torch.dtype | None
) -> Teacher:
    """Return a teacher with its weights in the dtype to compute in; raise if it cannot teach."""
    if ops.ops_of(model).exact or ops.ops_of(teacher.model).exact:
        raise ValueError(
            "logprob_fn expects networks of native operations with teacher=, since the divergence "
            "over a vocabulary has no exact ones, got exact; a batch's teacher_logprobs work there."
        )
    if chunk is not None and not forward_takes(teacher.model, "head"):
        raise ValueError(
            f"logprob_fn expects no chunk= with a teacher whose forward does not take head=, got "
            f"chunk={chunk} for {type(teacher.model).__name__}."
        )
    params = tree.map(torch.Tensor.detach, teacher.params)
    return teacher._replace(params=params if dtype is None else tree.cast(params, dtype))


def _scores_fn(
    model: nn.Module,
    temperature: float,
    chunk: int | Literal["all"] | None,
    attend: ops.AttendFn | None,
    attend_segments: ops.AttendSegmentsFn | None,
    teacher: Teacher | None,
    critic: bool,
    truncation: ops.Truncation | None,
) -> ScoresFn:
    """Return `(params, sample, dtype) -> TokenScores`; the arguments are those of `logprob_fn`.

    With exact operations a network that takes more axes than [T] may be given a batch of samples.
    """
    apply, network_ops = logits_fn(model), ops.ops_of(model)
    # Operations of one's own need know of neither where there is none.
    given = {"cap": _cap(model), "truncation": truncation}
    given = {name: value for name, value in given.items() if value is not None}
    taught = None if teacher is None else _Taught(teacher, temperature, attend, attend_segments)

    def scores_of(params: Params, sample: Row, dtype: torch.dtype | None) -> TokenScores:
        options = _options(model, sample, attend, attend_segments)
        if dtype is not None and network_ops.exact:
            options["dtype"] = dtype  # weights are cast where they are used: gradients stay wide
        elif dtype is not None:
            params = tree.cast(params, dtype)
        if chunk is None and not network_ops.exact:
            logits = apply(params, sample, **options)
            found = token_scores(logits, sample.tokens, temperature, truncation)
            if taught is None:
                return found
            return found._replace(divergence=_shifted(taught.of_logits(sample, logits)))

        every = params
        params = without_critic(params) if critic else params

        def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor | Absent, ...]:
            # The last position predicts nothing, but is scored as well: T rows, unlike T - 1, need
            # no copy and suit a GPU's tiles.
            targets = sample.tokens.roll(-1, dims=-1)
            size = chunk or _CHUNK
            found = network_ops.scores(hidden, weight, targets, temperature, size, **given)
            divergence: Tensor | Absent = ()
            if taught is not None:
                divergence = taught.of_hidden(sample, hidden, weight, size, _cap(model))
            return *found, divergence, _values(hidden, every) if critic else ()

        return tree.map(_shifted, TokenScores(*apply(params, sample, head=scores, **options)))

    return scores_of


def _values(hidden: Tensor, params: Params) -> Tensor:
    """Return what a critic expects after each token [T], in at least float32."""
    missing = [name for name in CRITIC if name not in params]
    if missing:
        raise ValueError(
            f"logprob_fn(critic=True) expects the parameters of a critic, which "
            f"funcrl.models.with_critic adds, got none for {missing[0]!r}."
        )
    wide = numerics.at_least_float32(hidden.dtype)
    weight, bias = (params[name].to(wide) for name in CRITIC)
    return hidden.to(wide) @ weight + bias


class _Taught:
    """The divergence from a teacher, given what a network has computed of a sample."""

    def __init__(
        self,
        teacher: Teacher,
        temperature: float,
        attend: ops.AttendFn | None,
        attend_segments: ops.AttendSegmentsFn | None,
    ) -> None:
        self._teacher, self._temperature = teacher, temperature
        self._apply = logits_fn(teacher.model)
        # A network of another kind than the student attends in its own way.
        taken = attend if forward_takes(teacher.model, "attend") else None
        self._attends = taken, attend_segments

    def of_logits(self, sample: Row, logits: Tensor) -> Tensor:
        """Return the divergence [T] of logits [T, V]."""
        of_teacher = self._run(sample)
        return ops.divergence(logits, of_teacher, self._teacher.divergence, self._temperature)

    def of_hidden(
        self, sample: Row, hidden: Tensor, weight: Tensor, chunk: CountOrAll, cap: float | None
    ) -> Tensor:
        """Return the divergence [T] of the last layer's output [T, D], with few logits alive."""
        teacher_hidden, teacher_weight = self._run(sample, head=lambda x, weight: (x, weight))
        return ops.linear_divergence(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            self._teacher.divergence,
            self._temperature,
            chunk,
            cap,
            _cap(self._teacher.model),
        )

    def _run(self, sample: Row, **head: Any) -> Any:
        options = _options(self._teacher.model, sample, *self._attends)
        return self._apply(self._teacher.params, sample, **head, **options)


def _shifted(values: Tensor) -> Tensor:
    """Return values of predictions at the tokens that they predict, 0 at the first token."""
    return torch.cat([torch.zeros_like(values[..., :1]), values[..., :-1]], dim=-1)


def _cap(model: nn.Module) -> float | None:
    return model.config.logit_cap if isinstance(model, Transformer) else None


def _options(
    model: nn.Module,
    sample: Row,
    attend: ops.AttendFn | None,
    attend_segments: ops.AttendSegmentsFn | None,
) -> dict[str, Any]:
    """Return the arguments of a network by which its tokens attend."""
    options: dict[str, Any] = {}
    if attend is not None:
        options["attend"] = _each_layer(model, attend, recur_causal)
    segment_ids = getattr(sample, "segment_ids", ())
    if not isinstance(segment_ids, tuple):
        prefix_ids = getattr(sample, "prefix_ids", ())
        options |= _of_packed_row(model, segment_ids, prefix_ids, attend, attend_segments)
    return options


def _of_packed_row(
    model: nn.Module,
    segment_ids: Tensor,
    prefix_ids: Tensor | Absent,
    attend: ops.AttendFn | None,
    attend_segments: ops.AttendSegmentsFn | None,
) -> dict[str, Any]:
    """Return the arguments of a network by which no sample of a packed row sees another one."""
    resets = forward_takes(model, "resets")
    if (resets or has_delta(model)) and not isinstance(prefix_ids, tuple):
        raise ValueError(
            f"logprob_fn expects rows without shared prefixes for a network that carries a state, "
            f"which does not fork, got a PackedBatch with prefix_ids for {type(model).__name__}; "
            f"funcrl.pack gives each sample a prompt of its own."
        )
    if resets:
        return {"resets": attention.starts(segment_ids)}
    if attend_segments is None:
        raise ValueError(
            "logprob_fn expects attend_segments= beside attend= for the rows of a PackedBatch, "
            "whose samples do not see each other, got attend="
            f"{getattr(attend, '__name__', attend)} alone."
        )
    if not forward_takes(model, "attend"):
        raise ValueError(
            f"logprob_fn expects one sample a row, a Batch, for a network whose forward takes "
            f"neither attend= nor resets=, got a PackedBatch for {type(model).__name__}."
        )
    of_segments = attend_segments(segment_ids, prefix_ids)
    return {"attend": _each_layer(model, of_segments, recur_segments(segment_ids))}


def _each_layer(model: nn.Module, attend: ops.AttendFn, recur: RecurFn) -> Any:
    """Return what a network takes as `attend`: a function for each layer where layers differ."""
    if isinstance(model, Transformer) and has_delta(model):
        return model.each_layer(attend, recur)
    return attend


@checked
def score(
    model_fn: ModelFn, params: Params, batch: Any, microbatch: Count | None = None
) -> TokenScores:
    """Return the scores [B, T] of every row, without gradients.

    For a reference model's log-probabilities, and for those of the policy before several passes.

    Args:
        model_fn: `(params, sample) -> TokenScores`; for a `PackedBatch` it must read
            `sample.segment_ids`, as those of `logprob_fn` do.
        params: the parameters to score with.
        batch: a `Batch`, or any tree of [B, T] tensors whose rows the model function reads.
        microbatch: rows scored at a time, all of them when left out.

    Example:
        >>> import torch, funcrl
        >>> model_fn = lambda params, sample: funcrl.TokenScores(
        ...     sample["x"] * params["w"], sample["x"])
        >>> funcrl.score(model_fn, {"w": torch.tensor(2.0)}, {"x": torch.ones(2, 1)}).logprobs
        tensor([[2.],
                [2.]])
    """
    if isinstance(model_fn, ExactModelFn):
        of_rows, given = model_fn.of_rows(params, 1), model_fn.split(params)
    else:
        of_rows, given = over_rows("score", reading_segments("score", model_fn)), params
    with torch.no_grad():
        parts = [of_rows(given, part) for part in split_rows("score", batch, microbatch)]
        scores = tree.map(lambda *fields: torch.cat(fields), *parts)
    tokens = getattr(batch, "tokens", scores.logprobs)
    for name, value in scores._asdict().items():
        if not isinstance(value, tuple):
            what = f"model_fn(...).{name}"
            checks.check_shape("score", what, value, "batch.tokens", tokens.shape)
    return scores

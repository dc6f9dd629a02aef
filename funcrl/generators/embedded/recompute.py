"""Draws from any function of logits: every token is drawn from a forward pass of all before it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core import tree
from funcrl.core.arguments import Count, checked
from funcrl.core.rows import over_rows, split_rows
from funcrl.core.types import Params, Row, Sample, TokenScores
from funcrl.generators.contract import Prompts, padded_prompts
from funcrl.generators.draw import LogSoftmaxFn
from funcrl.generators.embedded.batch import Batch
from funcrl.generators.embedded.engine import (
    PASS_TOKENS,
    UNLIMITED,
    DrawFn,
    EmbeddedGenerator,
    Network,
    cast,
)
from funcrl.generators.embedded.schedule import Completions, Drawn, Request, completions
from funcrl.generators.stops import DecodeFn
from funcrl.models.functional import check_params
from funcrl.models.logprobs import logprob_fn, token_scores
from funcrl.models.networks import LogitsFn, context_length_of, logits_fn, vocab_size_of
from funcrl.ops import NATIVE, ops_of

# Rows are as long as the longest sample, rounded up: a pass meets few lengths.
_BUCKET = 16


class Recompute(EmbeddedGenerator):
    """The generator of any network: right, and slow, since it keeps nothing between two tokens.

    A completion of S tokens costs S forward passes over the sample so far, where a generator with a
    cache costs one. Samples are drawn as the `Sampler` draws them, from the same seeds.

    Args:
        logits: `(params, sample) -> logits [T, V]`, a pure function of one sample, whose `tokens`
            and `positions` are [T], such as `funcrl.models.logits_fn(module)`; or the module
            itself. `logits[t]` must depend on `tokens[: t + 1]` alone.
        decode: from tokens to text, for stop strings.
        slots: samples drawn at a time.
        dtype: to compute in; that of the parameters when left out.
        context_length: tokens of a prompt and its completion, at most; as the module says when left
            out, and without a limit if it says nothing.

    Example:
        >>> import torch, funcrl
        >>> def bigram(params, sample):
        ...     return params["table"][sample.tokens]
        >>> generator = funcrl.generators.Recompute(bigram)
        >>> generator.push({"table": torch.zeros(5, 5)})
        >>> sampling = funcrl.generators.Sampling(num_samples=2, max_tokens=3)
        >>> generator.generate([[1, 2]], sampling, seed=0).tokens.shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(
        self,
        logits: LogitsFn | nn.Module,
        *,
        decode: DecodeFn | None = None,
        slots: Count = 256,
        dtype: torch.dtype | None = None,
        context_length: Count | None = None,
    ) -> None:
        module = logits if isinstance(logits, nn.Module) else None
        function: LogitsFn = logits if module is None else logits_fn(module)
        own = None if module is None else context_length_of(module)

        ops = NATIVE if module is None else ops_of(module)
        if module is not None and ops.exact:
            model_fn = logprob_fn(module, dtype=dtype)
        else:
            model_fn = _scores_of(function, dtype)

        def lay_out(params: Params, dtype: torch.dtype | None) -> DrawFn:
            given = cast(params, dtype)
            return lambda request: _draw(function, given, request, ops.log_softmax)

        network = Network(
            vocab_size=None if module is None else vocab_size_of(module),
            context_length=context_length or own or UNLIMITED,
            model_fn=model_fn,
            check_params=_check_named if module is None else _checker(module),
            lay_out=lay_out,
        )
        super().__init__(network, decode=decode, slots=slots, dtype=dtype)


class Recomputed:
    """The tokens of the samples, from which logits are computed anew each time."""

    def __init__(self, logits: LogitsFn, params: Params, rows: int, places: int) -> None:
        device = next(iter(params.values())).device
        self._params = params
        self._tokens = torch.zeros(rows, places, dtype=torch.int64, device=device)

        def last_logits(params: Params, row: tuple[Sample, Tensor]) -> Tensor:
            sample, position = row
            found = _checked(logits(params, sample), len(sample.tokens))
            return found.index_select(0, position[None])[0]

        self._logits = over_rows("Recompute", last_logits)

    def prefill(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Keep the prompts' tokens for each sample, and compute what follows each prompt."""
        tokens, lengths = padded_prompts(prompts, self._tokens.device)
        self._tokens[rows, : tokens.shape[1]] = tokens.repeat_interleave(group, dim=0)
        return self._last(tokens, lengths - 1).repeat_interleave(group, dim=0)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Keep one more token of each sample, and compute what follows it."""
        rows = self._tokens[: len(tokens)]
        rows.scatter_(1, positions[:, None], tokens[:, None])
        width = min(math.ceil((longest + 1) / _BUCKET) * _BUCKET, rows.shape[1])
        return self._last(rows[:, :width], positions)

    def evict(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep nothing of samples that have ended."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the tokens of some samples to other rows."""
        self._tokens[to, places] = self._tokens[origin, places]

    def _last(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the logits [n, V] at the last position of each row [n, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        rows = Sample(tokens, positions), last
        size = max(PASS_TOKENS // tokens.shape[1], 1)
        parts = [self._logits(self._params, part) for part in split_rows("Recompute", rows, size)]
        return torch.cat(parts)


def _draw(
    function: LogitsFn, params: Params, request: Request, log_softmax: LogSoftmaxFn
) -> Completions:
    def open_decoder(rows: int, places: int) -> Recomputed:
        return Recomputed(function, params, rows, places)

    leaf = next(iter(params.values()))
    return completions(Batch(open_decoder, request, leaf.device, log_softmax).run(), leaf)


def _scores_of(logits: LogitsFn, dtype: torch.dtype | None) -> Callable[[Params, Row], TokenScores]:
    def model_fn(params: Params, sample: Row) -> TokenScores:
        given = params if dtype is None else tree.cast(params, dtype)
        found = _checked(logits(given, sample), len(sample.tokens))
        return token_scores(found, sample.tokens)

    return model_fn


def _checked(found: Any, length: int) -> Tensor:
    """Return what a function of logits returned, if it is logits of `length` tokens."""
    is_tensor = isinstance(found, Tensor)
    if is_tensor and found.ndim == 2 and len(found) == length and found.is_floating_point():
        logits: Tensor = found
        return logits
    got = f"{found.dtype} of shape {list(found.shape)}" if is_tensor else type(found).__name__
    raise TypeError(
        f"Recompute expects logits, floating-point numbers of shape [T, V], of a sample of "
        f"T={length} tokens, got {got}."
    )


def _checker(module: nn.Module) -> Callable[[Params], None]:
    return lambda params: check_params(module, params)


def _check_named(params: Params) -> None:
    """Raise unless these are tensors by name, of which there is at least one."""
    if not isinstance(params, dict) or not params:
        raise TypeError(
            f"Recompute expects parameters, a dict of tensors by name, got {type(params).__name__}."
        )
    tree.check_tensors("Recompute", "the parameters", params)

"""The trainer's ways to compute log-probabilities: in batches, padded, packed, traced, compiled."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcrl.config import CompileConfig
from funcrl.core import tree
from funcrl.core.rows import over_rows, split_rows
from funcrl.core.types import (
    Batch,
    Metrics,
    ModelFn,
    PackedBatch,
    Params,
    Rollout,
    Rows,
    Sample,
    Step,
    TrainState,
)
from funcrl.graph.compilation import compile_step
from funcrl.graph.tracing import trace
from funcrl.loop.parity.sides import LOGPROBS, Part, Side, TokensFn, Way, of_samples, tokens_fn
from funcrl.models import Transformer
from funcrl.models.logprobs import logprob_fn
from funcrl.models.transformer import has_delta
from funcrl.rl.algorithms import grpo
from funcrl.rl.packing import pack, pack_groups

_SIZES = (1, 7, 64)
_PADDING = 64
_RATE = 1e-3


def one_by_one(fn: TokensFn, params: Params, tokens: Tensor) -> Side:
    """Return the reference: a forward pass of each sample [T] by itself."""
    with torch.no_grad():
        rows = [fn(params, Sample(row, _positions(row))) for row in tokens]
    return of_samples({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def trainer_ways(
    model: Transformer, params: Params, tokens: Tensor, prompt: int, compiled: bool
) -> Iterator[Way]:
    """Yield the trainer's ways.

    Args:
        model: the network.
        params: its parameters.
        tokens: [B, T], samples of one length.
        prompt: the number of tokens of each that are its prompt.
        compiled: whether to yield those that torch compiles, which takes a minute.
    """

    def way(name: str, fn: Callable[..., Side], *inputs: Any) -> Way:
        return Way(
            f"trainer, {name}", lambda rec: fn(tokens_fn(model, rec), params, tokens, *inputs)
        )

    count, length = tokens.shape
    for size in sorted({*_SIZES, count}):
        yield way(f"batch of {size}", batched, size, length)
    padded = -(-(length + 1) // _PADDING) * _PADDING
    yield way(f"padded to {padded} tokens", batched, count, padded)
    yield way("packed rows", packed, prompt, pack)
    if not has_delta(model):  # whose state does not fork
        yield way("packed rows, prompts shared", packed, prompt, pack_groups)
    yield way("4 micro-batches", batched, -(-count // 4), length)
    model_fn = logprob_fn(model)

    def stepped(name: str, run: Callable[[Step, TrainState, Batch], Step]) -> Way:
        return Way(
            f"trainer, {name}", lambda _: _of_step(run, model_fn, params, tokens), records=False
        )

    yield stepped("step traced", _traced)
    if compiled:
        backends: tuple[tuple[str, dict[str, Any]], ...] = (
            ("aot_eager", {"backend": "aot_eager"}),
            ("inductor", {"backend": "inductor"}),
        )
        if tokens.is_cuda:
            backends += (("CUDA graph", {"backend": "inductor", "cudagraph": "full"}),)
        for name, options in backends:
            config = CompileConfig(fuse="none", **options)
            yield stepped(f"step compiled, {name}", partial(_compiled, config=config))


def batched(fn: TokensFn, params: Params, tokens: Tensor, size: int, length: int) -> Side:
    """Return the values of batches of `size` rows padded to `length`; rows are repeated to fill."""
    count, width = tokens.shape
    filled = tokens[torch.arange(-(-count // size) * size, device=tokens.device) % count]
    filled = torch.nn.functional.pad(filled, (0, length - width))
    mapped = over_rows("parity", fn)
    with torch.no_grad():
        parts = split_rows("parity", Sample(filled, _positions(filled)), size)
        found = [mapped(params, part) for part in parts]
    joined = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    return of_samples({name: values[:count, :width] for name, values in joined.items()})


def packed(
    fn: TokensFn, params: Params, tokens: Tensor, prompt: int, pack_fn: Callable[..., PackedBatch]
) -> Side:
    """Return the values of samples that `pack` or `pack_groups` lays end to end."""
    count, length = tokens.shape
    mask = (torch.arange(length, device=tokens.device) >= prompt).expand(count, length)
    numbers = torch.arange(count, device=tokens.device)
    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        # Which sample a token is of, so that it can be found in its packed row.
        behavior_logprobs=numbers[:, None].expand(count, length).double(),
        rewards=torch.zeros(count, device=tokens.device),
        group=numbers,
        policy_version=torch.zeros_like(numbers),
    )
    rows = pack_fn(rollout, grpo(), 3 * length + 5)  # a length that leaves padding
    with torch.no_grad():
        values = over_rows("parity", fn)(params, rows)
    side: Side = {name: [] for name in values}
    for row, place, sample in _segments(rows):
        position = int(rows.positions[row, place])  # of the first token that is the sample's alone
        stop = place + length - position
        for name, found in values.items():
            first = int(name == LOGPROBS)  # of a segment's first token there is none
            part = found[row, place + first : stop]
            side[name].append(Part(sample, position + first, part))
    return side


def _segments(rows: PackedBatch) -> Iterator[tuple[int, int, int]]:
    """Yield the row, the first place and the number of each packed sample."""
    ids = rows.segment_ids
    for row in range(len(ids)):
        for segment in ids[row][rows.mask[row]].unique().tolist():  # a shared prompt has no mask
            own = (ids[row] == segment).nonzero()
            yield row, int(own[0]), int(rows.behavior_logprobs[row, own[-1]])


def _of_step(
    run: Callable[[Step, TrainState, Batch], Step],
    model_fn: ModelFn,
    params: Params,
    tokens: Tensor,
) -> Side:
    zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
    state = TrainState(params, (), zero, zero.clone())
    none = torch.zeros(tokens.shape, device=tokens.device)
    batch = Batch(tokens, _positions(tokens), none.bool(), none, none, none)
    _, metrics = run(_training_step(model_fn), state, batch)(state, batch)
    return of_samples({LOGPROBS: metrics.last["logprobs"]})


def _training_step(model_fn: ModelFn) -> Step:
    """Return a step with a backward pass and an update, whose metric is all log-probabilities."""
    mapped = over_rows("parity", model_fn)

    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        def loss(params: Params) -> tuple[Tensor, Tensor]:
            logprobs = mapped(params, batch).logprobs
            return logprobs.sum(), logprobs

        grads, logprobs = torch.func.grad(loss, has_aux=True)(state.params)
        params = tree.map(lambda leaf, grad: leaf + _RATE * grad, state.params, grads)
        metrics = Metrics(sums={}, means={}, maxes={}, last={"logprobs": logprobs})
        return state._replace(params=params, step=state.step + 1), metrics

    return Step(lambda params, seed=0: TrainState(params, (), seed, seed), update)


def _traced(step: Step, state: TrainState, batch: Batch) -> Step:
    graph = trace(step.update, state, batch)
    return Step(step.init, torch.no_grad()(graph))


def _compiled(step: Step, state: TrainState, batch: Batch, config: CompileConfig) -> Step:
    return compile_step(step, state, batch, config)


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens).contiguous()

"""Draws from a model of transformers on the cache that the model itself makes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core import rng
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Params
from funcrl.generators.contract import sample_seeds
from funcrl.generators.draw import draw_tokens
from funcrl.generators.embedded.engine import UNLIMITED, DrawFn, EmbeddedGenerator, Network, cast
from funcrl.generators.embedded.schedule import (
    Completions,
    Drawn,
    Request,
    append_tokens,
    completions,
    new_samples,
)
from funcrl.generators.stops import DecodeFn
from funcrl.models.functional import bind, check_params
from funcrl.models.logprobs import logprob_fn
from funcrl.models.networks import (
    context_length_of,
    forward_takes,
    is_of_transformers,
    vocab_size_of,
)


class HuggingFace(EmbeddedGenerator):
    """The generator of models of transformers: a token costs one pass over that token alone.

    Prompts of one length are drawn together, so that rows need neither padding nor a mask,
    whatever attention the model has; prompts of many lengths therefore take longer than in the
    `Sampler`. Samples are drawn as the `Sampler` draws them, from the same seeds.

    Args:
        model: such as `transformers.AutoModelForCausalLM.from_pretrained(...)`, after `eval()`;
            only its structure is used. One that keeps no `past_key_values` is refused:
            `funcrl.generators.Recompute(model)` draws from it.
        decode: from tokens to text, for stop strings.
        slots: samples drawn at a time; at least `sampling.num_samples`.
        dtype: to compute in; that of the parameters when left out.

    Example:
        >>> import torch, transformers, funcrl
        >>> shape = transformers.LlamaConfig(
        ...     vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(shape).eval()
        >>> generator = funcrl.generators.HuggingFace(model)
        >>> generator.push(dict(model.named_parameters()))
        >>> sampling = funcrl.generators.Sampling(num_samples=2, max_tokens=3)
        >>> generator.generate([[1, 2]], sampling, seed=0).tokens.shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        decode: DecodeFn | None = None,
        slots: Count = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not (is_of_transformers(model) and forward_takes(model, "past_key_values")):
            raise TypeError(
                f"HuggingFace expects a model of transformers that takes past_key_values, got "
                f"{type(model).__name__}; funcrl.generators.Recompute(model) draws from any "
                f"network."
            )

        def lay_out(params: Params, dtype: torch.dtype | None) -> DrawFn:
            bound = bind(model, cast(params, dtype))
            return lambda request: _draw(bound, request)

        network = Network(
            vocab_size=vocab_size_of(model),
            context_length=context_length_of(model) or UNLIMITED,
            model_fn=logprob_fn(model, dtype=dtype),
            check_params=lambda params: check_params(model, params),
            lay_out=lay_out,
        )
        super().__init__(network, decode=decode, slots=slots, dtype=dtype)


def _draw(model: nn.Module, request: Request) -> Completions:
    samples = new_samples(request)
    group = request.sampling.num_samples
    seeds = sample_seeds(request.prompts, group, request.seed)
    for prompts in _of_one_length(request):
        numbers = [prompt * group + k for prompt in prompts for k in range(group)]
        _draw_together(model, request, [samples[n] for n in numbers], [seeds[n] for n in numbers])
    return completions(samples, next(model.parameters()))


def _of_one_length(request: Request) -> Iterator[list[int]]:
    """Yield the indices of prompts of one length, as many as there are slots for."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(request.prompts):
        by_length.setdefault(len(prompt), []).append(index)
    size = max(request.slots // request.sampling.num_samples, 1)
    for indices in by_length.values():
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _draw_together(
    model: nn.Module, request: Request, samples: list[Drawn], seeds: list[int]
) -> None:
    """Draw samples whose prompts are of one length, all to their ends."""
    device = next(model.parameters()).device
    group = request.sampling.num_samples
    uniforms = rng.uniform(torch.tensor(seeds, device=device), request.max_tokens)
    prompts = [list(request.prompts[each.prompt]) for each in samples[::group]]
    logits, cache = _run(model, torch.tensor(prompts, device=device), None)
    rows = torch.arange(len(prompts), device=device).repeat_interleave(group)
    logits = logits[rows]
    _take(cache, rows)
    going = list(range(len(samples)))  # the samples that the rows of the cache belong to
    while True:
        count = len(samples[going[0]].tokens)
        counts = torch.full((len(going),), count, device=device)
        drawn = draw_tokens(logits, counts, uniforms[going, count], request.sampling)
        running = [samples[n] for n in going]
        append_tokens(running, drawn)
        kept = [row for row, each in enumerate(running) if not each.end(request)]
        if not kept:
            return
        tokens = drawn[0]
        if len(kept) < len(going):
            going, tokens = [going[row] for row in kept], tokens[kept]
            _take(cache, torch.tensor(kept, device=device))
        logits, cache = _run(model, tokens[:, None], cache)


def _take(cache: Any, rows: Tensor) -> None:
    """Make these rows those of a cache, a row as often as it is among them."""
    if "batch_select_indices" in vars(type(cache)):  # a model's own cache, such as MiniMax's
        cache.batch_select_indices(rows)
    else:  # as beam search does: the other leaves the states of linear attention as they are
        cache.reorder_cache(rows)


def _run(model: nn.Module, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Return the logits after the last of the tokens [n, S], and the cache of all until there."""
    out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return out.logits[:, -1], out.past_key_values

"""Draws from a model of transformers on the cache that the model itself makes."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core import rng
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Params
from funcrl.generators.contract import Prompts, sample_seeds
from funcrl.generators.draw import draw_tokens
from funcrl.generators.embedded.engine import (
    PASS_TOKENS,
    UNLIMITED,
    DrawFn,
    EmbeddedGenerator,
    Network,
    cast,
)
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
    cache_name,
    context_length_of,
    forward_takes,
    keeps_cache,
    vocab_size_of,
)


class HuggingFace(EmbeddedGenerator):
    """The generator of models of transformers: a token costs one pass over that token alone.

    Prompts are drawn together, as many as there are slots for, those of similar lengths first, and
    padded on the left. A model that gives a padded row other logits than the row alone, as a short
    trial shows, draws prompts of one length together, without padding. Samples are drawn as the
    `Sampler` draws them, from the same seeds.

    Args:
        model: such as `transformers.AutoModelForCausalLM.from_pretrained(...)`, after `eval()`;
            only its structure is used. One that takes no cache of earlier tokens is refused:
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
        if not keeps_cache(model):
            raise TypeError(
                f"HuggingFace expects a model of transformers that takes a cache, got "
                f"{type(model).__name__}; funcrl.generators.Recompute(model) draws from any "
                f"network."
            )

        def lay_out(params: Params, dtype: torch.dtype | None) -> DrawFn:
            bound = bind(model, cast(params, dtype))
            return lambda request: _draw(bound, request, may_pad)

        tried: list[bool] = []  # once, when prompts of several lengths are first drawn

        def may_pad(bound: nn.Module) -> bool:
            if not tried:
                tried.append(_gives_padded_rows_their_logits(bound))
            return tried[0]

        network = Network(
            vocab_size=vocab_size_of(model),
            context_length=context_length_of(model) or UNLIMITED,
            model_fn=logprob_fn(model, dtype=dtype),
            check_params=lambda params: check_params(model, params),
            lay_out=lay_out,
        )
        super().__init__(network, decode=decode, slots=slots, dtype=dtype)


def _draw(model: nn.Module, request: Request, may_pad: Callable[[nn.Module], bool]) -> Completions:
    samples = new_samples(request)
    group = request.sampling.num_samples
    seeds = sample_seeds(request.prompts, group, request.seed)
    for prompts in _batches(model, request, may_pad):
        numbers = [prompt * group + k for prompt in prompts for k in range(group)]
        _draw_together(model, request, [samples[n] for n in numbers], [seeds[n] for n in numbers])
    return completions(samples, next(model.parameters()))


def _batches(
    model: nn.Module, request: Request, may_pad: Callable[[nn.Module], bool]
) -> Iterator[list[int]]:
    """Yield the indices of prompts that are drawn together, as many as slots and a pass hold."""

    def length(prompt: int) -> int:
        return len(request.prompts[prompt])

    size = max(request.slots // request.sampling.num_samples, 1)
    order = sorted(range(len(request.prompts)), key=length)
    # Beside a longer prompt, a sample that fills its row must not be beyond the context.
    most = request.context_length - request.sampling.max_tokens
    pads = length(order[0]) < length(order[-1]) and may_pad(model)

    def batch(prompt: int) -> int:
        return 0 if pads and length(prompt) <= most else length(prompt)

    for _, prompts in groupby(order, batch):
        together: list[int] = []
        for prompt in prompts:
            is_full = (len(together) + 1) * length(prompt) > PASS_TOKENS
            if together and (is_full or len(together) == size):
                yield together
                together = []
            together.append(prompt)
        yield together


def _draw_together(
    model: nn.Module, request: Request, samples: list[Drawn], seeds: list[int]
) -> None:
    """Draw samples, all to their ends."""
    device = next(model.parameters()).device
    group = request.sampling.num_samples
    uniforms = rng.uniform(torch.tensor(seeds, device=device), request.max_tokens)
    rows = _Rows(model, [request.prompts[each.prompt] for each in samples[::group]])
    rows.take(torch.arange(len(samples) // group, device=device).repeat_interleave(group))
    going = list(range(len(samples)))  # the samples that the rows belong to
    while True:
        count = len(samples[going[0]].tokens)
        counts = torch.full((len(going),), count, device=device)
        drawn = draw_tokens(rows.logits, counts, uniforms[going, count], request.sampling)
        running = [samples[n] for n in going]
        append_tokens(running, drawn)
        kept = [row for row, each in enumerate(running) if not each.end(request)]
        if not kept:
            return
        tokens = drawn[0]
        if len(kept) < len(going):
            going, tokens = [going[row] for row in kept], tokens[kept]
            rows.take(torch.tensor(kept, device=device))
        rows.extend(tokens)


class _Rows:
    """Rows of tokens, padded on the left to one length, and the cache that a model keeps of them.

    Args:
        model: bound to its parameters.
        prompts: a row each.
    """

    def __init__(self, model: nn.Module, prompts: Prompts) -> None:
        device = next(model.parameters()).device
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        padded = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        self._model, self._cache, self._length = model, None, 0
        self._cache_name = cache_name(model)
        self._takes_positions = forward_takes(model, "position_ids")
        # Those of a prompt's other tokens are not read.
        self._keeps = {"logits_to_keep": 1} if forward_takes(model, "logits_to_keep") else {}
        self._padding: Tensor | None = None  # [n] tokens, where there are any
        if min(lengths) < longest:
            self._padding = longest - torch.tensor(lengths, device=device)
        self.logits = self._run(torch.tensor(padded, device=device))  # [n, V], of what follows

    def extend(self, tokens: Tensor) -> None:
        """Add a token [n] to each row."""
        self.logits = self._run(tokens[:, None])

    def take(self, rows: Tensor) -> None:
        """Keep these rows, each as often as it is among them."""
        self.logits = self.logits[rows]
        if self._padding is not None:
            self._padding = self._padding[rows]
        cache: Any = self._cache
        if "batch_select_indices" in vars(type(cache)):  # a model's own cache, such as MiniMax's
            cache.batch_select_indices(rows)
        else:  # as beam search does: the other leaves the states of linear attention as they are
            cache.reorder_cache(rows)

    def _run(self, tokens: Tensor) -> Tensor:
        options: dict[str, Any] = {**self._keeps, self._cache_name: self._cache}
        if self._padding is not None:
            places = torch.arange(self._length + tokens.shape[1], device=tokens.device)
            padding = self._padding[:, None]
            options["attention_mask"] = (places >= padding).long()
            if self._takes_positions:
                options["position_ids"] = (places[self._length :] - padding).clamp(min=0)
        found = self._model(input_ids=tokens, use_cache=True, **options)
        self._cache = getattr(found, self._cache_name)
        self._length += tokens.shape[1]
        logits: Tensor = found.logits[:, -1]
        return logits


def _gives_padded_rows_their_logits(model: nn.Module) -> bool:
    """Return whether a row has the same logits when it is padded on the left, up to rounding."""
    if not forward_takes(model, "attention_mask"):
        return False
    device = next(model.parameters()).device
    prompts, tokens = [[1], [2, 1, 2]], torch.tensor([2, 1], device=device)
    try:
        together, alone = _Rows(model, prompts), [_Rows(model, [each]) for each in prompts]
        found, wanted = [together.logits], [each.logits for each in alone]
        together.extend(tokens)
        for row, each in enumerate(alone):
            each.extend(tokens[row, None])
    except Exception:  # whatever a forward raises that has no such mask
        return False
    found, wanted = [*found, together.logits], [*wanted, *(each.logits for each in alone)]
    difference = (torch.cat(found) - torch.cat(wanted)).abs().max()
    rounding = torch.finfo(together.logits.dtype).eps ** 0.5 * torch.cat(wanted).abs().max()
    return bool(difference < rounding)  # equal zeros say nothing

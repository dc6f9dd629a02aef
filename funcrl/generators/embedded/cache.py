"""The forward pass on a KV cache: prefill, then decode token by token."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.generators.contract import Prompts, padded_prompts
from funcrl.generators.embedded.schedule import Drawn
from funcrl.models import Memory, Past, Transformer
from funcrl.models.layers import MixFn
from funcrl.models.transformer import LayerFn

# What a layer keeps of M samples: [M, K, S, 2 C], a key and its value side by side; or a memory,
# whose parts have M rows.
Kept: TypeAlias = Tensor | Memory


class Prefix(NamedTuple):
    """What N prompts leave behind, and what comes next."""

    kept: list[Kept]  # of each layer
    logits: Tensor  # [N, V] after each prompt's last token


class CachedTransformer:
    """A `Transformer` bound to its parameters, and what its layers keep of the samples."""

    def __init__(self, model: Transformer, rows: int, places: int) -> None:
        self._model = model
        self._cache = empty_cache(model, rows, places, model.norm.weight)

    def prefill(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Run the prompts once, and share what they leave with their samples."""
        tokens, lengths = padded_prompts(prompts, self._model.norm.weight.device)
        prefix = prefill(self._model, tokens, lengths)
        write_prefix(self._cache, prefix, rows, group)
        return prefix.logits.repeat_interleave(group, dim=0)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Run one more token of each sample."""
        return extend(self._model, self._cache, tokens, positions, longest)

    def evict(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep nothing of samples that have ended."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy what is kept of some samples to other rows."""
        for layer in self._cache:
            if isinstance(layer, Memory):
                for part in layer:
                    part[to] = part[origin]
            else:
                layer[to, :, places] = layer[origin, :, places]


def empty_cache(model: Transformer, samples: int, places: int, like: Tensor) -> list[Kept]:
    """Return what each layer keeps of so many samples, zeros on the device of `like`.

    Keys and values are in its dtype. Place s of S holds the token at position s; a key and its
    value lie side by side, so that both are written at once.
    """
    c = model.config
    zeros = like.new_zeros

    def of_layer(kind: str) -> Kept:
        if kind != "delta":
            return zeros(samples, c.num_kv_heads, places, 2 * c.head_width)
        state = samples, c.delta_heads, c.delta_key_width, c.delta_value_width
        history = zeros(samples, c.delta_conv - 1, c.delta_channels)
        return Memory(history, zeros(state, dtype=at_least_float32(like.dtype)))

    return [of_layer(kind) for kind in c.kinds]


def write_prefix(cache: Sequence[Kept], prefix: Prefix, rows: slice, group: int) -> None:
    """Write what prompts leave into some rows of a cache, each prompt's `group` times."""
    for layer, kept in zip(cache, prefix.kept, strict=True):
        if isinstance(layer, Memory):
            for whole, part in zip(layer, kept, strict=True):
                whole[rows] = part.repeat_interleave(group, dim=0)
        else:
            assert isinstance(kept, Tensor)
            layer[rows, :, : kept.shape[2]] = kept.repeat_interleave(group, dim=0)


def prefill(model: Transformer, prompts: Tensor, lengths: Tensor) -> Prefix:
    """Return the prefix of each prompt [N, P], padded on the right, in one forward pass.

    Args:
        model: bound to its parameters.
        prompts: [N, P] tokens.
        lengths: [N] each prompt's own length.
    """
    kept: list[Kept] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
        kept.append(torch.cat([k, v], dim=-1))
        # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
        return model.ops.attend_prompts(q, k, v, **window)

    def recur(mix: MixFn) -> Tensor:
        outputs, memory = mix(Past(lengths=lengths))
        kept.append(memory)
        return outputs

    def next_logits(x: Tensor, _weight: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return model.logits(x[rows, lengths - 1])

    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    layers = model.each_layer(attend, recur)
    logits: Tensor = model(prompts, positions, attend=layers, head=next_logits)
    return Prefix(kept, logits)


def extend(
    model: Transformer, cache: Sequence[Kept], tokens: Tensor, positions: Tensor, longest: int
) -> Tensor:
    """Return logits [n, V] after one more token of the cache's first n samples.

    Writes what the tokens leave into the cache, which belongs to the caller.

    Args:
        model: bound to its parameters.
        cache: of at least n samples.
        tokens: [n].
        positions: [n], where each token stands in its sample.
        longest: the highest of the positions.
    """
    layers = _layers(model, cache, positions, longest)

    def last_logits(x: Tensor, _weight: Tensor) -> Tensor:
        return model.logits(x[:, -1])

    logits: Tensor = model(tokens[:, None], positions[:, None], attend=layers, head=last_logits)
    return logits


def _layers(
    model: Transformer, cache: Sequence[Kept], positions: Tensor, longest: int
) -> list[LayerFn]:
    """Return the function of each layer for one token of each sample, which it writes."""
    keys_of_layers = [layer for layer in cache if isinstance(layer, Tensor)]
    attends = iter(_attends(model, keys_of_layers, positions, longest))
    return [
        _recur_on(layer, len(positions)) if isinstance(layer, Memory) else next(attends)
        for layer in cache
    ]


def _attends(
    model: Transformer, layers: Sequence[Tensor], positions: Tensor, longest: int
) -> list[LayerFn]:
    """Return the attention of one token of each sample on each of these layers."""
    if not layers:
        return []
    num_heads, num_places, width = layers[0].shape[1:]
    starts = torch.arange(len(positions) * num_heads, device=positions.device) * num_places
    written = starts + positions.repeat_interleave(num_heads)
    attend_last = model.ops.attend_last(positions, layers[0], longest + 1)

    def on_layer(layer: Tensor) -> LayerFn:
        rows = layer.view(-1, width)  # one for each sample, head and place
        keys, values = layer[: len(positions), :, : longest + 1].chunk(2, dim=-1)

        def attend(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
            rows.index_copy_(0, written, torch.cat([k, v], dim=-1).view(-1, width))
            return attend_last(q, keys, values, **window)

        return attend

    return [on_layer(layer) for layer in layers]


def _recur_on(layer: Memory, count: int) -> LayerFn:
    """Return the recurrence of the first `count` samples, whose memory it writes."""
    memory = Memory(*(part[:count] for part in layer))

    def recur(mix: MixFn) -> Tensor:
        outputs, after = mix(Past(memory))
        for part, new in zip(memory, after, strict=True):
            part.copy_(new)
        return outputs

    return recur

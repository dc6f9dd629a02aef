"""The forward pass on a cache of keys and values: prompts at once, then a token at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.generators.embedded.drawn import Drawn
from funcrl.generators.embedded.entering import padded_prompts
from funcrl.generators.prompts import Prompts
from funcrl.models import Transformer
from funcrl.ops import AttendFn


class Prefix(NamedTuple):
    """What a prompt leaves behind: its keys and values a layer, and what comes next."""

    pairs: list[Tensor]  # L of [N, K, P, 2 C], a key and its value side by side
    logits: Tensor  # [N, V] after each prompt's last token


class CachedTransformer:
    """A `Transformer` bound to its parameters, and the keys and values of the samples."""

    def __init__(self, model: Transformer, rows: int, places: int) -> None:
        self._model = model
        self._cache = empty_cache(model, rows, places, model.norm.weight)

    def enter(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Run the prompts once, and share what they leave with their samples."""
        tokens, lengths = padded_prompts(prompts, self._cache.device)
        prefix = prefill(self._model, tokens, lengths)
        for layer, pairs in zip(self._cache, prefix.pairs, strict=True):
            layer[rows, :, : tokens.shape[1]] = pairs.repeat_interleave(group, dim=0)
        return prefix.logits.repeat_interleave(group, dim=0)

    def extend(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Run one more token of each sample."""
        return extend(self._model, self._cache, tokens, positions, longest)

    def leave(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep nothing of samples that have ended."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the keys and values of some samples to other rows."""
        self._cache[:, to, :, places] = self._cache[:, origin, :, places]


def empty_cache(model: Transformer, samples: int, places: int, like: Tensor) -> Tensor:
    """Return a cache of zeros [L, M, K, S, 2 C] in the dtype and on the device of `like`.

    Place s of S holds the token at position s; a key and its value lie side by side, so that both
    are written at once.
    """
    c = model.config
    shape = (c.num_layers, samples, c.num_kv_heads, places, 2 * c.head_width)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def prefill(model: Transformer, prompts: Tensor, lengths: Tensor) -> Prefix:
    """Return the prefix of each prompt [N, P], padded on the right, in one forward pass.

    Args:
        model: bound to its parameters.
        prompts: [N, P] tokens.
        lengths: [N] each prompt's own length.
    """
    pairs: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs.append(torch.cat([k, v], dim=-1))
        # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
        return model.ops.attend_prompts(q, k, v)

    def next_logits(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return model.ops.linear(x[rows, lengths - 1], weight, None)

    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    logits = model(prompts, positions, attend=attend, head=next_logits)
    return Prefix(pairs, logits)


def extend(
    model: Transformer, cache: Tensor, tokens: Tensor, positions: Tensor, longest: int
) -> Tensor:
    """Return logits [n, V] after one more token of the cache's first n samples.

    Writes the tokens' keys and values into the cache, which belongs to the caller.

    Args:
        model: bound to its parameters.
        cache: of at least n samples.
        tokens: [n].
        positions: [n], where each token stands in its sample.
        longest: the highest of the positions.
    """
    num_samples, (num_heads, num_places, width) = len(tokens), cache.shape[2:]
    starts = torch.arange(num_samples * num_heads, device=tokens.device) * num_places
    written = starts + positions.repeat_interleave(num_heads)
    attend_last = model.ops.attend_last(positions, cache[0], longest + 1)

    def on_layer(layer: Tensor) -> AttendFn:
        rows = layer.view(-1, width)  # one for each sample, head and place
        keys, values = layer[:num_samples, :, : longest + 1].chunk(2, dim=-1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows.index_copy_(0, written, torch.cat([k, v], dim=-1).view(-1, width))
            return attend_last(q, keys, values)

        return attend

    def last_logits(x: Tensor, weight: Tensor) -> Tensor:
        return model.ops.linear(x[:, -1], weight, None)

    attends = [on_layer(layer) for layer in cache]
    return model(tokens[:, None], positions[:, None], attend=attends, head=last_logits)

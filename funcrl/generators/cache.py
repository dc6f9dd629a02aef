"""The forward pass on a cache of keys and values: prompts at once, then a token at a time."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from funcrl.models import Transformer
from funcrl.ops import AttendFn


class Cache(NamedTuple):
    """Keys and values of M samples, S places each; place s holds the token at position s."""

    keys: Tensor  # [L, M, K, S, C]
    values: Tensor  # [L, M, K, S, C]


class Prefix(NamedTuple):
    """What a prompt leaves behind: its keys and values a layer, and what comes next."""

    keys: list[Tensor]  # L of [N, K, P, C]
    values: list[Tensor]
    logits: Tensor  # [N, V] after each prompt's last token


def empty_cache(model: Transformer, samples: int, places: int, like: Tensor) -> Cache:
    """Return a cache of zeros in the dtype and on the device of `like`.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.generators.cache import empty_cache
        >>> model = funcrl.models.Transformer(funcrl.models.TransformerConfig(num_layers=2))
        >>> empty_cache(model, samples=3, places=5, like=torch.zeros(1)).keys.shape
        torch.Size([2, 3, 2, 5, 32])
    """
    c = model.config
    shape = (c.num_layers, samples, c.num_kv_heads, places, c.head_width)
    return Cache(*(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in Cache._fields))


def prefill(model: Transformer, prompts: Tensor, lengths: Tensor) -> Prefix:
    """Return the prefix of each prompt [N, P], padded on the right, in one forward pass.

    Args:
        model: bound to its parameters.
        prompts: [N, P] tokens.
        lengths: [N] each prompt's own length.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.functional import bind
        >>> from funcrl.generators.cache import prefill
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> bound = bind(model, funcrl.init_params(model, seed=0))
        >>> prefill(bound, torch.tensor([[1, 2, 3]]), torch.tensor([3])).logits.shape
        torch.Size([1, 7])
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def next_logits(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return model.ops.linear(x[rows, lengths - 1], weight, None)

    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    logits = model(prompts, positions, attend=attend, head=next_logits)
    return Prefix(keys, values, logits)


def extend(
    model: Transformer, cache: Cache, tokens: Tensor, positions: Tensor, longest: int
) -> Tensor:
    """Return logits [n, V] after one more token of the cache's first n samples.

    Writes the tokens' keys and values into the cache, which belongs to the caller.

    Args:
        model: bound to its parameters.
        cache: of at least n samples.
        tokens: [n].
        positions: [n], where each token stands in its sample.
        longest: the highest of the positions.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.functional import bind
        >>> from funcrl.generators.cache import empty_cache, extend
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> bound = bind(model, funcrl.init_params(model, seed=0))
        >>> cache = empty_cache(model, samples=2, places=4, like=torch.zeros(1))
        >>> extend(bound, cache, torch.tensor([3]), torch.tensor([0]), longest=0).shape
        torch.Size([1, 7])
    """
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    places = torch.arange(longest + 1, device=tokens.device)
    hidden = (places > positions[:, None]).repeat_interleave(model.config.num_kv_heads, dim=0)
    bias = torch.zeros_like(hidden, dtype=cache.keys.dtype).masked_fill_(hidden, -torch.inf)

    def on_layer(keys: Tensor, values: Tensor) -> AttendFn:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[rows, :, positions] = k[..., 0, :]
            values[rows, :, positions] = v[..., 0, :]
            seen = (slice(len(rows)), slice(None), slice(longest + 1))
            return _attend_last(q, keys[seen], values[seen], bias[:, None])

        return attend

    attends = [on_layer(k, v) for k, v in zip(cache.keys, cache.values, strict=True)]

    def last_logits(x: Tensor, weight: Tensor) -> Tensor:
        return model.ops.linear(x[:, -1], weight, None)

    return model(tokens[:, None], positions[:, None], attend=attends, head=last_logits)


def _attend_last(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return attention of one query a sample, [n, H, 1, C], over [n, K, S, C]."""
    n, num_heads, _, head_width = q.shape
    # One product for each sample and key head; the slices of the cache are views all the way.
    q = q.reshape(n * k.shape[1], -1, head_width)
    scores = torch.baddbmm(bias, q, k.flatten(0, 1).mT, alpha=head_width**-0.5)
    attended = torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1))
    return attended.view(n, num_heads, 1, head_width)

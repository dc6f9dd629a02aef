"""Native attention for generators: no gradients, and keys that stand in a cache."""

import functools

import torch
from torch import Tensor, nn

from funcrl.core.arguments import Count, checked
from funcrl.ops.contract import AttendFn


@checked
def attend_prompts(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
    """Return causal attention by torch's fastest kernel, to the last tokens with a window."""
    length = q.shape[-2]
    if window is None or window >= length:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@checked
def attend_last(positions: Tensor, layer: Tensor, places: int) -> AttendFn:
    """Return attention of one token a sample over the keys up to its position.

    Args:
        positions: [n], where each token stands in its sample.
        layer: [n, K, S, 2 C], a layer of the cache.
        places: the number of places in use.
    """
    last = positions.repeat_interleave(layer.shape[1])[:, None]
    keys_at = torch.arange(places, device=positions.device)

    @functools.cache  # once for all layers of a kind
    def bias_of(window: int | None) -> Tensor:
        hidden = keys_at > last
        if window is not None:
            hidden |= keys_at <= last - window
        bias = torch.zeros_like(hidden, dtype=layer.dtype).masked_fill_(hidden, -torch.inf)
        return bias[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        # One product for each sample and key head; the slices of the cache are views all the way.
        keys, values = (part.flatten(0, 1) for part in (k, v))
        rows = q.reshape(len(keys), -1, q.shape[-1])
        scores = torch.baddbmm(bias_of(window), rows, keys.mT, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)

    return attend

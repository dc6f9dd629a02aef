"""Native attention for generators: no gradients, and keys that stand in a cache."""

import torch
from torch import Tensor, nn

from funcrl.core.arguments import checked
from funcrl.ops.contract import AttendFn


@checked
def attend_prompts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch's fastest kernel."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@checked
def attend_last(positions: Tensor, layer: Tensor, places: int) -> AttendFn:
    """Return attention of one token a sample over the keys up to its position.

    Args:
        positions: [n], where each token stands in its sample.
        layer: [n, K, S, 2 C], a layer of the cache.
        places: the number of places in use.
    """
    last = positions.repeat_interleave(layer.shape[1])
    hidden = (torch.arange(places, device=positions.device) > last[:, None])[:, None]
    bias = torch.zeros_like(hidden, dtype=layer.dtype).masked_fill_(hidden, -torch.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # One product for each sample and key head; the slices of the cache are views all the way.
        keys, values = (part.flatten(0, 1) for part in (k, v))
        rows = q.reshape(len(keys), -1, q.shape[-1])
        scores = torch.baddbmm(bias, rows, keys.mT, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)

    return attend

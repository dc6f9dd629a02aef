"""The forward pass on a cache of pages: prompts at once, then one token of each sample.

A page holds the keys and values of `SIZE` places for all heads. Each row has a table of pages, in
which place p is at `table[p // SIZE]`. A place of -1 belongs to no sample and sees nothing; where a
prompt's padding has one, it is written to the page `SCRAP`, which no sample has.
"""

import torch
from torch import Tensor

from funcrl.models import Transformer, TransformerConfig
from funcrl.ops import AttendFn
from funcrl.ops.exact.paged import Sharing, attend_new

SIZE = 64  # attention takes as many keys at a time
SCRAP = 0


def empty_pages(config: TransformerConfig, count: int, like: Tensor) -> Tensor:
    """Return a cache of zeros [L, pages, K, SIZE, 2 C] in the dtype and on the device of `like`.

    A key and its value lie side by side, so that both are written at once.

    Args:
        config: of the network.
        count: the number of pages of a layer.
        like: a tensor.
    """
    shape = (config.num_layers, count, config.num_kv_heads, SIZE, 2 * config.head_width)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def extend_paged(
    network: Transformer,
    cache: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tables: Tensor,
    sharing: Sharing,
) -> Tensor:
    """Return logits [n, V] after one more token of each row, whose keys and values are written.

    All work is queued on the device, and no value is read by the host.

    Args:
        network: of the exact operations, bound to its parameters.
        cache: [L, pages, K, SIZE, 2 C], which belongs to the caller.
        tokens: [n].
        positions: [n] where each token stands in its sample, -1 for a row without a sample.
        tables: [n, W] the pages of each row.
        sharing: which rows share their first pages.
    """

    def on_layer(layer: Tensor) -> AttendFn:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.squeeze(2), k.squeeze(2), v.squeeze(2)
            return attend_new(q, k, v, layer, tables, positions, sharing).unsqueeze(2)

        return attend

    def last_logits(x: Tensor, weight: Tensor) -> Tensor:
        return network.ops.linear(x[:, -1], weight, None)

    logits: Tensor = network(
        tokens[:, None], positions[:, None], attend=list(map(on_layer, cache)), head=last_logits
    )
    return logits


def prefill_paged(
    network: Transformer,
    cache: Tensor,
    prompts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    copies: Tensor,
) -> Tensor:
    """Return logits [N, V] after the last token of each prompt, whose keys and values are written.

    Args:
        network: of the exact operations, bound to its parameters.
        cache: [L, pages, K, SIZE, 2 C], which belongs to the caller.
        prompts: [N, P] tokens, padded on the right.
        lengths: [N] each prompt's own length.
        tables: [N, W] the pages of each prompt.
        copies: [2, m] pages to copy once they are written, and the pages to copy them to.
    """
    places = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    own = places.masked_fill(places >= lengths[:, None], -1)
    written = _places_in_cache(cache, tables, own)
    origin, to = copies

    def on_layer(layer: Tensor) -> AttendFn:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            _write(layer, written, k, v)
            if len(to):
                layer.index_copy_(0, to, layer.index_select(0, origin))
            # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
            return network.ops.attend_prompts(q, k, v)

        return attend

    def next_logits(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        return network.ops.linear(x[rows, lengths - 1], weight, None)

    logits: Tensor = network(prompts, places, attend=list(map(on_layer, cache)), head=next_logits)
    return logits


def _write(layer: Tensor, written: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values [n, K, P, C] to their places in a layer of the cache."""
    width = layer.shape[-1]
    layer.view(-1, width).index_copy_(0, written, torch.cat([k, v], dim=-1).view(-1, width))


def _places_in_cache(cache: Tensor, tables: Tensor, places: Tensor) -> Tensor:
    """Return the rows [n K P] of a layer, seen as [pages K SIZE, 2 C], of places [n, P]."""
    num_heads = cache.shape[2]
    pages = tables.gather(1, places.clamp(min=0) // SIZE).masked_fill(places < 0, SCRAP)
    heads = torch.arange(num_heads, device=cache.device)[:, None]
    in_page = (places % SIZE)[:, None]
    return ((pages[:, None] * num_heads + heads) * SIZE + in_page).view(-1)

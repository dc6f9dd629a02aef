"""Attention in torch's operations: causal, by segments, and of prompts and caches."""

import functools

import torch
from einops import rearrange
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Absent
from funcrl.ops.contract import AttendFn


def starts(segment_ids: Tensor) -> Tensor:
    """Return whether each token is the first of its segment; those of a segment are neighbours."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return torch.cat([torch.ones_like(segment_ids[..., :1], dtype=torch.bool), changes], dim=-1)


def first_places(segment_ids: Tensor) -> Tensor:
    """Return where the segment of each token begins."""
    places = torch.arange(segment_ids.shape[-1], device=segment_ids.device)
    return torch.where(starts(segment_ids), places, 0).cummax(dim=-1).values


def spans_of_prefixes(segment_ids: Tensor, prefix_ids: Tensor, first: Tensor) -> Tensor:
    """Return [..., T, 2], the first place and the length of each token's prefix, 0 for none.

    Args:
        segment_ids: [..., T], -1 on padding.
        prefix_ids: [..., T], the segment that is a token's prefix, -1 for none.
        first: of `first_places`.
    """
    length = segment_ids.shape[-1]
    ends = length - first_places(segment_ids.flip(-1)).flip(-1)
    # Tables by segment, and one place more, for padding. All tokens of a segment write the same.
    segment = torch.where(segment_ids < 0, length, segment_ids)
    prefix = torch.where(prefix_ids < 0, length, prefix_ids)
    table = first.new_zeros(*first.shape[:-1], length + 1)
    begins, counts = (table.scatter(-1, segment, each) for each in (first, ends - first))
    spans = torch.stack([begins.gather(-1, prefix), counts.gather(-1, prefix)], dim=-1)
    return torch.where(prefix_ids[..., None] < 0, 0, spans)


@checked
def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
    """Return softmax attention in which a token sees itself and all tokens before it.

    Query head h reads key head h // (H / K): grouped-query attention (arXiv:2305.13245).

    Args:
        q: [..., H, T, C].
        k: [..., K, T, C].
        v: [..., K, T, C].
        window: the number of tokens that each one sees, itself included; all when left out.

    Example:
        >>> import torch, funcrl
        >>> q, k, v = torch.zeros(2, 2, 1), torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]])
        >>> funcrl.ops.attend_causal(q, k, v).squeeze(-1)
        tensor([[1., 2.],
                [1., 2.]])
        >>> funcrl.ops.attend_causal(q, k, v, window=1).squeeze(-1)
        tensor([[1., 3.],
                [1., 3.]])
    """
    hidden = _future(q)
    if window is not None:
        hidden = hidden | _outside(torch.arange(q.shape[-2], device=q.device), window)
    return attend_hidden(q, k, v, hidden)


@checked
def attend_segments(segment_ids: Tensor, prefix_ids: Tensor | Absent = ()) -> AttendFn:
    """Return causal attention within segments, for a row that packs many samples.

    The function takes a window, too, as `attend_causal` does: the last tokens of a prefix and its
    sample together.

    Args:
        segment_ids: [T], equal for the tokens of one sample, which are neighbours; -1 on padding.
        prefix_ids: [T], the segment of which each token sees all tokens too, -1 for none; none has
            one when left out.

    Example:
        >>> import torch, funcrl
        >>> zero, v = torch.zeros(1, 3, 1), torch.tensor([[[1.0], [3.0], [8.0]]])
        >>> attend = funcrl.ops.attend_segments(torch.tensor([0, 0, 1]))
        >>> attend(zero, zero, v).squeeze(-1)
        tensor([[1., 2., 8.]])
        >>> attend = funcrl.ops.attend_segments(torch.tensor([0, 0, 1]), torch.tensor([-1, -1, 0]))
        >>> attend(zero, zero, v).squeeze(-1)
        tensor([[1., 2., 4.]])
    """
    checks.check_rank("attend_segments", "segment_ids", segment_ids, "T")
    others = segment_ids[:, None] != segment_ids[None, :]
    unshared = torch.ones_like(others)
    if not isinstance(prefix_ids, tuple):
        shape = segment_ids.shape
        checks.check_shape("attend_segments", "prefix_ids", prefix_ids, "segment_ids", shape)
        prefix = prefix_ids[:, None]
        unshared = (prefix != segment_ids[None, :]) | (prefix < 0)

    @checked
    def attend(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
        hidden = (_future(q) | others) & unshared
        if window is not None:
            hidden = hidden | _outside(_places(segment_ids, prefix_ids), window)
        return attend_hidden(q, k, v, hidden)

    return attend


@checked
def attend_hidden(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Return softmax attention in which query t does not see key s where `hidden[t, s]`.

        softmax(q k^T / sqrt(C)) v

    Args:
        q: [..., H, T, C].
        k: [..., K, S, C].
        v: [..., K, S, C].
        hidden: [..., T, S] bool, over the axes before the heads; no row may be all True.

    Example:
        >>> import torch, funcrl
        >>> zero, v = torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]])
        >>> hidden = torch.tensor([[False, True], [True, False]])
        >>> funcrl.ops.attend_hidden(zero, zero, v, hidden).squeeze(-1)
        tensor([[1., 3.]])
    """
    num_kv_heads, length = k.shape[-3], q.shape[-2]
    # The queries of one key head as rows of one product: nothing is repeated.
    q = rearrange(q, "... (k g) t c -> ... k (g t) c", k=num_kv_heads)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
    scores = rearrange(scores, "... k (g t) s -> ... k g t s", t=length)
    scores = scores.masked_fill(hidden[..., None, None, :, :], -torch.inf)
    weights = rearrange(torch.softmax(scores, dim=-1), "... k g t s -> ... k (g t) s")
    return rearrange(weights @ v, "... k (g t) c -> ... (k g) t c", t=length)


def _outside(places: Tensor, window: int) -> Tensor:
    """Return [T, T], where a key stands too far before a query for a window."""
    return places[:, None] - places >= window


def _places(segment_ids: Tensor, prefix_ids: Tensor | Absent) -> Tensor:
    """Return where each token stands in its sample, whose prefix comes first."""
    first = first_places(segment_ids)
    places = torch.arange(len(segment_ids), device=segment_ids.device) - first
    if isinstance(prefix_ids, tuple):
        return places
    return places + spans_of_prefixes(segment_ids, prefix_ids, first)[:, 1]


def _future(q: Tensor) -> Tensor:
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)


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

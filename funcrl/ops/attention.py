"""Attention functions, an argument of a model: they say which tokens see which."""

import torch
from einops import rearrange
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Absent
from funcrl.ops.contract import AttendFn
from funcrl.ops.segments import first_places, spans_of_prefixes


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

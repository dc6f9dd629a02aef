"""Who sees whom: attention functions that a model takes as an argument."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# (q [..., H, T, C], k [..., H, T, C], v [..., H, T, C]) -> [..., H, T, C]
AttendFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax attention in which a token sees itself and what came before.

    Args:
        q: [..., T, C].
        k: [..., T, C].
        v: [..., T, C].

    Example:
        >>> import torch, funcrl
        >>> v = torch.tensor([[1.0], [3.0]])
        >>> funcrl.ops.attend_causal(torch.zeros(2, 1), torch.zeros(2, 1), v)
        tensor([[1.],
                [2.]])
    """
    return _attend(q, k, v, _future(q))


def attend_segments(segment_ids: Tensor) -> AttendFn:
    """Return causal attention within segments, for a row that packs many samples.

    Args:
        segment_ids: [T], equal for the tokens of one sample, -1 on padding.

    Example:
        >>> import torch, funcrl
        >>> attend = funcrl.ops.attend_segments(torch.tensor([0, 0, 1]))
        >>> zero, v = torch.zeros(3, 1), torch.tensor([[1.0], [3.0], [8.0]])
        >>> attend(zero, zero, v)
        tensor([[1.],
                [2.],
                [8.]])
    """
    others = segment_ids[:, None] != segment_ids[None, :]
    return lambda q, k, v: _attend(q, k, v, _future(q) | others)


def _future(q: Tensor) -> Tensor:
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v

"""Where the samples of a packed row begin, and where the prefixes that they see lie."""

import torch
from torch import Tensor


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

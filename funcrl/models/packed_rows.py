"""Whether a model function knows that a row may hold many samples."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from funcrl.core.types import ExactModelFn, ModelFn, PackedBatch, Params, TokenScores


def reading_segments(function: str, model_fn: ModelFn) -> ModelFn:
    """Return the model function with a check that it reads where the samples of packed rows lie.

    One that reads tokens and positions alone takes a packed row for one sample, in which each token
    sees all tokens before it. It must read `segment_ids`, and `prefix_ids` where they are given.

    Args:
        function: for errors.
        model_fn: `(params, sample) -> TokenScores`.
    """
    if isinstance(model_fn, ExactModelFn | _ReadingSegments):  # those of `logprob_fn` read them
        return model_fn
    return _ReadingSegments(function, model_fn)


@dataclass(frozen=True)
class _ReadingSegments:
    function: str
    model_fn: ModelFn

    def __call__(self, params: Params, sample: Any) -> TokenScores:
        if not isinstance(sample, PackedBatch):
            return self.model_fn(params, sample)
        read: set[str] = set()
        scores = self.model_fn(params, _watched(sample, read))
        needed = ["segment_ids", *(["prefix_ids"] if isinstance(sample.prefix_ids, Tensor) else [])]
        unread = [name for name in needed if name not in read]
        if unread:
            raise ValueError(
                f"{self.function} expects one sample a row, a Batch, for a model_fn that does not "
                f"read sample.{unread[0]}, got a PackedBatch: it would let a sample see those "
                f"beside it. funcrl.collate makes a Batch, and so does --packing none."
            )
        return scores


def _watched(row: PackedBatch, read: set[str]) -> PackedBatch:
    """Return the row, which adds the names of the fields that are read of it to `read`.

    Rows that are made of it, by `_replace` or by a function over trees, add to it as well. To go
    through all fields, as these do, is to read none: what they mean is in their names.
    """

    class WatchedRow(PackedBatch):
        def __getattribute__(self, name: str) -> Any:
            if name in PackedBatch._fields:
                read.add(name)
            return super().__getattribute__(name)

        def __getitem__(self, place: Any) -> Any:
            found = PackedBatch._fields[place]
            read.update([found] if isinstance(found, str) else found)
            return super().__getitem__(place)

    return WatchedRow(*row)

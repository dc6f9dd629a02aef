"""Whether a model function knows that a row may hold many samples."""

from typing import Any

from funcrl.core.types import ExactModelFn, ModelFn, PackedBatch, Params, TokenScores

_FIELDS = frozenset(PackedBatch._fields)
_IDS = {"segment_ids", "prefix_ids"}


def reading_segments(function: str, model_fn: ModelFn) -> ModelFn:
    """Return the model function with a check that it reads where the samples of packed rows lie.

    One that reads tokens and positions alone takes a packed row for one sample, in which each token
    sees all tokens before it. It must read `segment_ids`, and `prefix_ids` where they are given.

    Args:
        function: for errors.
        model_fn: `(params, sample) -> TokenScores`.
    """
    if isinstance(model_fn, ExactModelFn):
        return model_fn  # of `logprob_fn`, which reads them

    def scores_of(params: Params, sample: Any) -> TokenScores:
        if not isinstance(sample, PackedBatch):
            return model_fn(params, sample)
        read: set[str] = set()
        scores = model_fn(params, _watched(sample, read))
        needed = {"segment_ids"} if isinstance(sample.prefix_ids, tuple) else _IDS
        unread = sorted(needed - read, reverse=True)
        if unread:
            raise ValueError(
                f"{function} expects one sample a row, a Batch, for a model_fn that does not read "
                f"sample.{unread[0]}, got a PackedBatch: it would let a sample see those beside "
                f"it. funcrl.collate makes a Batch, and so does --packing none."
            )
        return scores

    return scores_of


def _watched(row: PackedBatch, read: set[str]) -> PackedBatch:
    """Return the row, which adds the names of the fields that are read of it to `read`.

    Rows that are made of it, by `_replace` or by a function over trees, add to it as well.
    """

    class WatchedRow(PackedBatch):
        def __getattribute__(self, name: str) -> Any:
            if name in _FIELDS:
                read.add(name)
            return super().__getattribute__(name)

        def __iter__(self) -> Any:
            read.update(_FIELDS)
            return super().__iter__()

        def __getitem__(self, place: Any) -> Any:
            read.update(_FIELDS)
            return super().__getitem__(place)

        def _replace(self, **changes: Any) -> Any:
            fields = dict(zip(PackedBatch._fields, tuple.__iter__(self), strict=True))
            return type(self)(**fields | changes)

    return WatchedRow(*row)

"""Counts what a network computes in by a run on meta tensors, which have no numbers."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from funcrl.config import TrainConfig
from funcrl.core.types import Params, Sample
from funcrl.graph.grouped_mm import GroupedOfAnyDtype
from funcrl.loop.block_memory import Rows, Work
from funcrl.models import Recurrent
from funcrl.models.functional import functional
from funcrl.models.networks import (
    cache_name,
    is_of_transformers,
    keeps_cache,
    logits_fn,
    runs_under_vmap,
)

_Found = TypeVar("_Found")


class Uncounted(ValueError):
    """What a network keeps is not known: the error names the network."""


class Row(NamedTuple):
    """A forward pass of a row."""

    kept: int  # bytes, for its backward pass
    vocabulary: int  # logits of a token


def work_of_module(config: TrainConfig, model: nn.Module, sizes: Rows, logits: int) -> Work:
    """Return what a network computes in, with `logits_bytes`."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    by_row = is_of_transformers(model) and not _once(  # one after the other
        model, "vmap", lambda: runs_under_vmap(model)
    )
    row = forward_of_row(model, sizes.padded, dtype)
    return Work(
        kept=row.kept * (1 if by_row else sizes.rows),
        logits=logits * row.vocabulary,
        of_teacher=logits * row.vocabulary,
        recomputed=_of_scan(model) * sizes.rows * sizes.padded * dtype.itemsize,
        cache=sizes.slots * cached_by_row(model, sizes.length, dtype),
        is_captured=False,
        has_layout=False,
    )


def _of_scan(model: nn.Module) -> int:
    """Return a token's numbers in the gradient of a layer's scan: of its gates, in two layouts."""
    if not isinstance(model, Recurrent):
        return 0
    return {"lstm": 9, "gru": 12}[model.config.cell] * model.config.width


def forward_of_row(model: nn.Module, length: int, dtype: torch.dtype) -> Row:
    """Return what the logits of a row's tokens keep for their backward pass, and their number."""

    def count(params: Params) -> Row:
        read = {_storage(leaf) for leaf in params.values()}
        kept: dict[int, Tensor] = {}  # by its storage; alive, so that no other has its place

        def keep(saved: Tensor) -> Tensor:
            if _storage(saved) not in read:
                kept[_storage(saved)] = saved
            return saved

        tokens = _tokens(length)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda same: same):
            logits = logits_fn(model)(params, Sample(tokens, tokens))
        num_bytes = sum(saved.untyped_storage().nbytes() for saved in kept.values())
        return Row(num_bytes, logits.shape[-1])

    return _once(model, ("forward", length, dtype), lambda: _counted(count, model, dtype))


def cached_by_row(model: nn.Module, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the cache that a sample of this length is decoded with."""
    if not keeps_cache(model):
        return 0

    def count(params: Params) -> int:
        with torch.no_grad():
            found = functional(model)(params, input_ids=_tokens(length)[None], use_cache=True)
        cache = getattr(found, cache_name(model))
        kept = {_storage(tensor): tensor for tensor in _tensors_in(cache)}
        return sum(tensor.nbytes for tensor in kept.values())

    return _once(model, ("cache", length, dtype), lambda: _counted(count, model, dtype))


# Choosing options asks for the same of a model many times. No model is kept alive by it.
_FOUND: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def _once(model: nn.Module, key: Hashable, find: Callable[[], _Found]) -> _Found:
    """Return what a function finds of a model, which is remembered as long as that is there."""
    known = _FOUND.setdefault(model, {})
    if key not in known:
        known[key] = find()
    found: _Found = known[key]
    return found


def _counted(count: Callable[[Params], _Found], model: nn.Module, dtype: torch.dtype) -> _Found:
    """Return what a function counts for a model's tensors on meta."""
    params = {
        name: leaf.detach().to("meta", dtype).requires_grad_()
        for name, leaf in model.named_parameters()
    }
    buffers = {name: leaf.to("meta") for name, leaf in model.named_buffers()}
    try:
        with GroupedOfAnyDtype():  # type: ignore[no-untyped-call]  # (torch's own)
            return count(params | buffers)
    except Exception as error:  # whatever a forward raises where its tensors are on meta
        raise Uncounted(f"{type(model).__name__}, which does not run on meta tensors") from error


def _tokens(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.int64, device="meta")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache of transformers, which has objects for its layers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        parts = value if isinstance(value, dict) else vars(value)
        for name, part in parts.items():
            if name != "config":
                yield from _tensors_in(part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

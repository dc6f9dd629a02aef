"""Counts what a model of transformers computes in, by a run on meta tensors, without numbers."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from funcrl.config import TrainConfig
from funcrl.core.types import Params, Sample
from funcrl.loop.block_memory import Rows, Work, logits_bytes, number_bytes
from funcrl.models.functional import functional
from funcrl.models.logprobs import logprob_fn
from funcrl.models.networks import forward_takes, runs_under_vmap, vocab_size_of


class Uncounted(ValueError):
    """What a network keeps is not known: the error names the network."""


def work_of_module(config: TrainConfig, model: nn.Module, sizes: Rows) -> Work:
    """Return what a model of transformers computes in, its logits among what is kept."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    rows = sizes.rows if runs_under_vmap(model) else 1  # one row after the other
    logits = logits_bytes(config, sizes.rows * sizes.padded, number_bytes(config))
    return Work(
        kept=rows * kept_by_row(model, sizes.padded, dtype),
        logits=0,
        of_teacher=logits * (vocab_size_of(model) or 0),
        recomputed=0,
        cache=sizes.slots * cached_by_row(model, sizes.length, dtype),
        is_captured=False,
        has_layout=False,
    )


def kept_by_row(model: nn.Module, length: int, dtype: torch.dtype) -> int:
    """Return the bytes that a row's log-probabilities keep for their backward pass."""

    def log_probabilities(params: Params) -> int:
        read = {_storage(leaf) for leaf in params.values()}
        kept: dict[int, Tensor] = {}  # by its storage; alive, so that no other has its place

        def keep(saved: Tensor) -> Tensor:
            if _storage(saved) not in read:
                kept[_storage(saved)] = saved
            return saved

        tokens = _tokens(length)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda same: same):
            logprob_fn(model)(params, Sample(tokens, tokens))
        return sum(saved.untyped_storage().nbytes() for saved in kept.values())

    return _once("kept", log_probabilities, model, length, dtype)


def cached_by_row(model: nn.Module, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the cache that a sample of this length is decoded with."""
    if not forward_takes(model, "past_key_values"):
        return 0

    def cache(params: Params) -> int:
        with torch.no_grad():
            found = functional(model)(params, input_ids=_tokens(length)[None], use_cache=True)
        kept = {_storage(tensor): tensor for tensor in _tensors_in(found.past_key_values)}
        return sum(tensor.nbytes for tensor in kept.values())

    return _once("cached", cache, model, length, dtype)


# Choosing options asks for the same of a model many times. No model is kept alive by it.
_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[str, int, torch.dtype], int]] = WeakKeyDictionary()


def _once(
    what: str, count: Callable[[Params], int], model: nn.Module, length: int, dtype: torch.dtype
) -> int:
    """Return what a function counts, which is remembered as long as the model is there."""
    found, key = _FOUND.setdefault(model, {}), (what, length, dtype)
    if key not in found:
        found[key] = _counted(count, model, dtype)
    return found[key]


def _counted(count: Callable[[Params], int], model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes that a function counts for a model's tensors on meta.

    torch's grouped product of experts has bfloat16 alone there: its bytes say those of others.
    """
    half = torch.bfloat16
    try:
        return count(_on_meta(model, dtype))
    except Exception as error:  # whatever a forward raises where its tensors are on meta
        if dtype == half:
            raise Uncounted(
                f"{type(model).__name__}, which does not run on meta tensors"
            ) from error
    return _counted(count, model, half) * dtype.itemsize // half.itemsize


def _on_meta(model: nn.Module, dtype: torch.dtype) -> Params:
    params = {
        name: leaf.detach().to("meta", dtype).requires_grad_()
        for name, leaf in model.named_parameters()
    }
    return params | {name: leaf.to("meta") for name, leaf in model.named_buffers()}


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

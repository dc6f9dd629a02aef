"""Logits of any network, as a pure function of its parameters and one sample."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from funcrl.core.arguments import checked
from funcrl.core.types import Params, Row
from funcrl.models.functional import functional

LogitsFn: TypeAlias = Callable[..., Tensor]  # (params, sample) -> logits [T, V]


@checked
def logits_fn(model: nn.Module) -> LogitsFn:
    """Return `(params, sample) -> logits` of a network; `logits[t]` predicts `tokens[t + 1]`.

    The network is one of three:

    * `model(tokens, positions) -> logits`, of tokens [T], positions [T] and logits [T, V], such as
      `funcrl.models.Transformer`: positions are given to an argument of that name, wherever it
      stands, or else to a second argument that is needed;
    * `model(tokens) -> logits`, which finds positions itself, such as a recurrent network;
    * a model of transformers, whose output has `logits`. It is called for one row without a mask:
      its attention is causal, and rows are padded at their ends.

    Args:
        model: only its structure is used, never its weights.

    Example:
        >>> import torch, funcrl
        >>> network = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
        >>> sample = funcrl.types.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
        >>> params = funcrl.init_params(network, seed=0)
        >>> funcrl.models.logits_fn(network)(params, sample).shape
        torch.Size([3, 7])
    """
    apply = functional(model)
    if is_of_transformers(model):
        takes_positions = forward_takes(model, "position_ids")
        takes_cache = forward_takes(model, "use_cache")

        @checked
        def logits_of_transformers(params: Params, sample: Row) -> Tensor:
            # Without a mask and with a cache, transformers reads no values: see docs/models.md.
            call: dict[str, Any] = {"input_ids": sample.tokens[None]}
            if takes_positions:
                call["position_ids"] = sample.positions[None]
            if takes_cache:  # a config that was saved in training often says False
                call["use_cache"] = True
            logits: Tensor = apply(params, **call).logits[0]
            return logits

        return logits_of_transformers
    by_name, takes_two = forward_takes(model, "positions"), _takes_two(model)

    @checked
    def logits(params: Params, sample: Row, **options: Any) -> Any:
        if by_name:
            return apply(params, sample.tokens, positions=sample.positions, **options)
        given = (sample.tokens, sample.positions) if takes_two else (sample.tokens,)
        return apply(params, *given, **options)

    return logits


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a network is one of transformers, which need not be installed."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def forward_takes(model: nn.Module, name: str) -> bool:
    """Return whether a network's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def context_length_of(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a network says it takes, None if it does not.

    Its attribute `context_length`, that of its `config`, or transformers' name for it.
    """
    config = getattr(model, "config", None)
    for owner, name in (
        (model, "context_length"),
        (config, "context_length"),
        (config, "max_position_embeddings"),
    ):
        length = getattr(owner, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def vocab_size_of(model: nn.Module) -> int | None:
    """Return the size of a network's vocabulary: its own, or its config's; None if it has none."""
    for owner in (model, getattr(model, "config", None)):
        size = getattr(owner, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _takes_two(model: nn.Module) -> bool:
    """Return whether a network's forward needs a second argument, which is the positions.

    One that may be left out, such as a recurrent network's first state, is not.
    """
    given = inspect.signature(model.forward).parameters.values()
    kinds = [each.kind for each in given if each.default is each.empty]
    needed = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return sum(kind in needed for kind in kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds

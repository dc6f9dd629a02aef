"""The logits of any network, and what a network says of itself."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from funcrl.core.arguments import checked
from funcrl.core.types import Params, Row, Sample
from funcrl.core.unbatched import Unbatched
from funcrl.models.functional import bind, functional

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
      its attention is causal, and rows are padded at their ends. One that `torch.vmap` cannot run
      for all rows at once is called for one row after the other.

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
    if is_of_transformers(model):
        of_one = logits_of_transformers(model)
        return of_one if runs_under_vmap(model, of_one) else row_by_row(of_one)
    apply = functional(model)
    by_name, takes_two = forward_takes(model, "positions"), _takes_two(model)

    @checked
    def logits(params: Params, sample: Row, **options: Any) -> Any:
        if by_name:
            return apply(params, sample.tokens, positions=sample.positions, **options)
        given = (sample.tokens, sample.positions) if takes_two else (sample.tokens,)
        return apply(params, *given, **options)

    return logits


def logits_of_transformers(model: nn.Module) -> LogitsFn:
    """Return `(params, sample) -> logits` of a model of transformers, for one row."""
    apply = functional(_without_padding(model))
    takes_positions = forward_takes(model, "position_ids")
    takes_cache = forward_takes(model, "use_cache")
    longest = getattr(model, "context_length", None)  # beyond which its rotation is another

    @checked
    def logits(params: Params, sample: Row) -> Tensor:
        if longest is not None and len(sample.tokens) > longest:
            raise ValueError(
                f"logits_fn expects rows of at most {longest} tokens, the context_length of "
                f"{type(model).__name__}, got {len(sample.tokens)}."
            )
        # Without a mask and with a cache, transformers reads no values: see docs/models.md.
        call: dict[str, Any] = {"input_ids": sample.tokens[None]}
        if takes_positions:
            call["position_ids"] = sample.positions[None]
        if takes_cache:  # a config that was saved in training often says False
            call["use_cache"] = True
        found: Tensor = apply(params, **call).logits[0]
        return found

    return logits


def runs_under_vmap(model: nn.Module, logits: LogitsFn | None = None) -> bool:
    """Return whether `torch.vmap` can run a model of transformers for all rows at once.

    It cannot where a forward reads a value, or writes in place into a tensor without a batch axis.
    It is tried on meta tensors, which compute nothing; with its `logits`, if they are made already.
    """
    logits = logits or logits_of_transformers(model)
    leaves = [*model.named_parameters(), *model.named_buffers()]
    params = {name: leaf.detach().to("meta") for name, leaf in leaves}
    rows = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    try:
        torch.vmap(logits, (None, 0))(params, Sample(rows, rows))
    except Unbatched:
        return False
    except Exception:  # whatever a forward raises where its tensors are on meta
        return True
    return True


class _Derivative(NamedTuple):
    """The derivative of `function(tokens, positions, *leaves)` by some of its leaves."""

    function: Callable[..., Tensor]
    by: list[int]

    def __call__(
        self, tokens: Tensor, positions: Tensor, grad: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        own = [leaf.detach().requires_grad_(n in self.by) for n, leaf in enumerate(leaves)]
        with torch.enable_grad():
            result = self.function(tokens, positions, *own)
        by = [own[n] for n in self.by]
        return torch.autograd.grad(result, by, grad, allow_unused=True, materialize_grads=True)


class _RowByRow(torch.autograd.Function):
    """A function of a row, which is called for one row after the other, and so is its derivative.

    That calls the function again, so that no more than a row's activations are ever kept.
    """

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Tensor) -> Any:
        return function(*tensors)

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], function: Callable[..., Any], *tensors: Tensor
    ) -> tuple[Any, Any]:
        def of_row(row: int) -> Any:
            pairs = zip(tensors, axes[1:], strict=True)
            own = (leaf if axis is None else leaf.select(axis, row) for leaf, axis in pairs)
            return _call_rows(function, *own)

        rows = [of_row(row) for row in range(info.batch_size)]
        if isinstance(rows[0], Tensor):
            return torch.stack(rows), 0
        return tuple(torch.stack(each) for each in zip(*rows, strict=True)), (0,) * len(rows[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if isinstance(ctx.function, _Derivative):
            raise NotImplementedError(
                "logits_fn expects to be differentiated once where torch.vmap cannot run a model."
            )
        tokens, positions, *leaves = ctx.saved_tensors
        by = [n for n, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        derivative = _Derivative(ctx.function, by)
        found = iter(_call_rows(derivative, tokens, positions, *grads, *leaves))
        return None, None, None, *(next(found) if n in by else None for n in range(len(leaves)))


def _call_rows(function: Any, *tensors: Tensor) -> Any:
    return _RowByRow.apply(function, *tensors)  # type: ignore[no-untyped-call]  # (torch's own)


def row_by_row(logits: LogitsFn) -> LogitsFn:
    """Return logits that `torch.vmap` computes row by row, where it cannot for all at once."""

    @checked
    def of_rows(params: Params, sample: Row) -> Tensor:
        if not is_batchedtensor(sample.tokens):
            return logits(params, sample)

        def of_row(tokens: Tensor, positions: Tensor, *leaves: Tensor) -> Tensor:
            return logits(dict(zip(params, leaves, strict=True)), Sample(tokens, positions))

        found: Tensor = _call_rows(of_row, sample.tokens, sample.positions, *params.values())
        return found

    return of_rows


def _without_padding(model: nn.Module) -> nn.Module:
    """Return a model of transformers that does not look for padding, as GPT-2 does to warn of it.

    Rows are padded at their ends, so that no token sees it.
    """
    if getattr(model.config, "pad_token_id", None) is None:
        return model
    quiet: Any = bind(model, dict(model.named_parameters()))
    quiet.config.pad_token_id = None  # of a copy, which all of the copy's modules share
    return quiet


def is_of_transformers(model: object) -> bool:
    """Return whether a network is one of transformers, which need not be installed."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer of a transformers model is linear, as GPT-2's `Conv1D` is, too."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer has its weight [in, out], as GPT-2's `Conv1D` has."""
    return type(layer).__name__ == "Conv1D"


def forward_takes(model: nn.Module, name: str) -> bool:
    """Return whether a network's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


# What models of transformers call the cache that they take and return; the first from 5.24 on.
_CACHES = ("cache", "past_key_values", "cache_params")


def keeps_cache(model: nn.Module) -> bool:
    """Return whether a network is a model of transformers that decodes on a cache."""
    return is_of_transformers(model) and any(forward_takes(model, name) for name in _CACHES)


def cache_name(model: nn.Module) -> str:
    """Return what a model that keeps a cache calls it."""
    return next(name for name in _CACHES if forward_takes(model, name))


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

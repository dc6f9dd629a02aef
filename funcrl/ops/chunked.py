"""Token scores from the last layer's output, with few tokens' logits at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core import checks, numerics
from funcrl.core.arguments import CountOrAll, Positive, checked
from funcrl.ops.arithmetic import cap_gradient, cap_logits
from funcrl.ops.logits import logits_gradient, plain_score_logits, score_logits
from funcrl.ops.truncation import Truncation, truncated_logits

# The number of rows of the weight's gradient that are added to at a time.
_VOCABULARY = 8192
_FIRST = (
    "linear_scores has a first derivative only, got a second one to compute; "
    "logprob_fn(model, chunk=None) has them all."
)


@checked
def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Positive = 1.0,
    chunk: CountOrAll = 1024,
    cap: Positive | None = None,
    truncation: Truncation | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] of targets under `softmax(hidden W^T / temperature)`, and
    entropies [T].

    No more than [chunk, V] is alive at a time: the backward pass computes each chunk's logits
    anew. In a batch under `vmap` the chunk is of the whole batch's tokens, and the gradient of one
    shared weight is accumulated in one [V, D]. With the chunk "all" there is one product of all
    tokens, [T, V], which the backward pass reads: less work for more memory. It has a first
    derivative only.

    Args:
        hidden: [T, D]; `hidden[t]` predicts `targets[t]`.
        weight: [V, D].
        targets: [T] int64.
        temperature: that of sampling.
        chunk: tokens at a time, or "all".
        cap: logits become cap * tanh(logits / cap) before the temperature; no cap when left out.
        truncation: of which tokens the distribution is, besides the targets; all when left out.

    Example:
        >>> import torch, funcrl
        >>> hidden, weight = torch.zeros(3, 4), torch.zeros(2, 4)
        >>> funcrl.ops.linear_scores(hidden, weight, torch.tensor([0, 1, 1]), chunk=2)
        (tensor([-0.6931, -0.6931, -0.6931]), tensor([0.6931, 0.6931, 0.6931]))
    """
    checks.check_rank("linear_scores", "hidden", hidden, "TD")
    checks.check_rank("linear_scores", "weight", weight, "VD")
    checks.check_shape("linear_scores", "targets", targets, "hidden's first axis", hidden.shape[:1])
    if chunk == "all":
        logits = cap_logits(nn.functional.linear(hidden, weight), cap)
        return score_logits(_kept(logits, targets, temperature, truncation), targets, temperature)
    logprobs, entropy, _ = _LinearScores.apply(  # type: ignore[no-untyped-call]  # (torch's own)
        hidden, weight, targets, temperature, chunk, cap, truncation
    )
    return logprobs, entropy


class _LinearScores(torch.autograd.Function):
    """The forward pass; its third result, the log-normaliser, is for the backward pass."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int,
        cap: float | None, truncation: Truncation | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        columns = []
        for rows in chunks(hidden.shape[0], chunk):
            logits = cap_logits(hidden[rows] @ weight.mT, cap)
            logits = _kept(logits, targets[rows], temperature, truncation)
            columns.append(plain_score_logits(logits, targets[rows], temperature))
        if not columns:
            empty = hidden.new_zeros(0, dtype=numerics.at_least_float32(hidden.dtype))
            return empty, empty.clone(), empty.clone()
        logprob, entropy, normaliser = (torch.cat(parts) for parts in zip(*columns, strict=True))
        return logprob, entropy, normaliser

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, targets, *ctx.constants = inputs
        _, entropy, normaliser = output
        ctx.mark_non_differentiable(normaliser)
        ctx.save_for_backward(hidden, weight, targets, entropy, normaliser)

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor, _: Any) -> Any:
        trained = ctx.needs_input_grad[1]  # not where adapters are trained on a constant base
        grad_hidden, *grad_weight = _Gradients.apply(  # type: ignore[no-untyped-call]  # (torch's own)
            *ctx.saved_tensors, grad_logprob, grad_entropy, *ctx.constants, trained
        )
        return grad_hidden, *(grad_weight or (None,)), *[None] * 5

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], hidden: Tensor, weight: Tensor, targets: Tensor,
        *constants: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        size = info.batch_size
        hidden, weight, targets = (
            leaf if at is None else leaf.movedim(at, 0)
            for leaf, at in zip((hidden, weight, targets), in_dims[:3], strict=True)
        )
        hidden = hidden if in_dims[0] is not None else hidden.expand(size, *hidden.shape)
        targets = targets if in_dims[2] is not None else targets.expand(size, *targets.shape)
        if in_dims[1] is None:
            rows = hidden.flatten(0, 1), weight, targets.flatten(0, 1)
            results = _LinearScores.apply(*rows, *constants)  # type: ignore[no-untyped-call]  # (torch's own)
            return tuple(part.view(targets.shape) for part in results), (0, 0, 0)
        each = [
            _LinearScores.apply(*row, *constants)  # type: ignore[no-untyped-call]  # (torch's own)
            for row in zip(hidden, weight, targets, strict=True)
        ]
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0, 0, 0)


class _Gradients(torch.autograd.Function):
    """The backward pass as an op of its own, so that its derivative is an error.

    It writes in place only into what has every batch axis that the values written can have.
    """

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, targets: Tensor, entropy: Tensor, normaliser: Tensor,
        grad_logprob: Tensor, grad_entropy: Tensor, temperature: float, chunk: int,
        cap: float | None, truncation: Truncation | None, trained: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if not hidden.shape[0]:
            return torch.zeros_like(hidden), *([torch.zeros_like(weight)] if trained else [])
        grads, wide = (grad_logprob, grad_entropy), numerics.at_least_float32(hidden.dtype)
        grad_hidden = []
        grad_weight: Tensor | None = None
        for rows in chunks(hidden.shape[0], chunk):
            # Slices of many samples are no single matrix: without a copy the samples would be
            # multiplied one after the other, and each would read all of the weight.
            inputs = hidden[rows].clone(memory_format=torch.contiguous_format)
            columns = [each[rows] for each in (targets, entropy, normaliser, *grads)]
            logits = cap_logits(inputs @ weight.mT, cap)
            kept = _kept(logits, columns[0], temperature, truncation)
            outer = logits_gradient(kept, temperature, *columns).to(logits.dtype)
            del kept
            outer = cap_gradient(outer, logits, cap)
            del logits
            grad_hidden.append(outer @ weight)
            if not trained:
                continue
            if grad_weight is None:
                grad_weight = outer.new_zeros(weight.shape, dtype=wide)
                parts = grad_weight.split(_VOCABULARY)  # no second [V, D] for the product
            for part, piece in zip(parts, outer.split(_VOCABULARY, dim=-1), strict=True):
                part += (piece.mT @ inputs).to(wide)
        if grad_weight is None:
            return (torch.cat(grad_hidden),)
        return torch.cat(grad_hidden), grad_weight.to(weight.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """Return the results of all samples, in chunks that count the whole batch's tokens."""
        *tensors, temperature, chunk, cap, truncation, trained = inputs
        chunk = max(1, chunk // info.batch_size)
        constants = temperature, chunk, cap, truncation, trained
        results = _EachGradients.apply(in_dims, constants, *tensors)  # type: ignore[no-untyped-call]  # (torch's own)
        return results, (0,) * len(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no backward pass."""

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(_FIRST)


class _EachGradients(torch.autograd.Function):
    """`_Gradients` of each sample of a batch, an op of its own for the same reason."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        in_dims: tuple[int | None, ...], constants: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        def gradients(*rows: Any) -> tuple[Tensor, ...]:
            return _Gradients.forward(*rows, *constants)

        mapped: Any = torch.vmap(gradients, in_dims=in_dims[: len(tensors)])
        return mapped(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no backward pass."""

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(_FIRST)


def _kept(
    logits: Tensor, targets: Tensor, temperature: float, truncation: Truncation | None
) -> Tensor:
    """Return logits with -inf for what a truncated distribution leaves out."""
    if truncation is None:
        return logits
    return truncated_logits(logits, targets, truncation, temperature)


def chunks(length: int, chunk: int) -> Iterator[slice]:
    """Yield slices of at most `chunk` rows."""
    return (slice(start, start + chunk) for start in range(0, length, chunk))

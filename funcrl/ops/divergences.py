"""The divergence of two distributions over the vocabulary, with few tokens' logits at a time."""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import CountOrAll, Positive, checked
from funcrl.ops.arithmetic import cap_gradient, cap_logits
from funcrl.ops.chunked import chunks
from funcrl.ops.logits import widened

# reverse is KL(pi, teacher), which a policy lowers by leaving out what the teacher would not say;
# forward is KL(teacher, pi), by covering all that it would.
Divergence: TypeAlias = Literal["reverse", "forward"]


@checked
def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    kind: Divergence = "reverse",
    temperature: Positive = 1.0,
) -> Tensor:
    """Return KL(pi, teacher), or forward KL(teacher, pi), over the last axis.

        reverse: sum_v pi(v) (log pi(v) - log teacher(v))
        forward: sum_v teacher(v) (log teacher(v) - log pi(v))

    Both are `softmax(logits / temperature)`, in at least float32. Where one has more logits than
    the other, such as the padding of a larger model's vocabulary, those are left out.

    Args:
        logits: [..., V] of the policy.
        teacher_logits: [..., V] of the teacher.
        kind: "reverse" or "forward".
        temperature: that of sampling.

    Example:
        >>> import torch, funcrl
        >>> logits = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
        >>> funcrl.ops.divergence(logits, logits.flip(0))
        tensor([0.5108, 0.3681])
    """
    shared = min(logits.shape[-1], teacher_logits.shape[-1])
    own, teacher = (
        _log_softmax(each[..., :shared], temperature) for each in (logits, teacher_logits)
    )
    return _of_log_softmax(own, teacher, kind)


@checked
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    kind: Divergence = "reverse",
    temperature: Positive = 1.0,
    chunk: CountOrAll = 1024,
    cap: Positive | None = None,
    teacher_cap: Positive | None = None,
) -> Tensor:
    """Return the `divergence` [T] of `hidden W^T` from the teacher's own logits.

    No more than [chunk, V] of each is alive at a time: the backward pass computes them anew. Under
    `vmap` the chunk is of the whole batch's tokens where the weights are shared. The teacher is a
    constant: it gets no gradient.

    Args:
        hidden: [T, D] of the policy.
        weight: [V, D].
        teacher_hidden: [T, E] of the teacher.
        teacher_weight: [V, E].
        kind: "reverse" or "forward".
        temperature: that of sampling.
        chunk: tokens at a time, or "all".
        cap: the policy's logits become cap * tanh(logits / cap); no cap when left out.
        teacher_cap: the same of the teacher's.

    Example:
        >>> import torch, funcrl
        >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
        >>> funcrl.ops.linear_divergence(hidden, weight, hidden, 0 * weight, chunk=1)
        tensor([0.0000, 0.1109])
    """
    function = "linear_divergence"
    checks.check_rank(function, "hidden", hidden, "TD")
    checks.check_rank(function, "weight", weight, "VD")
    checks.check_rank(function, "teacher_hidden", teacher_hidden, "TE")
    checks.check_rank(function, "teacher_weight", teacher_weight, "VE")
    rows = hidden.shape[:1]
    checks.check_shape(
        function, "teacher_hidden's first axis", teacher_hidden[:, 0], "hidden's", rows
    )
    shared = min(len(weight), len(teacher_weight))
    size = max(len(hidden), 1) if chunk == "all" else chunk
    found: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]  # (torch's own)
        hidden, weight[:shared], teacher_hidden, teacher_weight[:shared], kind, temperature, size,
        cap, teacher_cap,
    )  # fmt: skip
    return found


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        kind: Divergence, temperature: float, chunk: int, cap: float | None,
        teacher_cap: float | None,
    ) -> Tensor:  # fmt: skip
        found = [
            divergence(
                cap_logits(hidden[rows] @ weight.mT, cap),
                cap_logits(teacher_hidden[rows] @ teacher_weight.mT, teacher_cap),
                kind,
                temperature,
            )
            for rows in chunks(hidden.shape[0], chunk)
        ]
        if not found:
            return hidden.new_zeros(0, dtype=numerics.at_least_float32(hidden.dtype))
        return torch.cat(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs[:4])
        ctx.constants = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, teacher_hidden, teacher_weight = ctx.saved_tensors
        kind, temperature, chunk, cap, teacher_cap = ctx.constants
        trained = ctx.needs_input_grad[1]  # not where adapters are trained on a constant base
        wide = numerics.at_least_float32(weight.dtype)
        grad_hidden, grad_weight = [], torch.zeros_like(weight, dtype=wide)
        for rows in chunks(hidden.shape[0], chunk):
            logits = cap_logits(hidden[rows] @ weight.mT, cap)
            teacher_logits = cap_logits(teacher_hidden[rows] @ teacher_weight.mT, teacher_cap)
            outer = _logits_gradient(logits, teacher_logits, grad[rows], kind, temperature)
            outer = cap_gradient(outer.to(logits.dtype), logits, cap)
            grad_hidden.append(outer @ weight)
            if trained:
                grad_weight = grad_weight + (outer.mT @ hidden[rows]).to(wide)
        found = torch.cat(grad_hidden) if grad_hidden else torch.zeros_like(hidden)
        return found, grad_weight.to(weight.dtype) if trained else None, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        size, constants = info.batch_size, inputs[4:]
        hidden, weight, teacher_hidden, teacher_weight = (
            leaf.expand(size, *leaf.shape) if at is None else leaf.movedim(at, 0)
            for leaf, at in zip(inputs[:4], in_dims[:4], strict=True)
        )
        if in_dims[1] is None and in_dims[3] is None:
            flat = _LinearDivergence.apply(  # type: ignore[no-untyped-call]  # (torch's own)
                hidden.flatten(0, 1), inputs[1], teacher_hidden.flatten(0, 1), inputs[3], *constants
            )
            return flat.view(hidden.shape[:2]), 0
        each = [
            _LinearDivergence.apply(*row, *constants)  # type: ignore[no-untyped-call]  # (torch's own)
            for row in zip(hidden, weight, teacher_hidden, teacher_weight, strict=True)
        ]
        return torch.stack(each), 0


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(widened(logits, temperature), dim=-1)


def _of_log_softmax(own: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    first, second = (own, teacher) if kind == "reverse" else (teacher, own)
    return (first.exp() * (first - second)).sum(dim=-1)


def _logits_gradient(
    logits: Tensor, teacher_logits: Tensor, grad: Tensor, kind: Divergence, temperature: float
) -> Tensor:
    """Return the gradient of the policy's logits, given that of their divergence."""
    own, teacher = (_log_softmax(each, temperature) for each in (logits, teacher_logits))
    if kind == "forward":
        slope = own.exp() - teacher.exp()
    else:
        gap = own - teacher - _of_log_softmax(own, teacher, kind)[..., None]
        slope = own.exp() * gap
    return slope * (grad[..., None] / temperature)

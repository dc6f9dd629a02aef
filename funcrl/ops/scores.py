"""The entropy of a categorical distribution, as an op that keeps only its argument."""

from typing import Any

import torch
from torch import Tensor

from funcrl.core.arguments import checked


@checked
def entropy(log_softmax: Tensor) -> Tensor:
    """Return `-sum p log p` over the last axis, given `log p`; a token of probability 0 adds 0.

    Recorded op by op it would keep three more tensors of [T, V] for a backward pass that mostly
    never comes: an entropy is reported at each step, and differentiated only for a bonus.

    Args:
        log_softmax: [..., V], normalised log-probabilities; -inf is allowed.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.entropy(torch.tensor([0.5, 0.5, 0.0]).log())
        tensor(0.6931)
    """
    result: Tensor = _Entropy.apply(log_softmax)  # type: ignore[no-untyped-call]  # (torch's own)
    return result


class _Entropy(torch.autograd.Function):
    """The op as an autograd function that works under grad, vmap and make_fx."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_softmax: Tensor) -> Tensor:
        # entr(p) = -p log p, and 0 at p = 0.
        return torch.special.entr(log_softmax.exp()).sum(dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # d(-p log p) / d(log p) = -p (log p + 1), which is 0 at p = 0 and not 0 * -inf.
        (log_softmax,) = ctx.saved_tensors
        finite = log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)
        return -log_softmax.exp() * (finite + 1) * grad[..., None]

"""Log-probabilities of chosen tokens and entropies, as one op that keeps only the logits."""

from typing import Any

import torch
from torch import Tensor

from funcrl import checks


def logprobs_and_entropy(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return `log softmax(logits)[t, chosen[t]]` and the entropy of each row, in float32 at least.

    Only the logits are kept for the backward pass, which computes their softmax again. Recorded
    op by op, the entropy alone would keep three tensors of [T, V] alive, used or not.

    Args:
        logits: [T, V].
        chosen: [T] int64, one entry of each row.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.logprobs_and_entropy(torch.zeros(1, 2), torch.tensor([1]))
        (tensor([-0.6931]), tensor([0.6931]))
    """
    checks.check_rank("logprobs_and_entropy", "logits", logits, "TV")
    checks.check_shape(
        "logprobs_and_entropy", "chosen", chosen, "logits' first axis", logits.shape[:1]
    )
    result: tuple[Tensor, Tensor] = _Scores.apply(logits, chosen)  # type: ignore[no-untyped-call]  # (torch)
    return result


class _Scores(torch.autograd.Function):
    """The op, in the form that is right under grad, vmap and make_fx.

    Tensors of [T, V] are dropped as soon as the next one is made: three are alive at most.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        log_softmax = _log_softmax(logits)
        logprobs = log_softmax.gather(-1, chosen[:, None]).squeeze(-1)
        probabilities = log_softmax.exp()
        del log_softmax
        # entr(p) = -p log p, and 0 at p = 0.
        return logprobs, torch.special.entr(probabilities).sum(dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        # d log p_c / dx_j = [j = c] - p_j      dH / dx_j = -p_j (log p_j + H)
        logits, chosen, entropy = ctx.saved_tensors
        log_softmax = _log_softmax(logits)
        # Finite, so that a token of probability 0 gets the gradient 0 and not 0 * inf.
        finite = log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)
        constant = -(grad_logprobs + grad_entropy * entropy)[:, None]
        factor = torch.addcmul(constant, -grad_entropy[:, None], finite)
        del finite
        probabilities = log_softmax.exp()
        del log_softmax
        grad = probabilities * factor
        del probabilities, factor
        grad = grad.scatter_add(-1, chosen[:, None], grad_logprobs[:, None])
        return grad.to(logits.dtype), None


def _log_softmax(logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits, dim=-1, dtype=wide)

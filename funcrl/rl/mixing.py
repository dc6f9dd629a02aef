"""Whether the samples of a packed row are to an algorithm what each is alone.

Only a ratio function is told where samples begin. A surrogate or a penalty that reads more than its
own token, such as a mean over a completion, reads other samples in a packed row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcrl.core.reprs import described
from funcrl.core.types import Algorithm, Batch, PackedBatch, TokenScores
from funcrl.rl.algorithms import grpo
from funcrl.rl.losses import policy_loss


def mixing_parts(algorithm: Algorithm) -> str:
    """Return which functions of an algorithm mix the samples of a packed row, "" if none does.

    They are run on a fixed row of five samples, of which the middle one has all the weight. The
    loss, and its gradient at each token of the row, must be those of that sample by itself.
    Functions that fail on it, for what they need is not there, are not known to mix.

    Args:
        algorithm: whose `ratio`, `surrogate` and `penalty` to run.

    Example:
        >>> import funcrl
        >>> from funcrl.rl.mixing import mixing_parts
        >>> def mean(logprobs, ratio, advantages):
        ...     return funcrl.types.Surrogate(ratio.mean() * advantages)
        >>> mixing_parts(funcrl.gspo()), mixing_parts(funcrl.gspo()._replace(surrogate=mean))
        ('', 'surrogate=mean')
    """
    if not _mixes(algorithm):
        return ""
    parts = {name: getattr(algorithm, name) for name in ("ratio", "surrogate", "penalty")}
    alone = {n: part for n, part in parts.items() if _mixes(grpo()._replace(**{n: part}))}
    return ", ".join(f"{name}={described(part)}" for name, part in (alone or parts).items())


def _mixes(algorithm: Algorithm) -> bool:
    row, scores, middle = _row()
    fields = row._asdict()
    sample = Batch(**{name: fields[name][middle] for name in Batch._fields})
    try:
        loss, grad = _loss(algorithm, scores, row)
        own_loss, own_grad = _loss(algorithm, scores[middle], sample)
        expected = pad(own_grad, (0, 0, middle.start, len(row.mask) - middle.stop))
        return not (_close(loss, own_loss) and _close(grad, expected))
    except Exception:  # such as of a function that holds tensors of a GPU
        return False


def _close(value: Tensor, expected: Tensor) -> bool:
    # Up to the rounding of float32, in which a function may compute.
    return torch.allclose(value, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def _loss(algorithm: Algorithm, scores: Tensor, row: Batch | PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the loss of a row, and its gradient with respect to the scores [T, 2]."""
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        loss = policy_loss(algorithm, TokenScores(*scores.T), row)[0]
        return loss.detach(), torch.autograd.grad(loss, scores)[0]


def _row() -> tuple[PackedBatch, Tensor, slice]:
    """Return a packed row [T], its scores [T, 2], and where the middle one of its five samples is.

    The ratios of the middle sample are inside and outside of usual clips, with advantages of both
    signs, and those beside it are near 1 as well, so that corrections keep them. The first and the
    last are far from 1: bounds on a sum, a mean or an extreme of the row are met. Each begins with
    a token of the prompt; padding is last.
    """
    segment, position, log_ratio, advantage = torch.tensor(
        [
            [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, -1],
            [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0],
            [0, -3, -2, 0, 0.04, 0, 0.3, -0.3, 0.1, -0.09, 0, -0.15, 0.12, 0, 6, 2, 1, 0],
            [0, 1, 1, 0, -2, 0, 0.7, -0.8, -0.9, 1.1, 0, 1, 1, 0, -1, -1, -1, 0],
        ],
        dtype=torch.float64,
        device="cpu",
    )
    # No log-probability is above 0.
    logprobs = -0.5 - position / 8 - segment.abs() / 3 + log_ratio.clamp(max=0)
    row = PackedBatch(
        tokens=position.long(),
        positions=position.long(),
        mask=position > 0,
        behavior_logprobs=logprobs - log_ratio,
        advantages=advantage,
        token_weights=(segment == 2) * position / 10,
        segment_ids=segment.long(),
        ref_logprobs=1.5 * logprobs,
    )
    return row, torch.stack([logprobs, 1 - logprobs], dim=1), slice(5, 10)

"""Whether the samples of a packed row are to an algorithm what each is alone.

Only a ratio function is told where samples begin. A surrogate or a penalty that reads more than its
own token, such as a mean over a completion, reads other samples in a packed row.
"""

from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

from funcrl.core import rng
from funcrl.core.printing import described
from funcrl.core.types import Algorithm, Batch, PackedBatch, TokenScores
from funcrl.rl.algorithms import grpo
from funcrl.rl.losses import policy_loss

_PARTS = ("ratio", "surrogate", "penalty")
# The rows that are tried: where the samples lie, and of each token its sample and its place in it.
_SAMPLES = tuple(slice(*ends) for ends in ((0, 3), (3, 5), (5, 10), (10, 13), (13, 17)))
_MIDDLE = _SAMPLES[2]
# A function is said to mix if it did in each of so many attempts, with equal results: a random one
# that drops half of the samples does so once in a million.
_ATTEMPTS = 20
_SEGMENTS = (0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, -1)
_PLACES = (0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0)
# In the middle inside and outside of usual clips; beside it near 0 as well, so that corrections
# keep a sample there; the others far from 0.
_LOG_RATIOS = (0, 3, 2, 0, 0.04, 0, 0.3, -0.3, 0.1, -0.09, 0, -0.15, 0.12, 0, 6, 2, 1, 0)
_ADVANTAGES = (0, 1, 1, 0, -2, 0, 0.7, -0.8, -0.9, 1.1, 0, 1, 1, 0, -1, -1, -1, 0)


def mixing_parts(algorithm: Algorithm) -> str:
    """Return which functions of an algorithm mix the samples of a packed row, "" if none does.

    They are run on six fixed rows of five samples, of which the middle one has all the weight. The
    loss, and its gradient at each token of the row, must be those of the samples by themselves.
    Functions that fail on a row, for what they need is not there, or that give something else when
    they are run again, are not known to mix. Global random numbers stand afterwards as before.

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
    own, plain = algorithm._asdict(), grpo()._asdict()
    mixing = [name for name in _PARTS if _mixes(Algorithm(**plain | {name: own[name]}))]
    needed = [name for name in _PARTS if not _mixes(Algorithm(**own | {name: plain[name]}))]
    return ", ".join(f"{name}={described(own[name])}" for name in mixing or needed or _PARTS)


def _mixes(algorithm: Algorithm) -> bool:
    try:
        # The functions are somebody's: they may draw, and this may be a block of inference mode.
        with torch.inference_mode(False), rng.restored_global_state():
            return any(_mixes_in(algorithm, row, scores) for row, scores in _rows())
    except Exception:  # such as of a function that holds tensors of a GPU
        return False


def _mixes_in(algorithm: Algorithm, row: PackedBatch, scores: Tensor) -> bool:
    first = _loss(algorithm, scores, row)
    for attempt in range(_ATTEMPTS):
        found = _loss(algorithm, scores, row) if attempt else first
        # A sample whose loss is not finite makes a row's not finite even where its weight is 0.
        alone = (_apart(algorithm, scores, row, each) for each in ((_MIDDLE,), _SAMPLES))
        if not _close(found, first) or any(_close(found, each) for each in alone):
            return False  # it does not mix, or it is random
    return True


def _apart(
    algorithm: Algorithm, scores: Tensor, row: PackedBatch, samples: Iterable[slice]
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of samples alone, and its gradient for the row's scores."""
    fields, loss, grad = row._asdict(), scores.new_zeros(()), torch.zeros_like(scores)
    for at in samples:
        sample = Batch(**{name: fields[name][at] for name in Batch._fields})
        own_loss, grad[at] = _loss(algorithm, scores[at], sample)
        loss = loss + own_loss
    return loss, grad


def _loss(algorithm: Algorithm, scores: Tensor, row: Batch | PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the loss of a row, and its gradient with respect to the scores [T, 2]."""
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        loss = policy_loss(algorithm, TokenScores(*scores.T), row)[0]
        return loss.detach(), torch.autograd.grad(loss, scores)[0]


def _close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    # Up to the rounding of float32, in which a function may compute.
    return all(
        torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def _rows() -> Iterator[tuple[PackedBatch, Tensor]]:
    """Give packed rows [T], each with its scores [T, 2].

    A sum, a mean or an extreme of a row must not be the middle sample's own: the samples around it
    have ratios above its own in half of the rows and below in the others, KL estimates and
    entropies likewise; and its advantages have both signs, or one that theirs have not.
    """
    segment, place, log_ratio, advantage = torch.tensor(
        [_SEGMENTS, _PLACES, _LOG_RATIOS, _ADVANTAGES], dtype=torch.float64, device="cpu"
    )
    inside, sampled = segment == 2, place > 0
    for up, sign in product((1, -1), (0, 1, -1)):
        log_ratios = torch.where(inside, 1, up) * log_ratio
        signed = torch.where(inside, sign, -2 * sign) * advantage.abs()
        # No log-probability is above 0.
        logprobs = -0.5 - place / 8 - segment.abs() / 3 + log_ratios.clamp(max=0)
        row = PackedBatch(
            tokens=place.long(),
            positions=place.long(),
            mask=sampled,
            behavior_logprobs=logprobs - log_ratios,
            advantages=signed if sign else advantage,
            token_weights=inside * place / 10,
            segment_ids=segment.long(),
            ref_logprobs=1.5 * logprobs - torch.where(inside, 0, 4 * up) * sampled,
        )
        entropy = torch.where(inside, 1, 3 if up > 0 else 0.2) * (1 - logprobs)
        yield row, torch.stack([logprobs, entropy], dim=1)

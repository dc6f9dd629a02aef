"""Token weights: rules by which a loss over tokens becomes one number.

Each rule turns a mask [B, T] into weights [B, T] that are 0 outside it and hold every
normalisation, with denominators over the whole batch. A loss is then only a sum of
`weight * objective`, the same under any micro-batching and in any order.
"""

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Finite, Positive, checked
from funcrl.core.printing import remembers
from funcrl.core.types import WeightFn


@checked
def token_mean(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `1 / (all sampled tokens)` for each sampled token: DAPO's rule (arXiv:2503.14476).

    Args:
        mask: [B, T] bool, True where the policy sampled the token.
        dtype: of the weights.

    Example:
        >>> import torch, funcrl
        >>> mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> funcrl.aggregation.token_mean(mask)
        tensor([[0.0000, 0.3333, 0.3333],
                [0.0000, 0.3333, 0.0000]])
    """
    weights = _as_weights("token_mean", mask, dtype)
    return weights / weights.sum().clamp(min=1)


@checked
def sequence_mean(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `1 / (sequences * sampled tokens of this sequence)`: GRPO's rule (arXiv:2402.03300).

    A row without a sampled token has weight 0 and is not counted as a sequence.

    Args:
        mask: [B, T] bool, True where the policy sampled the token.
        dtype: of the weights.

    Example:
        >>> import torch, funcrl
        >>> mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> funcrl.aggregation.sequence_mean(mask)
        tensor([[0.0000, 0.2500, 0.2500],
                [0.0000, 0.5000, 0.0000]])
    """
    weights = _as_weights("sequence_mean", mask, dtype)
    tokens = weights.sum(dim=1, keepdim=True).clamp(min=1)
    return weights / (tokens * _num_sequences(weights))


@checked
def constant(mask: Tensor, length: Positive, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `1 / (sequences * length)` for each sampled token: Dr. GRPO's (arXiv:2503.20783).

    With `length=1` it is the sum over a sequence's tokens and the mean over sequences, the
    gradient of `log p(completion)` that REINFORCE and RLOO use.

    Args:
        mask: [B, T] bool, True where the policy sampled the token.
        length: the constant, usually the longest completion allowed.
        dtype: of the weights.

    Example:
        >>> import torch, funcrl
        >>> mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> funcrl.aggregation.constant(mask, length=4)
        tensor([[0.0000, 0.1250, 0.1250],
                [0.0000, 0.1250, 0.0000]])
    """
    weights = _as_weights("constant", mask, dtype)
    return weights / (_num_sequences(weights) * length)


@checked
@remembers
def scaled(rule: WeightFn, factor: Finite) -> WeightFn:
    """Return the rule with its weights multiplied by a factor, the coefficient of a stream.

    Args:
        rule: `(mask [B, T], dtype) -> weights [B, T]`.
        factor: of all weights.

    Example:
        >>> import torch, funcrl
        >>> half = funcrl.aggregation.scaled(funcrl.aggregation.token_mean, 0.5)
        >>> half(torch.tensor([[False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500]])
    """

    @checked
    def weights(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return rule(mask, dtype=dtype) * factor

    return weights


def _as_weights(function: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    checks.check_rank(function, "mask", mask, "BT")
    checks.check_dtype(function, "mask", mask, torch.bool)
    return mask.to(dtype)


def _num_sequences(weights: Tensor) -> Tensor:
    """Return the number of rows with a sampled token, at least 1, in the dtype of the weights."""
    return (weights > 0).any(dim=1).sum().clamp(min=1).to(weights.dtype)

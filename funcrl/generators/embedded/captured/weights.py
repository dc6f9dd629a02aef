"""The network of the program, bound to weights that stay where they are."""

import torch
from torch import Tensor

from funcrl.core.types import Params
from funcrl.models import Transformer, TransformerConfig
from funcrl.models.functional import bind
from funcrl.ops.exact import EXACT_FORWARD


class Weights:
    """A copy of the parameters that graphs may read: a push writes into it.

    The network computes by the exact kernels, whatever the numerics of the model are: they are the
    fastest here, and give one row the same bits in each bucket.
    """

    def __init__(
        self, config: TransformerConfig, params: Params, dtype: torch.dtype | None
    ) -> None:
        self._leaves = {
            name: torch.empty(leaf.shape, dtype=dtype or leaf.dtype, device=leaf.device)
            for name, leaf in params.items()
        }
        self.network = bind(Transformer(config, EXACT_FORWARD), self._leaves)

    @property
    def leaf(self) -> Tensor:
        """One of the weights: all have its dtype and its device."""
        return self.network.norm.weight

    def holds(self, params: Params, dtype: torch.dtype | None) -> bool:
        """Return whether parameters can be written here: each has the device and dtype of ours."""
        return all(
            (mine.device, mine.dtype) == (params[name].device, dtype or params[name].dtype)
            for name, mine in self._leaves.items()
        )

    def write(self, params: Params) -> None:
        """Copy parameters into the weights, cast to their dtype."""
        given = [params[name] for name in self._leaves]
        torch._foreach_copy_(list(self._leaves.values()), given)

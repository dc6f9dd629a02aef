"""The network of the program, bound to weights that stay where they are."""

import torch
from torch import Tensor

from funcrl.core.types import Params
from funcrl.models import MLP, Attention, Transformer, TransformerConfig
from funcrl.models.functional import bind
from funcrl.ops.exact import EXACT_FORWARD


class Weights:
    """A copy of the parameters that graphs may read: a push writes into it.

    Matrices that multiply one input lie side by side, so that one product has them all.

    The network computes by the exact kernels, whatever the numerics of the model are: they are the
    fastest here, and give one row the same bits in each bucket.
    """

    def __init__(
        self, config: TransformerConfig, params: Params, dtype: torch.dtype | None
    ) -> None:
        network = Transformer(config, EXACT_FORWARD)
        self._leaves: Params = {}
        for names in _multiplied_together(network, params):
            self._leaves |= _side_by_side({name: params[name] for name in names}, dtype)
        self.network = bind(network, self._leaves)

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


def _multiplied_together(network: Transformer, params: Params) -> list[list[str]]:
    """Return the names of all parameters, those together that multiply one input."""
    together = []
    for path, module in network.named_modules():
        parts = {Attention: ("q", "k", "v"), MLP: ("gate", "up")}.get(type(module), ())
        for kind in ("weight", "bias"):
            names = [f"{path}.{part}.{kind}" for part in parts]
            together.append([name for name in names if name in params])
    found = {name for names in together for name in names}
    return [names for names in together if names] + [[name] for name in params if name not in found]


def _side_by_side(params: Params, dtype: torch.dtype | None) -> Params:
    """Return tensors like the parameters, each in memory where the one before ends."""
    first = next(iter(params.values()))
    sizes = [leaf.numel() for leaf in params.values()]
    memory = torch.empty(sum(sizes), dtype=dtype or first.dtype, device=first.device)
    parts = zip(params.items(), memory.split(sizes), strict=True)
    return {name: part.view(leaf.shape) for (name, leaf), part in parts}

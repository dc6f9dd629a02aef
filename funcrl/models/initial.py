"""New parameters of a module."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import rng
from funcrl.core.arguments import checked
from funcrl.core.types import Params
from funcrl.models.delta import GatedDelta
from funcrl.models.layers import RMSNorm
from funcrl.models.transformer import Block

# (uniform numbers in [0, 1) of a parameter's shape, the module that has it) -> the parameter
_DrawFn: TypeAlias = Callable[[Tensor, GatedDelta], Tensor]


@checked
def init_params(
    model: nn.Module, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Params:
    """Return new parameters of a module: a flat dictionary, its keys sorted.

    Norms begin as a factor of 1 and biases as 0; matrices are normal with deviation 0.02, and those
    that write to the residual stream (`o` and `down`) are divided by sqrt(2 L), as in GPT-2. A
    delta layer's convolution, rates and steps are drawn as Mamba-2's (arXiv:2405.21060). A module's
    `deviations`, by name, are for matrices that need others, as in `Recurrent`. Each parameter has
    its own seed, `fold_in(seed, its index among the sorted names)`.

    Args:
        model: a module, on the meta device or not; its own weights are not read.
        seed: of the initial weights.
        dtype: of the parameters.
        device: of the parameters.

    Example:
        >>> import torch, funcrl
        >>> params = funcrl.init_params(torch.nn.Linear(3, 2), seed=0)
        >>> {name: tuple(leaf.shape) for name, leaf in params.items()}
        {'bias': (2,), 'weight': (2, 3)}
    """
    named = dict(sorted(model.named_parameters()))
    num_layers = sum(isinstance(child, Block) for child in model.modules())
    own_deviations: Mapping[str, float] = getattr(model, "deviations", {})
    params: Params = {}
    for index, (name, leaf) in enumerate(named.items()):
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        # Drawn on the CPU in float32, so that a seed gives the same numbers for any dtype, device.
        drawn: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        if isinstance(owner, GatedDelta):
            numbers = torch.rand(leaf.shape, generator=rng.generator(seed, index), **drawn)
            value = _OF_DELTA[attribute](numbers, owner)
        elif leaf.ndim < 2:
            fill = 0.0 if "bias" in attribute else 1.0
            if isinstance(owner, RMSNorm):
                fill -= owner.offset
            value = torch.full(leaf.shape, fill, **drawn)
        else:
            writes = ("attention.o.weight", "delta.o.weight", "mlp.down.weight")
            deviation = 0.02 / (math.sqrt(2 * num_layers) if name.endswith(writes) else 1.0)
            deviation = own_deviations.get(name, deviation)
            generator = rng.generator(seed, index)
            value = torch.randn(leaf.shape, generator=generator, **drawn) * deviation
        params[name] = value.to(device=device, dtype=dtype)
    return params


def _conv(numbers: Tensor, layer: GatedDelta) -> Tensor:
    """Return weights between -1 and 1 over sqrt(K), as torch's own convolution has them."""
    return (2 * numbers - 1) * layer.config.delta_conv**-0.5


def _log_rate(numbers: Tensor, _layer: GatedDelta) -> Tensor:
    """Return the logarithm of rates between 1 and 16."""
    return torch.log(1 + 15 * numbers)


def _step_bias(numbers: Tensor, _layer: GatedDelta) -> Tensor:
    """Return what softplus makes a step of: steps between 0.001 and 0.1, even in logarithm."""
    steps = 0.001 * 100**numbers
    return steps + torch.log(-torch.expm1(-steps))


_OF_DELTA: dict[str, _DrawFn] = {"conv": _conv, "log_rate": _log_rate, "step_bias": _step_bias}

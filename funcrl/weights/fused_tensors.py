"""Tensors of a Hugging Face folder and the parameters in them, which are not always one for one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core.types import Params
from funcrl.models import TransformerConfig
from funcrl.weights.names import translate


class FusedTensor(NamedTuple):
    """A tensor of a folder and the parameters that it holds."""

    name: str  # of the tensor
    parts: tuple[str, ...]  # the parameters
    join: Callable[[Sequence[Tensor]], Tensor]  # the tensor of parameters
    split: Callable[[Tensor], Sequence[Tensor]]  # the parameters of the tensor


def fused_tensors_of(
    names: Iterable[str], config: TransformerConfig, vocabulary: str = "hugging_face"
) -> list[FusedTensor]:
    """Return the tensors that hold parameters.

    Args:
        names: of the parameters; those that share a tensor are all there.
        config: of their network.
        vocabulary: of the tensors, a field of `Name`.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(getattr(translate(name, config), vocabulary), []).append(name)
    return [_held(name, each, config) for name, each in parts.items()]


def as_stored(params: Mapping[str, Tensor], config: TransformerConfig) -> Params:
    """Return the tensors of a Hugging Face folder, by their names, that hold parameters."""
    return {
        held.name: held.join([params[part] for part in held.parts])
        for held in fused_tensors_of(params, config)
    }


def _held(name: str, parts: Sequence[str], config: TransformerConfig) -> FusedTensor:
    if len(parts) > 1:
        rows = config.head_width

        def join(leaves: Sequence[Tensor]) -> Tensor:
            return torch.stack([leaf.unflatten(0, (-1, rows)) for leaf in leaves], 1).flatten(0, 2)

        def split(tensor: Tensor) -> Sequence[Tensor]:
            heads = tensor.unflatten(0, (-1, len(parts), rows))
            return [part.flatten(0, 1) for part in heads.unbind(1)]

        return FusedTensor(
            name, tuple(sorted(parts, reverse=True)), join, split
        )  # q, then its gate
    if parts[0].endswith("delta.conv"):  # with an axis for the one channel that each filter reads
        return FusedTensor(
            name, tuple(parts), lambda leaves: leaves[0].unsqueeze(1), lambda t: [t.squeeze(1)]
        )
    return FusedTensor(name, tuple(parts), lambda leaves: leaves[0], lambda tensor: [tensor])

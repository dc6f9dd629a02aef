"""torch's grouped product of experts in a trace: of any dtype, and with its operations counted."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl.core.custom_op import FLOPS, operator

_grouped_mm = torch.ops.aten._grouped_mm


def _shape(a: Tensor, b: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if a.ndim == b.ndim == 3:
        return *a.shape[:2], b.shape[2]
    if a.ndim == b.ndim:  # the groups are parts of the axis that is summed over
        assert offsets is not None
        return len(offsets), a.shape[0], b.shape[1]
    return a.shape[-2], b.shape[-1]


def _flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    # Each column of a `b` without an axis of groups is one group's.
    return 2 * prod(a[-2:] if len(b) == 2 else a) * b[-1]


@operator("grouped_mm", lambda *inputs: inputs[0].new_empty(_shape(*inputs)), (), flops=_flops)
def _of_any_dtype(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    product: Tensor = _grouped_mm(a, b, offsets)
    return product.contiguous()


FLOPS[_grouped_mm] = _flops  # torch's counter has none


def traceable(operation: Any, args: Sequence[Any]) -> Any:
    """Return the operation to trace in place of another one: itself, but for a grouped product.

    torch computes a grouped product of experts in float32, too, but its rule for the shape of the
    result refuses all dtypes but bfloat16.
    """
    refused = operation is _grouped_mm.default and args[0].dtype != torch.bfloat16
    return _of_any_dtype if refused else operation


class GroupedOfAnyDtype(TorchDispatchMode):
    """A context in which tensors on meta have grouped products of any dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return traceable(func, args)(*args, **(kwargs or {}))

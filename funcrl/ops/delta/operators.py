"""The chunked scan as an operator, and its gradients as another: by torch's products or kernels."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

from funcrl.ops.delta import chunked
from funcrl.ops.exact.delta import Pair, Six, in_order, like_gradients, like_scan, scan_of
from funcrl.ops.exact.recipe import operator
from funcrl.ops.streams import as_samples, flat, token_major

Shape: TypeAlias = Sequence[int]


def _count(q: Shape, _k: Shape, v: Shape, *rest: Any) -> int:
    """Three products with the state for each token, and with the other tokens of its chunk."""
    chunk = min(rest[-2], q[-2])
    return 2 * math.prod(q[:-1]) * (3 * q[-1] * v[-1] + 2 * chunk * (q[-1] + v[-1]))


def _count_gradients(_grad: Shape, _grad_state: Shape, *inputs: Any) -> int:
    return 3 * _count(*inputs)  # the replay, and two gradients of each product


@operator("gated_delta_chunked", like_scan, rows=range(7), flops=_count)
def chunked_op(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor,
    chunk: int, kernels: str,
) -> Pair:  # fmt: skip
    """Return the outputs and the last state, by the kernels of that name."""
    *parts, before, begins = as_samples(q, k, v, decay, beta, state, resets)
    outputs, last = _kernels(kernels).scan(chunked.Tokens._make([*parts, begins]), before, chunk)
    return token_major(outputs, -2).view(v.shape), last.view(state.shape)


@operator("gated_delta_chunked_gradients", like_gradients, rows=range(9), flops=_count_gradients)
def chunked_gradients_op(
    grad_outputs: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor,
    beta: Tensor, state: Tensor, resets: Tensor, chunk: int, kernels: str,
) -> Six:  # fmt: skip
    """Return the gradients of all but the resets."""
    given = (q, k, v, decay, beta, state)
    grads = flat(grad_outputs, 3), flat(grad_state, 3)
    *parts, before, begins = as_samples(*given, resets)
    tokens = chunked.Tokens._make([*parts, begins])
    return in_order(_kernels(kernels).scan_gradients(*grads, tokens, before, chunk), given)


def _kernels(name: str) -> ModuleType:
    if name == "torch":
        return chunked
    # Imported here, because it needs triton.
    from funcrl.ops.delta import cuda

    return cuda


chunked_scan = scan_of(chunked_op, chunked_gradients_op)

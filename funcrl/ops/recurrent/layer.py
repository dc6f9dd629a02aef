"""A recurrent layer as one operator forward and one backward, which can compute anew what it needs.

It goes over the sequence in pieces of some steps. The product of x with W_ih, [N, T, G], the gates
and the cell states, which autograd would keep for every step, are in memory for one piece at a
time, unless the forward pass keeps them: `recompute` says what the backward pass computes anew.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.custom_op import differentiable, each_sample, leading, only_rows, operator
from funcrl.ops.recurrent import gru, lstm
from funcrl.ops.recurrent.contract import Cell, Precision, ScanKernels, steps_of_piece
from funcrl.ops.recurrent.passes import Saved, backward_pass, forward_pass, sequences_of
from funcrl.ops.sequence_args import flat


def kernels_of(cell: str, backend: str, precision: str) -> ScanKernels:
    """Return the kernels of the backend "op", "exact" or "triton"."""
    if backend == "triton":
        # Imported here, because it needs triton.
        from funcrl.ops.recurrent.cuda import scan as on_gpu

        return on_gpu.scan_kernels(cast(Cell, cell), cast(Precision, precision))
    kernels = lstm.KERNELS if cell == "lstm" else gru.KERNELS
    return kernels[backend]


# What the forward pass keeps for the backward pass, by what that one recomputes.
_KEPT = {"none": "gates", "chunk": "starts", "full": "nothing"}
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _like(x: Tensor, h: Tensor, c: Tensor, *rest: Any) -> Results:
    kept = rest[-1]
    lead, length, width = x.shape[:-2], x.shape[-2], h.shape[-1]
    steps = length if kept == "gates" else 0
    states = {"gates": length, "nothing": 0, "starts": _num_pieces(lead, length)}[kept]
    return (
        x.new_empty(*lead, length, width),
        torch.empty_like(h, memory_format=torch.contiguous_format),
        torch.empty_like(c, memory_format=torch.contiguous_format),
        x.new_empty(*lead, steps, 4 * width),
        c.new_empty(*lead, states, c.shape[-1], dtype=numerics.at_least_float32(c.dtype)),
    )


def _num_pieces(lead: Sequence[int], length: int) -> int:
    return -(-length // steps_of_piece(math.prod(lead)))


def _count(x: Sequence[int], *rest: Any) -> int:
    """Return the operations of the products with x and with h."""
    weight_ih, weight_hh = rest[3:5]
    return 2 * math.prod(x[:-1]) * (math.prod(weight_ih) + math.prod(weight_hh))


@operator("recurrent_layer", _like, rows=(0, 1, 2, 3), flops=_count)
def layer_op(
    x: Tensor, h: Tensor, c: Tensor, resets: Tensor | None, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, cell: str, backend: str, precision: str,
    kept: str,
) -> Results:  # fmt: skip
    """Return the outputs, the last states, and the gates and cell states that are kept.

    Kept are "gates": both of every step; "starts": the cell states before each piece; "nothing".
    """
    given = sequences_of(x, h, c, resets, weight_ih, weight_hh, bias_ih, bias_hh)
    like = _like(x, h, c, cell, backend, precision, kept)
    written = Saved(kept, flat(like[0], 2), flat(like[3], 2), flat(like[4], 2))
    last = forward_pass(given, kernels_of(cell, backend, precision), written)
    for result, state in zip(like[1:3], last, strict=True):
        result.copy_(state.view(result.shape))
    return like


def _like_gradients(x: Tensor, h: Tensor, c: Tensor, _resets: Any, *rest: Any) -> Gradients:
    weights, (groups, wants_x, wants_weights) = rest[:4], rest[-3:]
    wide = numerics.at_least_float32(x.dtype)

    def of_weight(weight: Tensor | None) -> Tensor:
        shape = weight.shape if weight is not None and wants_weights else (0,)
        return x.new_empty(groups, *shape, dtype=wide)

    grad_x = x.new_empty(x.shape if wants_x else (*x.shape[:-2], 0))
    of_weights = [of_weight(each) for each in weights]
    return cast(Gradients, (grad_x, h.new_empty(h.shape), c.new_empty(c.shape), *of_weights))


def _over_batch(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
    """Run a batch as more sequences, and as more groups of them.

    Where the forward pass was of no batch, and only gradients are, its pieces are those of fewer
    sequences: then each sample is a call of its own, which cuts the sequences alike.
    """
    if not only_rows(in_dims, _ROWS) or in_dims[_OUTPUTS] is None:
        return each_sample(gradients_op, info.batch_size, in_dims, inputs)
    *tensors, groups, wants_x, wants_weights = leading(info.batch_size, in_dims, inputs, _ROWS)
    found = gradients_op(*tensors, groups * info.batch_size, wants_x, wants_weights)
    of_weights = (each.unflatten(0, (info.batch_size, groups)) for each in found[3:])
    return (*found[:3], *of_weights), (0,) * len(found)


def _count_gradients(x: Sequence[int], *rest: Any) -> int:
    """Return the operations of the products, those that are computed anew included."""
    *_, kept, _, wants_x, wants_weights = rest
    of_x, of_h = (math.prod(each) for each in rest[3:5])
    # An LSTM that kept nothing first finds the cell states, then the gates.
    again = 0 if kept == "gates" else 2 if kept == "nothing" and rest[1][-1] else 1
    per_step = of_x * (again + wants_x + wants_weights) + of_h * (again + 1 + wants_weights)
    return 2 * math.prod(x[:-1]) * per_step


_OUTPUTS = 8  # the place of the forward pass's outputs
_ROWS = (*range(4), *range(_OUTPUTS, 14))


@operator(
    "recurrent_layer_gradients", _like_gradients, rows=_ROWS, flops=_count_gradients,
    over_batch=_over_batch,
)  # fmt: skip
def gradients_op(
    x: Tensor, h: Tensor, c: Tensor, resets: Tensor | None, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, outputs: Tensor, gates: Tensor, cells: Tensor,
    grad_outputs: Tensor, grad_h: Tensor, grad_c: Tensor, cell: str, backend: str, precision: str,
    kept: str, groups: int, wants_x: bool, wants_weights: bool,
) -> Gradients:  # fmt: skip
    """Return the gradients of the inputs; those of weights for each group of sequences."""
    inputs = x, h, c, resets, weight_ih, weight_hh, bias_ih, bias_hh
    given, like = sequences_of(*inputs), _like_gradients(*inputs, groups, wants_x, wants_weights)
    wide = given.c0.dtype
    grads = flat(grad_outputs, 2), flat(grad_h, 1).to(wide), flat(grad_c, 1).to(wide)
    first = backward_pass(
        given,
        kernels_of(cell, backend, precision),
        Saved(kept, flat(outputs, 2), flat(gates, 2), flat(cells, 2)),
        grads,
        flat(like[0], 2) if wants_x else None,
        [each.zero_() for each in like[3:]] if wants_weights else None,
    )
    for result, state in zip(like[1:3], first, strict=True):
        result.copy_(state.view(result.shape))
    return like


def _forward(*inputs: Any) -> Results:
    *given, recompute = inputs
    found: Results = layer_op(*given, _KEPT[recompute])
    return found


def _plain(*inputs: Any) -> tuple[Tensor, ...]:
    return layer_op(*inputs[:-1], "nothing")[:3]


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    *given, cell, backend, precision, recompute = inputs
    (outputs, _, _, gates, cells) = results
    grad_x, grad_h, grad_c, *of_weights = gradients_op(
        *given, outputs, gates, cells, *grads, cell, backend, precision, _KEPT[recompute], 1,
        wanted[0], any(wanted[4:8]),
    )  # fmt: skip
    found = [grad_x, grad_h, grad_c, None, *(each[0] for each in of_weights)]
    return [
        each.to(like.dtype)
        for each, like, want in zip(found, given, wanted, strict=False)
        if want and each is not None
    ]


def _layer(function: str) -> Any:
    return differentiable(
        function, _forward, _backward, rows=(0, 1, 2, 3), returned=3, plain=_plain,
        instead='backend="loop" has them all',
    )  # fmt: skip


LAYERS: dict[Cell, Any] = {"lstm": _layer("lstm_scan"), "gru": _layer("gru_scan")}

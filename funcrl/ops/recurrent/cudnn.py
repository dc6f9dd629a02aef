"""A recurrent layer by cuDNN's kernels, which keep what they need for the backward pass.

What they keep is of all sequences together, and so is their gradient of the weights. Under `vmap`
each sample is a call of its own; leading axes of `x` are one call.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from funcrl.core.custom_op import differentiable, operator
from funcrl.ops.recurrent.contract import Cell, Layer
from funcrl.ops.sequence_args import flat

aten = torch.ops.aten
_MODES = {"lstm": 2, "gru": 3}  # as cuDNN and torch count them
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _like(x: Tensor, h: Tensor, c: Tensor, *rest: Any) -> Results:
    del rest
    outputs = x.new_empty(x.shape[-2], *x.shape[:-2], h.shape[-1]).movedim(0, -2)
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
    kept, weights = x.new_empty(sizes[0], dtype=torch.uint8), x.new_empty(sizes[1])
    return outputs, h.new_empty(h.shape), c.new_empty(c.shape), kept, weights


@operator("cudnn_layer", _like, rows=())
def layer_op(
    x: Tensor, h: Tensor, c: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, cell: str, keep: bool,
) -> Results:  # fmt: skip
    """Return the outputs, the last states, what cuDNN keeps, and the weights in its own layout."""
    # Copies, for the next call makes them views of one piece of memory.
    weights = [each.clone() for each in _weights(weight_ih, weight_hh, bias_ih, bias_hh)]
    layout = aten._cudnn_rnn_flatten_weight(weights, len(weights), x.shape[-1], *_sizes(cell, h))
    outputs, last_h, last_c, *kept = aten._cudnn_rnn(
        flat(x, 2), weights, len(weights), layout, *_states(h, c), *_options(cell, h, keep)
    )
    last_c = last_c.view(c.shape) if cell == "lstm" else torch.empty_like(c)
    return outputs.view(*x.shape[:-1], h.shape[-1]), last_h.view(h.shape), last_c, kept[0], kept[1]


def _like_gradients(*inputs: Any) -> Gradients:
    found = (inputs[0].new_empty(0 if each is None else each.shape) for each in inputs[:7])
    return cast(Gradients, tuple(found))


@operator("cudnn_layer_gradients", _like_gradients, rows=())
def gradients_op(
    x: Tensor, h: Tensor, c: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, outputs: Tensor, kept: Tensor, own_weights: Tensor,
    grad_outputs: Tensor, grad_h: Tensor, grad_c: Tensor, cell: str,
) -> Gradients:  # fmt: skip
    """Return the gradients of x, of both states, of the weights and of the biases."""
    weights = _weights(weight_ih, weight_hh, bias_ih, bias_hh)
    of_x, of_h, of_c, of_weights = aten._cudnn_rnn_backward(
        flat(x, 2), weights, len(weights), own_weights, *_states(h, c),
        flat(outputs, 2), flat(grad_outputs, 2), *_states(grad_h, grad_c),
        *_options(cell, h, True), kept.clone(),  # the kernel writes into it
        [True, True, cell == "lstm", True],
    )  # fmt: skip
    found = _like_gradients(x, h, c, weight_ih, weight_hh, bias_ih, bias_hh)
    for result, given in zip(found, (of_x, of_h, of_c, *of_weights), strict=False):
        if result.numel():
            result.copy_(given.view(result.shape))
    return found


def _weights(*weights: Tensor | None) -> list[Tensor]:
    return [each for each in weights if each is not None]


def _states(h: Tensor, c: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return h and c as [1, N, H], for one layer; a GRU has no c."""
    shape = (1, math.prod(h.shape[:-1]), h.shape[-1])
    found = [each.reshape(shape).contiguous() if each.shape[-1] else None for each in (h, c)]
    return found[0], found[1]


def _sizes(cell: str, h: Tensor) -> tuple[Any, ...]:
    """Return what torch's functions call sizes and modes.

    They are the mode, H, the width of a projection, the number of layers, whether the batch is the
    first axis, and whether there are two directions.
    """
    return _MODES[cell], h.shape[-1], 0, 1, True, False


def _options(cell: str, h: Tensor, train: bool) -> tuple[Any, ...]:
    """Return the sizes, with dropout, training, lengths of sequences and dropout's state."""
    *sizes, two_directions = _sizes(cell, h)
    return *sizes, 0.0, train, two_directions, [], None


def _forward(*inputs: Any) -> Results:
    found: Results = layer_op(*inputs, True)
    return found


def _plain(*inputs: Any) -> tuple[Tensor, ...]:
    return layer_op(*inputs, False)[:3]


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    *given, cell = inputs
    outputs, _, _, *kept = results
    found = gradients_op(*given, outputs, *kept, *grads, cell)
    return [each for each, want in zip(found, wanted, strict=False) if want]


def _layer(function: str) -> Any:
    return differentiable(
        function, _forward, _backward, rows=(), returned=3, plain=_plain,
        instead='backend="loop" has them all',
    )  # fmt: skip


_LAYERS: dict[Cell, Any] = {"lstm": _layer("lstm_scan"), "gru": _layer("gru_scan")}


def run_layer(
    cell: Cell, x: Tensor, layer: Layer, h: Tensor, c: Tensor, _: None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, and the states after the last step; there are no resets."""
    outputs, h, last_c = _LAYERS[cell](x, h, c.to(x.dtype), *layer, cell)
    return outputs, h, last_c.to(c.dtype)

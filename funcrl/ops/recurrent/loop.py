"""Recurrent layers step by step in torch's own operations: the oracle, with all derivatives."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from funcrl.ops.recurrent.params import Layer


def lstm_layer(
    x: Tensor, layer: Layer, h: Tensor, c: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [..., T, H], and the states after the last step."""
    outputs = []
    for step in range(x.shape[-2]):
        h, c = _unless_reset(h, resets, step), _unless_reset(c, resets, step)
        mixed = linear(h, layer.weight_hh, layer.bias_hh)
        pre = linear(x[..., step, :], layer.weight_ih, layer.bias_ih) + mixed
        i, f, g, o = pre.to(c.dtype).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(x.dtype)
        outputs.append(h)
    return torch.stack(outputs, dim=-2), h, c


def gru_layer(
    x: Tensor, layer: Layer, h: Tensor, c: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [..., T, H], the state after the last step, and `c` as it is."""
    outputs = []
    for step in range(x.shape[-2]):
        h = _unless_reset(h, resets, step)
        of_x = linear(x[..., step, :], layer.weight_ih, layer.bias_ih).chunk(3, dim=-1)
        of_h = linear(h, layer.weight_hh, layer.bias_hh).chunk(3, dim=-1)
        r, z = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
        n = torch.tanh(of_x[2] + r * of_h[2])
        h = n + z * (h - n)
        outputs.append(h)
    return torch.stack(outputs, dim=-2), h, c


LAYERS = {"lstm": lstm_layer, "gru": gru_layer}


def _unless_reset(state: Tensor, resets: Tensor | None, step: int) -> Tensor:
    if resets is None:
        return state
    return torch.where(resets[..., step, None], torch.zeros_like(state), state)

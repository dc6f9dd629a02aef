"""The parameters of a recurrent network under torch's names, and checks of them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from funcrl.core import checks

_WEIGHTS, _BIASES = ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh")


class Layer(NamedTuple):
    """The parameters of one layer; G is 4 H (LSTM: i f g o) or 3 H (GRU: r z n)."""

    weight_ih: Tensor  # [G, D]
    weight_hh: Tensor  # [G, H]
    bias_ih: Tensor | None  # [G]
    bias_hh: Tensor | None  # [G]


def layers_of(
    function: str, x: Tensor, params: Mapping[str, Tensor], num_gates: int
) -> list[Layer]:
    """Return the layers that a dict has, after checking names, shapes and dtypes.

    Args:
        function: the public function, for errors.
        x: [..., T, D].
        params: under torch's names, such as `weight_ih_l0`.
        num_gates: 4 of an LSTM, 3 of a GRU.
    """
    count = sum(name.startswith("weight_hh_l") for name in params)
    names = {f"{kind}_l{n}" for n in range(count) for kind in (*_WEIGHTS, *_BIASES)}
    unknown = sorted(params.keys() - names)
    if unknown or not count:
        found = unknown[0] if unknown else "none"
        raise ValueError(
            f"{function} expects params named weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, "
            f"and so on for each layer, got {found!r}."
        )
    layers = [_layer(function, params, n) for n in range(count)]
    width_in, width = x.shape[-1], layers[0].weight_hh.shape[-1]
    for n, layer in enumerate(layers):
        rows = num_gates * width
        expected = ((rows, width_in), (rows, width), (rows,), (rows,))
        for kind, tensor, shape in zip((*_WEIGHTS, *_BIASES), layer, expected, strict=True):
            if tensor is None:
                continue
            name = f"params['{kind}_l{n}']"
            if tensor.shape != torch.Size(shape):
                raise ValueError(
                    f"{function} expects {name} of shape {list(shape)}, got {list(tensor.shape)}."
                )
            check_like(function, name, tensor, x)
        width_in = width
    return layers


def check_like(
    function: str, name: str, tensor: Tensor, x: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise unless a tensor is on the device of x and has its dtype, or the given one."""
    if tensor.device != x.device:
        raise ValueError(
            f"{function} expects {name} on the device of x, {x.device}, got {tensor.device}."
        )
    checks.check_dtype(function, name, tensor, dtype or x.dtype)


def _layer(function: str, params: Mapping[str, Tensor], n: int) -> Layer:
    names = [f"{kind}_l{n}" for kind in (*_WEIGHTS, *_BIASES)]
    biased = [name in params for name in names[2:]]
    for name in names if any(biased) else names[:2]:
        if name not in params:
            raise ValueError(f"{function} expects params[{name!r}], got {sorted(params)}.")
    weight_ih, weight_hh, bias_ih, bias_hh = names
    return Layer(params[weight_ih], params[weight_hh], params.get(bias_ih), params.get(bias_hh))


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

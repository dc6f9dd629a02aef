"""Recurrent networks over whole sequences: `lstm_scan` and `gru_scan`."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.ops.recurrent import loop
from funcrl.ops.recurrent.kernels import Cell, Precision
from funcrl.ops.recurrent.params import Layer, layers_of

Backend = Literal["auto", "loop", "op", "triton", "cudnn"]
Recompute = Literal["none", "full", "chunk"]
# (x, layer, h0, c0, resets) -> outputs, h, c
LayerFn: TypeAlias = Callable[
    [Tensor, Layer, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]
]


@checked
def lstm_scan(
    x: Tensor,
    params: Mapping[str, Tensor],
    state: tuple[Tensor, Tensor] | None = None,
    resets: Tensor | None = None,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    precision: Precision = "ieee",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the outputs [..., T, H] of an LSTM over whole sequences, and its last state.

    Args:
        x: [..., T, D].
        params: under the names of `torch.nn.LSTM`.
        state: h and c before the first step, [..., L, H] each; zero if None.
        resets: [..., T] bool, True where a new episode begins.
        backend: what computes it.
        recompute: what the backward pass computes anew.
        precision: of the products with `weight_hh` in the "triton" backend.
    """
    return _scan("lstm_scan", "lstm", x, params, state, resets, backend, recompute, precision)


@checked
def gru_scan(
    x: Tensor,
    params: Mapping[str, Tensor],
    state: Tensor | None = None,
    resets: Tensor | None = None,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    precision: Precision = "ieee",
) -> tuple[Tensor, Tensor]:
    """Return the outputs [..., T, H] of a GRU over whole sequences, and its last state [..., L, H].

    The arguments are those of `lstm_scan`, the parameters named as in `torch.nn.GRU`.
    """
    states = None if state is None else (state, state[..., :0])
    outputs, (h, _) = _scan(
        "gru_scan", "gru", x, params, states, resets, backend, recompute, precision
    )
    return outputs, h


def _scan(
    function: str,
    cell: Cell,
    x: Tensor,
    params: Mapping[str, Tensor],
    state: tuple[Tensor, Tensor] | None,
    resets: Tensor | None,
    backend: Backend,
    recompute: Recompute,
    precision: Precision,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run the layers one after the other."""
    checks.check_floating(function, "x", x)
    layers = layers_of(function, x, params, 4 if cell == "lstm" else 3)
    width = layers[0].weight_hh.shape[-1]
    if state is None:
        zeros = x.new_zeros(*x.shape[:-2], len(layers), width)
        state = zeros, zeros if cell == "lstm" else zeros[..., :0]
    run = loop.lstm_layer if cell == "lstm" else loop.gru_layer
    last = []
    for layer, h0, c0 in zip(layers, *(each.unbind(-2) for each in state), strict=True):
        x, h, c = run(x, layer, h0, c0, resets)
        last.append((h, c))
    hs, cs = (torch.stack(each, dim=-2) for each in zip(*last, strict=True))
    return x, (hs, cs)

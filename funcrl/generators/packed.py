"""Weights laid out for decoding on a CPU, made once a push: each token multiplies by them all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from funcrl import ops
from funcrl.core.types import Params
from funcrl.models import MLP, Attention, GatedDelta, Linear, Transformer
from funcrl.models.functional import bind, fill
from funcrl.ops import LinearFn, Weights
from funcrl.ops.exact import EXACT_FORWARD

# Smaller matrices stay in the cache, where the plain product is at least as fast (measured).
_SMALLEST = 1 << 18
_DTYPES = (torch.float32, torch.bfloat16)


def pack_weights(model: Transformer, params: Params) -> Transformer:
    """Return the model bound to `params`, on a CPU with copies laid out for products of few rows.

    Matrices that multiply the same input are joined to one, and large ones take oneDNN's blocked
    layout, which halves the time of a product with a few rows. A model of exact numerics calls its
    kernels directly. One with operations of its own, other dtypes, and other devices get the plain
    bound model.
    """
    if model.ops == ops.EXACT:
        return fill(Transformer(model.config, EXACT_FORWARD), params)
    first = next(iter(params.values()))
    plain = model.ops is not ops.NATIVE or first.device.type != "cpu" or first.dtype not in _DTYPES
    if plain or not torch.backends.mkldnn.is_available():
        return bind(model, params)
    # By the id of a weight, which stays its own because the network keeps the weight alive.
    products: dict[int, LinearFn] = {}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return products[id(weight)](x, weight, bias)

    def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
        first, bias = weights[0]
        return products[id(first)](x, first, bias).split([len(w) for w, _ in weights], dim=-1)

    fast = ops.NATIVE._replace(linear=linear, project=project)
    network = fill(Transformer(model.config, fast), params)
    for child in network.modules():
        if isinstance(child, Attention | GatedDelta):
            parts = child.projections()
            products[id(parts[0].weight)] = _joined(parts)
            products[id(child.o.weight)] = _product(child.o.weight)
        if isinstance(child, MLP):
            products[id(child.gate.weight)] = _joined([child.gate, child.up])
            products[id(child.down.weight)] = _product(child.down.weight)
    products[id(network.unembed.weight)] = _product(network.unembed.weight)
    return network


def _joined(parts: Sequence[Linear]) -> LinearFn:
    """Return the product with all the parts' matrices, one above the other."""
    product = _product(torch.cat([part.weight for part in parts]))
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = [part.weight.new_zeros(len(part.weight)) for part in parts]
        pairs = zip(parts, zeros, strict=True)
        bias = torch.cat([zero if part.bias is None else part.bias for part, zero in pairs])
    return lambda x, _weight, _bias: product(x, _weight, bias)


def _product(weight: Tensor) -> LinearFn:
    """Return the fastest product with a matrix; it ignores the weight that it is called with."""
    if weight.numel() < _SMALLEST or not _has_blocked_layout(weight.dtype):
        return lambda x, _, bias: nn.functional.linear(x, weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x, _, bias: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


def _has_blocked_layout(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a layout for weights of a dtype on this processor."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

"""Weights laid out for decoding on a CPU, made once a push: each token multiplies by them all."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from funcrl import ops
from funcrl.core.types import Params
from funcrl.models import MLP, Attention, GatedDelta, Linear, Transformer
from funcrl.models.config import is_plain
from funcrl.models.functional import bind, fill
from funcrl.models.layers import RMSNorm
from funcrl.models.transformer import Block
from funcrl.ops import AttendFn, Weights, arithmetic
from funcrl.ops.exact import EXACT_FORWARD

# Smaller matrices stay in the cache, where the plain product is at least as fast (measured).
_SMALLEST = 1 << 18
_DTYPES = (torch.float32, torch.bfloat16)
# Options that a `PackedBlock` computes, or that change nothing within a block.
_KNOWN = ("window", "local_rope_theta", "rope_factor", "logit_cap", "embed_scale")
ProductFn: TypeAlias = Callable[[Tensor], Tensor]


def pack_weights(model: Transformer, params: Params, by_operation: bool = False) -> Transformer:
    """Return the model bound to `params`, on a CPU with copies laid out for products of few rows.

    Matrices that multiply the same input are joined to one, and large ones take oneDNN's blocked
    layout, which halves the time of a product with a few rows. A model of exact numerics calls its
    kernels directly. One with operations of its own, other dtypes, and other devices get the plain
    bound model.

    Args:
        model: whose blocks become a `PackedBlock` where that computes the same.
        params: its parameters.
        by_operation: leave the blocks as they are, which call the model's operations one by one.
    """
    if model.ops == ops.EXACT:
        return fill(Transformer(model.config, EXACT_FORWARD), params)
    first = next(iter(params.values()))
    plain = model.ops is not ops.NATIVE or first.device.type != "cpu" or first.dtype not in _DTYPES
    if plain or not torch.backends.mkldnn.is_available():
        return bind(model, params)
    # By the id of a weight, which stays its own because the network keeps the weight alive.
    products: dict[int, ProductFn] = {}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        del bias  # which the product has
        return products[id(weight)](x)

    def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
        sizes = [len(weight) for weight, _ in weights]
        return products[id(weights[0][0])](x).split(sizes, dim=-1)

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
    if not by_operation and is_plain(model.config, *_KNOWN):
        for index, block in enumerate(network.blocks):
            if isinstance(block, Block) and block.kind != "delta":
                network.blocks[index] = PackedBlock(block, products)
    return network


class PackedBlock(nn.Module):
    """A block of attention in few calls, with the bits of native operations and no derivative.

    A token of a small network waits for calls into torch, not for sums.

    Args:
        block: whose result it returns.
        products: with the block's matrices, by their ids; of joined ones by that of the first.
    """

    def __init__(self, block: Block, products: Mapping[int, ProductFn]) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.kind = block.kind
        self._config = c = attention.config
        self._window = {} if attention.window is None else {"window": attention.window}
        self._norms = block.attention_norm.weight.detach(), block.mlp_norm.weight.detach()
        self._gains = None
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            of_k = k_norm.weight.expand(c.num_kv_heads, 1, -1)
            self._gains = torch.cat([q_norm.weight.expand(c.num_heads, 1, -1), of_k]).detach()
        self._qkv, self._out, self._gate_up, self._down = (
            products[id(part.weight)] for part in (attention.q, attention.o, mlp.gate, mlp.down)
        )

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return the residual stream [..., T, D] after the block, as `Block` does."""
        c = self._config
        q_end, k_end = c.num_heads, c.num_heads + c.num_kv_heads
        before, between = self._norms
        qkv = self._qkv(self._normed(x) * before)
        qkv = qkv.view(*x.shape[:-1], -1, c.head_width).transpose(-2, -3)
        qk, v = qkv[..., :k_end, :, :], qkv[..., k_end:, :, :]
        if self._gains is not None:
            qk = self._normed(qk) * self._gains
        qk = _rotate(qk, rotation)
        q, k = qk[..., :q_end, :, :], qk[..., q_end:, :, :]
        mixed = attend(q, k, v, **self._window).transpose(-2, -3).flatten(-2)
        x = x + self._out(mixed)
        gate, up = self._gate_up(self._normed(x) * between).chunk(2, dim=-1)
        return x + self._down(nn.functional.silu(gate) * up)

    def _normed(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], eps=self._config.norm_eps)


_rotate = inspect.unwrap(arithmetic.rotate)  # without the checks of its arguments


def _joined(parts: Sequence[Linear]) -> ProductFn:
    """Return the product with all the parts' matrices, one above the other."""
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = [part.weight.new_zeros(len(part.weight)) for part in parts]
        pairs = zip(parts, zeros, strict=True)
        bias = torch.cat([zero if part.bias is None else part.bias for part, zero in pairs])
    return _product(torch.cat([part.weight for part in parts]), bias)


def _product(weight: Tensor, bias: Tensor | None = None) -> ProductFn:
    """Return the fastest product with a matrix, and a sum with a bias where there is one."""
    if weight.numel() < _SMALLEST or not _has_blocked_layout(weight.dtype):
        return lambda x: nn.functional.linear(x, weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


def _has_blocked_layout(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a layout for weights of a dtype on this processor."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

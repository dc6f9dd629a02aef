"""Layers that act on each token, and attention: functions of any leading batch axes.

Letters: T tokens, D width, H query heads, K key heads, C head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from funcrl.models.config import Kind, TransformerConfig
from funcrl.ops import AttendFn, Ops


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last axis."""

    def __init__(self, width: int, eps: float, ops: Ops, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.offset = offset
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised over its last axis."""
        return self.ops.rms_norm(x, self.weight, *self.constants())

    def constants(self) -> tuple[float, ...]:
        """Return what `ops.rms_norm` takes after the weight: operations of one's own may know of
        no offset, which is left out where there is none."""
        return (self.eps, self.offset) if self.offset else (self.eps,)


class Linear(nn.Linear):
    """`x W^T + b`, the product by `ops.linear`."""

    def __init__(self, width: int, out: int, bias: bool, ops: Ops) -> None:
        super().__init__(width, out, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection [..., out]."""
        return self.ops.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `attend` says which tokens see which."""

    def __init__(self, config: TransformerConfig, ops: Ops, kind: Kind = "full") -> None:
        super().__init__()
        self.config = c = config
        self.ops = ops
        self.window = c.window if kind == "sliding" else None
        heads = c.num_heads * c.head_width
        self.q = Linear(c.width, heads, c.qkv_bias, ops)
        self.k = Linear(c.width, c.num_kv_heads * c.head_width, c.qkv_bias, ops)
        self.v = Linear(c.width, c.num_kv_heads * c.head_width, c.qkv_bias, ops)
        self.o = Linear(heads, c.width, False, ops)
        self.gate = Linear(c.width, heads, False, ops) if c.attention_gate else None
        self.q_norm = head_norm(c, ops) if c.qk_norm else nn.Identity()
        self.k_norm = head_norm(c, ops) if c.qk_norm else nn.Identity()

    def projections(self) -> list[Linear]:
        """Return the maps of the layer's input: to queries, keys, values, and the gate if any."""
        return [self.q, self.k, self.v, *([] if self.gate is None else [self.gate])]

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return attention's output [..., T, D] under a rotation by `ops.rotation`."""
        maps = [(part.weight, part.bias) for part in self.projections()]
        q, k, v, *gates = self.ops.project(x, maps)
        q, k = self._normed_and_rotated(self._heads(q), self._heads(k), rotation)
        # A function of one's own need know of no window where there is none.
        window = {} if self.window is None else {"window": self.window}
        attended = attend(self._scaled(q), k, self._heads(v).transpose(-2, -3), **window)
        mixed = attended.transpose(-2, -3).flatten(-2)
        for gate in gates:
            mixed = self.ops.sigmoid_gate(gate, mixed)
        out: Tensor = self.o(mixed)
        return out

    def _normed_and_rotated(self, q: Tensor, k: Tensor, rotation: Tensor) -> Sequence[Tensor]:
        """Return queries and keys [..., T, heads, C] as attention takes them: heads, then T."""
        fused, kinds = self.ops.norm_rotate, {type(self.q_norm), type(self.k_norm)}
        c = self.config
        whole = c.rotated_width == c.head_width and not c.norm_offset
        if fused is None or not whole or kinds not in ({RMSNorm}, {nn.Identity}):
            normed = [self.q_norm(q).transpose(-2, -3), self.k_norm(k).transpose(-2, -3)]
            return self._rotated(normed, rotation)
        gains = None
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            gains = self.q_norm.weight, self.k_norm.weight
        return fused(q, k, gains, c.norm_eps, rotation)

    def _rotated(self, parts: Sequence[Tensor], rotation: Tensor) -> Sequence[Tensor]:
        """Return [..., heads, T, C] with their first `rotated_width` numbers rotated."""
        width = self.config.rotated_width
        if width == self.config.head_width:
            return self.ops.rotate(parts, rotation)
        turned = self.ops.rotate([part[..., :width] for part in parts], rotation)
        return [
            torch.cat([first, part[..., width:]], dim=-1)
            for first, part in zip(turned, parts, strict=True)
        ]

    def _scaled(self, q: Tensor) -> Tensor:
        """Return queries for attention, which multiplies their scores by 1 / sqrt(C)."""
        scale = self.config.attention_scale
        factor = 1.0 if scale is None else scale * self.config.head_width**0.5
        return q if factor == 1.0 else q * factor

    def _heads(self, x: Tensor) -> Tensor:
        """Return [..., T, H C] as [..., T, H, C]."""
        return x.unflatten(-1, (-1, self.config.head_width))


class MLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU, or GeGLU."""

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width, False, ops)
        self.up = Linear(config.width, config.mlp_width, False, ops)
        self.down = Linear(config.mlp_width, config.width, False, ops)
        self.ops = ops
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated projection [..., T, D]."""
        maps = [(part.weight, None) for part in (self.gate, self.up)]
        gated = {"silu": self.ops.swiglu, "gelu_tanh": self.ops.geglu}[self.activation]
        out: Tensor = self.down(gated(*self.ops.project(x, maps)))
        return out


def add_and_norm(x: Tensor, delta: Tensor, norm: nn.Module, ops: Ops) -> tuple[Tensor, Tensor]:
    """Return `x + delta` and its norm, at once where the operations have that."""
    if ops.add_rms_norm is None or type(norm) is not RMSNorm:
        total = x + delta
        return total, norm(total)
    return ops.add_rms_norm(x, delta, norm.weight, *norm.constants())


def stream_norm(config: TransformerConfig, ops: Ops) -> RMSNorm:
    """Return a norm of the residual stream, or of what is added to it."""
    return RMSNorm(config.width, config.norm_eps, ops, config.norm_offset)


def head_norm(config: TransformerConfig, ops: Ops) -> RMSNorm:
    """Return a norm of one head's queries or keys."""
    return RMSNorm(config.head_width, config.norm_eps, ops, config.norm_offset)

"""The layers of a network: norms, attention, gated MLPs, and the gated delta layer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core.arguments import checked
from funcrl.core.numerics import at_least_float32
from funcrl.models.config import Kind, TransformerConfig
from funcrl.ops import AttendFn, Ops, attention


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

    def reset_parameters(self) -> None:
        """Draw nothing: a network holds no weights of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection [..., out]."""
        return self.ops.linear(x, self.weight, self.bias)


def empty_embedding(vocab_size: int, width: int) -> nn.Embedding:
    """Return an embedding whose weight is not drawn: drawing one on the meta device makes torch
    import its compiler, two seconds of a start."""
    return nn.Embedding.from_pretrained(torch.empty(vocab_size, width), freeze=False)


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


_EPS = 1e-6  # added to the square of the length of a query or key


class Memory(NamedTuple):
    """What a delta layer keeps of the tokens of a sample."""

    history: Tensor  # [..., K - 1, E], the last inputs of the convolution
    state: Tensor  # [..., H, Ck, Cv]


class Past(NamedTuple):
    """Where a delta layer begins: at the start of a sample if nothing is said."""

    memory: Memory | None = None  # of the tokens before
    resets: Tensor | None = None  # [..., T] bool, True where a new sample begins
    lengths: Tensor | None = None  # [...], the number of tokens that count, all without padding


# the past -> (the layer's result [..., H, T, Cv], what it keeps after the last token that counts)
MixFn: TypeAlias = Callable[[Past], tuple[Tensor, Memory]]
RecurFn: TypeAlias = Callable[[MixFn], Tensor]  # runs a layer on the past that it chooses


@checked
def recur_causal(mix: MixFn) -> Tensor:
    """Return a delta layer's result where the tokens are one sample.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, layers=("delta",))
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> recurs = [funcrl.models.recur_causal] * config.num_layers
        >>> tokens = torch.tensor([1, 2, 3])
        >>> funcrl.functional(model)(params, tokens, torch.arange(3), attend=recurs).shape
        torch.Size([3, 7])
    """
    return mix(Past())[0]


@checked
def recur_segments(segment_ids: Tensor) -> RecurFn:
    """Return the recurrence of a row that packs many samples: each begins without a past.

    Args:
        segment_ids: [..., T], equal for the tokens of one sample, which are neighbours.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(
        ...     vocab_size=7, width=8, num_layers=2, layers=("delta", "full"))
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> ids = torch.tensor([0, 0, 1])
        >>> recur = funcrl.models.recur_segments(ids)
        >>> layers = [recur, funcrl.ops.attend_segments(ids)]
        >>> tokens, positions = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])
        >>> funcrl.functional(model)(params, tokens, positions, attend=layers).shape
        torch.Size([3, 7])
    """
    resets = attention.starts(segment_ids)

    @checked
    def recur(mix: MixFn) -> Tensor:
        return mix(Past(resets=resets))[0]

    return recur


class GatedDelta(nn.Module):
    """A layer whose memory of all tokens before is one matrix a head."""

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.config = c = config
        self.ops = ops
        keys, values = c.delta_key_heads * c.delta_key_width, c.delta_heads * c.delta_value_width
        self._widths = [keys, keys, values]
        self.qkv = Linear(c.width, c.delta_channels, False, ops)
        self.z = Linear(c.width, values, False, ops)
        self.a = Linear(c.width, c.delta_heads, False, ops)
        self.b = Linear(c.width, c.delta_heads, False, ops)
        self.conv = nn.Parameter(torch.empty(c.delta_channels, c.delta_conv))
        self.log_rate = nn.Parameter(torch.empty(c.delta_heads))
        self.step_bias = nn.Parameter(torch.empty(c.delta_heads))
        self.norm = RMSNorm(c.delta_value_width, c.norm_eps, ops)
        self.o = Linear(values, c.width, False, ops)

    def projections(self) -> list[Linear]:
        """Return the maps of the layer's input."""
        return [self.qkv, self.z, self.a, self.b]

    def forward(self, x: Tensor, recur: RecurFn) -> Tensor:
        """Return the layer's output [..., T, D]."""
        maps = [(part.weight, None) for part in self.projections()]
        qkv, z, a, b = self.ops.project(x, maps)
        gates = self.ops.delta_gates(a, b, self.log_rate, self.step_bias)

        def mix(past: Past) -> tuple[Tensor, Memory]:
            return self._mixed(qkv, gates, past)

        normed = self.norm(recur(mix).transpose(-2, -3)).flatten(-2)
        out: Tensor = self.o(self.ops.swiglu(z, normed))
        return out

    def _mixed(
        self, qkv: Tensor, gates: tuple[Tensor, Tensor], past: Past
    ) -> tuple[Tensor, Memory]:
        """Return the scan's outputs [..., H, T, Cv] of the convolution's inputs [..., T, E]."""
        history, state = past.memory or (None, None)
        found, kept = self.ops.short_conv(qkv, self.conv, history, past.resets)
        decay, beta = gates
        if past.lengths is not None:
            # A padding token leaves the state as it is: nothing decays, and nothing is written.
            places = torch.arange(qkv.shape[-2], device=qkv.device)
            padding = (places >= past.lengths[..., None])[..., None]
            decay, beta = (part.masked_fill(padding, 0) for part in gates)
            kept = _last_rows(qkv, history, past.lengths, kept.shape[-2])
        q, k, v = found.split(self._widths, dim=-1)
        c = self.config
        outputs, state = self.ops.gated_delta(
            self._normed(q, 1 / c.delta_key_width),  # of length 1, times 1 / sqrt(Ck)
            self._normed(k, c.delta_key_width**-0.5),
            v.unflatten(-1, (c.delta_heads, -1)).transpose(-2, -3),
            decay.transpose(-1, -2),
            beta.transpose(-1, -2),
            state,
            past.resets,
        )
        return outputs, Memory(kept, state)

    def _normed(self, x: Tensor, gain: float) -> Tensor:
        """Return [..., T, heads Ck] as [..., H, T, Ck], each head of length sqrt(Ck) `gain`."""
        c = self.config
        heads = x.unflatten(-1, (c.delta_key_heads, -1))
        wide = heads.to(at_least_float32(x.dtype))
        weight = wide.new_full((c.delta_key_width,), gain)
        # x / sqrt(sum(x^2) + eps) is an RMS norm, of a mean, with eps / Ck.
        normed = self.ops.rms_norm(wide, weight, _EPS / c.delta_key_width).to(x.dtype)
        repeats = c.delta_heads // c.delta_key_heads
        return normed.transpose(-2, -3).repeat_interleave(repeats, dim=-3)


def _last_rows(x: Tensor, history: Tensor | None, lengths: Tensor, count: int) -> Tensor:
    """Return the `count` rows of history and x [..., T, E] that end with the last that counts."""
    if history is None:
        history = x.new_zeros(*x.shape[:-2], count, x.shape[-1])
    places = lengths[..., None] + torch.arange(count, device=x.device)
    index = places[..., None].expand(*places.shape, x.shape[-1])
    return torch.cat([history, x], dim=-2).gather(-2, index)

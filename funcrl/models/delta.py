"""The gated delta layer (arXiv:2412.06464), as Qwen3.5 has it: attention's place, with a state.

Letters: T tokens, E channels of the convolution, H value heads, Ck and Cv the widths of a key's and
a value's head. What the layer remembers of the tokens before, and where it forgets, is an argument
of its call, `recur`, as `attend` is one of attention's.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core.arguments import checked
from funcrl.core.numerics import at_least_float32
from funcrl.models.config import TransformerConfig
from funcrl.models.layers import Linear, RMSNorm
from funcrl.ops import Ops, attention

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

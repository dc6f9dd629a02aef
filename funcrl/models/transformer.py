"""The one network: a decoder-only transformer whose options make it Llama, Qwen2 or Qwen3.

Layers take one sample, or any leading batch axes; letters: T tokens, D width, H query heads,
K key heads, C head width, V vocabulary. The module is built on the meta device and holds no
weights; parameters are a separate flat dictionary. Three parts of it are arguments: the arithmetic
(`ops`), which tokens see which (`attend`), and what becomes of the last layer's output (`head`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks, rng
from funcrl.core.arguments import Count, Positive, check_fields, checked
from funcrl.core.types import Params
from funcrl.ops import AttendFn, Ops, choose_ops

# (the last layer's output [..., T, D], the output matrix [V, D]) -> anything
HeadFn: TypeAlias = Callable[[Tensor, Tensor], Any]


# Far above any existing model, and so low that no product of two overflows. A file with a larger
# size is broken, or meant to cost its reader memory and time.
LARGEST = {
    "vocab_size": 1 << 24, "width": 1 << 18, "num_layers": 1 << 12, "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14, "head_width": 1 << 14, "mlp_width": 1 << 20,
    "context_length": 1 << 28,
}  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a `Transformer`; the defaults are a model that trains on a laptop.

    No size may be above that in `funcrl.models.LARGEST`.

    Args:
        vocab_size: V.
        width: D.
        num_layers: the number of blocks.
        num_heads: H.
        num_kv_heads: K, a divisor of `num_heads`.
        head_width: C, even.
        mlp_width: of the gated MLP.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        qkv_bias: whether q, k and v have biases (Qwen2).
        rope_theta: the base of the rotary embedding.
        norm_eps: added to the mean square in RMSNorm.
        tied: whether the output projection is the embedding.
        context_length: the longest sample, prompt and completion, that a generator makes.
        numerics: "native", torch's fastest operations; or "exact", operations whose result for a
            row depends on that row alone, so that trainer and generator agree to the last bit.
    """

    vocab_size: Count = 512
    width: Count = 128
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_width: Count = 32
    mlp_width: Count = 384
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-6
    tied: bool = True
    context_length: Count = 4096
    numerics: Literal["native", "exact"] = "native"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, largest in LARGEST.items():
            checks.check_range("TransformerConfig", name, getattr(self, name), 1, largest)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"TransformerConfig expects num_kv_heads to divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}."
            )
        if self.head_width % 2:
            raise ValueError(
                f"TransformerConfig expects an even head_width, got {self.head_width}."
            )


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised over its last axis."""
        return self.ops.rms_norm(x, self.weight, self.eps)


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

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.config = c = config
        self.ops = ops
        self.q = Linear(c.width, c.num_heads * c.head_width, c.qkv_bias, ops)
        self.k = Linear(c.width, c.num_kv_heads * c.head_width, c.qkv_bias, ops)
        self.v = Linear(c.width, c.num_kv_heads * c.head_width, c.qkv_bias, ops)
        self.o = Linear(c.num_heads * c.head_width, c.width, False, ops)
        self.q_norm = RMSNorm(c.head_width, c.norm_eps, ops) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_width, c.norm_eps, ops) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return attention's output [..., T, D] under a rotation by `ops.rotation`."""
        maps = [(part.weight, part.bias) for part in (self.q, self.k, self.v)]
        q, k, v = (self._heads(part) for part in self.ops.project(x, maps))
        q, k = self._normed_and_rotated(q, k, rotation)
        attended = attend(q, k, v.transpose(-2, -3))
        out: Tensor = self.o(attended.transpose(-2, -3).flatten(-2))
        return out

    def _normed_and_rotated(self, q: Tensor, k: Tensor, rotation: Tensor) -> Sequence[Tensor]:
        """Return queries and keys [..., T, heads, C] as attention takes them: heads, then T."""
        fused, kinds = self.ops.norm_rotate, {type(self.q_norm), type(self.k_norm)}
        if fused is None or kinds not in ({RMSNorm}, {nn.Identity}):
            normed = [self.q_norm(q), self.k_norm(k)]
            return self.ops.rotate([part.transpose(-2, -3) for part in normed], rotation)
        gains = None
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            gains = self.q_norm.weight, self.k_norm.weight
        return fused(q, k, gains, self.config.norm_eps, rotation)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [..., T, H C] as [..., T, H, C]."""
        return x.unflatten(-1, (-1, self.config.head_width))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width, False, ops)
        self.up = Linear(config.width, config.mlp_width, False, ops)
        self.down = Linear(config.mlp_width, config.width, False, ops)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated projection [..., T, D]."""
        maps = [(part.weight, None) for part in (self.gate, self.up)]
        out: Tensor = self.down(self.ops.swiglu(*self.ops.project(x, maps)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normalised residual stream."""

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps, ops)
        self.attention = Attention(config, ops)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, ops)
        self.mlp = MLP(config, ops)
        self.ops = ops

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return the residual stream [..., T, D] after the block."""
        attended = self.attention(self.attention_norm(x), rotation, attend)
        norm, fused = self.mlp_norm, self.ops.add_rms_norm
        if fused is None:
            x = x + attended
            normalised = norm(x)
        else:
            x, normalised = fused(x, attended, norm.weight, norm.eps)
        out: Tensor = x + self.mlp(normalised)
        return out


class Transformer(nn.Module):
    """A decoder-only transformer, `model(tokens, positions) -> logits`, without weights of its own.

    Two more arguments of the call are functions, and `dtype` is the one to compute in where exact
    operations cast weights themselves. `attend` says which tokens see which: a causal
    sample when left out, `funcrl.ops.attend_segments(segment_ids)` for a packed row, a sequence
    with one function a layer where layers differ, as on a cache. `head` is called with the last
    layer's output [..., T, D] and the output matrix [V, D], and its result is the model's: all
    logits when left out.

    Args:
        config: its shape and its numerics.
        ops: the arithmetic, "native", "exact" or a `funcrl.ops.Ops`; that of `config.numerics` when
            left out.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8)
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> apply = funcrl.functional(model)
        >>> apply(params, torch.tensor([1, 2, 3]), torch.arange(3)).shape
        torch.Size([3, 7])
        >>> apply(params, torch.tensor([1, 2]), torch.arange(2), head=lambda x, w: x).shape
        torch.Size([2, 8])
    """

    def __init__(self, config: TransformerConfig, ops: str | Ops | None = None) -> None:
        super().__init__()
        self.config = config
        self.ops = chosen = choose_ops("Transformer", config.numerics if ops is None else ops)
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(Block(config, chosen) for _ in range(config.num_layers))
            self.norm = RMSNorm(config.width, config.norm_eps, chosen)
            self.unembed = Linear(config.width, config.vocab_size, False, chosen)
        if config.tied:
            self.unembed.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: AttendFn | Sequence[AttendFn] | None = None,
        head: HeadFn | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return logits [..., T, V], where `logits[t]` predicts the token after `tokens[t]`."""
        checks.check_shape("Transformer", "positions", positions, "tokens", tokens.shape)
        if dtype is not None and not self.ops.exact:
            raise ValueError(
                f"Transformer expects no dtype= with native operations, whose weights say it, got "
                f"{dtype}; cast the parameters."
            )
        attend = self.ops.attend_causal if attend is None else attend
        layers = [attend] * len(self.blocks) if callable(attend) else attend
        x = self.ops.embed(tokens, self.embed.weight, dtype)
        c = self.config
        rotation = self.ops.rotation(positions, c.head_width, c.rope_theta)
        for block, attend_fn in zip(self.blocks, layers, strict=True):
            x = block(x, rotation, attend_fn)
        x = self.norm(x)
        return self.unembed(x) if head is None else head(x, self.unembed.weight)


@checked
def init_params(
    model: nn.Module, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Params:
    """Return new parameters of a module: a flat dictionary, its keys sorted.

    Vectors of norms are 1 and biases 0; matrices are normal with deviation 0.02, and those that
    write to the residual stream (`o` and `down`) are divided by sqrt(2 L), as in GPT-2. A module's
    `deviations`, by name, are for matrices that need others, as in `Recurrent`. Each parameter has
    its own seed, `fold_in(seed, its index among the sorted names)`.

    Args:
        model: a module, on the meta device or not; its own weights are not read.
        seed: of the initial weights.
        dtype: of the parameters.
        device: of the parameters.

    Example:
        >>> import torch, funcrl
        >>> params = funcrl.init_params(torch.nn.Linear(3, 2), seed=0)
        >>> {name: tuple(leaf.shape) for name, leaf in params.items()}
        {'bias': (2,), 'weight': (2, 3)}
    """
    named = dict(sorted(model.named_parameters()))
    num_layers = sum(isinstance(child, Block) for child in model.modules())
    own_deviations: Mapping[str, float] = getattr(model, "deviations", {})
    # Drawn on the CPU in float32, so that a seed gives the same numbers for any dtype and device.
    drawn: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    params: Params = {}
    for index, (name, leaf) in enumerate(named.items()):
        if leaf.ndim < 2:
            fill = 0.0 if "bias" in name.split(".")[-1] else 1.0
            value = torch.full(leaf.shape, fill, **drawn)
        else:
            writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
            deviation = 0.02 / (math.sqrt(2 * num_layers) if writes_residual else 1.0)
            deviation = own_deviations.get(name, deviation)
            generator = rng.generator(seed, index)
            value = torch.randn(leaf.shape, generator=generator, **drawn) * deviation
        params[name] = value.to(device=device, dtype=dtype)
    return params

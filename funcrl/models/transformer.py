"""The one network: a decoder-only transformer whose options make it Llama, Qwen2 or Qwen3.

Layers take one sample, or any leading batch axes; letters: T tokens, D width, H query heads,
K key heads, C head width, V vocabulary. The module is built on the meta device and holds no
weights; parameters are a separate flat dictionary.
"""

import math
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from funcrl import checks, numerics, rng
from funcrl.ops import AttendFn, attend_causal
from funcrl.types import Params


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a `Transformer`; the defaults are a model that trains on a laptop.

    Args:
        vocab_size: V.
        width: D.
        num_layers: how many blocks.
        num_heads: H.
        num_kv_heads: K, a divisor of `num_heads`.
        head_width: C, even.
        mlp_width: of the gated MLP.
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        qkv_bias: whether q, k and v have biases (Qwen2).
        rope_theta: the base of the rotary embedding.
        norm_eps: added to the mean square in RMSNorm.
        tied: whether the output projection is the embedding.
    """

    vocab_size: int = 512
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_width: int = 32
    mlp_width: int = 384
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = True

    def __post_init__(self) -> None:
        counts = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_width")
        for name in (*counts, "mlp_width"):
            checks.check_count("TransformerConfig", name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            checks.check_positive("TransformerConfig", name, getattr(self, name))
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
    """`x / sqrt(mean(x^2) + eps) * weight`, in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised over its last axis."""
        wide = x.to(numerics.at_least_float32(x.dtype))
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `attend` says who sees whom."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q = nn.Linear(c.width, c.num_heads * c.head_width, bias=c.qkv_bias)
        self.k = nn.Linear(c.width, c.num_kv_heads * c.head_width, bias=c.qkv_bias)
        self.v = nn.Linear(c.width, c.num_kv_heads * c.head_width, bias=c.qkv_bias)
        self.o = nn.Linear(c.num_heads * c.head_width, c.width, bias=False)
        self.q_norm = RMSNorm(c.head_width, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_width, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return attention's output [..., T, D] under a rotation [2, ..., T, C / 2]."""
        heads = "... t (h c) -> ... h t c"
        c = self.config.head_width
        q = rotate(self.q_norm(rearrange(self.q(x), heads, c=c)), rotation)
        k = rotate(self.k_norm(rearrange(self.k(x), heads, c=c)), rotation)
        v = rearrange(self.v(x), heads, c=c)
        shared = self.config.num_heads // self.config.num_kv_heads
        k, v = (repeat(part, "... k t c -> ... (k g) t c", g=shared) for part in (k, v))
        out: Tensor = self.o(rearrange(attend(q, k, v), "... h t c -> ... t (h c)"))
        return out


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated projection [..., T, D]."""
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normalised residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Tensor, attend: AttendFn) -> Tensor:
        """Return the residual stream [..., T, D] after the block."""
        x = x + self.attention(self.attention_norm(x), rotation, attend)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder-only transformer, `model(tokens, positions) -> logits`, without weights of its own.

    Who sees whom is a third argument of the call, `attend`: a causal sample when left out,
    `funcrl.ops.attend_segments(segment_ids)` for a packed row.

    Args:
        config: its shape.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8)
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> apply = funcrl.functional(model)
        >>> apply(params, torch.tensor([1, 2, 3]), torch.arange(3)).shape
        torch.Size([3, 7])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = RMSNorm(config.width, config.norm_eps)
            self.unembed = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.unembed.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: AttendFn = attend_causal
    ) -> Tensor:
        """Return logits [..., T, V]; `logits[t]` predicts the token after `tokens[t]`."""
        x = self.embed(tokens)
        angles = rotary_angles(positions, self.config.head_width, self.config.rope_theta)
        rotation = torch.stack([angles.cos(), angles.sin()]).unsqueeze(-3)  # the same for all heads
        for block in self.blocks:
            x = block(x, rotation, attend)
        logits: Tensor = self.unembed(self.norm(x))
        return logits


def rotary_angles(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Return `position * theta^(-2 i / C)` for each pair i, in float32: [..., T, C / 2].

    Example:
        >>> import torch, funcrl
        >>> funcrl.models.rotary_angles(torch.tensor([0, 3]), head_width=2, theta=10.0)
        tensor([[0.],
                [3.]])
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(pairs * (-math.log(theta) / head_width))
    return positions[..., None].to(torch.float32) * frequencies


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return `x` [..., T, C] with each pair (i, i + C/2) turned by its angle (arXiv:2104.09864).

    Args:
        x: [..., T, C].
        rotation: [2, ..., T, C / 2], the cosine and the sine of each angle.

    Example:
        >>> import torch, funcrl
        >>> quarter_turn = torch.tensor([[[0.0]], [[1.0]]])
        >>> funcrl.models.rotate(torch.tensor([[1.0, 2.0]]), quarter_turn)
        tensor([[-2.,  1.]])
    """
    cos, sin = rotation
    first, second = x.to(numerics.at_least_float32(x.dtype)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def init_params(
    model: nn.Module, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Params:
    """Return new parameters of a module: a flat dictionary, its keys sorted.

    Vectors of norms are 1 and biases 0; matrices are normal with deviation 0.02, and those that
    write to the residual stream (`o` and `down`) are divided by sqrt(2 L), as in GPT-2. Each
    parameter has its own seed, `fold_in(seed, its index among the sorted names)`.

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
    params: Params = {}
    for index, (name, leaf) in enumerate(named.items()):
        if leaf.ndim < 2:
            value = (
                torch.zeros(leaf.shape) if "bias" in name.split(".")[-1] else torch.ones(leaf.shape)
            )
        else:
            writes_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
            deviation = 0.02 / (math.sqrt(2 * num_layers) if writes_residual else 1.0)
            generator = rng.generator(seed, index)
            value = torch.randn(leaf.shape, generator=generator) * deviation
        params[name] = value.to(device=device, dtype=dtype)
    return params

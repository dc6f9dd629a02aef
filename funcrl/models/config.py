"""The shape of a `Transformer`: its sizes, the kinds of its layers, and its options."""

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import Count, Positive, check_fields

Kind: TypeAlias = Literal["full", "sliding", "delta"]

# Far above any existing model, and so low that no product of two overflows. A file with a larger
# size is broken, or meant to cost its reader memory and time.
LARGEST = {
    "vocab_size": 1 << 24, "width": 1 << 18, "num_layers": 1 << 12, "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14, "head_width": 1 << 14, "mlp_width": 1 << 20,
    "context_length": 1 << 28, "delta_heads": 1 << 14, "delta_key_heads": 1 << 14,
    "delta_key_width": 1 << 14, "delta_value_width": 1 << 14, "delta_conv": 1 << 10,
    "window": 1 << 28,
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
        layers: the kinds of the layers, repeated over `num_layers`: "full", attention to all tokens
            before; "sliding", attention to the last `window` ones; "delta", a gated delta layer,
            whose memory is a state of fixed size (arXiv:2412.06464).
        window: the number of tokens that a sliding layer sees, itself included.
        local_rope_theta: the base of the rotary embedding in sliding layers; `rope_theta` when left
            out.
        rope_factor: what positions are divided by in full layers.
        rope_scaling: Llama 3's factor, low, high and first context, which scale the rotation of
            full layers (`funcrl.models.rotary_angles`); none when left out.
        rotary_width: the numbers of a head, the first ones, that are rotated; all when left out.
        attention_gate: whether attention's result is multiplied by a sigmoid gate of the layer's
            input (Qwen3.5).
        attention_scale: the factor of attention's scores; 1 / sqrt(C) when left out.
        logit_cap: logits become cap * tanh(logits / cap) (Gemma 2); no cap when left out.
        norm_offset: norms multiply by this plus their weight; 1 in Gemma and Qwen3.5.
        post_norms: whether what attention and the MLP return is normalised before it is added
            (Gemma).
        activation: of the MLP's gate.
        embed_scale: the factor of the embedding (Gemma).
        delta_heads: the number of heads of a delta layer's values, and of its states.
        delta_key_heads: that of its queries and keys, a divisor of `delta_heads`.
        delta_key_width: of a head of its queries and keys.
        delta_value_width: of a head of its values.
        delta_conv: the number of tokens that the convolution before it sees.
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
    layers: tuple[Kind, ...] = ("full",)
    window: Count | None = None
    local_rope_theta: Positive | None = None
    rope_factor: Positive = 1.0
    rope_scaling: tuple[Positive, ...] = ()
    rotary_width: Count | None = None
    attention_gate: bool = False
    attention_scale: Positive | None = None
    logit_cap: Positive | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: Positive = 1.0
    delta_heads: Count = 16
    delta_key_heads: Count = 16
    delta_key_width: Count = 128
    delta_value_width: Count = 128
    delta_conv: Count = 4

    def __post_init__(self) -> None:
        check_fields(self)
        for name, largest in LARGEST.items():
            if getattr(self, name) is not None:
                checks.check_range("TransformerConfig", name, getattr(self, name), 1, largest)
        if not math.isfinite(self.norm_offset):
            raise ValueError(
                f"TransformerConfig expects a finite norm_offset, got {self.norm_offset}."
            )
        for few, many in (("num_kv_heads", "num_heads"), ("delta_key_heads", "delta_heads")):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(
                    f"TransformerConfig expects {few} to divide {many}={getattr(self, many)}, "
                    f"got {getattr(self, few)}."
                )
        if self.head_width % 2:
            raise ValueError(
                f"TransformerConfig expects an even head_width, got {self.head_width}."
            )
        if self.rope_scaling and (
            len(self.rope_scaling) != 4 or not self.rope_scaling[1] < self.rope_scaling[2]
        ):
            raise ValueError(
                f"TransformerConfig expects rope_scaling to be a factor, low, high above it, and a "
                f"context, got {self.rope_scaling}."
            )
        width = self.rotary_width
        if width is not None and (width % 2 or width > self.head_width):
            raise ValueError(
                f"TransformerConfig expects an even rotary_width of at most "
                f"head_width={self.head_width}, got {width}."
            )
        if not self.layers:
            raise ValueError("TransformerConfig expects layers to name at least one kind, got ().")
        if "sliding" in self.kinds and self.window is None:
            raise ValueError("TransformerConfig expects window= with sliding layers, got None.")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer.

        Example:
            >>> import funcrl
            >>> config = funcrl.models.TransformerConfig(num_layers=3, layers=("delta", "full"))
            >>> config.kinds
            ('delta', 'full', 'delta')
        """
        return tuple(self.layers[index % len(self.layers)] for index in range(self.num_layers))

    @property
    def rotated_width(self) -> int:
        """The number of each head's numbers that are rotated by their position.

        Example:
            >>> import funcrl
            >>> funcrl.models.TransformerConfig(head_width=32).rotated_width
            32
        """
        return self.head_width if self.rotary_width is None else self.rotary_width

    @property
    def delta_channels(self) -> int:
        """The number of channels of a delta layer's convolution: queries, keys and values.

        Example:
            >>> import funcrl
            >>> funcrl.models.TransformerConfig().delta_channels  # 3 x 16 heads of 128
            6144
        """
        keys = self.delta_key_heads * self.delta_key_width
        return 2 * keys + self.delta_heads * self.delta_value_width


# What every forward pass of a network with attention computes, and sizes of layers of other kinds.
# A new option is none of these: what has not been told of it would ignore it.
_PLAIN = {
    "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_width", "mlp_width",
    "qk_norm", "qkv_bias", "rope_theta", "rope_scaling", "norm_eps", "tied", "context_length",
    "numerics", "layers", "delta_heads", "delta_key_heads", "delta_key_width", "delta_value_width",
    "delta_conv",
}  # fmt: skip


def is_plain(config: TransformerConfig, *known: str) -> bool:
    """Return whether a network has no options but the plain ones, and those that are named."""
    default = TransformerConfig()
    others = {field.name for field in fields(config)} - _PLAIN - {*known}
    return all(getattr(config, name) == getattr(default, name) for name in others)

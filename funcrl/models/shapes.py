"""Named shapes of the networks, for `--model`."""

from dataclasses import replace

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.models.config import TransformerConfig
from funcrl.models.recurrent import RecurrentConfig

_GEMMA3 = TransformerConfig(
    width=640, num_layers=18, num_heads=4, num_kv_heads=1, head_width=256, mlp_width=2048,
    layers=("sliding",) * 5 + ("full",), window=512, rope_theta=1_000_000.0,
    local_rope_theta=10_000.0, norm_offset=1.0, post_norms=True, activation="gelu_tanh",
    embed_scale=640**0.5, context_length=32_768,
)  # fmt: skip
# The shapes of transformers that have a name.
SHAPES: dict[str, TransformerConfig] = {
    "micro": TransformerConfig(
        width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192
    ),
    "micro-hybrid": TransformerConfig(
        width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192,
        layers=("delta", "full"), delta_heads=4, delta_key_heads=4, delta_key_width=16,
        delta_value_width=16, attention_gate=True, norm_offset=1.0,
    ),
    "tiny": TransformerConfig(),
    "small": TransformerConfig(
        width=384, num_layers=8, num_heads=6, num_kv_heads=2, head_width=64, mlp_width=1024
    ),
    "smollm2-135m": TransformerConfig(
        width=576, num_layers=30, num_heads=9, num_kv_heads=3, head_width=64, mlp_width=1536,
        qk_norm=False, rope_theta=100_000.0, norm_eps=1e-5, context_length=8192,
    ),
    "llama-1b": TransformerConfig(
        width=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_width=64, mlp_width=8192,
        qk_norm=False, rope_theta=500_000.0, norm_eps=1e-5, context_length=8192,
    ),
    "qwen3-0.6b": TransformerConfig(
        width=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_width=128, mlp_width=3072,
        rope_theta=1_000_000.0, context_length=40_960,
    ),
    "qwen3.5-0.8b": TransformerConfig(
        width=1024, num_layers=24, num_heads=8, num_kv_heads=2, head_width=256, mlp_width=3584,
        layers=("delta", "delta", "delta", "full"), attention_gate=True, norm_offset=1.0,
        rope_theta=10_000_000.0, rotary_width=64, context_length=262_144,
    ),
    "gemma3-270m": _GEMMA3,
    "gemma3-1b": replace(
        _GEMMA3, width=1152, num_layers=26, mlp_width=6912, embed_scale=1152**0.5
    ),
}  # fmt: skip
# The shapes of recurrent networks that have a name.
RECURRENT_SHAPES: dict[str, RecurrentConfig] = {
    "lstm": RecurrentConfig(),
    "gru": RecurrentConfig(cell="gru"),
}


def is_shape(name: str) -> bool:
    """Return whether a model's name is that of a shape, which starts from nothing."""
    return name in SHAPES or name in RECURRENT_SHAPES


@checked
def shape(name: str, vocab_size: int) -> TransformerConfig:
    """Return the config of a named shape of a `Transformer`, for `vocab_size` tokens.

    Example:
        >>> import funcrl
        >>> funcrl.models.shape("micro", vocab_size=13).width
        64
    """
    checks.check_choice("shape", "--model", name, SHAPES)
    return replace(SHAPES[name], vocab_size=vocab_size)

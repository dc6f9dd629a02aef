"""Named shapes of the networks, for `--model`."""

from dataclasses import replace

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.models.config import TransformerConfig
from funcrl.models.recurrent import RecurrentConfig

SHAPES: dict[str, TransformerConfig] = {
    "micro": TransformerConfig(
        width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192
    ),
    "micro-hybrid": TransformerConfig(
        width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_width=16, mlp_width=192,
        layers=("delta", "full"), delta_heads=4, delta_key_heads=4, delta_key_width=16,
        delta_value_width=16,
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
}  # fmt: skip
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

"""config.json of transformers and `TransformerConfig`: the same shapes in two vocabularies."""

from collections.abc import Mapping
from typing import Any

from funcrl.models import TransformerConfig

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
# Options that change the network, with the values under which they do not.
_UNCHANGED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}


def from_hugging_face(values: Mapping[str, Any], place: str) -> TransformerConfig:
    """Return the shape that a config.json describes.

    Args:
        values: its content.
        place: where it stands, for errors.

    Example:
        >>> from funcrl.weights import from_hugging_face
        >>> from_hugging_face({"architectures": ["GPT2LMHeadModel"]}, "gpt2")
        Traceback (most recent call last):
        ValueError: load_params supports LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, \
got 'GPT2LMHeadModel' in gpt2; funcrl.functional takes any module of transformers.
    """
    name = (values.get("architectures") or [None])[0]
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"load_params supports {', '.join(_ARCHITECTURES)}, got {name!r} in {place}; "
            f"funcrl.functional takes any module of transformers."
        )
    for option, allowed in _UNCHANGED.items():
        if values.get(option, allowed[0]) not in allowed:
            raise ValueError(
                f"load_params supports {option} {allowed[0]!r}, got {values[option]!r} in {place}."
            )
    missing = [each for each in ("vocab_size", "hidden_size", "num_hidden_layers",
                                 "num_attention_heads", "intermediate_size")
               if each not in values]  # fmt: skip
    if missing:
        raise ValueError(f"load_params expects {missing[0]} in {place}, got none.")
    num_heads = values["num_attention_heads"]
    kind = _ARCHITECTURES[name]
    return TransformerConfig(
        vocab_size=values["vocab_size"],
        width=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_width=values.get("head_dim") or values["hidden_size"] // num_heads,
        mlp_width=values["intermediate_size"],
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        rope_theta=float(_rope_theta(values, place)),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tied=bool(values.get("tie_word_embeddings", False)),
        context_length=values.get("max_position_embeddings", 2048),
    )


def to_hugging_face(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Return a config.json that transformers reads as the same network.

    Args:
        config: the shape.
        dtype: of the weights beside it, such as "float32".

    Example:
        >>> import funcrl
        >>> from funcrl.weights import from_hugging_face, to_hugging_face
        >>> config = funcrl.models.TransformerConfig(qk_norm=True)
        >>> from_hugging_face(to_hugging_face(config, "float32"), "here") == config
        True
    """
    if config.qk_norm and config.qkv_bias:
        raise ValueError(
            "save_params expects a shape that Llama, Qwen2 or Qwen3 has, got qk_norm and qkv_bias "
            "together."
        )
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    name = next(name for name, each in _ARCHITECTURES.items() if each == kind)
    return {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context_length,
        "dtype": dtype,
        "torch_dtype": dtype,  # what versions of transformers before 5 read
    }


def _rope_theta(values: Mapping[str, Any], place: str) -> float:
    """Return the base of rotary positions, which newer files keep in `rope_parameters`."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"load_params supports plain rotary positions, got rope type {kind!r} in {place}."
        )
    return rope.get("rope_theta", values.get("rope_theta", 10_000.0))

"""config.json of transformers and `TransformerConfig`: the same shapes in two vocabularies."""

from collections.abc import Mapping
from typing import Any

from funcrl.core.arguments import checked
from funcrl.core.reading import brief
from funcrl.models import TransformerConfig
from funcrl.weights.metadata import Metadata

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
# Fields of `TransformerConfig` and their names.
_SIZES = {
    "vocab_size": "vocab_size", "width": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim", "mlp_width": "intermediate_size",
}  # fmt: skip
# Options that change the network, with the values under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "is_causal": (True, None),
    "quantization_config": (None,),
}
# The same of rotary positions, in either of the two places that transformers reads.
_PLAIN_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1, None),
    "partial_rotary_factor": (1, None),
}


@checked
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
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in tuple(_ARCHITECTURES):  # a list or an object is none, and has no hash
        raise ValueError(
            f"load_params supports {', '.join(_ARCHITECTURES)}, got {brief(name)} in {place}; "
            f"funcrl.functional takes any module of transformers."
        )
    kind = _ARCHITECTURES[name]
    # These two may be null, which says the same as nothing.
    left_out = {"num_key_value_heads": None, "head_dim": None}.items()
    fields = Metadata(
        {key: each for key, each in values.items() if (key, each) not in left_out}, place
    )
    num_layers = fields.size(_SIZES["num_layers"], "num_layers")
    fields.check(
        _PLAIN | {"model_type": (kind,), "layer_types": (None, ["full_attention"] * num_layers)}
    )
    return fields.shape(
        _SIZES,
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        rope_theta=_rope_theta(fields),
        norm_eps=float(fields.get("rms_norm_eps", float, 1e-6)),
        tied=fields.get("tie_word_embeddings", bool, False),
        context_length=fields.size("max_position_embeddings", "context_length", 2048),
    )


@checked
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
    kind = architecture(config)
    name = next(name for name, each in _ARCHITECTURES.items() if each == kind)
    return {
        "architectures": [name],
        "model_type": kind,
        **{name: getattr(config, field) for field, name in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context_length,
        "dtype": dtype,
        "torch_dtype": dtype,  # what versions of transformers before 5 read
    }


def architecture(config: TransformerConfig) -> str:
    """Return the family that has this shape: llama, qwen2 or qwen3."""
    if config.qk_norm and config.qkv_bias:
        raise ValueError(
            "save_params expects a shape that Llama, Qwen2 or Qwen3 has, got qk_norm and qkv_bias "
            "together."
        )
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def _rope_theta(fields: Metadata) -> float:
    """Return the base of rotary positions: transformers has kept it in three places by now.

    Its versions differ in which place wins, so all that are there must say the same.
    """
    found = [fields.get("rope_theta", float)] if "rope_theta" in fields.values else []
    for place in ("rope_scaling", "rope_parameters"):
        rope = fields.values.get(place) or {}
        if not isinstance(rope, dict):
            raise ValueError(
                f"load_params expects an object as {place} in {fields.place}, got {brief(rope)}."
            )
        inside = Metadata(
            {f"{place}.{n}": each for n, each in rope.items()}, fields.place, f"{place}."
        )
        unknown = rope.keys() - _PLAIN_ROPE.keys() - {"rope_theta"}
        inside.check(_PLAIN_ROPE | dict.fromkeys(sorted(unknown), (None,)))
        if "rope_theta" in rope:
            found.append(inside.get("rope_theta", float))
    if len(set(found)) > 1:
        raise ValueError(f"load_params expects one rope_theta in {fields.place}, got {found}.")
    return float(found[0]) if found else 10_000.0

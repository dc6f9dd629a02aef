"""config.json of transformers and `TransformerConfig`: the same shapes in two vocabularies."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from funcrl.core.arguments import checked
from funcrl.core.files import brief
from funcrl.models import TransformerConfig
from funcrl.weights.families import FAMILIES, Family
from funcrl.weights.tensors import Metadata, UnsupportedNetwork, UnsupportedOption

# Fields of `TransformerConfig` and their names.
_SIZES = {
    "vocab_size": "vocab_size", "width": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim", "mlp_width": "intermediate_size",
}  # fmt: skip
# Options of all families that change the network, with the values under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "is_causal": (True, None),
    "quantization_config": (None,),
}

# What a config.json says besides the network: its origin, and how it is stored and run.
_BESIDES = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


@checked
def from_hugging_face(values: Mapping[str, Any], place: str) -> TransformerConfig:
    """Return the shape that a config.json describes: of its text model, if it has others besides.

    Args:
        values: its content.
        place: where it stands, for errors.

    Example:
        >>> from funcrl.weights import from_hugging_face
        >>> from_hugging_face({"architectures": ["GPT2LMHeadModel"]}, "gpt2")
        Traceback (most recent call last):
        funcrl.weights.tensors.UnsupportedNetwork: load_params supports LlamaForCausalLM, \
Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM, Qwen3_5ForCausalLM, Gemma3ForCausalLM, \
Qwen3_5ForConditionalGeneration, Gemma3ForConditionalGeneration, got 'GPT2LMHeadModel' in gpt2.
    """
    family, is_outer = family_in(values, place)
    try:
        described = _text_part(family, Metadata(values, place), is_outer)
        described.check({**_PLAIN, **family.plain, "model_type": (family.model_type,)})
        read = family.read(described)
    except UnsupportedOption as error:
        if error.name in family.others_there and not values.get("quantization_config"):
            raise UnsupportedNetwork(str(error)) from error
        raise
    return described.shape(
        _SIZES,
        **family.options,
        **read,
        norm_eps=float(described.get("rms_norm_eps", float, 1e-6)),
        tied=described.get("tie_word_embeddings", bool, False),
        context_length=described.size("max_position_embeddings", "context_length", 2048),
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
    return {
        **_described(config, family_of(config)),
        "dtype": dtype,
        "torch_dtype": dtype,  # what versions of transformers before 5 read
    }


def family_of(config: TransformerConfig) -> Family:
    """Return the family of a network: what its config.json says of it reads as the same."""
    candidates = [(_differing(config, family), family) for family in FAMILIES]
    names, nearest = min(candidates, key=lambda each: len(each[0]))
    if names:
        others = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
        raise ValueError(
            f"save_params expects a network of {', '.join(each.architecture for each in FAMILIES)},"
            f" got one that is no {nearest.architecture}, the nearest, because of {others}."
        )
    return nearest


def same_network(config: TransformerConfig) -> TransformerConfig:
    """Return the one config that stands for all of the same network, however they are run."""
    plain = TransformerConfig()
    unused = {"context_length", "numerics"}
    if "delta" not in config.kinds:
        unused |= {"delta_heads", "delta_key_heads", "delta_key_width", "delta_value_width",
                   "delta_conv"}  # fmt: skip
    sliding = "sliding" in config.kinds
    return replace(
        config,
        **{name: getattr(plain, name) for name in unused},
        layers=config.kinds,
        window=config.window if sliding else None,
        local_rope_theta=(config.local_rope_theta or config.rope_theta) if sliding else None,
        rotary_width=config.rotated_width,
        attention_scale=config.attention_scale or config.head_width**-0.5,
    )


def same_module(values: Mapping[str, Any], module: nn.Module) -> bool:
    """Return whether a config.json describes a model of transformers, in whatever dtype."""
    config: Any = module.config
    try:  # through its class: an older file says less, or the same in other words
        there = type(config).from_dict(dict(values))
    except Exception as error:
        raise ValueError(f"transformers does not read it: {error}") from error
    here = type(config).from_dict(plain_json(config))
    same_class = values.get("architectures") == [type(module).__name__]
    return same_class and _network(plain_json(there)) == _network(plain_json(here))


def plain_json(config: Any) -> dict[str, Any]:
    """Return all that a configuration of transformers says, as its config.json does."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _network(values: Any) -> Any:
    """Return a description without what is not of the network, in its parts as well."""
    if not isinstance(values, dict):
        return values
    return {name: _network(each) for name, each in values.items() if name not in _BESIDES}


def _differing(config: TransformerConfig, family: Family) -> list[str]:
    """Return the fields in which a network is none of a family."""
    known = set(config.kinds) <= set(family.kinds)
    near = config if known else replace(config, layers=("full",))
    found = same_network(from_hugging_face(_described(near, family), "a description"))
    wanted = same_network(config)
    names = [field.name for field in fields(config)]
    return [name for name in names if getattr(found, name) != getattr(wanted, name)]


def family_in(values: Mapping[str, Any], place: str) -> tuple[Family, bool]:
    """Return the family that a config.json names, and whether as a part of a larger model."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    for family in FAMILIES:
        is_outer = bool(family.outer) and name == family.outer
        if is_outer or name == family.architecture:
            return family, is_outer
    known = [family.architecture for family in FAMILIES]
    known += [family.outer for family in FAMILIES if family.outer]
    raise (UnsupportedNetwork if name and isinstance(name, str) else ValueError)(
        f"load_params supports {', '.join(known)}, got {brief(name)} in {place}."
    )


def _text_part(family: Family, described: Metadata, is_outer: bool) -> Metadata:
    """Return what a config.json says of the text model, and what it leaves out."""
    described.check(_PLAIN)
    text = described.inside("text_config") if is_outer else described
    found = {name.removeprefix(text.prefix): each for name, each in text.values.items()}
    # These two may be null, which says the same as nothing.
    left_out = {"num_key_value_heads": None, "head_dim": None}.items()
    found = {name: each for name, each in found.items() if (name, each) not in left_out}
    tied = described.value("tie_word_embeddings")
    if tied is not None and found.setdefault("tie_word_embeddings", tied) != tied:
        raise ValueError(
            f"load_params expects one tie_word_embeddings in {described.place}, got {brief(tied)} "
            f"and {brief(found['tie_word_embeddings'])} in text_config."
        )
    found = {**family.defaults, **found}
    return Metadata(
        {text.prefix + name: each for name, each in found.items()}, text.place, text.prefix
    )


def _described(config: TransformerConfig, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: getattr(config, field) for field, name in _SIZES.items()},
        **family.write(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.context_length,
    }

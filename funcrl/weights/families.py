"""The families of networks that a config.json may describe, and how each says what it is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from funcrl.core.files import brief
from funcrl.models import TransformerConfig
from funcrl.weights.tensors import Metadata, UnsupportedOption

# A number that a description may have.
Place: TypeAlias = tuple[Metadata, str]
# Options that change the rotation, with the values under which they do not.
PLAIN_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1, None),
    "partial_rotary_factor": (1, None),
}
# The same of scaled rotations, by their type: by a factor of the positions, and Llama 3's.
SCALED_ROPE: dict[str, dict[str, tuple[Any, ...]]] = {
    kind: {"rope_type": (kind,), "type": (kind,), "partial_rotary_factor": (1, None)}
    for kind in ("linear", "llama3")
}
# The numbers of each, Llama 3's in the order of `TransformerConfig.rope_scaling`.
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NUMBERS = {"linear": ("factor",), "llama3": _LLAMA3}


def rope_objects(fields: Metadata) -> tuple[Metadata, Metadata]:
    """Return the objects that describe a rotation, older versions' first."""
    return fields.inside("rope_scaling"), fields.inside("rope_parameters")


def check_rope(rope: Metadata, plain: Mapping[str, tuple[Any, ...]], *read: str) -> None:
    """Raise unless each value is one that changes nothing, or has a name that is read."""
    names = {name.removeprefix(rope.prefix) for name in rope.values}
    unknown = sorted(names - plain.keys() - set(read))
    rope.check({**plain, **dict.fromkeys(unknown, (None,))})


def agreed(places: Sequence[Place], default: float) -> float:
    """Return the number that is in some of these places, the same in all of them.

    Versions of transformers differ in which place wins.
    """
    found = _numbers(places)
    if len(set(found)) > 1:
        fields, name = places[0]
        raise ValueError(f"load_params expects one {name} in {fields.place}, got {found}.")
    return found[0] if found else default


def first(places: Sequence[Place], default: float) -> float:
    """Return the number in the first of these places that has it."""
    return (_numbers(places) or [default])[0]


def _numbers(places: Sequence[Place]) -> list[float]:
    """Return the numbers that are in some of these places."""
    there = [each for each in places if each[0].prefix + each[1] in each[0].values]
    return [float(fields.get(name, float)) for fields, name in there]


_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "delta"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
# Fields of `TransformerConfig` that describe delta layers, and their names.
_DELTA = {
    "delta_heads": "linear_num_value_heads", "delta_key_heads": "linear_num_key_heads",
    "delta_key_width": "linear_key_head_dim", "delta_value_width": "linear_value_head_dim",
    "delta_conv": "linear_conv_kernel_dim",
}  # fmt: skip
_GEMMA_THETA, _GEMMA_LOCAL_THETA = 1_000_000.0, 10_000.0


class Family(NamedTuple):
    """The networks of one class of transformers."""

    architecture: str  # its name
    model_type: str
    options: Mapping[str, Any]  # fields of `TransformerConfig` that all of them have in common
    kinds: tuple[str, ...]  # of its layers
    plain: Mapping[str, tuple[Any, ...]]  # options, with the values under which nothing changes
    read: Callable[[Metadata], dict[str, Any]]  # the fields besides these and the sizes
    write: Callable[[TransformerConfig], dict[str, Any]]  # the same under the names of config.json
    # Options under which the class of transformers is another network, not a `Transformer`.
    others_there: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})  # what a config.json may leave out
    outer: str = ""  # the class that has such a network in its text_config, beside others
    others: tuple[str, ...] = ()  # what names of parameters begin with that are no part of it


def _layers(fields: Metadata, interval: str, default: int, kind: str) -> list[str]:
    """Return the kind of each layer: as listed, or `kind` but for a full one each interval."""
    kinds = (_NAMES[kind], "full_attention")
    num_layers = fields.size("num_hidden_layers", "num_layers")
    listed = fields.values.get(f"{fields.prefix}layer_types")
    if listed is None:
        every = fields.get(interval, int, default)
        listed = [kinds[(layer + 1) % every == 0] for layer in range(num_layers)]
    if not isinstance(listed, list) or any(each not in kinds for each in listed):
        raise ValueError(
            f"load_params expects {fields.prefix}layer_types in {fields.place} to be a list of "
            f"{' and '.join(kinds)}, got {brief(listed)}."
        )
    if len(listed) != num_layers:
        raise ValueError(
            f"load_params expects {fields.prefix}layer_types in {fields.place} to name "
            f"{num_layers} layers, got {len(listed)}."
        )
    return [_KINDS[each] for each in listed]


def _pattern(kinds: list[str]) -> tuple[str, ...]:
    """Return the shortest pattern that, repeated and cut off, gives these kinds of layers."""
    lengths = range(1, len(kinds) + 1)
    fitting = (n for n in lengths if kinds[n:] == kinds[: len(kinds) - n])
    return tuple(kinds[: next(fitting)])


def _layer_types(config: TransformerConfig) -> list[str]:
    return [_NAMES[kind] for kind in config.kinds]


def _read_plain(fields: Metadata) -> dict[str, Any]:
    num_layers = fields.size("num_hidden_layers", "num_layers")
    fields.check({"layer_types": (["full_attention"] * num_layers, None)})
    ropes = rope_objects(fields)
    kinds = [rope.value("rope_type") or rope.value("type") for rope in ropes]
    kind = next((each for each in kinds if each in _NUMBERS), "")
    scaled = [rope for rope, each in zip(ropes, kinds, strict=True) if kind and each == kind]
    for rope in ropes:
        if rope in scaled:
            check_rope(rope, SCALED_ROPE[kind], "rope_theta", *_NUMBERS[kind])
        else:
            # Beside a scaled one there may be nothing else: versions differ in which of them wins.
            check_rope(rope, {} if scaled else PLAIN_ROPE, "rope_theta")
    for rope in scaled:
        for name in _NUMBERS[kind]:
            rope.get(name, float)  # none may be missing
    places = [(fields, "rope_theta"), *((rope, "rope_theta") for rope in ropes)]
    numbers = [agreed([(rope, name) for rope in scaled], 0.0) for name in _NUMBERS.get(kind, ())]
    return {
        "rope_theta": agreed(places, 10_000.0),
        "rope_factor": numbers[0] if kind == "linear" else 1.0,
        "rope_scaling": tuple(numbers) if kind == "llama3" else (),
    }


def _write_plain(config: TransformerConfig) -> dict[str, Any]:
    plain = {"hidden_act": "silu", "rope_theta": config.rope_theta}
    if not config.rope_scaling:
        scaling = {"rope_type": "linear", "factor": config.rope_factor}
        return plain if config.rope_factor == 1 else {**plain, "rope_scaling": scaling}
    *factors, context = config.rope_scaling
    numbers = dict(zip(_LLAMA3, [*factors, int(context)], strict=True))
    return {**plain, "rope_scaling": {"rope_type": "llama3", **numbers}}


def _read_mistral(fields: Metadata) -> dict[str, Any]:
    plain = _read_plain(fields)
    if fields.value("sliding_window") is None:
        return plain
    window = fields.get("sliding_window", int)
    if plain["rope_factor"] != 1 or plain["rope_scaling"]:  # of full layers alone in a Transformer
        raise UnsupportedOption(
            "sliding_window",
            f"load_params supports no sliding_window beside a scaled rotation, got {window} in "
            f"{fields.place}.",
        )
    return {**plain, "layers": ("sliding",), "window": window}


def _write_mistral(config: TransformerConfig) -> dict[str, Any]:
    # Only full layers have a scaled rotation, and there are none here.
    plain = replace(config, rope_factor=1.0, rope_scaling=())
    return {**_write_plain(plain), "sliding_window": config.window}


def _read_qwen3_5(fields: Metadata) -> dict[str, Any]:
    ropes = rope_objects(fields)
    plain = {name: each for name, each in PLAIN_ROPE.items() if name != "partial_rotary_factor"}
    for rope in ropes:
        # The three positions of mrope are one for text.
        check_rope(rope, plain, "rope_theta", "partial_rotary_factor", "mrope_section",
                   "mrope_interleaved")  # fmt: skip
    places = [(rope, "partial_rotary_factor") for rope in (*ropes, fields)]
    head_width = fields.size("head_dim", "head_width")
    rotary_width = int(head_width * first(places, 0.25))
    return {
        "layers": _pattern(_layers(fields, "full_attention_interval", 4, "delta")),
        "rope_theta": agreed([(each, "rope_theta") for each in (fields, *ropes)], 10_000.0),
        "rotary_width": None if rotary_width == head_width else rotary_width,
        **{field: fields.size(name, field) for field, name in _DELTA.items()},
    }


def _write_qwen3_5(config: TransformerConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",  # of the states, in vLLM too
        "layer_types": _layer_types(config),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": _factor(config.rotated_width, config.head_width),
        },
        **{name: getattr(config, field) for field, name in _DELTA.items()},
    }


def _factor(part: int, whole: int) -> float:
    """Return the number whose product with `whole`, rounded down, is `part`."""
    factor = part / whole
    return factor if int(whole * factor) == part else math.nextafter(factor, 1.0)


def _read_gemma3(fields: Metadata) -> dict[str, Any]:
    kinds = _layers(fields, "sliding_window_pattern", 6, "sliding")
    scaled, nested = rope_objects(fields)
    full, local = nested.inside("full_attention"), nested.inside("sliding_attention")
    check_rope(nested, {}, "full_attention", "sliding_attention")
    check_rope(local, PLAIN_ROPE, "rope_theta")
    for rope in (scaled, full):
        is_linear = "linear" in (rope.value("rope_type"), rope.value("type"))
        plain = SCALED_ROPE["linear"] if is_linear else PLAIN_ROPE
        check_rope(rope, plain, "rope_theta", "factor")
    scalar = fields.get("query_pre_attn_scalar", float)
    has_cap = fields.value("final_logit_softcapping") is not None
    found = {
        "layers": _pattern(kinds),
        "rope_theta": agreed(
            [(each, "rope_theta") for each in (fields, scaled, full)], _GEMMA_THETA
        ),
        "rope_factor": agreed([(each, "factor") for each in (scaled, full)], 1.0),
        "attention_scale": None if scalar == fields.value("head_dim") else scalar**-0.5,
        "embed_scale": fields.size("hidden_size", "width") ** 0.5,
        "logit_cap": fields.get("final_logit_softcapping", float) if has_cap else None,
    }
    if "sliding" in kinds:
        places = [(fields, "rope_local_base_freq"), (local, "rope_theta")]
        found["local_rope_theta"] = agreed(places, _GEMMA_LOCAL_THETA)
        found["window"] = fields.get("sliding_window", int)
    return found


def _write_gemma3(config: TransformerConfig) -> dict[str, Any]:
    scale = config.attention_scale
    scaling = {"rope_type": "linear", "factor": config.rope_factor}
    # Without sliding layers there is none, and transformers runs no Gemma 3 whose window is null.
    window = {"sliding_window": config.window} if "sliding" in config.kinds else {}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(config),
        **window,
        # Under the names that all versions of transformers read.
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.local_rope_theta or config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else scaling,
        "query_pre_attn_scalar": config.head_width if scale is None else max(round(scale**-2), 1),
        "final_logit_softcapping": config.logit_cap,
    }


_SILU = {"hidden_act": ("silu",)}
_PLAIN = _SILU | {
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}
_QWEN3_5_SIZES = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 32_768, "linear_num_value_heads": 32,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
_OTHERS_THERE = ("hidden_act", "rope_type", "type")
_LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    options={"qk_norm": False},
    kinds=("full",),
    plain=_PLAIN,
    read=_read_plain,
    write=_write_plain,
    others_there=(*_OTHERS_THERE, "attention_bias", "mlp_bias"),
)
_QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    options={"qk_norm": True, "norm_offset": 1.0, "attention_gate": True},
    kinds=("delta", "full"),
    plain=_SILU
    | {
        "attn_output_gate": (True, None),
        "mlp_only_layers": ([], None),
        "mamba_ssm_dtype": ("float32", None),
    },
    read=_read_qwen3_5,
    write=_write_qwen3_5,
    defaults=_QWEN3_5_SIZES,
    outer="Qwen3_5ForConditionalGeneration",
    others=("model.visual.", "mtp."),
)
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    options={"qk_norm": True, "norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh"},
    kinds=("sliding", "full"),
    plain={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
        "partial_rotary_factor": (1, None),
    },
    read=_read_gemma3,
    write=_write_gemma3,
    defaults=_GEMMA3_SIZES | {"tie_word_embeddings": True},
    outer="Gemma3ForConditionalGeneration",
    others=("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.",
            "multi_modal_projector."),
)  # fmt: skip
FAMILIES = (
    _LLAMA,
    _LLAMA._replace(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        options={"qk_norm": False, "qkv_bias": True},
        others_there=(*_OTHERS_THERE, "use_sliding_window", "layer_types"),
    ),
    _LLAMA._replace(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        options={"qk_norm": True},
        others_there=(*_OTHERS_THERE, "attention_bias", "use_sliding_window", "layer_types"),
    ),
    _LLAMA._replace(
        architecture="MistralForCausalLM",
        model_type="mistral",
        kinds=("sliding",),
        read=_read_mistral,
        write=_write_mistral,
        others_there=(*_OTHERS_THERE, "sliding_window"),
        defaults={"sliding_window": 4096},
    ),
    _QWEN3_5,
    _GEMMA3,
)

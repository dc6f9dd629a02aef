"""Parameters that are made: named shapes, initial values, and those of a critic."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks, rng
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Params
from funcrl.models.config import TransformerConfig
from funcrl.models.layers import GatedDelta, RMSNorm
from funcrl.models.recurrent import RecurrentConfig
from funcrl.models.transformer import Block, Transformer

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


# (uniform numbers in [0, 1) of a parameter's shape, the module that has it) -> the parameter
_DrawFn: TypeAlias = Callable[[Tensor, GatedDelta], Tensor]


def has_values(network: nn.Module) -> bool:
    """Return whether a network starts from the values that it has, not from those of a seed."""
    is_on_meta = any(leaf.is_meta for leaf in network.parameters())
    return not isinstance(network, Transformer) and not is_on_meta


@checked
def init_params(
    model: nn.Module, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Params:
    """Return new parameters of a module: a flat dictionary, its keys sorted.

    Norms begin as a factor of 1 and biases as 0; matrices are normal with deviation 0.02, and those
    that write to the residual stream (`o` and `down`) are divided by sqrt(2 L), as in GPT-2. A
    delta layer's convolution, rates and steps are drawn as Mamba-2's (arXiv:2405.21060). A module's
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
    params: Params = {}
    for index, (name, leaf) in enumerate(named.items()):
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        # Drawn on the CPU in float32, so that a seed gives the same numbers for any dtype, device.
        drawn: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        if isinstance(owner, GatedDelta):
            numbers = torch.rand(leaf.shape, generator=rng.generator(seed, index), **drawn)
            value = _OF_DELTA[attribute](numbers, owner)
        elif leaf.ndim < 2:
            fill = 0.0 if "bias" in attribute else 1.0
            if isinstance(owner, RMSNorm):
                fill -= owner.offset
            value = torch.full(leaf.shape, fill, **drawn)
        else:
            writes = ("attention.o.weight", "delta.o.weight", "mlp.down.weight")
            deviation = 0.02 / (math.sqrt(2 * num_layers) if name.endswith(writes) else 1.0)
            deviation = own_deviations.get(name, deviation)
            generator = rng.generator(seed, index)
            value = torch.randn(leaf.shape, generator=generator, **drawn) * deviation
        params[name] = value.to(device=device, dtype=dtype)
    return params


def _conv(numbers: Tensor, layer: GatedDelta) -> Tensor:
    """Return weights between -1 and 1 over sqrt(K), as torch's own convolution has them."""
    return (2 * numbers - 1) * layer.config.delta_conv**-0.5


def _log_rate(numbers: Tensor, _layer: GatedDelta) -> Tensor:
    """Return the logarithm of rates between 1 and 16."""
    return torch.log(1 + 15 * numbers)


def _step_bias(numbers: Tensor, _layer: GatedDelta) -> Tensor:
    """Return what softplus makes a step of: steps between 0.001 and 0.1, even in logarithm."""
    steps = 0.001 * 100**numbers
    return steps + torch.log(-torch.expm1(-steps))


_OF_DELTA: dict[str, _DrawFn] = {"conv": _conv, "log_rate": _log_rate, "step_bias": _step_bias}


CRITIC = ("critic.weight", "critic.bias")


@checked
def with_critic(params: Params, width: Count) -> Params:
    """Return the parameters with those of a critic, which expects 0 of everything at first.

    Args:
        params: of a network.
        width: of its last layer's output.

    Example:
        >>> import torch, funcrl
        >>> params = funcrl.models.with_critic({"embed.weight": torch.ones(3, 2)}, width=2)
        >>> params["critic.weight"], params["critic.bias"]
        (tensor([0., 0.]), tensor(0.))
    """
    like = next(iter(params.values()))
    zeros = like.new_zeros(width), like.new_zeros(())
    return {**params, **dict(zip(CRITIC, zeros, strict=True))}


@checked
def without_critic(params: Params) -> Params:
    """Return the parameters of the network alone, to generate with or to save.

    Example:
        >>> import torch, funcrl
        >>> params = funcrl.models.with_critic({"embed.weight": torch.ones(3, 2)}, width=2)
        >>> sorted(funcrl.models.without_critic(params))
        ['embed.weight']
    """
    return {name: leaf for name, leaf in params.items() if not name.startswith("critic.")}

"""Parameters that are made: named shapes, initial values, and low-rank adapters (LoRA)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks, rng
from funcrl.core.arguments import Count, Positive, checked
from funcrl.core.types import ModelFn, Params, TokenScores
from funcrl.models.config import TransformerConfig
from funcrl.models.layers import GatedDelta, RMSNorm
from funcrl.models.recurrent import RecurrentConfig
from funcrl.models.transformer import Block

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


_DOWN, _UP = ".lora_down", ".lora_up"


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


class Lora(NamedTuple):
    """A model as a function of its low-rank adapters."""

    model_fn: ModelFn  # (adapters, sample) -> TokenScores
    init: Callable[[int], Params]  # seed -> adapters, under which the model is the base itself
    merge: Callable[[Params], Params]  # adapters -> the base's parameters with them added


# Of a delta layer, those that are as wide as the network.
_OF_LAYERS = (".attention.", ".mlp.", ".delta.qkv.", ".delta.z.", ".delta.o.")


def _is_of_a_layer(name: str) -> bool:
    return any(part in name for part in _OF_LAYERS)


@checked
def lora(
    model_fn: ModelFn,
    base: Params,
    *,
    rank: Count = 8,
    alpha: Positive = 16.0,
    targets: Callable[[str], bool] = _is_of_a_layer,
) -> Lora:
    """Return a model whose parameters are low-rank changes of some matrices (arXiv:2106.09685).

        W = W_base + alpha / rank * up down

    The base is a constant. Any step trains the adapters as it trains all parameters, and
    `merge` makes parameters to push into a generator or to save.

    Args:
        model_fn: `(params, sample) -> TokenScores`.
        base: its parameters; they are referred to, never changed.
        rank: of each change.
        alpha: scales the change.
        targets: of a parameter's name, whether it gets an adapter; vectors never do.

    Example:
        >>> import funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> base = funcrl.init_params(model, seed=0)
        >>> small = funcrl.lora(funcrl.logprob_fn(model), base, rank=4)
        >>> step = funcrl.grpo_step(small.model_fn)
        >>> state = step.init(small.init(0))
        >>> sum(leaf.numel() for leaf in state.params.values())
        9728
        >>> params = small.merge(state.params)  # for a generator, or funcrl.save_params
    """
    base = dict(base)  # a copy, so that later changes of the caller's dict do not matter
    adapted = {name: leaf for name, leaf in base.items() if leaf.ndim == 2 and targets(name)}
    if not adapted:
        raise ValueError(
            f"lora expects targets among the matrices of the base, got none of {len(base)} "
            f"parameters."
        )
    for name, leaf in adapted.items():
        if rank > min(leaf.shape):
            raise ValueError(
                f"lora expects a rank of at most {min(leaf.shape)} for {name!r} of shape "
                f"{list(leaf.shape)}, got {rank}."
            )

    @checked
    def init(seed: int) -> Params:
        adapters = {}
        for index, (name, leaf) in enumerate(sorted(adapted.items())):
            rows, columns = leaf.shape
            # Uniform with the deviation of a linear layer's weights; the other factor is 0.
            generator = rng.generator(seed, index)
            drawn = torch.rand(
                rank, columns, generator=generator, dtype=torch.float32, device="cpu"
            )
            down = (drawn * 2 - 1) / math.sqrt(columns)
            adapters[name + _DOWN] = down.to(device=leaf.device, dtype=leaf.dtype)
            adapters[name + _UP] = leaf.new_zeros(rows, rank)
        return dict(sorted(adapters.items()))

    @checked
    def merge(adapters: Params) -> Params:
        _check_adapters(adapters, adapted, rank)
        changed = {
            name: leaf + (alpha / rank) * (adapters[name + _UP] @ adapters[name + _DOWN])
            for name, leaf in adapted.items()
        }
        return {**base, **changed}

    @checked
    def scores(adapters: Params, sample: Any) -> TokenScores:
        return model_fn(merge(adapters), sample)

    return Lora(scores, init, merge)


def _check_adapters(adapters: Params, adapted: Params, rank: int) -> None:
    """Raise unless the adapters have the rank of this model: others would be scaled wrongly."""
    wanted = {}
    for name, leaf in adapted.items():
        wanted[name + _DOWN] = (rank, leaf.shape[1]), leaf.dtype
        wanted[name + _UP] = (leaf.shape[0], rank), leaf.dtype
    if adapters.keys() != wanted.keys():
        odd = min(adapters.keys() ^ wanted.keys())
        problem = f"got none for {odd!r}" if odd in wanted else f"got {odd!r} besides"
        raise ValueError(f"lora expects the adapters that its init makes, {problem}.")
    for name, (shape, dtype) in wanted.items():
        found = adapters[name]
        if (found.shape, found.dtype) != (shape, dtype):
            raise ValueError(
                f"lora expects {name!r} of shape {list(shape)} and {dtype}, got "
                f"{list(found.shape)} and {found.dtype}."
            )

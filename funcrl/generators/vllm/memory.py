"""The memory of vLLM: its KV cache, and what it leaves to the trainer."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from funcrl.config.generation import VLLMConfig
from funcrl.generators.vllm.transport import BUCKET_BYTES
from funcrl.models import Transformer, TransformerConfig
from funcrl.models.config import Kind
from funcrl.models.networks import context_length_of

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
_BLOCK = 128  # tokens; the largest block of attention that vLLM takes by itself
_CPU_CACHE = 1 << 30
# What transformers calls layers whose cache is of keys and values.
_KINDS: dict[str, Kind] = {
    "full_attention": "full", "chunked_attention": "full", "sliding_attention": "sliding",
}  # fmt: skip


def shape_of(model: nn.Module) -> TransformerConfig:
    """Return the shape of a network: of a model of transformers, what its memory depends on."""
    if isinstance(model, Transformer):
        return model.config
    config: Any = model.config
    heads = getattr(config, "num_attention_heads", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    others = {each for each in kinds if each not in _KINDS}
    if not heads or others or hasattr(config, "layers_block_type"):
        raise ValueError(
            f"VLLM expects a model of transformers whose layers are attention, with a cache of "
            f"keys and values, got {type(model).__name__}; --generator sampler takes any."
        )
    width = config.hidden_size
    return TransformerConfig(
        vocab_size=config.vocab_size,
        width=width,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        mlp_width=getattr(config, "intermediate_size", None) or 4 * width,
        context_length=context_length_of(model) or TransformerConfig.context_length,
        layers=tuple(_KINDS[each] for each in kinds),
        window=getattr(config, "sliding_window", None) or None,  # some say 0 for none
    )


def samples_at_a_time(
    shape: TransformerConfig, config: VLLMConfig, dtype: str, longest: int
) -> int:
    """Return how many samples of `longest` tokens the cache has room for, at least one."""
    blocks = cache_bytes(shape, config, dtype) // _block_bytes(shape, dtype) - _layers(shape)
    return max(1, min(config.slots, blocks // _blocks(shape, dtype, longest)))


def cache_limits(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> tuple[int, int]:
    """Return the bytes of the cache for one sample, and for all that can be under way."""
    context = min(config.context_length, shape.context_length)
    sample, own = _blocks(shape, dtype, context), _layers(shape)  # a block of each is vLLM's own
    least, most = (count * sample + own for count in (1, config.slots))
    return least * _block_bytes(shape, dtype), most * _block_bytes(shape, dtype)


def cache_bytes(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> int:
    """Return the size of the cache: what is allowed, or all that can be filled.

    On a GPU `cache_bytes` 0 allows all, until `with_cache` has seen how much is left.
    """
    least, most = cache_limits(shape, config, dtype)
    allowed = config.cache_bytes or (most if torch.cuda.is_available() else _CPU_CACHE)
    if allowed < least:
        context = min(config.context_length, shape.context_length)
        raise ValueError(
            f"VLLM expects --vllm.cache-bytes of at least {least} for a sample of {context} tokens "
            f"(--vllm.context-length), got {allowed}."
        )
    return min(allowed, most)


def _blocks(shape: TransformerConfig, dtype: str, tokens: int) -> int:
    """Return the blocks of one sample, in all layers."""
    delta = _layers(shape, "delta")
    return (_layers(shape) - delta) * -(-tokens // _block_tokens(shape, dtype)) + delta


def _layers(shape: TransformerConfig, *kinds: str) -> int:
    """Return the number of layers, of some kinds or all, that vLLM has blocks for.

    Layers of one kind share blocks in groups, all as large as the smallest kind has layers.
    """
    counts: dict[str, int] = {kind: shape.kinds.count(kind) for kind in shape.kinds}
    size = min(counts.values())
    return sum(-(-counts.get(kind, 0) // size) * size for kind in kinds or counts)


def _block_bytes(shape: TransformerConfig, dtype: str) -> int:
    return _block_tokens(shape, dtype) * _token_bytes(shape, dtype)


def _block_tokens(shape: TransformerConfig, dtype: str) -> int:
    """Return the tokens of a block: more where it must hold the state of a delta layer."""
    state = _state_bytes(shape, dtype) if "delta" in shape.kinds else 0
    return _BLOCK * max(1, -(-state // (_BLOCK * _token_bytes(shape, dtype))))


def _token_bytes(shape: TransformerConfig, dtype: str) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    return 2 * shape.num_kv_heads * shape.head_width * FLOAT_BYTES[dtype]


def _state_bytes(shape: TransformerConfig, dtype: str) -> int:
    """Return the bytes of what a delta layer knows of a sample, its sums in float32."""
    c = shape
    sums = c.delta_heads * c.delta_key_width * c.delta_value_width
    return 4 * sums + FLOAT_BYTES[dtype] * (c.delta_conv - 1) * c.delta_channels


# For CUDA graphs, kernels' workspaces, and what lies between the tensors of two allocators; and the
# part by which a trainer's estimated peak may be too low.
_MARGIN, _PART = 1 << 30, 10


def left_for_cache(device: int, trainer: int, weights: int, work: int, least: int) -> int:
    """Return how many bytes of a device are left for a cache of keys and values.

    device - 1.1 * trainer - weights - work - 1 GiB
    """
    left = device - trainer - trainer // _PART - weights - work - _MARGIN
    if left < least:
        gigabytes = [f"{each / 1e9:.2f}" for each in (least, left, device, trainer, weights, work)]
        needed, there, whole, trained, own, busy = gigabytes
        raise ValueError(
            f"VLLM expects at least {needed} GB of the GPU to be left for its cache, got {there}: "
            f"of {whole} the trainer needs {trained}, vLLM's weights {own}, its work {busy}. Lower "
            f"--microbatch, --vllm.batched-tokens or --vllm.context-length, lend the engine's "
            f"memory to the update by --vllm.sleep, or say --vllm.cache-bytes."
        )
    return left


def own_weights(model: nn.Module, config: VLLMConfig, dtype: str) -> int:
    """Return the bytes of an engine's own weights at most: none where it refers to the trainer's.

    The trainer's are float32.
    """
    is_unified = config.network == "unified"
    own = FLOAT_BYTES[dtype] * sum(leaf.numel() for leaf in model.parameters())
    if config.form == "server":  # nothing is shared, and the next ones arrive beside the old ones
        return own + (own if is_unified else min(own, BUCKET_BYTES))
    return 0 if is_unified and config.compile.is_eager and dtype == "float32" else own


def work_bytes(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> int:
    """Return the bytes that an engine computes in: one layer of a batch, and its logits."""
    c, tokens = shape, max(config.batched_tokens, min(config.context_length, shape.context_length))
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_width
    # Norms widen to float32; a projection and what rotation makes of it; the gated MLP.
    token = 4 * 4 * c.width + FLOAT_BYTES[dtype] * (2 * heads + 3 * c.mlp_width)
    # Logits, scaled, as probabilities, and the noise that draws from them.
    return tokens * token + 4 * 4 * config.slots * c.vocab_size


def with_cache(model: nn.Module, config: VLLMConfig, dtype: str, trainer: int) -> VLLMConfig:
    """Return the configuration with its cache's size, if that is to be what is left of a GPU.

    The trainer will need so many bytes at most while the engine holds its cache.
    """
    if config.cache_bytes or not torch.cuda.is_available():
        return config
    shape = shape_of(model)
    least, most = cache_limits(shape, config, dtype)
    # What torch holds and nobody uses is as good as free.
    device = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    left = left_for_cache(
        device,
        max(trainer, torch.cuda.memory_allocated()),
        own_weights(model, config, dtype),
        work_bytes(shape, config, dtype),
        least,
    )
    return replace(config, cache_bytes=min(left, most))

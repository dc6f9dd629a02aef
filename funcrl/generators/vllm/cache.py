"""The size of vLLM's cache: keys and values of attention, and the states of delta layers.

vLLM keeps both in blocks of one size. A block holds a number of tokens of one layer of attention,
or all that a delta layer knows of one sample.
"""

import torch

from funcrl.config.generation import VLLMConfig
from funcrl.models import TransformerConfig

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
_BLOCK = 128  # tokens; the largest block of attention that vLLM takes by itself
_CPU_CACHE = 1 << 30


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

"""What vLLM is told: how to compile, and how large its cache is."""

from typing import Any

import torch

from funcrl.config_generation import VLLMConfig
from funcrl.models import TransformerConfig

_BLOCK = 128  # tokens; the largest block of the cache that vLLM takes by itself
_CPU_CACHE = 1 << 30
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


def compile_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for how to compile.

    Example:
        >>> from funcrl.config_generation import CompileConfig, VLLMConfig
        >>> from funcrl.generators.vllm_settings import compile_arguments
        >>> compile_arguments(VLLMConfig())
        {'enforce_eager': True}
    """
    backend, cudagraph = config.compile.backend, config.compile.cudagraph
    if cudagraph != "none" and not torch.cuda.is_available():
        raise ValueError(f"VLLM expects --compile.cudagraph none on a CPU, got {cudagraph}.")
    if backend == "eager" and cudagraph == "none":
        return {"enforce_eager": True}
    graphs = {"none": "NONE", "piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE"}
    if backend == "eager":
        # One graph a batch size for decoding; prompts run as they are.
        return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"compilation_config": {"mode": 3, "cudagraph_mode": graphs[cudagraph]}}


def sleep_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for memory that can be given up.

    Example:
        >>> from funcrl.config_generation import VLLMConfig
        >>> from funcrl.generators.vllm_settings import sleep_arguments
        >>> sleep_arguments(VLLMConfig())
        {}
    """
    if not config.sleep:
        return {}
    if not torch.cuda.is_available():
        raise ValueError("VLLM expects --no-vllm.sleep on a CPU, got --vllm.sleep.")
    return {"enable_sleep_mode": True}


def cache_limits(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> tuple[int, int]:
    """Return the bytes of keys and values of one sample, and of all that can be under way.

    Example:
        >>> import funcrl
        >>> from funcrl.config_generation import VLLMConfig
        >>> from funcrl.generators.vllm_settings import cache_limits
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> cache_limits(shape, VLLMConfig(slots=4, context_length=100), "float32")
        (131072, 327680)
    """
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width * FLOAT_BYTES[dtype]
    context = min(config.context_length, shape.context_length)
    sample = -(-context // _BLOCK)
    # A block besides is vLLM's own.
    least, most = ((count + 1) * _BLOCK * token for count in (sample, config.slots * sample))
    return least, most


def cache_bytes(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> int:
    """Return the size of the cache of keys and values: what is allowed, or all that can be filled.

    On a GPU `cache_bytes` 0 allows all, until `with_cache` has seen how much is left.

    Example:
        >>> import funcrl
        >>> from funcrl.config_generation import VLLMConfig
        >>> from funcrl.generators.vllm_settings import cache_bytes
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> cache_bytes(shape, VLLMConfig(slots=4, context_length=100), "float32")
        327680
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

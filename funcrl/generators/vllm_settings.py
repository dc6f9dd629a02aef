"""What vLLM is told: how to compile, and how large its cache is."""

from typing import Any

import torch

from funcrl.config_generation import VLLMConfig
from funcrl.models import TransformerConfig

_BLOCK = 128  # tokens; the largest block of the cache that vLLM takes by itself
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


def compile_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for how to compile.

    Example:
        >>> from funcrl.config_generation import CompileConfig, VLLMConfig
        >>> from funcrl.generators.vllm_settings import compile_arguments
        >>> compile_arguments(VLLMConfig())
        {'enforce_eager': True}
    """
    backend, cudagraph = config.compile.backend, config.compile.cudagraph
    if backend == "aot_eager":
        raise ValueError("VLLM expects --compile.backend eager or inductor, got aot_eager.")
    if config.compile.remat != "none":
        raise ValueError(
            f"VLLM expects --compile.remat none, for it has no backward pass, got "
            f"{config.compile.remat}."
        )
    if config.compile.cache_dir is not None:
        raise ValueError(
            f"VLLM expects no --compile.cache-dir, for it keeps a cache of its own, got "
            f"{config.compile.cache_dir}."
        )
    if cudagraph != "none" and not torch.cuda.is_available():
        raise ValueError(f"VLLM expects --compile.cudagraph none on a CPU, got {cudagraph}.")
    if backend == "eager" and cudagraph == "none":
        return {"enforce_eager": True}
    graphs = {"none": "NONE", "piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE"}
    if backend == "eager":
        # One graph a batch size for decoding; prompts run as they are.
        return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"compilation_config": {"mode": 3, "cudagraph_mode": graphs[cudagraph]}}


def cache_bytes(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> int:
    """Return the size of the cache of keys and values: what is allowed, or all that can be filled.

    Example:
        >>> import funcrl
        >>> from funcrl.config_generation import VLLMConfig
        >>> from funcrl.generators.vllm_settings import cache_bytes
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> cache_bytes(shape, VLLMConfig(slots=4, context_length=100), "float32")
        327680
    """
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width * _FLOAT_BYTES[dtype]
    context = min(config.context_length, shape.context_length)
    sample = -(-context // _BLOCK)
    least, most = ((count + 1) * _BLOCK * token for count in (sample, config.slots * sample))
    if config.cache_bytes < least:  # a block besides is vLLM's own
        raise ValueError(
            f"VLLM expects --vllm.cache-bytes of at least {least} for a sample of {context} tokens "
            f"(--vllm.context-length), got {config.cache_bytes}."
        )
    return min(config.cache_bytes, most)

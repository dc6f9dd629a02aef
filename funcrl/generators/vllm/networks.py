"""Which networks an engine runs, and what vLLM is told of them."""

import importlib.util
from typing import Any

import torch

from funcrl.config.generation import VLLMConfig
from funcrl.generators.vllm.server.processes import check_plugin
from funcrl.models import TransformerConfig
from funcrl.weights import to_hugging_face

# Of vLLM's delta layers on a CPU.
_CPU_WIDTHS, _CPU_CONV = (64, 128), 4


def network_arguments(
    shape: TransformerConfig, config: VLLMConfig, dtype: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return an engine's arguments of its network, and the config.json that vLLM is to read.

    Raise if vLLM has not what it needs for them.
    """
    if config.form == "server":
        check_plugin()
    if config.network == "unified":
        return _unified(shape, config), None
    return {"load_format": "dummy"}, _native(shape, dtype)


def _unified(shape: TransformerConfig, config: VLLMConfig) -> dict[str, Any]:
    """Return the arguments for funcrl's network on vLLM's cache."""
    if "delta" in shape.kinds:
        raise ValueError(
            "VLLM expects a network without delta layers for form 'unified', which has no place "
            "for their states in vLLM's cache, got some; form 'native' is vLLM's own class for "
            "Qwen3.5, and --generator sampler takes any."
        )
    from funcrl.generators.vllm.plugin.unified import overrides

    is_exact = shape.numerics == "exact"
    if is_exact:
        _check_exact(config)
    has_kernel = _has_kernel(shape.head_width)
    own = config.attention == "funcrl" or (config.attention == "auto" and not has_kernel)
    if (own or is_exact) and "sliding" in shape.kinds:
        raise ValueError(
            f"VLLM expects vLLM's own attention for sliding layers, and so native numerics, a "
            f"head_width that it has a kernel for and --vllm.attention auto or vllm, got "
            f"{shape.numerics}, {shape.head_width} and {config.attention}; --generator sampler "
            f"takes any."
        )
    return overrides(shape, own or is_exact)


def _native(shape: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json by which vLLM chooses its own class."""
    if not _has_kernel(shape.head_width):
        raise ValueError(
            f"VLLM expects a head_width that vLLM's attention has a kernel for, got "
            f"{shape.head_width}; form 'unified' takes any."
        )
    if shape.qkv_bias and shape.num_heads * shape.head_width != shape.width:
        raise ValueError(
            f"VLLM expects head_width of width / num_heads = {shape.width // shape.num_heads} for "
            f"vLLM's Qwen2, got {shape.head_width}; form 'unified' takes any."
        )
    if "delta" in shape.kinds:
        _check_delta(shape, dtype)
    try:
        described = to_hugging_face(shape, dtype)
    except ValueError as error:
        raise ValueError(
            f"VLLM expects a network that vLLM has a class for, got another ({error}); form "
            f"'unified' takes any without delta layers, and --generator sampler any."
        ) from error
    from vllm import ModelRegistry

    (architecture,) = described["architectures"]
    if architecture not in ModelRegistry.get_supported_archs():
        raise ValueError(
            f"VLLM expects a vLLM that has {architecture}, got one without; --generator sampler "
            f"needs none."
        )
    return described


def _check_delta(shape: TransformerConfig, dtype: str) -> None:
    """Raise if vLLM's delta layers compute nothing like these here, or cannot be imported."""
    widths = shape.delta_key_width, shape.delta_value_width, shape.delta_conv
    if not torch.cuda.is_available():
        if dtype != "bfloat16":
            raise ValueError(
                f"VLLM expects dtype bfloat16 for delta layers on a CPU, got {dtype}; --generator "
                f"sampler takes any."
            )
        if widths not in [(each, each, _CPU_CONV) for each in _CPU_WIDTHS]:
            raise ValueError(
                f"VLLM expects delta layers on a CPU with delta_key_width and delta_value_width "
                f"both 64 or both 128, and delta_conv {_CPU_CONV}, got {widths}; --generator "
                f"sampler takes any."
            )
    if importlib.util.find_spec("torchvision") is None:
        raise ImportError(
            "VLLM expects torchvision, which vLLM's class for delta layers imports, got none; "
            "install the one of this torch, or use --generator sampler."
        )


def _check_exact(config: VLLMConfig) -> None:
    """Raise if a row's bits would not be its own."""
    if config.attention == "vllm":
        raise ValueError(
            "VLLM expects --vllm.attention auto or funcrl with exact numerics, whose attention is "
            "the trainer's kernel, got vllm."
        )
    if config.compile.backend == "inductor":
        raise ValueError(
            "VLLM expects --vllm.compile.backend eager with exact numerics, got inductor, which "
            "fuses operations; --vllm.compile.cudagraph full needs no compiler."
        )


def _has_kernel(head_width: int) -> bool:
    if torch.cuda.is_available():
        return head_width % 8 == 0 and head_width <= 256  # FlashAttention's
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return bool(CPUAttentionBackend.supports_head_size(head_width))

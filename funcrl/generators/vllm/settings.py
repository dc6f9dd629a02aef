"""vLLM's own settings: by its version, and by the network that the engine runs."""

import gc
import importlib.util
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from funcrl.config.generation import Sampling, VLLMConfig
from funcrl.core.types import Params
from funcrl.generators.contract import Lifecycle
from funcrl.generators.stops import DecodeFn
from funcrl.generators.vllm.memory import cache_bytes, shape_of
from funcrl.generators.vllm.processes import check_plugin
from funcrl.models import Transformer, TransformerConfig
from funcrl.weights import to_hugging_face
from funcrl.weights.names import as_stored
from funcrl.weights.transformers_class import as_checkpoint, config_json

# Of vLLM's delta layers on a CPU.
_CPU_WIDTHS, _CPU_CONV = (64, 128), 4


def network_arguments(
    model: nn.Module, config: VLLMConfig, dtype: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return an engine's arguments of its network, and the config.json that vLLM is to read.

    Raise if vLLM has not what it needs for them.
    """
    shape = shape_of(model)
    if config.form == "server":
        check_plugin()
    if config.network == "unified":
        return _unified(shape, config), None
    _check_kernel(shape)
    if isinstance(model, Transformer):
        return {"load_format": "dummy"}, _native(shape, dtype)
    return {"load_format": "dummy"}, _of_transformers(model, config, dtype)


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
    if shape.qkv_bias and shape.num_heads * shape.head_width != shape.width:
        raise ValueError(
            f"VLLM expects head_width of width / num_heads = {shape.width // shape.num_heads} for "
            f"vLLM's Qwen2, got {shape.head_width}; form 'unified' takes any."
        )
    if "delta" in shape.kinds:
        _check_delta(shape, dtype)
    try:
        values = to_hugging_face(shape, dtype)
    except ValueError as error:
        raise ValueError(
            f"VLLM expects a network that vLLM has a class for, got another ({error}); form "
            f"'unified' takes any without delta layers, and --generator sampler any."
        ) from error
    _check_known(values["architectures"][0])
    return values


def _of_transformers(model: nn.Module, config: VLLMConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json by which vLLM chooses its class for a model of transformers."""
    architecture = type(model).__name__
    _check_known(architecture)
    from vllm import ModelRegistry

    place = getattr(ModelRegistry.models[architecture], "module_name", "")
    if place.split(".")[-1] == "transformers" and config.form != "server":
        raise ValueError(
            f"VLLM expects --vllm.form server for {architecture}, which vLLM runs as a class of "
            f"transformers that it changes for all of a process, got an engine in the trainer's."
        )
    return config_json(model, dtype)


def _check_known(architecture: str) -> None:
    """Raise unless vLLM has a class for an architecture."""
    from vllm import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        raise ValueError(
            f"VLLM expects a vLLM that has {architecture}, got one without; --generator sampler "
            f"needs none."
        )


def _check_kernel(shape: TransformerConfig) -> None:
    if not _has_kernel(shape.head_width):
        raise ValueError(
            f"VLLM expects a head_width that vLLM's attention has a kernel for, got "
            f"{shape.head_width}; form 'unified' takes any of a Transformer, and --generator "
            f"sampler any."
        )


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


# The first and the last minor version of 0.x that were run; 0.24 is CUDA's for torch 2.11, 0.32 and
# 0.33 are the CPU's and CUDA's for torch 2.13 and 2.14.
_FIRST, _LAST = 24, 33
# From here on every model runs on the second runner, where there is a GPU.
_RUNNER_FOR_ALL = 27


def is_installed() -> bool:
    """Return whether vLLM can be imported; a folder named vllm, as of its sources, is not it."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def check_version() -> int:
    """Return the minor version of the installed vLLM 0.x; raise if there is none that will do."""
    if not is_installed():
        raise ImportError(
            "VLLM expects vLLM, which is not installed; --generator sampler needs none. On a GPU: "
            "pip install vllm==0.24.0 (torch 2.11); on a CPU see docs/vllm.md."
        )
    import vllm

    minor = supported(vllm.__version__)
    if minor is None:
        raise ImportError(
            f"VLLM expects vLLM 0.{_FIRST} to 0.{_LAST}, got {vllm.__version__}; the embedded "
            f"sampler needs none."
        )
    return minor


def supported(version: str) -> int | None:
    """Return the minor version of a supported 0.x version, None for any other."""
    major, minor = version.split(".")[:2]
    return int(minor) if major == "0" and _FIRST <= int(minor) <= _LAST else None


def architectures(name: str, minor: int) -> list[str]:
    """Return what a config says of a model that funcrl has registered under a name.

    vLLM takes the first that it knows. Before version 0.27 it chose its second, faster runner by
    the names: there one of its own follows.
    """
    return [name] if minor >= _RUNNER_FOR_ALL else [name, "Qwen3ForCausalLM"]


def allow_capture() -> None:
    """Let an engine capture CUDA graphs: the one before it has left that forbidden."""
    from vllm.compilation import monitor

    monitor.set_cudagraph_capturing_enabled(True)


def release_pools() -> None:
    """Give back what held the memory of an engine that could sleep: another one may follow.

    vLLM has its own function for that after 0.24, which keeps the same order: a pool calls its
    allocator when it ends. While something still refers to a tensor there, nothing is done.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    keeper = CuMemAllocator.instance
    if keeper is None or hasattr(keeper, "release_pools"):
        return
    held = keeper.allocator_and_pools
    parts = [part for pool, _ in held.values() for part in pool.snapshot()]
    if not any(part["allocated_size"] for part in parts):
        allocators = [allocator for _, allocator in held.values()]
        held.clear()
        gc.collect()
        del allocators


# The cache's size is given: all that is left of this is a check that so much of the GPU is free,
# which it need not be with a trainer beside the engine.
_UTILISATION = 0.01
# The engine computes in its own process. On a CPU vLLM takes "uni" for a wish, and starts a process
# that only computes; by its path it takes the same class as it is.
_EXECUTORS = {"cuda": "uni", "cpu": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
_LOGPROBS_MODES = {"policy": "raw_logprobs", "sampling": "processed_logprobs"}


class EngineSetup(NamedTuple):
    """All that an engine is started with, in this process or as servers."""

    model: nn.Module  # the trainer's, without its weights
    config: VLLMConfig  # how large, how to compile, and how many servers
    dtype: str  # "float32" or "bfloat16", of weights and cache
    overrides: dict[str, Any]  # arguments of vLLM's `EngineArgs` besides
    hf_config: dict[str, Any] | None  # the config.json that vLLM is to read, if it needs one
    lifecycle: Lifecycle  # the state of the engine
    decode: DecodeFn | None  # from tokens to text, for stop strings

    @property
    def shape(self) -> TransformerConfig:
        """The shape of the model, as `memory.shape_of` has it."""
        return shape_of(self.model)

    @property
    def is_exact(self) -> bool:
        """Whether log-probabilities are funcrl's own: of its network with exact numerics."""
        return self.config.network == "unified" and self.shape.numerics == "exact"

    def named(self, params: Params) -> Params:
        """Return parameters under the names that the engine's network has for them."""
        if self.config.network == "unified":
            return params
        if self.is_checkpoint:
            return as_checkpoint(self.model, params)
        return as_stored(params, self.shape)

    @property
    def is_checkpoint(self) -> bool:
        """Whether vLLM loads what is pushed, as a checkpoint: into a class not known to funcrl."""
        return not isinstance(self.model, Transformer)


def engine_settings(setup: EngineSetup) -> dict[str, Any]:
    """Return vLLM's arguments for an engine, by the names of its `EngineArgs`."""
    shape, config, dtype = setup.shape, setup.config, setup.dtype
    context = min(config.context_length, shape.context_length)
    return {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # none of a model's own sampling defaults
        "dtype": dtype,
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": max(context, config.batched_tokens),
        "kv_cache_memory_bytes": cache_bytes(shape, config, dtype),
        "gpu_memory_utilization": _UTILISATION,
        # A delta layer's state is of the whole prompt: vLLM keeps those of parts only where it cuts
        # prompts in pieces.
        "enable_prefix_caching": "delta" not in shape.kinds,
        # On a CPU a seeded request whose prompt is cut in pieces crashes vLLM 0.32.
        "enable_chunked_prefill": torch.cuda.is_available(),
        "logprobs_mode": _logprobs_mode(setup),
        "disable_log_stats": True,
        "distributed_executor_backend": _EXECUTORS["cuda" if torch.cuda.is_available() else "cpu"],
        **compile_arguments(config),
        **sleep_arguments(config),
        **setup.overrides,
    }


def who_draws(setup: EngineSetup, sampling: Sampling) -> tuple[Sampling, Sampling, VLLMConfig]:
    """Return the sampling that vLLM applies, the one that its model applies, and what is reported.

    vLLM gets logits from its model, and applies `sampling` to them. With exact numerics the model
    returns log-probabilities, which are reported as they are: either the policy's, or those under
    `sampling`, whose temperature and truncation the model has then applied, so that vLLM applies
    none. Temperature 0 and `min_tokens` are left to vLLM, and the policy's are reported.
    """
    policy, config = Sampling(), setup.config
    if not setup.is_exact or config.logprobs == "policy":
        return sampling, policy, config
    if sampling.temperature == 0 or sampling.min_tokens:
        return sampling, policy, replace(config, logprobs="policy")
    plain = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return plain, sampling, config


def sample_fields(sampling: Sampling, seed: int, max_tokens: int) -> dict[str, Any]:
    """Return vLLM's description of one sample, as its API and its `SamplingParams` have it."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": max_tokens,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,  # what ends a sample is in `stop_tokens`, whatever a config.json says
        "seed": None if sampling.temperature == 0 else seed % 2**62,
        "logprobs": 0,
    }


def _logprobs_mode(setup: EngineSetup) -> str:
    if not setup.is_exact:
        return _LOGPROBS_MODES[setup.config.logprobs]
    # Reported as they are. The runner for GPUs does not know that mode in 0.24, and reports them by
    # `GivenLogprobs`.
    return "raw_logprobs" if torch.cuda.is_available() else "raw_logits"


def compile_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for how to compile."""
    backend, cudagraph = config.compile.backend, config.compile.cudagraph
    if cudagraph != "none" and not torch.cuda.is_available():
        raise ValueError(f"VLLM expects --vllm.compile.cudagraph none on a CPU, got {cudagraph}.")
    if config.compile.is_eager:
        return {"enforce_eager": True}
    graphs = {"none": "NONE", "piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE"}
    if backend == "eager":
        # One graph a batch size for decoding; prompts run as they are.
        return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"compilation_config": {"mode": 3, "cudagraph_mode": graphs[cudagraph]}}


def sleep_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for memory that can be given up."""
    if not config.sleep:
        return {}
    if not torch.cuda.is_available():
        raise ValueError("VLLM expects --no-vllm.sleep on a CPU, got --vllm.sleep.")
    return {"enable_sleep_mode": True}

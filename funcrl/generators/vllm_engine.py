"""vLLM's engine in this process: started, run until all is said, and closed."""

import json
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcrl.config import Sampling
from funcrl.config_generation import VLLMConfig
from funcrl.generators.batch import DecodeFn, has_stop_string, sample_seeds
from funcrl.generators.vllm_versions import check_version
from funcrl.models import TransformerConfig

_BLOCK = 128  # tokens; the largest block of the cache that vLLM takes by itself
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


class Spoken(NamedTuple):
    """One finished sample."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


def start_engine(
    shape: TransformerConfig,
    config: VLLMConfig,
    dtype: str,
    overrides: dict[str, Any],
    described: dict[str, Any] | None,
) -> Any:
    """Return vLLM's engine, in this process, for a model of a shape; its weights mean nothing yet.

    Args:
        shape: of the model.
        config: how large, and how to compile.
        dtype: "float32" or "bfloat16", of weights and cache.
        overrides: arguments of vLLM's `EngineArgs` besides.
        described: the config.json that vLLM is to read, if it needs one.
    """
    check_version()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    on_cpu = not torch.cuda.is_available()
    context = min(config.context_length, shape.context_length)
    with tempfile.TemporaryDirectory(prefix="funcrl-vllm-") as folder:
        if described is not None:
            (Path(folder) / "config.json").write_text(json.dumps(described))
        arguments = EngineArgs(
            model=folder,
            tokenizer=None,
            skip_tokenizer_init=True,
            generation_config="vllm",  # none of a model's own sampling defaults
            dtype=dtype,
            seed=0,
            max_model_len=context,
            max_num_seqs=config.slots,
            max_num_batched_tokens=max(context, config.batched_tokens),
            kv_cache_memory_bytes=cache_bytes(shape, config, dtype),
            enable_prefix_caching=True,
            # On a CPU a seeded request whose prompt is cut in pieces crashes vLLM 0.32.
            enable_chunked_prefill=not on_cpu,
            logprobs_mode="processed_logprobs" if config.logprobs == "sampling" else "raw_logprobs",
            disable_log_stats=True,
            distributed_executor_backend="uni",
            **compile_arguments(config),
            **overrides,
        )
        settings = arguments.create_engine_config()
        # On a CPU vLLM turns "uni" into a process of its own, unless an environment variable says
        # otherwise.
        settings.parallel_config.distributed_executor_backend = "uni"
        return LLMEngine(
            vllm_config=settings,
            executor_class=UniProcExecutor,
            log_stats=False,
            multiprocess_mode=False,
        )


def compile_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return vLLM's arguments for how to compile.

    Example:
        >>> from funcrl.config_generation import CompileConfig, VLLMConfig
        >>> from funcrl.generators.vllm_engine import compile_arguments
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


def cache_bytes(shape: TransformerConfig, config: VLLMConfig, dtype: str) -> int:
    """Return the size of the cache of keys and values: what is allowed, or all that can be filled.

    Example:
        >>> import funcrl
        >>> from funcrl.config_generation import VLLMConfig
        >>> from funcrl.generators.vllm_engine import cache_bytes
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> cache_bytes(shape, VLLMConfig(slots=4, context_length=100), "float32")
        262144
    """
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_width * _FLOAT_BYTES[dtype]
    context = min(config.context_length, shape.context_length)
    blocks = config.slots * -(-context // _BLOCK) + 1  # one that vLLM keeps for itself
    return min(config.cache_bytes, blocks * _BLOCK * token)


def capacity(engine: Any) -> int:
    """Return how many blocks of the cache samples may fill."""
    return int(engine.vllm_config.cache_config.num_gpu_blocks) - 1


def speak(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    decode: DecodeFn | None,
) -> list[Spoken]:
    """Return every sample, group-major.

    A sample enters only when the cache has room for the longest that it can become: nothing is ever
    evicted and computed again, which with seeds would crash on a CPU, and cost time elsewhere.
    """
    group = sampling.num_samples
    seeds = sample_seeds(prompts, group, seed)
    block = int(engine.vllm_config.cache_config.block_size)
    limit = int(engine.vllm_config.model_config.max_model_len)
    room, waiting = capacity(engine), deque(range(len(seeds)))
    finished: dict[int, Spoken] = {}
    held: dict[int, int] = {}  # blocks of the samples under way
    while waiting or held:
        while waiting:
            row, prompt = waiting[0], prompts[waiting[0] // group]
            longest = min(len(prompt) + sampling.max_tokens, limit)
            needed = -(-longest // block)
            if needed > room:
                break
            asked = _request(sampling, seeds[row], longest - len(prompt))
            engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, asked)
            held[waiting.popleft()] = needed
            room -= needed
        if not held:
            raise MemoryError(
                f"generate expects room in vLLM's cache for {longest} tokens of one sample, got "
                f"{room * block}; raise --vllm.cache-bytes."
            )
        for output in engine.step():
            row, said = int(output.request_id), _spoken(output.outputs[0])
            stopped = has_stop_string(said.tokens, sampling, decode)
            if not (output.finished or stopped):
                continue
            if not output.finished:
                engine.abort_request([output.request_id])
            finished[row] = said._replace(finish_reason="stop") if stopped else said
            room += held.pop(row)
    return [finished[row] for row in range(len(seeds))]


def _request(sampling: Sampling, seed: int, most: int) -> Any:
    """Return vLLM's description of one sample of at most so many tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Stop strings are looked for here, after each token: the engine has no tokenizer.
    kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=most,
        min_tokens=min(sampling.min_tokens, most),
        stop_token_ids=list(sampling.stop_tokens),
        seed=None if sampling.temperature == 0 else seed % 2**62,
        logprobs=0,
        detokenize=False,
        output_kind=kind,
    )


def score_prompts(engine: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the log-probability of each prompt's tokens from the second on, as vLLM reads them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    for row, prompt in enumerate(prompts):
        engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, params)
    scores: dict[int, list[float]] = {}
    while len(scores) < len(prompts):
        for output in engine.step():
            row = int(output.request_id)
            pairs = zip(output.prompt_logprobs[1:], prompts[row][1:], strict=True)
            scores[row] = [each[token].logprob for each, token in pairs]
    return [scores[row] for row in range(len(prompts))]


def _spoken(output: Any) -> Spoken:
    tokens = list(output.token_ids)
    pairs = zip(output.logprobs, tokens, strict=True)
    logprobs = [each[token].logprob for each, token in pairs]
    return Spoken(tokens, logprobs, output.finish_reason or "")

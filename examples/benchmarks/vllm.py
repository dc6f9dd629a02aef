"""Speed of vLLM as a generator, in both forms, beside plain vLLM."""

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.inputs import with_vocabulary
from benchmarks.measure import num_bytes, seconds_of, summarize, timed
from benchmarks.table import Row, finish
from funcrl import rng
from funcrl.config import Sampling, ServerConfig, VLLMCompileConfig, VLLMConfig
from funcrl.core.arguments import Count, Natural, check_fields
from funcrl.core.types import Params
from funcrl.generators import VLLM, HuggingFace
from funcrl.models import Transformer, init_params
from funcrl.models.functional import without_weights
from funcrl.weights import to_hugging_face
from funcrl.weights.names import as_stored

_MODES = {
    "eager": VLLMCompileConfig(),
    "graphs": VLLMCompileConfig(cudagraph="full"),
    "inductor": VLLMCompileConfig(backend="inductor"),
    "inductor, graphs": VLLMCompileConfig(backend="inductor", cudagraph="full"),
}


@dataclass(frozen=True)
class VLLMBenchConfig:
    """Tokens per second of vLLM in both forms beside vLLM used directly, and what a push takes."""

    model: str = "qwen3-0.6b"
    """The name of a shape; its weights are random."""
    sequences: Count = 256
    """The number of prompts that are completed at a time; no two are alike."""
    prompt_tokens: Count = 32
    """The number of tokens of each prompt."""
    max_tokens: Count = 256
    """The number of tokens that are drawn for each prompt, no fewer and no more."""
    modes: tuple[Literal["eager", "graphs", "inductor", "inductor, graphs"], ...] = (
        "eager",
        "inductor, graphs",
    )
    """How the engines are compiled; graphs need a GPU."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of the engines; the pushed parameters are float32."""
    forms: tuple[Literal["native", "unified", "server", "class", "transformers"], ...] = (
        "native",
        "unified",
    )
    """The forms that are measured beside plain vLLM; a server runs vLLM's own class. class is the
    network as a model of transformers, whose weights vLLM loads as a checkpoint, and transformers
    that model's own forward on its own cache (`funcrl.generators.HuggingFace`)."""
    server_devices: tuple[Natural, ...] = ()
    """The GPUs that have a server each; with none there is one server, where the parameters are."""
    device: Literal["cpu", "cuda"] = "cuda"
    """The device of the parameters."""
    repeats: Count = 3
    """The number of measured generations, after one that warms up."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks vllm")
        with_vocabulary(self.model)


def bench_vllm(config: VLLMBenchConfig) -> list[Row]:
    """Return a row for plain vLLM and for each form, compiled in each mode."""
    import vllm

    rows = []
    for mode in config.modes:
        rows.append(_plain(config, mode))
        rows += [_own(config, form, mode) for form in config.forms]
    return finish(rows, config.json, vllm=vllm.__version__)


def _prompts(config: VLLMBenchConfig, round_: int) -> list[list[int]]:
    """Return prompts that no earlier round has left in a cache."""
    vocab_size = with_vocabulary(config.model).vocab_size
    return [
        [rng.fold_in(round_, n, t) % vocab_size for t in range(config.prompt_tokens)]
        for n in range(config.sequences)
    ]


def _row(
    config: VLLMBenchConfig,
    mode: str,
    variant: str,
    generate: Callable[[list[list[int]]], Any],
    start_s: float,
) -> Row:
    """Measure generations of an engine that has started, after one that warms it up."""
    rounds = [_prompts(config, number) for number in range(config.repeats + 1)]
    generate(rounds[0])
    seconds = [seconds_of(partial(generate, prompts), config.device) for prompts in rounds[1:]]
    words = (
        f"{config.model}, {config.dtype}, {config.sequences} prompts of {config.prompt_tokens} "
        f"tokens, {config.max_tokens} new each, seeded, with log-probs"
    )
    row = summarize(mode, words, variant, seconds, config.device, start_s=start_s)
    speed = config.sequences * config.max_tokens / row.median_s
    return row._replace(numbers={"tokens_per_s": speed} | row.numbers)


def _engine_config(config: VLLMBenchConfig, mode: str) -> VLLMConfig:
    return VLLMConfig(
        context_length=config.prompt_tokens + config.max_tokens,
        slots=config.sequences,
        cache_bytes=1 << 40,
        compile=_MODES[mode],
        server=ServerConfig(network="native", devices=config.server_devices),
    )


def _own(config: VLLMBenchConfig, form: str, mode: str) -> Row:
    """Measure a form of funcrl's own, and what a push takes."""
    model, params = _network(config, form)
    engine_config, dtype = _engine_config(config, mode), getattr(torch, config.dtype)

    def start() -> VLLM | HuggingFace:
        engine: VLLM | HuggingFace
        if form == "transformers":
            engine = HuggingFace(model, slots=config.sequences, dtype=dtype)
        else:
            in_vllm: Any = "native" if form == "class" else form
            engine = VLLM(model, in_vllm, config=engine_config, dtype=dtype)
        engine.push(params)
        engine.generate([[1, 2, 3]], Sampling(max_tokens=1), 0)
        return engine

    engine, start_s = timed(start, config.device)
    sampling = Sampling(max_tokens=config.max_tokens)
    row = _row(config, mode, form, lambda each: engine.generate(each, sampling, 0), start_s)
    # Each has a version of its own: an engine need not push what it has already.
    push = statistics.median(
        seconds_of(partial(engine.push, params, version), config.device) for version in range(1, 6)
    )
    engine.close()
    pushed = {"push_ms": 1e3 * push, "push_gb_per_s": num_bytes(params) / push / 1e9}
    return row._replace(numbers=row.numbers | pushed)


def _network(config: VLLMBenchConfig, form: str) -> tuple[torch.nn.Module, Params]:
    """Return the network that a form draws from, and its parameters."""
    shape = with_vocabulary(config.model)
    model = Transformer(shape)
    params = init_params(model, 0, device=config.device)
    if form not in ("class", "transformers"):
        return model, params
    from transformers import AutoConfig, AutoModelForCausalLM

    described = to_hugging_face(shape, "float32")
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**described), attn_implementation="eager"
    )
    return without_weights(module.to(config.device).eval()), as_stored(params, shape)


def _plain(config: VLLMBenchConfig, mode: str) -> Row:
    """Measure `vllm.LLM` as a user would call it, with the same prompts and options."""
    from vllm import LLM, SamplingParams

    from funcrl.generators.vllm.memory import cache_bytes
    from funcrl.generators.vllm.settings import compile_arguments

    shape, engine_config = with_vocabulary(config.model), _engine_config(config, mode)

    def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> None:
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, seed=number,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]  # fmt: skip
        each = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(each, sampling, use_tqdm=False)

    def start(folder: str) -> Any:
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype=config.dtype,
            max_model_len=engine_config.context_length, max_num_seqs=config.sequences,
            kv_cache_memory_bytes=cache_bytes(shape, engine_config, config.dtype),
            gpu_memory_utilization=0.5,
            **compile_arguments(engine_config),
        )  # fmt: skip
        generate(llm, [[1, 2, 3]], 1)
        return llm

    with tempfile.TemporaryDirectory() as folder:
        hf_config = json.dumps(to_hugging_face(shape, config.dtype))
        (Path(folder) / "config.json").write_text(hf_config)
        llm, start_s = timed(partial(start, folder), config.device)
        row = _row(
            config, mode, "plain vLLM", lambda each: generate(llm, each, config.max_tokens), start_s
        )
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
    return row

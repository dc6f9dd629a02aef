"""Speed of vLLM as a generator, in both forms, beside plain vLLM."""

import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from funcrl.cli.bench.measure import describe_machine, seconds_of, write_rows
from funcrl.config import CompileConfig, Sampling, ServerConfig, VLLMConfig
from funcrl.config.generation import Form
from funcrl.core import checks, rng
from funcrl.core.arguments import check_fields
from funcrl.core.types import Params
from funcrl.generators import VLLM
from funcrl.models import SHAPES, Transformer, init_params, shape
from funcrl.models import TransformerConfig as Shape
from funcrl.weights import to_hugging_face

_VOCABULARY = {"qwen3-0.6b": 151_936, "smollm2-135m": 49_152}
_MODES = {
    "eager": CompileConfig(),
    "graphs": CompileConfig(cudagraph="full"),
    "inductor": CompileConfig(backend="inductor"),
    "inductor, graphs": CompileConfig(backend="inductor", cudagraph="full"),
}


@dataclass(frozen=True)
class VLLMBenchConfig:
    """Tokens per second of vLLM in both forms beside vLLM used directly, and what a push takes."""

    model: str = "qwen3-0.6b"
    """A shape; its weights are random."""
    sequences: int = 256
    """Prompts at a time, no two alike."""
    prompt_tokens: int = 32
    """The number of tokens of each prompt."""
    max_tokens: int = 256
    """The number of tokens that are drawn for each prompt, no fewer and no more."""
    modes: tuple[Literal["eager", "graphs", "inductor", "inductor, graphs"], ...] = (
        "eager",
        "inductor, graphs",
    )
    """How the engines are compiled; graphs need a GPU."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype of the engines; the pushed parameters are float32."""
    forms: tuple[Form, ...] = ("native", "unified")
    """What is measured beside plain vLLM; a server runs vLLM's own class."""
    server_devices: tuple[int, ...] = ()
    """GPUs of the servers; none for one where the parameters are."""
    device: Literal["cpu", "cuda"] = "cuda"
    """The device of the parameters."""
    repeats: int = 3
    """The number of measured generations, after one that warms up."""
    json: Path | None = None
    """A file to write every row to as well."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("sequences", "prompt_tokens", "max_tokens", "repeats"):
            checks.check_count("bench vllm", name, getattr(self, name))
        for device in self.server_devices:
            checks.check_range("bench vllm", "server_devices", device, 0, float("inf"))


class VLLMRow(NamedTuple):
    """One engine's measurement."""

    what: str
    shape: str
    variant: str
    tokens_per_s: float  # median
    spread: float  # between the fastest and the slowest, of the median
    ratio: float  # to plain vLLM compiled alike
    start_s: float  # until the first token, of an engine that is not there yet
    push_ms: float  # of all parameters; 0 for plain vLLM, which takes none
    push_gb_per_s: float  # of the parameters' bytes, as they are read


def bench_vllm(config: VLLMBenchConfig) -> list[VLLMRow]:
    """Return a row for each engine; prints nothing."""
    if config.model not in SHAPES:
        raise ValueError(
            f"bench vllm expects a shape, one of {list(SHAPES)}, got {config.model!r}."
        )
    shape_ = shape(config.model, _VOCABULARY.get(config.model, 512))
    rows = []
    for mode in config.modes:
        plain = _plain(config, shape_, mode)
        own = [_own(config, shape_, form, mode) for form in config.forms]
        for row in (plain, *own):
            rows.append(row._replace(ratio=row.tokens_per_s / plain.tokens_per_s))
    write_rows(config.json, rows, config.device)
    return rows


def format_vllm_rows(rows: list[VLLMRow], device: str = "cuda") -> str:
    """Return the rows as a Markdown table, headed by the machine."""
    import vllm

    described = describe_machine(device) | {"vllm": vllm.__version__}
    lines = [", ".join(f"{name} {value}" for name, value in described.items()), "", rows[0].shape]
    lines += ["", "| engine | tokens/s | spread | x | start, s | push, ms | GB/s |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| {row.variant} | {row.tokens_per_s:,.0f} | {row.spread:.0%} | {row.ratio:.2f} "
        f"| {row.start_s:.1f} | {row.push_ms:.1f} | {row.push_gb_per_s:,.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _prompts(config: VLLMBenchConfig, vocab_size: int, round_: int) -> list[list[int]]:
    """Return prompts that no earlier round has left in a cache."""
    return [
        [rng.fold_in(round_, n, t) % vocab_size for t in range(config.prompt_tokens)]
        for n in range(config.sequences)
    ]


def _measured(config: VLLMBenchConfig, vocab: int, generate: Callable[[Any], Any]) -> list[float]:
    """Return the seconds of each measured generation."""
    rounds = [_prompts(config, vocab, number) for number in range(config.repeats + 1)]
    generate(rounds[0])
    return [seconds_of(lambda each=each: generate(each), config.device) for each in rounds[1:]]  # type: ignore[misc]  # (a default argument binds the loop's variable)


def _row(
    config: VLLMBenchConfig, variant: str, seconds: list[float], start: float,
    push: float = 0.0, num_bytes: int = 0,
) -> VLLMRow:  # fmt: skip
    tokens = config.sequences * config.max_tokens
    median = statistics.median(seconds)
    return VLLMRow(
        what="vllm",
        shape=f"{config.model}, {config.dtype}, {config.sequences} prompts of "
        f"{config.prompt_tokens} tokens, {config.max_tokens} new each, seeded, with log-probs",
        variant=variant,
        tokens_per_s=tokens / median,
        spread=(max(seconds) - min(seconds)) / median,
        ratio=1.0,
        start_s=start,
        push_ms=1e3 * push,
        push_gb_per_s=num_bytes / push / 1e9 if push else 0.0,
    )


def _engine_config(config: VLLMBenchConfig, mode: str) -> VLLMConfig:
    return VLLMConfig(
        context_length=config.prompt_tokens + config.max_tokens,
        slots=config.sequences,
        cache_bytes=1 << 40,
        compile=_MODES[mode],
        server=ServerConfig(network="native", devices=config.server_devices),
    )


def _own(config: VLLMBenchConfig, shape_: Shape, form: Form, mode: str) -> VLLMRow:
    model = Transformer(shape_)
    params = init_params(model, 0, device=config.device)
    first: list[VLLM] = []

    def start() -> None:
        engine = VLLM(
            model, form, config=_engine_config(config, mode), dtype=getattr(torch, config.dtype)
        )
        first.append(engine)
        engine.push(params)
        engine.generate([[1, 2, 3]], Sampling(max_tokens=1), 0)

    begun = seconds_of(start, config.device)
    engine = first.pop()
    sampling = Sampling(max_tokens=config.max_tokens)
    seconds = _measured(config, shape_.vocab_size, lambda each: engine.generate(each, sampling, 0))
    pushes = [seconds_of(lambda: engine.push(params), config.device) for _ in range(5)]
    engine.close()
    return _row(
        config, f"{form}, {mode}", seconds, begun, statistics.median(pushes), _num_bytes(params)
    )


def _num_bytes(params: Params) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in params.values())


def _plain(config: VLLMBenchConfig, shape_: Shape, mode: str) -> VLLMRow:
    """Measure `vllm.LLM` as a user would call it, asked for the same."""
    from vllm import LLM, SamplingParams

    from funcrl.generators.vllm.settings import cache_bytes, compile_arguments

    made: list[Any] = []
    engine_config = _engine_config(config, mode)

    def ask(llm: Any, prompts: list[list[int]], most: int) -> None:
        asked = [
            SamplingParams(
                temperature=1.0, max_tokens=most, ignore_eos=True, logprobs=0, seed=number,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]  # fmt: skip
        each = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(each, asked, use_tqdm=False)

    with tempfile.TemporaryDirectory() as folder:
        described = json.dumps(to_hugging_face(shape_, config.dtype))
        (Path(folder) / "config.json").write_text(described)

        def start() -> None:
            llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, dtype=config.dtype,
                max_model_len=engine_config.context_length, max_num_seqs=config.sequences,
                kv_cache_memory_bytes=cache_bytes(shape_, engine_config, config.dtype),
                gpu_memory_utilization=0.5,
                **compile_arguments(engine_config),
            )  # fmt: skip
            made.append(llm)
            ask(llm, [[1, 2, 3]], 1)

        begun = seconds_of(start, config.device)
        llm = made.pop()
        vocab = shape_.vocab_size
        seconds = _measured(config, vocab, lambda each: ask(llm, each, config.max_tokens))
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
    return _row(config, f"plain vLLM, {mode}", seconds, begun)

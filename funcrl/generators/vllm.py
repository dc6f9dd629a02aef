"""vLLM as a generator: the same parameters, in the engine that the field generates with."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from funcrl import tree
from funcrl.config import Sampling
from funcrl.config_generation import VLLMConfig
from funcrl.functional import check_params
from funcrl.generators.batch import DecodeFn, Prompts
from funcrl.generators.sampler import check_prompts
from funcrl.generators.vllm_engine import Spoken, score_prompts, speak, start_engine
from funcrl.generators.vllm_native import write_params
from funcrl.generators.vllm_versions import check_version
from funcrl.logprobs import logprob_fn, score
from funcrl.models import Transformer
from funcrl.types import Params, Sample, Samples
from funcrl.weights import load_params, to_hugging_face

# How far vLLM's log-probabilities of a probe may be from the model's own, on average: rounding is
# far below, a wrong name map far above for any model but one without structure.
_PROBE_TOKENS = 24
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class VLLM:
    """A vLLM engine in this process, with the embedded sampler's interface.

    Args:
        model: a `funcrl.models.Transformer`, whose parameters come by `push`; or a path as for
            `funcrl.load_params`, whose parameters are pushed at once.
        form: "native", vLLM's own class for the architecture, into whose tensors a push writes; or
            "unified", funcrl's `Transformer` on vLLM's paged cache, which a push binds to the very
            tensors of the parameters.
        config: the engine's size, and how it is compiled.
        dtype: of the engine; that of the first push is cast to it.
        decode: from tokens to text, for stop strings.

    The engine starts at the first push, when what is trained is in memory already.

    Every sample has a seed of its own, of its prompt and its number, as in the sampler; the numbers
    that vLLM draws from it are others.
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        form: str | None = None,
        *,
        config: VLLMConfig | None = None,
        dtype: torch.dtype = torch.float32,
        decode: DecodeFn | None = None,
    ) -> None:
        config = VLLMConfig() if config is None else config
        form = config.form if form is None else form
        if form not in ("native", "unified"):
            raise ValueError(f"VLLM expects form 'native' or 'unified', got {form!r}.")
        if dtype not in _PROBE_TOLERANCE:
            raise ValueError(f"VLLM expects dtype float32 or bfloat16, got {dtype}.")
        check_version()
        loaded: Params | None = None
        if not isinstance(model, Transformer):
            model, loaded = load_params(model, dtype)
        self._model, self._form, self._dtype, self._decode = model, form, dtype, decode
        self._config, self._overrides = config, _overrides(model, form, config)
        self._version, self._closed = 0, False
        self._engine: Any = None
        self.context_length = min(config.context_length, model.config.context_length)
        if loaded is not None:
            self.push(loaded)

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on.

        Native: they are written into vLLM's own. Unified: they are referred to, if they have the
        engine's dtype and no graph holds on to others.
        """
        check_params(self._model, params)
        first = self._engine is None
        if first:
            self._engine = self._start()
        engine = self._running("push")
        write = write_params if self._form == "native" else _adopt
        engine.apply_model(lambda model: write(model, params))
        # Keys and values of the old policy would answer for the new one.
        if not engine.reset_prefix_cache():
            raise RuntimeError("VLLM.push expects an engine at rest, got one that is generating.")
        self._version = version
        if first:
            self._probe(params)

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""
        engine = self._running("generate")
        check_prompts(prompts, sampling, self._model, self._decode, self.context_length)
        spoken = self._guarded(lambda: speak(engine, prompts, sampling, seed, self._decode))
        return self._collect(spoken, sampling)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return vLLM's log-probability of each prompt's tokens, from the second on."""
        engine = self._running("score")
        scores: list[list[float]] = self._guarded(lambda: score_prompts(engine, prompts))
        return scores

    def close(self) -> None:
        """Stop the engine and free its memory; another may be started after it."""
        engine, self._engine, self._closed = self._engine, None, True
        if engine is None:
            return
        engine.engine_core.shutdown()
        del engine
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()

    def _start(self) -> Any:
        if self._closed:
            raise RuntimeError("VLLM.push expects an engine, got one that is closed.")
        name = str(self._dtype).removeprefix("torch.")
        described = to_hugging_face(self._model.config, name) if self._form == "native" else None
        arguments = (self._model.config, self._config, name, self._overrides, described)
        return self._guarded(lambda: start_engine(*arguments))

    def _running(self, method: str) -> Any:
        if self._engine is None:
            what = "one that is closed" if self._closed else "no parameters; call push first"
            raise RuntimeError(f"VLLM.{method} expects an engine with parameters, got {what}.")
        return self._engine

    def _guarded(self, work: Any) -> Any:
        """Return what work on the engine gives; an engine that fails is closed, and said to be."""
        try:
            return work()
        except (MemoryError, torch.OutOfMemoryError) as error:
            self.close()
            raise MemoryError(
                f"VLLM ran out of memory: lower --vllm.cache-bytes, --vllm.slots or "
                f"--vllm.batched-tokens ({error})."
            ) from error

    def _probe(self, params: Params) -> None:
        """Raise if vLLM does not compute what the model does."""
        vocab = self._model.config.vocab_size
        count = min(_PROBE_TOKENS, self.context_length - 1)
        tokens = torch.arange(count) * 7919 % vocab
        found = torch.tensor(self.score([tokens.tolist()])[0])
        cast = tree.cast(params, self._dtype)
        rows = Sample(tokens[None], torch.arange(count)[None])
        on = next(iter(cast.values())).device
        rows = Sample(*(leaf.to(on) for leaf in rows))
        wanted = score(logprob_fn(self._model), cast, rows).logprobs[0, 1:].float().cpu()
        off = (found - wanted).abs().mean().item()
        if not off <= _PROBE_TOLERANCE[self._dtype]:
            raise RuntimeError(
                f"VLLM.push expects vLLM to give a probe's tokens the model's own "
                f"log-probabilities, got a mean difference of {off:.3g} in {self._dtype}; funcrl's "
                f"names of parameters and vLLM's do not agree."
            )

    def _collect(self, spoken: Sequence[Spoken], sampling: Sampling) -> Samples:
        width = max(len(said.tokens) for said in spoken)
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def padded(rows: list[list[Any]], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
            filled = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(filled, dtype=dtype, device=device)

        known = padded([said.logprobs for said in spoken], torch.float32)
        mask = padded([[1] * len(said.tokens) for said in spoken], torch.bool)
        # The two are one unless the temperature is not 1 or some tokens are never drawn.
        alike = sampling.temperature == 1 and not sampling.truncates
        unknown = known if alike else known.masked_fill(mask, math.nan)
        of_policy = self._config.logprobs == "policy"
        return Samples(
            tokens=padded([said.tokens for said in spoken], torch.int64),
            mask=mask,
            logprobs=unknown if of_policy else known,
            policy_logprobs=known if of_policy else unknown,
            finish_reasons=tuple(said.finish_reason for said in spoken),
            policy_version=self._version,
        )


def _adopt(model: Any, params: Params) -> None:
    model.adopt(params)


def _overrides(model: Transformer, form: str, config: VLLMConfig) -> dict[str, Any]:
    """Return the engine's arguments for a form."""
    width = model.config.head_width
    known = _has_kernel(width)
    if form == "native":
        if not known:
            raise ValueError(
                f"VLLM expects a head_width that vLLM's attention has a kernel for, got {width}; "
                f"form 'unified' takes any."
            )
        return {"load_format": "dummy"}
    from funcrl.generators.vllm_unified import overrides

    own = config.attention == "funcrl" or (config.attention == "auto" and not known)
    return overrides(model.config, own)


def _has_kernel(head_width: int) -> bool:
    if torch.cuda.is_available():
        return head_width % 8 == 0 and head_width <= 256  # FlashAttention's
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return bool(CPUAttentionBackend.supports_head_size(head_width))

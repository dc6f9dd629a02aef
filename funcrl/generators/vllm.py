"""vLLM as a generator: the same parameters, in the engine that the field generates with."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from funcrl import checks, tree
from funcrl.batching import pad_rows
from funcrl.config import Sampling
from funcrl.config_generation import VLLMConfig
from funcrl.functional import check_params
from funcrl.generators.batch import DecodeFn, Prompts
from funcrl.generators.sampler import check_prompts, num_writes
from funcrl.generators.vllm_native import write_params
from funcrl.generators.vllm_probe import check_probe
from funcrl.generators.vllm_settings import cache_bytes, compile_arguments
from funcrl.generators.vllm_versions import check_version
from funcrl.models import Transformer
from funcrl.types import Params, Samples
from funcrl.weights import load_params, to_hugging_face

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FORMS = ("native", "unified", "server")
_Result = TypeVar("_Result")


class VLLM:
    """A vLLM engine, in this process or in servers, with the embedded sampler's interface.

    The engine starts at the first push, when what is trained is in memory already. Every sample has
    a seed of its own, of its prompt and its number, as in the sampler; what vLLM draws with it is
    something else.

    Args:
        model: a `funcrl.models.Transformer`, whose parameters come by `push`; or a path as for
            `funcrl.load_params`, whose parameters are pushed at once.
        form: "native", vLLM's own class for the architecture, into whose tensors a push writes;
            "unified", funcrl's `Transformer` on vLLM's paged cache, which a push binds to the very
            tensors of the parameters; or "server", either of them in servers of their own, to
            which a push sends the parameters. The configuration's when left out.
        config: the engine's size, and how it is compiled.
        dtype: of the engine; parameters are cast to it.
        decode: from tokens to text, for stop strings.
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
        self._form = config.form if form is None else form
        if self._form not in _FORMS:
            raise ValueError(f"VLLM expects form to be one of {_FORMS}, got {self._form!r}.")
        if dtype not in _DTYPES:
            raise ValueError(f"VLLM expects dtype float32 or bfloat16, got {dtype}.")
        compile_arguments(config)
        loaded: Params | None = None
        if not isinstance(model, Transformer):
            model, loaded = load_params(model, dtype)
        cache_bytes(model.config, config, _DTYPES[dtype])
        check_version()
        network = config.server.network if self._form == "server" else self._form
        self._arguments = _arguments(model, network, config, _DTYPES[dtype])
        self._model, self._config, self._dtype, self._decode = model, config, dtype, decode
        self._engine: Any = None
        self._version, self._closed, self._probed = 0, False, False
        self._params: Params = {}
        self._written: list[int] = []  # how often each parameter had been written to
        self.context_length = min(config.context_length, model.config.context_length)
        if loaded is not None:
            self.push(loaded)

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on.

        Native: they are written into vLLM's own. Unified: they are referred to, if they have the
        engine's dtype and no graph holds on to others.
        """
        check_params(self._model, params)
        if self._engine is None:
            self._start()
        engine = self._running("push")
        self._guarded(lambda: engine.push(params))
        self._params, self._version = params, version
        self._written = num_writes(params)
        if not self._probed:
            check_probe(self._model, tree.cast(params, self._dtype), engine.score)
            self._probed = True

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""
        engine = self._running("generate")
        if self._form == "unified" and num_writes(self._params) != self._written:
            self.push(self._params, self._version)  # what is referred to has been written to
        check_prompts(prompts, sampling, self._model, self._decode, self.context_length)
        checks.check_range("VLLM.generate", "temperature", sampling.temperature, 0.0, 2.0)
        spoken = self._guarded(lambda: engine.speak(prompts, sampling, seed, self._decode))
        # Where what is trained is, which need not be where the engine is.
        device = next(iter(self._params.values())).device
        of_policy = self._config.logprobs == "policy"
        return _to_samples(spoken, sampling, of_policy, self._version, device)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return vLLM's log-probability of each prompt's tokens, from the second on."""
        engine = self._running("score")
        check_prompts(prompts, Sampling(), self._model, self._decode, self.context_length)
        return self._guarded(lambda: engine.score(prompts))

    def close(self) -> None:
        """Stop the engine and free its memory; another may be started after it."""
        engine, self._engine, self._closed = self._engine, None, True
        if engine is not None:
            engine.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the OpenAI-compatible APIs of servers are."""
        if self._form != "server":
            return ()
        return self._running("addresses").addresses

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("VLLM.push expects an engine, got one that is closed.")
        if self._form == "server":
            from funcrl.generators.vllm_remote import Remote

            self._engine = Remote(*self._arguments)
            return
        from funcrl.generators.vllm_engine import Engine

        write = write_params if self._form == "native" else _adopt
        self._engine = self._guarded(lambda: Engine(*self._arguments, write=write))

    def _running(self, method: str) -> Any:
        if self._engine is None:
            what = "one that is closed" if self._closed else "no parameters; call push first"
            raise RuntimeError(f"VLLM.{method} expects an engine with parameters, got {what}.")
        return self._engine

    def _guarded(self, work: Callable[[], _Result]) -> _Result:
        """Return what work gives; an engine without memory is closed, and the number named."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            self.close()
            raise MemoryError(
                f"VLLM ran out of memory: lower --vllm.cache-bytes, --vllm.slots or "
                f"--vllm.batched-tokens ({error})."
            ) from error


def _adopt(model: Any, params: Params) -> None:
    model.adopt(params)


def _arguments(model: Transformer, network: str, config: VLLMConfig, dtype: str) -> tuple[Any, ...]:
    """Return what an `Engine` is made with, after checking that vLLM has what the model needs."""
    shape = model.config
    known = _has_kernel(shape.head_width)
    if network == "unified":
        from funcrl.generators.vllm_unified import overrides

        own = config.attention == "funcrl" or (config.attention == "auto" and not known)
        return shape, config, dtype, overrides(shape, own), None
    if not known:
        raise ValueError(
            f"VLLM expects a head_width that vLLM's attention has a kernel for, got "
            f"{shape.head_width}; form 'unified' takes any."
        )
    if shape.qkv_bias and shape.num_heads * shape.head_width != shape.width:
        raise ValueError(
            f"VLLM expects head_width of width / num_heads = {shape.width // shape.num_heads} for "
            f"vLLM's Qwen2, got {shape.head_width}; form 'unified' takes any."
        )
    return shape, config, dtype, {"load_format": "dummy"}, to_hugging_face(shape, dtype)


def _has_kernel(head_width: int) -> bool:
    if torch.cuda.is_available():
        return head_width % 8 == 0 and head_width <= 256  # FlashAttention's
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return bool(CPUAttentionBackend.supports_head_size(head_width))


def _to_samples(
    spoken: Any, sampling: Sampling, of_policy: bool, version: int, device: torch.device
) -> Samples:
    """Return what was said; `of_policy` says whose the engine's log-probabilities are."""
    known = pad_rows([said.logprobs for said in spoken], torch.float32, device)
    mask = pad_rows([[1] * len(said.tokens) for said in spoken], torch.bool, device)
    # The two are one unless the temperature is not 1 or some tokens are never drawn.
    alike = sampling.temperature == 1 and not sampling.truncates
    other = known if alike else known.masked_fill(mask, math.nan)
    return Samples(
        tokens=pad_rows([said.tokens for said in spoken], torch.int64, device),
        mask=mask,
        logprobs=other if of_policy else known,
        policy_logprobs=known if of_policy else other,
        finish_reasons=tuple(said.finish_reason for said in spoken),
        policy_version=version,
    )

"""vLLM as a generator: the same parameters, in the engine that the field generates with."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from funcrl.config import Sampling
from funcrl.config.generation import Form, VLLMConfig
from funcrl.core import checks, tree
from funcrl.core.types import Params, Samples
from funcrl.generators.embedded.sampler import check_prompts, num_writes
from funcrl.generators.embedded.slots import Prompts
from funcrl.generators.stops import DecodeFn
from funcrl.generators.vllm.memory import with_cache
from funcrl.generators.vllm.owner import Owner
from funcrl.generators.vllm.probe import check_finite, check_probe
from funcrl.generators.vllm.server.processes import check_plugin
from funcrl.generators.vllm.settings import cache_bytes, compile_arguments, sleep_arguments
from funcrl.generators.vllm.versions import check_version
from funcrl.models import Transformer
from funcrl.models.functional import check_params
from funcrl.rl.batching import pad_rows
from funcrl.weights import load_params, to_hugging_face

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class VLLM(Owner):
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
        trainer_bytes: of the GPU, that a trainer beside the engine needs at its peak.
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        form: Form | None = None,
        *,
        config: VLLMConfig | None = None,
        dtype: torch.dtype = torch.float32,
        decode: DecodeFn | None = None,
        trainer_bytes: int = 0,
    ) -> None:
        super().__init__()
        config = VLLMConfig() if config is None else config
        if form is not None:
            config = replace(config, form=form)
        if config.form not in get_args(Form):
            forms = get_args(Form)
            raise ValueError(f"VLLM expects form to be one of {forms}, got {config.form!r}.")
        if dtype not in _DTYPES:
            raise ValueError(f"VLLM expects dtype float32 or bfloat16, got {dtype}.")
        compile_arguments(config)
        sleep_arguments(config)
        loaded: Params | None = None
        if not isinstance(model, Transformer):
            model, loaded = load_params(model, dtype)
        cache_bytes(model.config, config, _DTYPES[dtype])
        check_version()
        self._overrides = _overrides(model, config.network, config, _DTYPES[dtype])
        self._trainer_bytes = trainer_bytes
        self._model, self._config, self._dtype, self._decode = model, config, dtype, decode
        self._version, self._probed = 0, False
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
        check_finite(params)
        engine = self._started()
        self._guarded("push", lambda: engine.push(params))
        self._params, self._version = params, version
        self._written = num_writes(params)
        if not self._probed:
            check_probe(self._model, tree.cast(params, self._dtype), self.score)
            self._probed = True

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""
        engine = self._running("generate")
        check_prompts(prompts, sampling, self._model, self._decode, self.context_length)
        checks.check_range("VLLM.generate", "temperature", sampling.temperature, 0.0, 2.0)
        self.wake()
        decode = self._decode
        spoken = self._guarded("generate", lambda: engine.speak(prompts, sampling, seed, decode))
        if self._config.sleep:
            self.sleep()
        # Where what is trained is, which need not be where the engine is.
        device = next(iter(self._params.values())).device
        of_policy = self._config.logprobs == "policy"
        return _to_samples(spoken, sampling, of_policy, self._version, device)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return vLLM's log-probability of each prompt's tokens, from the second on."""
        engine = self._running("score")
        check_prompts(prompts, Sampling(), self._model, self._decode, self.context_length)
        self.wake()
        return self._guarded("score", lambda: engine.score(prompts))

    def sleep(self) -> None:
        """Give the engine's memory up until it is needed again; `VLLMConfig.sleep` allows it."""
        engine = self._running("sleep")
        if not self._config.sleep:
            raise ValueError("VLLM.sleep expects an engine with --vllm.sleep, got one without.")
        self._guarded("sleep", engine.sleep)

    def wake(self) -> None:
        """Take the memory again and the parameters, as `generate`, `score` and `push` do."""
        engine = self._running("wake")
        # What the unified form refers to may have been written to.
        stale = self._config.form == "unified" and num_writes(self._params) != self._written
        if engine.asleep or stale:
            self.push(self._params, self._version)

    def _start(self) -> Any:
        config, dtype = self._config, _DTYPES[self._dtype]
        if not (config.form == "server" and config.server.devices):  # which share no GPU
            config = with_cache(self._model, config.network, config, dtype, self._trainer_bytes)
        kind: Any
        if config.form == "server":
            from funcrl.generators.vllm.server.remote import Remote as kind
        else:
            from funcrl.generators.vllm.engine import Engine as kind
        return kind(self._model.config, config, dtype, *self._overrides)


def _overrides(model: Transformer, network: str, config: VLLMConfig, dtype: str) -> tuple[Any, Any]:
    """Return an engine's last arguments, after checking that vLLM has what it needs for them."""
    if config.form == "server":
        check_plugin()
    shape = model.config
    known = _has_kernel(shape.head_width)
    if network == "unified":
        from funcrl.generators.vllm.inside.unified import overrides

        own = config.attention == "funcrl" or (config.attention == "auto" and not known)
        return overrides(shape, own), None
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
    return {"load_format": "dummy"}, to_hugging_face(shape, dtype)


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

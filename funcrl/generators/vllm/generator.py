"""vLLM as a generator: the same parameters, in the engine that the field generates with."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import nn

from funcrl.config import Sampling, VLLMConfig
from funcrl.config.generation import Form
from funcrl.core import checks, tree
from funcrl.core.types import Params, Samples
from funcrl.generators.contract import Engine, Lifecycle, Prompts, Pushed, State, check_prompts
from funcrl.generators.stops import DecodeFn
from funcrl.generators.vllm.failures import (
    check_finite,
    check_probe,
    died,
    not_started,
    out_of_memory,
)
from funcrl.generators.vllm.memory import cache_bytes, shape_of, with_cache
from funcrl.generators.vllm.settings import (
    EngineSetup,
    check_version,
    compile_arguments,
    network_arguments,
    sleep_arguments,
)
from funcrl.models import Transformer
from funcrl.models.functional import check_params
from funcrl.models.networks import is_of_transformers
from funcrl.rl.batching import pad_rows
from funcrl.weights.load import load_params


class Completion(NamedTuple):
    """One finished completion."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


def check_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Return log-probabilities; raise if there was no distribution to draw from."""
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            f"generate expects logits that leave a distribution to draw from, got "
            f"log-probabilities of {list(logprobs[:3])}; have the parameters diverged?"
        )
    return list(logprobs)


def to_samples(
    completions: Sequence[Completion], sampling: Sampling, config: VLLMConfig, policy: Pushed
) -> Samples:
    """Return completions, group-major, as samples of the policy on the device of its parameters.

    The configuration says which log-probabilities the engine keeps.
    """
    device = next(iter(policy.params.values())).device
    kept = pad_rows([each.logprobs for each in completions], torch.float32, device)
    mask = pad_rows([[1] * len(each.tokens) for each in completions], torch.bool, device)
    # The two are one unless the temperature is not 1 or some tokens are never drawn.
    alike = sampling.temperature == 1 and not sampling.truncates
    other = kept if alike else kept.masked_fill(mask, math.nan)
    of_policy = config.logprobs == "policy"
    return Samples(
        tokens=pad_rows([each.tokens for each in completions], torch.int64, device),
        mask=mask,
        logprobs=other if of_policy else kept,
        policy_logprobs=kept if of_policy else other,
        finish_reasons=tuple(each.finish_reason for each in completions),
        policy_version=policy.version,
    )


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LEAST_CONTEXT = 3
_Result = TypeVar("_Result")


class _Started(Engine, Protocol):
    """vLLM that runs: `InProcess` or `Remote`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the OpenAI-compatible APIs of servers are."""


class VLLM:
    """A vLLM engine, in this process or in servers, with the embedded sampler's interface.

    The engine starts at the first push, when what is trained is in memory already. Every sample has
    a seed of its own, of its prompt and its number, as in the sampler; what vLLM draws with it is
    something else.

    Args:
        model: a `funcrl.models.Transformer` or a model of transformers, whose parameters come by
            `push`; or a path as for `funcrl.load_params`, whose parameters are pushed at once.
        form: "native", vLLM's own class for the architecture, into whose tensors a push writes, as
            it always is for a model of transformers; "unified", funcrl's `Transformer` on vLLM's
            paged cache, which a push binds to the very tensors of the parameters; or "server",
            either of them in servers of their own, to which a push sends the parameters. The
            configuration's when left out.
        config: the engine's size, and how it is compiled.
        dtype: of the engine; parameters are cast to it.
        decode: from tokens to text, for stop strings.
        trainer_bytes: of the GPU, that a trainer beside the engine needs at its peak.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        form: Form | None = None,
        *,
        config: VLLMConfig | None = None,
        dtype: torch.dtype = torch.float32,
        decode: DecodeFn | None = None,
        trainer_bytes: int = 0,
    ) -> None:
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
        if not isinstance(model, nn.Module):
            model, loaded = load_params(model, dtype)
        if not isinstance(model, Transformer):
            config = _as_native(model, config)
        shape = shape_of(model)
        self.context_length = min(config.context_length, shape.context_length)
        if self.context_length < _LEAST_CONTEXT:
            raise ValueError(
                f"VLLM expects --vllm.context-length of at least {_LEAST_CONTEXT}, for two tokens "
                f"that a probe scores and one of a completion, got {self.context_length}."
            )
        cache_bytes(shape, config, _DTYPES[dtype])
        check_version()
        self._lifecycle = Lifecycle()
        overrides, hf_config = network_arguments(model, config, _DTYPES[dtype])
        self._setup = EngineSetup(
            model, config, _DTYPES[dtype], overrides, hf_config, self._lifecycle, decode
        )
        self._model, self._config, self._dtype = model, config, dtype
        self._trainer_bytes = trainer_bytes
        self._engine: _Started | None = None  # started by the first push
        self._probed = False
        if loaded is not None:
            self.push(loaded)

    @property
    def state(self) -> State:
        """What the engine can do now."""
        return self._lifecycle.state

    @property
    def pushed(self) -> Pushed | None:
        """The parameters that the engine samples from."""
        return None if self._engine is None else self._engine.pushed

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the OpenAI-compatible APIs of servers are; of an engine in this process, none."""
        return self._running("addresses").addresses

    def push(self, params: Params, version: int | None = None) -> None:
        """Sample from these parameters from now on.

        Native: they are written into vLLM's own. Unified: they are referred to, if they have the
        engine's dtype and no graph holds on to others.

        A push that names a version does nothing if these very tensors are there as that version
        and torch has counted no write to them since. Torch does not count the writes of its fused
        optimizers and collectives, through `.data`, or by others' kernels: after these, name
        another version or none.
        """
        if self._probed and self.pushed is not None and self.pushed.holds(params, version):
            return
        check_params(self._model, params)
        check_finite(params)
        self._push(params, version)
        if not self._probed:
            cast = tree.cast(params, self._dtype)
            check_probe(self._model, cast, self.score, self.context_length)
            self._probed = True

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""
        engine = self._running("generate")
        self._check(prompts, sampling, self._setup.decode)
        checks.check_range("VLLM.generate", "temperature", sampling.temperature, 0.0, 2.0)
        self.wake()
        samples = self._guarded("generate", lambda: engine.generate(prompts, sampling, seed))
        if self._config.sleep:
            self.sleep()
        return samples

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return vLLM's log-probability of each prompt's tokens, from the second on."""
        engine = self._running("score")
        self._check(prompts, Sampling(), None)
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
        held = self._running("wake").pushed
        assert held is not None
        # What the unified form refers to may have been written to.
        stale = self._config.form == "unified" and held.is_written()
        if self.state is State.ASLEEP or stale:
            check_finite(held.params)
            self._push(held.params, held.version)

    def close(self) -> None:
        """Stop the engine and free its memory; another may be started after it."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        finally:
            self._lifecycle.state = State.CLOSED

    def _push(self, params: Params, version: int | None) -> None:
        if self.state is State.CLOSED:
            raise RuntimeError(f"VLLM.push expects an engine, got one {self.state.value}.")
        if self._engine is None:
            start = partial(_start, self._setup, self._trainer_bytes)
            self._engine = self._guarded("push", start)
        engine = self._engine
        self._guarded("push", lambda: engine.push(params, version))

    def _check(self, prompts: Prompts, sampling: Sampling, decode: DecodeFn | None) -> None:
        vocab_size = self._setup.shape.vocab_size
        check_prompts(prompts, sampling, vocab_size, decode, self.context_length)

    def _running(self, method: str) -> _Started:
        self._lifecycle.check_pushed(f"VLLM.{method}")
        assert self._engine is not None
        return self._engine

    def _guarded(self, method: str, work: Callable[[], _Result]) -> _Result:
        """Return what work gives; an engine that it has ended is closed, the error explained."""
        try:
            return work()
        except BaseException as error:
            explained: Exception | None = out_of_memory(method, error)
            if self._engine is None and self._setup.is_checkpoint:
                explained = explained or not_started(self._model, error)
            if self._engine is not None:
                if self.state is not State.FAILED:
                    raise
                explained = explained or died(method, error)
                # It may be too broken to be closed in order: what has ended it is what to tell.
                with suppress(Exception):
                    self.close()
            if explained is None or not isinstance(error, Exception):
                raise
            raise explained from error


def _as_native(model: nn.Module, config: VLLMConfig) -> VLLMConfig:
    """Return the configuration of an engine that runs vLLM's class for a model of transformers."""
    if not is_of_transformers(model):
        raise ValueError(
            f"VLLM expects a Transformer or a model of transformers, which vLLM has classes for, "
            f"got {type(model).__name__}; --generator sampler takes any network."
        )
    if config.form == "server":
        return replace(config, server=replace(config.server, network="native"))
    return replace(config, form="native")


def _start(setup: EngineSetup, trainer_bytes: int) -> _Started:
    """Return an engine that runs, with a cache of what the trainer leaves of the GPU."""
    config = setup.config
    if not (config.form == "server" and config.server.devices):  # which share no GPU
        setup = setup._replace(config=with_cache(setup.model, config, setup.dtype, trainer_bytes))
    if config.form == "server":
        from funcrl.generators.vllm.remote import Remote

        return Remote(setup)
    from funcrl.generators.vllm.engine import InProcess

    return InProcess(setup)

"""Servers as one engine: prompts are spread over them, parameters are pushed to all."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from funcrl.config import Sampling
from funcrl.config.generation import ServerConfig
from funcrl.core.types import Params, Samples
from funcrl.generators.contract import Prompts, Pushed, State, pushed, sample_seeds
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.generators.vllm.generator import Completion, check_logprobs, to_samples
from funcrl.generators.vllm.memory import samples_at_a_time
from funcrl.generators.vllm.processes import ServerError, Servers
from funcrl.generators.vllm.settings import EngineSetup, engine_settings, sample_fields, who_draws
from funcrl.generators.vllm.transport import (
    Broadcast,
    Bucket,
    SharedMemory,
    fingerprint,
    pack,
    plan_buckets,
)


class Link:
    """A way to servers, opened by the first push."""

    def __init__(self, servers: Servers, config: ServerConfig, dtype: torch.dtype) -> None:
        self._servers, self._config, self._dtype = servers, config, dtype
        self._sender: SharedMemory | Broadcast | None = None

    def push(self, params: Params, checkpoint: bool = False, clear: bool = False) -> None:
        """Send parameters to all servers, between two answers: none is of both policies.

        vLLM loads a `checkpoint` itself. With `clear` the servers empty their caches, where a
        policy has left NaN.
        """
        servers = self._servers
        sender = self._sender or self._open(params)
        buckets = plan_buckets(params, self._dtype)
        sent = {"buckets": buckets, "checkpoint": checkpoint, "clear": clear}
        sent |= self._fingerprints(params, buckets)
        servers.all("/pause?mode=wait")  # what is under way is finished, what comes is held back
        # The receiver puts them where they belong, also those of a checkpoint.
        servers.all("/start_weight_update", {"is_checkpoint_format": False})
        content = {"update_info": sent}
        sender.send(params, buckets, lambda: servers.all("/update_weights", content))
        servers.all("/finish_weight_update", {})
        # Keys and values of the old policy would answer for the new one.
        servers.all("/reset_prefix_cache")
        servers.all("/resume")

    def close(self) -> None:
        """Free what parameters were sent through."""
        if self._sender is not None:
            self._sender.close()

    def _fingerprints(self, params: Params, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Return by what the servers will know that they have what was sent."""
        key = secrets.randbits(63)
        found = [fingerprint(pack(params, each, self._dtype), key) for each in buckets]
        return {"key": key, "fingerprints": found}

    def _open(self, params: Params) -> SharedMemory | Broadcast:
        """Return a way that the servers know of."""
        device = next(iter(params.values())).device
        far = bool(self._config.devices) and device.type == "cuda"
        if self._config.transfer == "nccl" or (self._config.transfer == "auto" and far):
            self._sender = Broadcast(device, self._dtype, self._servers.run)
        else:
            count = sum(leaf.numel() for leaf in params.values())
            self._sender = SharedMemory(count, self._dtype, self._servers.run)

        def post(facts: list[dict[str, Any]]) -> None:
            path, infos = "/init_weight_transfer_engine", [{"init_info": each} for each in facts]
            self._servers.each(lambda index, server: server.post(path, infos[index]))

        self._sender.open(post, len(self._servers))
        return self._sender


_Result = TypeVar("_Result")
_UTILISATION = 0.9  # of a server's own GPU


class Remote:
    """vLLM servers as one engine; their weights mean nothing until they are pushed."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._lifecycle = setup, setup.lifecycle
        self.pushed: Pushed | None = None
        config = setup.config
        self.context_length = min(config.context_length, setup.shape.context_length)
        self._nan_in_cache = False
        settings = engine_settings(setup)
        settings["weight_transfer_config"] = {"backend": "funcrl"}
        if config.server.devices and not config.cache_bytes:  # GPUs that nobody else is on
            del settings["kv_cache_memory_bytes"]
            settings["gpu_memory_utilization"] = _UTILISATION
        devices = config.server.devices or (None,)
        limits = config.server.start_seconds, config.server.answer_seconds
        self._servers = Servers(settings, setup.hf_config, devices, *limits)
        self._link = Link(self._servers, config.server, getattr(torch, setup.dtype))

    @property
    def state(self) -> State:
        """What the servers can do now."""
        return self._lifecycle.state

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each server's OpenAI-compatible API is."""
        return self._servers.addresses

    def push(self, params: Params, version: int | None = None) -> None:
        """Send parameters to all servers: all have those of one push, or the engine has failed."""
        with self._lifecycle.transition_to(State.READY):
            named = self._setup.named(params)
            self._link.push(named, self._setup.is_checkpoint, clear=self._nan_in_cache)
        self._nan_in_cache, self.pushed = False, pushed(params, version)

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return every sample, group-major; samples of one prompt are one server's."""
        assert self.pushed is not None
        seeds = sample_seeds(prompts, sampling.num_samples, seed)
        longest = min(max(map(len, prompts)) + sampling.max_tokens, self.context_length)
        drawn_by, given, config = who_draws(self._setup, sampling)
        if given.temperature != 1 or given.truncates:
            raise ValueError(
                f"VLLM.generate expects temperature 1 and no top-k, top-p or min-p of a server "
                f"with exact numerics that keeps the log-probabilities of sampling "
                f"(--vllm.logprobs), got temperature {sampling.temperature}, top_k "
                f"{sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}; --vllm.form "
                f"unified takes all."
            )

        def one(row: int) -> Completion:
            index = row // sampling.num_samples
            most = min(sampling.max_tokens, self.context_length - len(prompts[index]))
            answer = self._complete(
                index, prompts[index], sample_fields(drawn_by, seeds[row], most)
            )
            logprobs = check_logprobs(answer["logprobs"]["token_logprobs"])
            completion = Completion(answer["token_ids"], logprobs, answer["finish_reason"])
            return shortened(completion, sampling, self._setup.decode)

        owners = [row // sampling.num_samples for row in range(len(seeds))]
        completions = self._each(one, owners, longest)
        return to_samples(completions, sampling, config, self.pushed)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens from the second on."""

        def one(row: int) -> list[float]:
            fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            found = self._complete(row, prompts[row], fields)["prompt_logprobs"][1:]
            pairs = zip(found, prompts[row][1:], strict=True)
            return check_logprobs([each[str(token)]["logprob"] for each, token in pairs])

        return self._each(one, range(len(prompts)), max(map(len, prompts)) + 1)

    def sleep(self) -> None:
        """Do nothing: the servers' memory is their own."""

    def close(self) -> None:
        """End the servers, and free what parameters were sent through."""
        self._servers.close()
        self._link.close()

    def _complete(
        self, index: int, prompt: Sequence[int], fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the first choice of OpenAI's /v1/completions, of the server whose turn it is."""
        server = self._servers[index]
        ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        content = {"model": server.model, "prompt": list(prompt), **fields, **ids}
        choice: dict[str, Any] = server.post("/v1/completions", content)["choices"][0]
        return choice

    def _each(
        self, one: Callable[[int], _Result], prompts: Sequence[int], longest: int
    ) -> list[_Result]:
        """Return `one` of every row of a prompt: of each server what it has room for at a time."""
        setup = self._setup
        room = samples_at_a_time(setup.shape, setup.config, setup.dtype, longest)
        pools = [ThreadPoolExecutor(room) for _ in range(len(self._servers))]
        rows = enumerate(prompts)
        answers = [pools[prompt % len(pools)].submit(one, row) for row, prompt in rows]
        with self._noticing_errors():
            try:
                return [each.result() for each in answers]
            finally:
                for each in answers:
                    each.cancel()  # after an error: ask for no more
                for pool in pools:
                    pool.shutdown()

    @contextmanager
    def _noticing_errors(self) -> Iterator[None]:
        """Remember what an error leaves behind: NaN in a cache, or a server that has ended."""
        try:
            yield
        except BaseException as error:
            self._nan_in_cache |= isinstance(error, FloatingPointError)
            if isinstance(error, ServerError) or not self._servers.alive:
                self._lifecycle.state = State.FAILED
            raise


def shortened(completion: Completion, sampling: Sampling, decode: DecodeFn | None) -> Completion:
    """Return a completion up to its first stop string: servers have no tokenizer to find it."""
    if not sampling.stop:
        return completion
    tokens, logprobs, _ = completion
    for end in range(1, len(tokens) + 1):
        if has_stop_string(tokens[:end], sampling, decode):
            return Completion(tokens[:end], logprobs[:end], "stop")
    return completion

"""Servers as one engine: what is asked is spread over them, what is pushed goes to all."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from funcrl.config import Sampling
from funcrl.config.generation import VLLMConfig
from funcrl.core.types import Params
from funcrl.generators.embedded.slots import sample_seeds
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.generators.vllm.finished import Spoken, finite, spoken
from funcrl.generators.vllm.server.link import Link
from funcrl.generators.vllm.server.processes import Servers
from funcrl.generators.vllm.settings import engine_settings, sample_fields, samples_at_a_time
from funcrl.models import TransformerConfig

_Result = TypeVar("_Result")
_UTILISATION = 0.9  # of a server's own GPU


class Remote:
    """vLLM servers for a model of a shape; their weights mean nothing until they are pushed.

    Args:
        shape: of the model.
        config: how large, how to compile, and how many servers.
        dtype: "float32" or "bfloat16", of weights and cache.
        overrides: arguments of vLLM's besides.
        described: the config.json that vLLM is to read, if it needs one.
    """

    def __init__(
        self,
        shape: TransformerConfig,
        config: VLLMConfig,
        dtype: str,
        overrides: dict[str, Any],
        described: dict[str, Any] | None,
    ) -> None:
        self._shape, self._config, self._dtype = shape, config, dtype
        self._context = min(config.context_length, shape.context_length)
        settings = engine_settings(shape, config, dtype) | overrides
        settings["weight_transfer_config"] = {"backend": "funcrl"}
        if config.server.devices and not config.cache_bytes:  # GPUs that nobody else is on
            del settings["kv_cache_memory_bytes"]
            settings["gpu_memory_utilization"] = _UTILISATION
        self._servers = Servers(
            settings, described, config.server.devices or (None,), config.server.start_seconds
        )
        self._link = Link(self._servers, config.server, getattr(torch, dtype))

    asleep = False  # a server's memory is its own

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each server's OpenAI-compatible API is."""
        return self._servers.addresses

    @property
    def sound(self) -> bool:
        """Whether all servers live, and have the parameters of one push."""
        return self._link.whole and self._servers.alive

    def push(self, params: Params) -> None:
        """Send parameters to all servers."""
        self._link.push(params)

    def speak(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int,
        decode: DecodeFn | None,
    ) -> list[Spoken]:  # fmt: skip
        """Return every sample, group-major; samples of one prompt are one server's."""
        seeds = sample_seeds(prompts, sampling.num_samples, seed)
        longest = min(max(map(len, prompts)) + sampling.max_tokens, self._context)

        def one(row: int) -> Spoken:
            index = row // sampling.num_samples
            most = min(sampling.max_tokens, self._context - len(prompts[index]))
            answer = self._complete(
                index, prompts[index], sample_fields(sampling, seeds[row], most)
            )
            logprobs = answer["logprobs"]["token_logprobs"]
            said = spoken(answer["token_ids"], logprobs, answer["finish_reason"])
            return shortened(said, sampling, decode)

        return self._each(one, [row // sampling.num_samples for row in range(len(seeds))], longest)

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens from the second on."""

        def one(row: int) -> list[float]:
            asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
            found = self._complete(row, prompts[row], asked)["prompt_logprobs"][1:]
            pairs = zip(found, prompts[row][1:], strict=True)
            return finite([each[str(token)]["logprob"] for each, token in pairs])

        return self._each(one, range(len(prompts)), max(map(len, prompts)) + 1)

    def close(self) -> None:
        """End the servers, and free what parameters were sent through."""
        self._servers.close()
        self._link.close()

    def _complete(self, index: int, prompt: Sequence[int], asked: dict[str, Any]) -> dict[str, Any]:
        how = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        return self._servers[index].complete({"prompt": list(prompt)} | asked | how)

    def _each(
        self, one: Callable[[int], _Result], prompts: Sequence[int], longest: int
    ) -> list[_Result]:
        """Return `one` of every row of a prompt: of each server what it has room for at a time."""
        room = samples_at_a_time(self._shape, self._config, self._dtype, longest)
        pools = [ThreadPoolExecutor(room) for _ in range(len(self._servers))]
        rows = enumerate(prompts)
        asked = [pools[prompt % len(pools)].submit(one, row) for row, prompt in rows]
        try:
            return [each.result() for each in asked]
        except FloatingPointError:
            self._link.spoiled = True
            raise
        finally:
            for each in asked:
                each.cancel()  # after an error: ask for no more
            for pool in pools:
                pool.shutdown()


def shortened(said: Spoken, sampling: Sampling, decode: DecodeFn | None) -> Spoken:
    """Return a sample up to its first stop string: the servers have no tokenizer to find it.

    Args:
        said: the whole sample.
        sampling: with its stop strings.
        decode: from tokens to text.

    Example:
        >>> from funcrl.config import Sampling
        >>> from funcrl.generators.vllm.server.remote import shortened
        >>> from funcrl.generators.vllm.finished import Spoken
        >>> said = Spoken([97, 98, 99], [-1.0, -2.0, -3.0], "length")
        >>> shortened(said, Sampling(stop=("b",)), lambda tokens: "".join(map(chr, tokens)))
        Spoken(tokens=[97, 98], logprobs=[-1.0, -2.0], finish_reason='stop')
    """
    if not sampling.stop:
        return said
    for end in range(1, len(said.tokens) + 1):
        if has_stop_string(said.tokens[:end], sampling, decode):
            return Spoken(said.tokens[:end], said.logprobs[:end], "stop")
    return said

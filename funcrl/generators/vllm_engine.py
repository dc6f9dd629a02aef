"""vLLM's engine in this process: started, run until all is said, and closed."""

import gc
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from funcrl.config import Sampling
from funcrl.config_generation import VLLMConfig
from funcrl.generators.batch import DecodeFn, has_stop_string, sample_seeds
from funcrl.generators.vllm_settings import engine_settings, sample_fields
from funcrl.generators.vllm_spoken import Spoken, spoken
from funcrl.generators.vllm_versions import allow_capture
from funcrl.models import TransformerConfig
from funcrl.types import Params


class Engine:
    """vLLM's engine for a model of a shape; its weights mean nothing until they are written.

    Args:
        shape: of the model.
        config: how large, and how to compile.
        dtype: "float32" or "bfloat16", of weights and cache.
        overrides: arguments of vLLM's `EngineArgs` besides.
        described: the config.json that vLLM is to read, if it needs one.
        write: puts parameters into the model.
    """

    def __init__(
        self,
        shape: TransformerConfig,
        config: VLLMConfig,
        dtype: str,
        overrides: dict[str, Any],
        described: dict[str, Any] | None,
        *,
        write: Callable[[Any, Params], None],
    ) -> None:
        self._write = write
        with tempfile.TemporaryDirectory(prefix="funcrl-vllm-") as folder:
            if described is not None:
                (Path(folder) / "config.json").write_text(json.dumps(described))
            arguments = engine_settings(shape, config, dtype) | overrides
            settings = EngineArgs(model=folder, **arguments).create_engine_config()
            # On a CPU vLLM takes a process of its own, unless an environment variable says other.
            settings.parallel_config.distributed_executor_backend = "uni"
            allow_capture()
            self._llm = LLMEngine(settings, UniProcExecutor, log_stats=False)
        self._block = int(settings.cache_config.block_size)
        self._blocks = int(settings.cache_config.num_gpu_blocks) - 1  # one is vLLM's own
        self._context = int(settings.model_config.max_model_len)

    def push(self, params: Params) -> None:
        """Compute with these parameters, and forget what the old ones computed."""
        # Keys and values of the old policy would answer for the new one.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("VLLM.push expects an engine at rest, got one that is generating.")
        write = self._write
        self._llm.apply_model(lambda model: write(model, params))

    def speak(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int,
        decode: DecodeFn | None,
    ) -> list[Spoken]:  # fmt: skip
        """Return every sample, group-major.

        A sample enters only when the cache has room for the longest that it can become: nothing is
        evicted and computed again, which with seeds would crash on a CPU, and cost time elsewhere.
        """
        seeds = sample_seeds(prompts, sampling.num_samples, seed)
        waiting, finished = deque(range(len(seeds))), dict[int, Spoken]()
        held = dict[int, int]()  # blocks of the samples under way
        with _nothing_left(self._llm, held):
            self._draw(prompts, sampling, seeds, waiting, held, finished, decode)
        return [finished[row] for row in range(len(seeds))]

    def _draw(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: list[int],
        waiting: deque[int], held: dict[int, int], finished: dict[int, Spoken],
        decode: DecodeFn | None,
    ) -> None:  # fmt: skip
        while waiting or held:
            while waiting:
                row, prompt = waiting[0], prompts[waiting[0] // sampling.num_samples]
                longest = min(len(prompt) + sampling.max_tokens, self._context)
                needed = -(-longest // self._block)
                if sum(held.values()) + needed > self._blocks:
                    break
                asked = _request(sampling, seeds[row], longest - len(prompt))
                self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, asked)
                held[waiting.popleft()] = needed
            for output in self._llm.step():
                row, said = int(output.request_id), _spoken(output.outputs[0])
                stopped = has_stop_string(said.tokens, sampling, decode)
                if stopped and not output.finished:
                    self._llm.abort_request([output.request_id])
                if stopped or output.finished:
                    finished[row] = said._replace(finish_reason="stop") if stopped else said
                    del held[row]

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens from the second on."""
        asked = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        for row, prompt in enumerate(prompts):
            self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, asked)
        scores: dict[int, list[float]] = {}
        with _nothing_left(self._llm, range(len(prompts))):
            while len(scores) < len(prompts):
                for output in self._llm.step():
                    row = int(output.request_id)
                    pairs = zip(output.prompt_logprobs[1:], prompts[row][1:], strict=True)
                    scores[row] = [each[token].logprob for each, token in pairs]
        return [scores[row] for row in range(len(prompts))]

    def close(self) -> None:
        """Stop, and free the memory."""
        self._llm.collective_rpc(_release)
        self._llm.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def _nothing_left(llm: LLMEngine, asked: Iterable[int]) -> Iterator[None]:
    """Take requests out of the engine if an error ends them: they would answer for others."""
    try:
        yield
    except BaseException:
        llm.abort_request([str(row) for row in asked])
        while llm.has_unfinished_requests():
            llm.step()
        raise


def _release(worker: Any) -> None:
    """Give the cache back, whoever still holds on to its tensors: compiled code may."""
    for cache in worker.model_runner.kv_caches:
        cache.untyped_storage().resize_(0)


def _request(sampling: Sampling, seed: int, most: int) -> Any:
    """Return vLLM's description of one sample of at most so many tokens."""
    # Stop strings are looked for here, after each token: the engine has no tokenizer.
    kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
    fields = sample_fields(sampling, seed, most)
    return SamplingParams(**fields, detokenize=False, output_kind=kind)


def _spoken(output: Any) -> Spoken:
    tokens = list(output.token_ids)
    pairs = zip(output.logprobs, tokens, strict=True)
    return spoken(tokens, [each[token].logprob for each, token in pairs], output.finish_reason)

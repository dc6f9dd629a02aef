"""vLLM's engine in this process, from its start to its end."""

import gc
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import MambaSpec

from funcrl.config import Sampling
from funcrl.core import tree
from funcrl.core.types import Params, Samples
from funcrl.generators.contract import Prompts, Pushed, State, pushed, sample_seeds
from funcrl.generators.stops import has_stop_string
from funcrl.generators.vllm.generator import Completion, check_logprobs, to_samples
from funcrl.generators.vllm.plugin.attention import unpack_score
from funcrl.generators.vllm.plugin.native import load_checkpoint, write_params
from funcrl.generators.vllm.plugin.unified import FuncrlForCausalLM
from funcrl.generators.vllm.settings import (
    EngineSetup,
    allow_capture,
    engine_settings,
    release_pools,
    sample_fields,
    who_draws,
)


class InProcess:
    """vLLM's engine in this process; its weights mean nothing until they are pushed."""

    addresses: tuple[str, ...] = ()  # only servers have some

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._lifecycle, self._decode = setup, setup.lifecycle, setup.decode
        self.pushed: Pushed | None = None
        self._llm = _start(setup)
        settings = self._llm.vllm_config
        (self._groups,) = self._llm.collective_rpc(_groups)
        self._blocks = int(settings.cache_config.num_gpu_blocks) - 1  # vLLM keeps one for itself
        self.context_length = int(settings.model_config.max_model_len)

    @property
    def state(self) -> State:
        """What the engine can do now."""
        return self._lifecycle.state

    def push(self, params: Params, version: int | None = None) -> None:
        """Compute with these parameters, and forget what the old ones computed."""
        self._wake()
        # Keys and values of the old policy would answer for the new one.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("VLLM.push expects an engine at rest, got one that is generating.")
        with self._lifecycle.transition_to(State.READY):
            named = self._setup.named(params)
            with set_current_vllm_config(self._llm.vllm_config):
                self._llm.apply_model(lambda model: _put(model, self._setup, named))
        self.pushed = pushed(params, version)

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major.

        A sample is admitted only when the cache has room for its longest completion: nothing is
        evicted and computed again, which with seeds would crash on a CPU, and cost time elsewhere.
        """
        assert self.pushed is not None
        seeds = sample_seeds(prompts, sampling.num_samples, seed)
        drawn_by, given, config = who_draws(self._setup, sampling)
        if self._setup.is_exact:
            self._llm.apply_model(lambda model: model.draw_from(given))
        waiting, finished = deque(range(len(seeds))), dict[int, Completion]()
        blocks = dict[int, int]()  # of the cache, that each sample under way may need
        with self._nothing_left(blocks):
            while waiting or blocks:
                self._enter(prompts, drawn_by, seeds, waiting, blocks)
                for row, completion in self._finished(sampling):
                    finished[row] = completion
                    del blocks[row]
        completions = [finished[row] for row in range(len(seeds))]
        return to_samples(completions, sampling, config, self.pushed)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens from the second on."""
        request = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        unpack: Callable[[float], float] = float
        if self._setup.is_exact:
            self._llm.apply_model(lambda model: model.score_prompts())
            unpack = unpack_score
        scores: dict[int, list[float]] = {}
        with self._nothing_left(range(len(prompts))):
            for row, prompt in enumerate(prompts):
                self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, request)
            while len(scores) < len(prompts):
                for output in self._step():
                    row = int(output.request_id)
                    pairs = zip(output.prompt_logprobs[1:], prompts[row][1:], strict=True)
                    found = [unpack(each[token].logprob) for each, token in pairs]
                    scores[row] = check_logprobs(found)
        return [scores[row] for row in range(len(prompts))]

    def sleep(self) -> None:
        """Give cache and weights up until the next `push`."""
        if self.state is not State.ASLEEP:
            with self._lifecycle.transition_to(State.ASLEEP):
                self._llm.apply_model(_let_go)
                self._llm.sleep(level=2)  # nothing is kept: weights come again with a push

    def close(self) -> None:
        """Stop, and free the memory."""
        has_memory = True
        try:
            self._wake()  # what is asleep cannot be freed
        except RuntimeError:
            has_memory = False  # no room to wake: only addresses are lost
        try:
            if has_memory:
                self._llm.collective_rpc(_release)
            self._llm.engine_core.shutdown()
        finally:  # a broken engine too leaves room for another
            del self._llm
            cleanup_dist_env_and_memory()
            gc.collect()
            release_pools()

    def _wake(self) -> None:
        if self.state is State.ASLEEP:
            torch.cuda.empty_cache()  # vLLM takes its memory from the device, not from torch
            with self._lifecycle.transition_to(State.EMPTY):
                self._llm.wake_up()
                self._llm.collective_rpc(_clear)

    def _enter(
        self, prompts: Prompts, sampling: Sampling, seeds: list[int], waiting: deque[int],
        blocks: dict[int, int],
    ) -> None:  # fmt: skip
        """Hand vLLM the samples that there is room for."""
        while waiting:
            row, prompt = waiting[0], prompts[waiting[0] // sampling.num_samples]
            longest = min(len(prompt) + sampling.max_tokens, self.context_length)
            needed = sum(1 if each is None else -(-longest // each) for each in self._groups)
            if sum(blocks.values()) + needed > self._blocks:
                return
            request = _request(sampling, seeds[row], longest - len(prompt))
            blocks[waiting.popleft()] = needed  # first: after an error these are taken out
            self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, request)

    def _finished(self, sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Let vLLM compute once, and yield the samples that have ended."""
        for output in self._step():
            completion = _completion(output.outputs[0])
            stopped = has_stop_string(completion.tokens, sampling, self._decode)
            if stopped and not output.finished:
                self._llm.abort_request([output.request_id])
            if stopped:
                completion = completion._replace(finish_reason="stop")
            if stopped or output.finished:
                yield int(output.request_id), completion

    def _step(self) -> list[Any]:
        with self._lifecycle.transition_to(State.READY):
            outputs: list[Any] = self._llm.step()
        return outputs

    @contextmanager
    def _nothing_left(self, rows: Iterable[int]) -> Iterator[None]:
        """Take requests out if an error ends them: they would answer for others."""
        try:
            yield
        except BaseException as error:
            if self.state is not State.FAILED:
                self._llm.abort_request([str(row) for row in rows])
                while self._llm.has_unfinished_requests():
                    self._step()
                if isinstance(error, FloatingPointError):
                    self._llm.collective_rpc(_clear)
            raise


def _start(setup: EngineSetup) -> LLMEngine:
    """Return vLLM's engine."""
    with tempfile.TemporaryDirectory(prefix="funcrl-vllm-") as folder:
        if setup.hf_config is not None:
            (Path(folder) / "config.json").write_text(json.dumps(setup.hf_config))
        settings = EngineArgs(model=folder, **engine_settings(setup)).create_engine_config()
        allow_capture()
        try:
            return LLMEngine(settings, UniProcExecutor, log_stats=False)
        except BaseException:
            cleanup_dist_env_and_memory()  # what it has begun would be in the next one's way
            raise


def _request(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """Return vLLM's request for one sample of at most `max_tokens` tokens."""
    # Stop strings are looked for here, after each token: the engine has no tokenizer.
    kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
    fields = sample_fields(sampling, seed, max_tokens)
    return SamplingParams(**fields, detokenize=False, output_kind=kind)


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    pairs = zip(output.logprobs, tokens, strict=True)
    logprobs = check_logprobs([each[token].logprob for each, token in pairs])
    return Completion(tokens, logprobs, output.finish_reason or "")


def _put(model: Any, setup: EngineSetup, params: Params) -> None:
    if setup.is_checkpoint:
        load_checkpoint(model, getattr(torch, setup.dtype), [params])
    elif isinstance(model, FuncrlForCausalLM):
        model.adopt(params)
    else:
        write_params(model, params)


def _groups(worker: Any) -> list[int | None]:
    """Return the tokens of a block, for each group of layers that has blocks of its own.

    None for delta layers, to which a sample is one block however long it is.
    """
    specs = [group.kv_cache_spec for group in worker.model_runner.kv_cache_config.kv_cache_groups]
    return [None if isinstance(spec, MambaSpec) else int(spec.block_size) for spec in specs]


def _let_go(model: Any) -> None:
    if isinstance(model, FuncrlForCausalLM):  # vLLM's own classes have weights of their own
        model.let_go()


@torch.inference_mode()
def _clear(worker: Any) -> None:
    """Leave no NaN in the cache: vLLM multiplies what is past a sequence's end by zero."""
    for cache in tree.leaves(worker.model_runner.kv_caches):
        cache.zero_()


def _release(worker: Any) -> None:
    """Give the cache back, whoever still holds on to its tensors: compiled code may."""
    for cache in tree.leaves(worker.model_runner.kv_caches):
        cache.untyped_storage().resize_(0)

"""vLLM's engine in this process, from its start to its end."""

import gc
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from funcrl.config.generation import VLLMConfig
from funcrl.core.types import Params
from funcrl.generators.vllm.inside.native import write_params
from funcrl.generators.vllm.inside.unified import FuncrlForCausalLM
from funcrl.generators.vllm.settings import engine_settings
from funcrl.generators.vllm.versions import allow_capture, release_pools
from funcrl.models import TransformerConfig


class Core:
    """vLLM's engine for a model of a shape; its weights mean nothing until they are written.

    Args:
        shape: of the model.
        config: how large, and how to compile.
        dtype: "float32" or "bfloat16", of weights and cache.
        overrides: arguments of vLLM's `EngineArgs` besides.
        described: the config.json that vLLM is to read, if it needs one.
    """

    addresses: tuple[str, ...] = ()  # only servers have some

    def __init__(
        self,
        shape: TransformerConfig,
        config: VLLMConfig,
        dtype: str,
        overrides: dict[str, Any],
        described: dict[str, Any] | None,
    ) -> None:
        self.sound, self.asleep = True, False
        with tempfile.TemporaryDirectory(prefix="funcrl-vllm-") as folder:
            if described is not None:
                (Path(folder) / "config.json").write_text(json.dumps(described))
            arguments = engine_settings(shape, config, dtype) | overrides
            settings = EngineArgs(model=folder, **arguments).create_engine_config()
            # On a CPU vLLM takes a process of its own, unless an environment variable says other.
            settings.parallel_config.distributed_executor_backend = "uni"
            allow_capture()
            try:
                self._llm = LLMEngine(settings, UniProcExecutor, log_stats=False)
            except BaseException:
                cleanup_dist_env_and_memory()  # what it has begun would be in the next one's way
                raise
        self._block = int(settings.cache_config.block_size)
        self._blocks = int(settings.cache_config.num_gpu_blocks) - 1  # one is vLLM's own
        self._context = int(settings.model_config.max_model_len)

    def push(self, params: Params) -> None:
        """Compute with these parameters, and forget what the old ones computed."""
        self._wake()
        # Keys and values of the old policy would answer for the new one.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("VLLM.push expects an engine at rest, got one that is generating.")
        with self._unsound_on_error():
            self._llm.apply_model(lambda model: _put(model, params))

    def sleep(self) -> None:
        """Give cache and weights up until the next `push`."""
        if not self.asleep:
            with self._unsound_on_error():
                self._llm.apply_model(_let_go)
                self._llm.sleep(level=2)  # nothing is kept: weights come again with a push
            self.asleep = True

    def close(self) -> None:
        """Stop, and free the memory."""
        # What is asleep cannot be freed. Where there is no room to wake, only addresses are lost.
        with suppress(RuntimeError):
            self._wake()
        try:
            if not self.asleep:
                self._llm.collective_rpc(_release)
            self._llm.engine_core.shutdown()
        finally:  # a broken engine too leaves room for another
            del self._llm
            cleanup_dist_env_and_memory()
            gc.collect()
            release_pools()

    def _wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM takes its memory from the device, not from torch
            with self._unsound_on_error():
                self._llm.wake_up()
                self._llm.collective_rpc(_clear)
            self.asleep = False

    def _step(self) -> list[Any]:
        with self._unsound_on_error():
            outputs: list[Any] = self._llm.step()
        return outputs

    @contextmanager
    def _unsound_on_error(self) -> Iterator[None]:
        """Remember an error inside vLLM, which may leave anything in any state."""
        self.sound = False
        yield
        self.sound = True

    @contextmanager
    def _nothing_left(self, asked: Iterable[int]) -> Iterator[None]:
        """Take requests out if an error ends them: they would answer for others."""
        try:
            yield
        except BaseException as error:
            if self.sound:
                self._llm.abort_request([str(row) for row in asked])
                while self._llm.has_unfinished_requests():
                    self._step()
                if isinstance(error, FloatingPointError):
                    self._llm.collective_rpc(_clear)
            raise


def _put(model: Any, params: Params) -> None:
    if isinstance(model, FuncrlForCausalLM):
        model.adopt(params)
    else:
        write_params(model, params)


def _let_go(model: Any) -> None:
    if isinstance(model, FuncrlForCausalLM):  # vLLM's own classes have weights of their own
        model.let_go()


@torch.inference_mode()
def _clear(worker: Any) -> None:
    """Leave no NaN in the cache: vLLM multiplies what is past a sequence's end by zero."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _release(worker: Any) -> None:
    """Give the cache back, whoever still holds on to its tensors: compiled code may."""
    for cache in worker.model_runner.kv_caches:
        cache.untyped_storage().resize_(0)

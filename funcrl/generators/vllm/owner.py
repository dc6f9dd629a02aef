"""An engine's life: started when it is needed first, closed at the end or when it has died."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")

# What torch and vLLM say where memory runs out, if not by torch's own error.
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "less than requested memory",
    "less than desired gpu memory", "larger than the available kv cache memory",
)  # fmt: skip


class EngineError(RuntimeError):
    """A vLLM engine has died, and is closed."""


class Owner(ABC):
    """Holds an engine; one that has died is closed, and what is asked of it then says so."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._closed = False

    def close(self) -> None:
        """Stop the engine and free its memory; another may be started after it."""
        engine, self._engine, self._closed = self._engine, None, True
        if engine is not None:
            engine.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the OpenAI-compatible APIs of servers are; of an engine in this process, none."""
        found: tuple[str, ...] = self._running("addresses").addresses
        return found

    @abstractmethod
    def _start(self) -> Any:
        """Return a new engine."""

    def _started(self) -> Any:
        if self._engine is None:
            if self._closed:
                raise RuntimeError("VLLM.push expects an engine, got one that is closed.")
            self._engine = self._guarded("push", self._start)
        return self._engine

    def _running(self, method: str) -> Any:
        if self._engine is None:
            what = "one that is closed" if self._closed else "no parameters; call push first"
            raise RuntimeError(f"VLLM.{method} expects an engine with parameters, got {what}.")
        return self._engine

    def _guarded(self, method: str, work: Callable[[], _Result]) -> _Result:
        """Return what work gives; an engine that it has killed is closed, the error explained."""
        try:
            return work()
        except BaseException as error:
            told: Exception | None = out_of_memory(method, error)
            if self._engine is not None:
                if self._engine.sound:
                    raise
                told = told or died(method, error)
                # It may be too broken to be closed in order: what killed it is what to tell.
                with suppress(Exception):
                    self.close()
            if told is None or not isinstance(error, Exception):
                raise
            raise told from error


def out_of_memory(method: str, error: BaseException) -> MemoryError | None:
    """Return the error that says which number to change, if memory has run out.

    Args:
        method: of `VLLM`, that was called.
        error: what vLLM raised.

    Example:
        >>> from funcrl.generators.vllm.owner import out_of_memory
        >>> type(out_of_memory("generate", RuntimeError("CUDA Error: out of memory at 1")))
        <class 'MemoryError'>
        >>> out_of_memory("generate", RuntimeError("boom"))
    """
    known = any(words in str(error).lower() for words in _NO_MEMORY)
    if not known and not isinstance(error, torch.OutOfMemoryError):
        return None
    return MemoryError(
        f"VLLM.{method} expects more memory than there is: lower --vllm.cache-bytes, --vllm.slots "
        f"or --vllm.batched-tokens, or on a GPU lend the engine's to the update by --vllm.sleep; "
        f"the engine is closed. Got {type(error).__name__}: {error}"
    )


def died(method: str, error: BaseException) -> EngineError:
    """Return the error that says what to do about one that has killed an engine.

    Args:
        method: of `VLLM`, that was called.
        error: what vLLM raised.

    Example:
        >>> from funcrl.generators.vllm.owner import died
        >>> str(died("generate", KeyError("row")))[:78]
        'VLLM.generate expects an engine that answers, got one that has died of KeyErro'
    """
    return EngineError(
        f"VLLM.{method} expects an engine that answers, got one that has died of "
        f"{type(error).__name__}: {error}. It is closed: go on with a run by --resume, or make "
        f"another VLLM."
    )

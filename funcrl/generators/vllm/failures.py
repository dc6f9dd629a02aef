"""What a user is told when memory ran out, or when vLLM's engine has ended."""

from funcrl.core.shortage import ExplainedMemoryError, is_out_of_memory

# What torch and vLLM say where memory runs out: on a CPU, at the start and in vLLM's own allocator
# they raise a RuntimeError or ValueError like any other, so that only their words tell it.
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "less than requested memory",
    "less than desired gpu memory", "larger than the available kv cache memory",
)  # fmt: skip


class EngineError(RuntimeError):
    """A vLLM engine has died, and is closed."""


def out_of_memory(method: str, error: BaseException) -> ExplainedMemoryError | None:
    """Return the error of a method of `VLLM` that names the options to lower, if memory ran out."""
    said = any(words in str(error).lower() for words in _NO_MEMORY)
    if not said and not is_out_of_memory(error):
        return None
    return ExplainedMemoryError(
        f"VLLM.{method} expects more memory than there is: lower --vllm.cache-bytes, --vllm.slots "
        f"or --vllm.batched-tokens, or on a GPU lend the engine's to the update by --vllm.sleep; "
        f"the engine is closed. Got {type(error).__name__}: {error}"
    )


def died(method: str, error: BaseException) -> EngineError:
    """Return the error of a method of `VLLM` that says what to do when another ended the engine."""
    return EngineError(
        f"VLLM.{method} expects an engine that answers, got one that has died of "
        f"{type(error).__name__}: {error}. It is closed: go on with a run by --resume, or make "
        f"another VLLM."
    )

"""Tells the errors that say that memory ran out from all others."""

import torch

# What torch says where an allocation fails with a RuntimeError like any other: the allocator of a
# CPU, and CUDA where it is not torch's own allocator that asks. The other errors have a type.
_NO_MEMORY = (
    "DefaultCPUAllocator: ", "CUDA error: out of memory", "CUDA driver error: out of memory",
)  # fmt: skip


class ExplainedMemoryError(MemoryError):
    """Memory ran out, and the message says what to do about it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of Python, NumPy or torch."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)

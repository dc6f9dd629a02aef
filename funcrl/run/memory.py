"""The memory that this process holds of a device, now and at most."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch

from funcrl.core.arguments import checked

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_OF_RESIDENT = "5"  # what Linux takes as "the peak is what is resident now"


class MemoryStats(NamedTuple):
    """Bytes that this process holds of a device.

    On a GPU they are those of torch's allocator. A CPU has no such record, and there both numbers
    are the process's resident memory: all that it has touched, Python and libraries included.
    """

    device: str
    allocated: int  # of tensors that are alive
    reserved: int  # these, and what torch keeps to give out again
    peak_allocated: int  # the most since the start of the process, or the last `reset_peak`
    peak_reserved: int


@checked
def memory_stats(device: str | torch.device | None = None) -> MemoryStats:
    """Return the bytes that this process holds of a device, now and at most.

    A GPU that is not there, or not in use yet, holds nothing. So does a CPU whose system is not
    Linux, which does not say.

    Args:
        device: a CPU or a CUDA GPU; None is the GPU, or the CPU where there is no GPU.

    Example:
        >>> import funcrl
        >>> stats = funcrl.memory_stats("cpu")
        >>> stats.peak_allocated >= stats.allocated
        True
    """
    return _stats(as_device("memory_stats", device))


@checked
def reset_peak(device: str | torch.device | None = None) -> MemoryStats:
    """Make what a device holds now its peak, and return what it holds.

    The peak of a CPU is Linux's (VmHWM), which belongs to the process. Where the system does not
    let a process reset it, it stays what it was, as the returned value then says.

    Args:
        device: a CPU or a CUDA GPU; None is the GPU, or the CPU where there is no GPU.

    Example:
        >>> import funcrl
        >>> before = funcrl.reset_peak("cpu")
        >>> funcrl.memory_stats("cpu").peak_reserved >= before.reserved
        True
    """
    place = as_device("reset_peak", device)
    if place.type == "cpu":
        with contextlib.suppress(OSError):  # a system without this file has no peak to reset
            _CLEAR.write_text(_PEAK_OF_RESIDENT)
    elif torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(place)
    return _stats(place)


def as_device(function: str, device: str | torch.device | None) -> torch.device:
    """Return a device whose memory can be read, or raise in the name of a function."""
    num_gpus = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda" if num_gpus else "cpu")
    error = ValueError(f"{function} expects device to be a CPU or a CUDA GPU, got {device!r}.")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise error from None
    if place.type not in ("cpu", "cuda"):
        raise error
    if place.type == "cuda" and num_gpus and (place.index or 0) >= num_gpus:
        raise ValueError(f"{function} expects one of {num_gpus} GPUs, got {str(place)!r}.")
    return place


def _stats(device: torch.device) -> MemoryStats:
    if device.type == "cpu":
        return _resident()
    if not torch.cuda.is_initialized():
        return MemoryStats(str(device), 0, 0, 0, 0)
    return MemoryStats(
        device=str(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
    )


def _resident() -> MemoryStats:
    """Return the resident memory of this process, as Linux counts it."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    fields = dict(line.split(":", 1) for line in lines)
    now, most = (1024 * int(fields.get(key, "0").split()[0]) for key in ("VmRSS", "VmHWM"))
    most = max(now, most)  # Linux counts them one after the other
    return MemoryStats("cpu", now, now, most, most)

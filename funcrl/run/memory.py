"""The memory that this process holds of a device, and what was alive at the peak of a block."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _EventType as EventType
from torch.autograd.profiler import profile

from funcrl.core.arguments import checked

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_OF_RESIDENT = "5"  # written to clear_refs: Linux then resets the peak of resident memory


class MemoryStats(NamedTuple):
    """Bytes that this process holds of a device.

    On a GPU they are those of torch's allocator. A CPU has no such record, and there both numbers
    are the process's resident memory: all that it has touched, Python and libraries included.
    """

    device: str
    allocated: int  # of tensors that are alive
    reserved: int  # these, and freed memory that torch keeps for the next ones
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


_SHOWN = 10  # blocks of memory in a profile's text
_TURN = "autograd::engine::evaluate_function: "  # what torch puts before a backward's name


class MemoryBlock(NamedTuple):
    """A tensor's memory."""

    num_bytes: int
    operator: str  # that allocated it, such as "aten::mm"; "" where that is not known
    where: str  # file, line and function of the call; "" where Python did not call
    is_from_before: bool = False  # whether it was alive when the profiled code began


class MemoryProfile(NamedTuple):
    """What a block of code has needed of a device's memory."""

    label: str
    device: str
    start_allocated: int  # bytes of tensors that were alive before it
    peak_allocated: int  # the most bytes of tensors alive at once, those included
    peak_reserved: int  # the most that the process has held, see `MemoryStats.reserved`
    live: tuple[MemoryBlock, ...]  # what was alive at that peak, the largest first

    def __str__(self) -> str:
        """Return the peak and what was alive then, as lines: what is from before in one of them."""
        lines = [
            f"{self.label} on {self.device}: peak {_megabytes(self.peak_allocated)} of tensors, "
            f"{_megabytes(self.start_allocated)} of them from before; "
            f"{_megabytes(self.peak_reserved)} held"
        ]
        before = [block for block in self.live if block.is_from_before]
        within = [block for block in self.live if not block.is_from_before]
        if before:
            tensors = "tensor" if len(before) == 1 else "tensors"
            lines.append(f"  {_total(before)}  from before, in {len(before):,} {tensors}")
        for block in within[:_SHOWN]:
            origin = ", ".join(filter(None, (block.operator, block.where)))
            lines.append(f"  {_megabytes(block.num_bytes)}  {origin or 'of unknown origin'}")
        if len(within) > _SHOWN:
            lines.append(f"  {_total(within[_SHOWN:])}  in {len(within) - _SHOWN:,} more")
        return "\n".join(lines)


class MemoryProfiler(contextlib.ContextDecorator):
    """Records the memory of each block of code that it encloses, or call that it decorates."""

    def __init__(
        self,
        label: str,
        device: torch.device,
        report: Callable[[MemoryProfile], object] | None,
        stacks: bool,
    ) -> None:
        self.label = label
        self.profiles: list[MemoryProfile] = []  # one for each block or call that has ended
        self._device, self._report, self._stacks = device, report, stacks
        self._before: dict[int, MemoryBlock] = {}
        self._recorder: profile | None = None

    @property
    def result(self) -> MemoryProfile:
        """The profile of the block or call that has ended last."""
        if not self.profiles:
            raise ValueError(
                f"memory_profile expects the block {self.label!r} to have ended before its result "
                f"is read, got none that has."
            )
        return self.profiles[-1]

    def __enter__(self) -> "MemoryProfiler":
        """Begin to record."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError(
                f"memory_profile expects no other profile of torch to be running when "
                f"{self.label!r} begins, got one; profile one block after the other."
            )
        self._before = _alive(self._device)
        reset_peak(self._device)
        self._recorder = profile(profile_memory=True, with_stack=self._stacks)
        self._recorder.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and keep what was found."""
        assert self._recorder is not None
        self._recorder.__exit__(kind, error, trace)
        stats = memory_stats(self._device)
        events = _memory_events(self._recorder, self._device)
        found = _at_peak(self.label, stats, self._before, events)
        self._before, self._recorder = {}, None
        self.profiles.append(found)
        if self._report is not None:
            self._report(found)


@checked
def memory_profile(
    label: str,
    device: str | torch.device | None = None,
    report: Callable[[MemoryProfile], object] | None = None,
    stacks: bool = True,
) -> MemoryProfiler:
    """Return a context manager, and decorator, that finds a block's peak and what was alive then.

    Every allocation that torch makes in this thread, and in autograd's, is counted, by its
    profiler: also what an operator needs for itself, and what autograd keeps. What other threads
    allocate is not. On a GPU `peak_allocated` is the allocator's own, of all threads. On a CPU
    tensors from before the block are those that Python can see; one that the block frees counts
    until its memory is used again, because torch does not record that it is freed. It resets the
    peak of `memory_stats`. Only one can be running at a time. On a CPU some versions of torch write
    two lines to stderr for each block, which begin with `USDT:`; `KINETO_LOG_LEVEL=9` in the
    environment, before torch is imported, leaves them out.

    Args:
        label: of the block, in what it returns and prints.
        device: a CPU or a CUDA GPU; None is the GPU, or the CPU where there is no GPU. A GPU that
            is not there needs nothing.
        report: is called with the `MemoryProfile` of each block, or of each decorated call, such as
            `print`.
        stacks: whether Python's calls are recorded, so that each tensor has the place of its
            allocation. Without them the block is about as fast as it is by itself.

    Returns:
        A `MemoryProfiler`, whose `result` is the last `MemoryProfile`, and `profiles` all of them.

    Example:
        >>> import torch, funcrl
        >>> with funcrl.memory_profile("two vectors", "cpu") as memory:
        ...     x = torch.zeros(1000)
        ...     y = x + 1
        >>> found = memory.result
        >>> within = [block for block in found.live if not block.is_from_before]
        >>> [block.operator for block in within if block.num_bytes == 4000]
        ['aten::zeros', 'aten::add']
    """
    return MemoryProfiler(label, as_device("memory_profile", device), report, stacks)


def _alive(device: torch.device) -> dict[int, MemoryBlock]:
    """Return, by address, the memory of tensors that are alive on a device."""
    if device.type == "cpu":
        return {
            storage.data_ptr(): MemoryBlock(storage.nbytes(), "", "", is_from_before=True)
            for storage in map(Tensor.untyped_storage, _tensors_on_cpu())
            if storage.nbytes()
        }
    if not torch.cuda.is_initialized():
        return {}
    torch.cuda.synchronize(device)
    return {
        block["address"]: MemoryBlock(block["size"], "", "", is_from_before=True)
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == _index(device)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _tensors_on_cpu() -> Iterator[Tensor]:
    """Yield the tensors with memory that Python can see, but not what transforms wrap around."""
    for value in gc.get_objects():
        if (
            type(value) in (Tensor, torch.nn.Parameter)
            and not torch._C._functorch.is_functorch_wrapped_tensor(value)
            and value.device.type == "cpu"
            and value.layout == torch.strided
        ):
            yield value


def _memory_events(recorder: profile, device: torch.device) -> list[Any]:
    """Return what was allocated and freed on a device, in order."""
    assert recorder.kineto_results is not None
    roots = recorder.kineto_results.experimental_event_tree()
    events = [
        event
        for event in _flat(roots)
        if event.tag == EventType.Allocation
        and event.extra_fields.device.type == device.type
        and (device.type == "cpu" or event.extra_fields.device.index == _index(device))
    ]
    return sorted(events, key=lambda event: event.start_time_ns)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    """Yield events with those that happened within them; a stack may be too deep for Python's."""
    waiting = list(events)[::-1]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children[::-1]


def _at_peak(
    label: str, stats: MemoryStats, before: dict[int, MemoryBlock], events: list[Any]
) -> MemoryProfile:
    """Return the profile of a block that began with `before`, and in which `events` happened."""
    start = alive = peak = sum(block.num_bytes for block in before.values())
    place = -1
    sizes = {address: block.num_bytes for address, block in before.items()}
    for index, event in enumerate(events):
        alive += _change(sizes, event.extra_fields)
        if alive > peak:
            peak, place = alive, index
    origins: dict[int, Any] = dict(before)
    sizes = {address: block.num_bytes for address, block in before.items()}
    for event in events[: place + 1]:
        _change(sizes, event.extra_fields)
        origins[event.extra_fields.ptr] = event
    blocks = [_block(size, origins[address]) for address, size in sizes.items()]
    return MemoryProfile(
        label=label,
        device=stats.device,
        start_allocated=start,
        peak_allocated=stats.peak_allocated if stats.device != "cpu" else peak,
        peak_reserved=stats.peak_reserved,
        live=tuple(sorted(blocks, key=lambda block: -block.num_bytes)),
    )


def _change(sizes: dict[int, int], change: Any) -> int:
    """Note an allocation or its end, and return by how much the bytes that are alive grow."""
    # What was at an address before has been freed, perhaps unseen; what nobody saw is not counted.
    freed = sizes.pop(change.ptr, 0)
    if change.alloc_size <= 0:
        return -freed
    sizes[change.ptr] = change.alloc_size
    return change.alloc_size - freed


def _block(size: int, origin: Any) -> MemoryBlock:
    if isinstance(origin, MemoryBlock):
        return origin
    operator, event = "", origin.parent
    while event is not None:
        if event.tag == EventType.TorchOp:
            operator = event.name.removeprefix(_TURN)
        for place in _places(event):
            if not place.file_name.startswith(("torch/", "<")):
                where = f"{place.file_name}:{place.line_number} in {place.function_name}"
                return MemoryBlock(size, operator, where)
        event = event.parent
    return MemoryBlock(size, operator, "")


def _places(event: Any) -> list[Any]:
    """Return the places in Python of a call: that of the function, and that of its caller."""
    if event.tag == EventType.PyCall:
        return [event.extra_fields.callsite, event.extra_fields.caller]
    return [event.extra_fields.caller] if event.tag == EventType.PyCCall else []


def _total(blocks: list[MemoryBlock]) -> str:
    return _megabytes(sum(block.num_bytes for block in blocks))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

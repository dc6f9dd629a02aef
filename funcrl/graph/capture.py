"""A program of tensors as one CUDA graph: its kernels are launched once, then replayed."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

Program: TypeAlias = Callable[..., Sequence[Tensor]]
_WARM_UPS = 3  # runs before the capture, in which libraries and autotuning settle
# A capture begins by waiting for the whole device, which another one under way would not survive.
_ONE_AT_A_TIME = threading.Lock()


def capture(
    program: Program, inputs: Sequence[Tensor], written: Collection[int], pool: Any = None
) -> Program:
    """Return the program as a CUDA graph of these shapes.

    A graph reads and writes fixed memory. What the program only reads is copied into buffers of
    its own before each replay. What it writes into (a donated state) is the memory of the inputs
    given here: given back by the program and passed in again, it is not copied at all; whatever
    is passed in instead is copied into it, so that what an earlier call gave back is used up by
    every later call. All other results are copied out, so that nobody holds the graph's memory,
    which the next replay overwrites.

    Args:
        program: tensors to tensors, without synchronisation with the host.
        inputs: its arguments, on a CUDA device; those that it writes into are kept, and are as
            they were when this returns.
        written: the indices of the inputs that it writes into.
        pool: from `torch.cuda.graph_pool_handle()`, for graphs of several shapes that never run at
            one time: they then share their memory, which is safe since results are copied out.
    """
    static = [leaf if index in written else leaf.clone() for index, leaf in enumerate(inputs)]
    graph, results = _recorded(program, static, [static[index] for index in written], pool)
    kept = {static[index].data_ptr(): static[index] for index in written}
    own = {leaf.untyped_storage().data_ptr() for leaf in kept.values()}

    def replay(*leaves: Tensor) -> list[Tensor]:
        moved = [
            # What is in another's memory, such as leaves that changed places, is read first.
            (buffer, leaf.clone() if leaf.untyped_storage().data_ptr() in own else leaf)
            for buffer, leaf in zip(static, leaves, strict=True)
            if buffer.data_ptr() != leaf.data_ptr()
        ]
        for buffer, leaf in moved:
            buffer.copy_(leaf)
        graph.replay()
        # A generator tells by torch's count of writes whether it has these parameters already.
        torch.autograd.graph.increment_version([static[index] for index in written])
        return [
            kept[place] if (place := result.data_ptr()) in kept else result.clone()
            for result in results
        ]

    return replay


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Record what is launched meanwhile, while no other thread records; others may compute."""
    # Other threads may allocate meanwhile, such as one that draws the next rollout.
    recorded = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    with _ONE_AT_A_TIME, recorded:
        yield


def _recorded(
    program: Program, static: list[Tensor], written: list[Tensor], pool: Any
) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Warm up and record; what warming up wrote is put back, from the host's memory."""
    before = [leaf.to("cpu", copy=True) for leaf in written]
    with torch.cuda.device(static[0].device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    program(*static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, pool):
                results = program(*static)
        finally:  # also where memory did not suffice: a caller may go on from the same state
            torch.cuda.current_stream().wait_stream(stream)
            for leaf, value in zip(written, before, strict=True):
                leaf.copy_(value)
    return graph, results

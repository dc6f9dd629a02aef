"""A CUDA device that the CPU plays, for `pytest -p emulated_cuda` and other programs.

    EMULATED_CUDA=device.so TRITON_INTERPRET=1 python -m pytest -p emulated_cuda ...

It is imported before torch is. Operations are those of device.cpp, Triton's kernels are those of
its interpreter, a stream is in order, and a CUDA graph is a list of the operations that it
captured, done again on the same memory. An allocation holds no zeros, tensors of two devices do not
meet, and a graph is not captured of what the host reads.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
import types

import numpy as np

assert "torch" not in sys.modules, "import emulated_cuda before torch"
DEVICE = ctypes.CDLL(os.environ["EMULATED_CUDA"])
for counter in (DEVICE.memory_allocated, DEVICE.max_memory_allocated):
    counter.restype = ctypes.c_int64

import torch  # noqa: E402
from interpreter import correct  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.runtime.interpreter import GridExecutor  # noqa: E402

MEMORY = 140 * 10**9
READ_BY_THE_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
capturing: list["CUDAGraph"] = []  # the graph that is captured, if one is
launch_alone = threading.RLock()  # Triton's interpreter is for one thread
launch_by_triton = GridExecutor.__call__


class Stream:
    """The device's one stream."""

    device = torch.device("cuda", 0)

    def __init__(self, *args, **options):
        pass

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass

    def query(self):
        return True


class Event:
    """A time."""

    def __init__(self, *args, **options):
        self.time = None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    synchronize = wait

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1000 * (later.time - self.time)


@contextlib.contextmanager
def uncaptured():
    """Yield the graph that is captured, to which kernels within are not appended."""
    with launch_alone:
        graph = capturing.pop()
        try:
            yield graph
        finally:
            capturing.append(graph)


class Captured(TorchDispatchMode):
    """What appends the operations to a graph's."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in READ_BY_THE_HOST:
            raise RuntimeError(f"{name} cannot be captured in a CUDA graph")
        with uncaptured():  # a kernel within is a part of this operation
            result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class CUDAGraph:
    """Operations in the order in which they were captured."""

    num_replays = 0  # of all graphs

    def __init__(self, keep_graph=False):
        self.operations = []
        self.mode = Captured(self.operations)

    def capture_begin(self, pool=None, capture_error_mode="global"):
        capturing.append(self)
        self.mode.__enter__()

    def capture_end(self):
        self.mode.__exit__(None, None, None)
        capturing.pop()

    @torch.no_grad()
    def replay(self):
        CUDAGraph.num_replays += 1
        for func, args, kwargs, result in self.operations:
            again = pytree.tree_leaves(func(*args, **kwargs))
            for old, new in zip(pytree.tree_leaves(result), again, strict=True):
                if isinstance(old, torch.Tensor) and storage_of(old) != storage_of(new):
                    old.copy_(new)

    def pool(self):
        return 0, 1

    def reset(self):
        self.operations.clear()


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


def launch_kernel(executor, *args, **options):
    with np.errstate(all="ignore"):  # a GPU says nothing of an overflow
        launch_by_triton(executor, *args, **options)


def launch(executor, *args, **options):
    """Launch a kernel of Triton, which is an operation of the graph that is captured."""
    with launch_alone:
        if not capturing:
            launch_kernel(executor, *args, **options)
            return
        with uncaptured() as graph:
            graph.mode.__exit__(None, None, None)
            try:
                launch_kernel(executor, *args, **options)
            finally:
                graph.mode.__enter__()
        graph.operations.append((launch_kernel, (executor, *args), options, None))


def cloned_storage(storage):
    cells = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return cells.clone().untyped_storage()


def nothing():
    """Return a function that does nothing, another one each time: torch's compiler keys by them."""
    return lambda *args, **options: None


STREAM = Stream()
TORCH_CUDA = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: bool(capturing),
    "current_stream": lambda device=None: STREAM,
    "default_stream": lambda device=None: STREAM,
    "stream": lambda stream: contextlib.nullcontext(),
    "device": lambda device: contextlib.nullcontext(),
    "_lazy_init": nothing(),
    "set_device": nothing(),
    "synchronize": nothing(),
    "empty_cache": nothing(),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *args: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "default_generators": (torch.default_generator,),
    "memory_allocated": lambda device=None: DEVICE.memory_allocated(),
    "memory_reserved": lambda device=None: DEVICE.memory_allocated(),
    "max_memory_allocated": lambda device=None: DEVICE.max_memory_allocated(),
    "max_memory_reserved": lambda device=None: DEVICE.max_memory_allocated(),
    "reset_peak_memory_stats": lambda device=None: DEVICE.reset_peak_memory_stats(),
    "mem_get_info": lambda device=None: (MEMORY - DEVICE.memory_allocated(), MEMORY),
    "get_device_name": lambda device=None: "the CPU, as a CUDA device",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: types.SimpleNamespace(
        name="the CPU, as a CUDA device",
        total_memory=MEMORY,
        major=9,
        minor=0,
        multi_processor_count=132,
    ),
}

for name, value in TORCH_CUDA.items():
    setattr(torch.cuda, name, value)
torch._C._cuda_getDevice = lambda: 0
torch.UntypedStorage.clone = cloned_storage
torch.Tensor.record_stream = nothing()
torch.Tensor.pin_memory = lambda tensor, device=None: tensor
GridExecutor.__call__ = launch
correct()

"""Functions of static tensors, replayed as CUDA graphs."""

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch

from funcrl.graph.compile.capture import recording

# A graph holds some memory of its own; those of samplings long past are let go.
_MOST = 256


class Graphs:
    """Runs functions by name: on a GPU the first run is captured, and later ones are replays.

    On other devices a function is called each time. A function must read and write tensors that
    stay where they are, and no value on the host. All graphs share the memory in between, so they
    are replayed one after the other, on one stream at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, name: Hashable, function: Callable[[], object]) -> None:
        """Run a function, which is the same each time that it has this name."""
        if name in self._graphs:
            self._graphs[name].replay()
            return
        # The first run is an ordinary one: it compiles kernels and chooses products, which a
        # capture cannot, and a capture itself computes nothing.
        function()
        if self._device.type == "cuda":
            if len(self._graphs) == _MOST:
                self.clear()
            self._graphs[name] = self._capture(function)

    def clear(self) -> None:
        """Forget all functions, and free what their graphs hold."""
        self._graphs.clear()

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        stream = _stream_of(self._device)
        with recording(graph, pool, stream):
            function()
        return graph


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a stream to capture on, always the same: libraries keep memory for each they meet."""
    return torch.cuda.Stream(device)

"""Functions of static tensors, replayed as CUDA graphs."""

from collections.abc import Callable, Hashable

import torch

# A graph holds some memory of its own; those of samplings long past are let go.
_MOST = 64


class Graphs:
    """Runs functions by name: on a GPU the first run is captured, and later ones are replays.

    On other devices a function is called each time. A function must read and write tensors that
    stay where they are, and no value on the host; all graphs share the memory in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, name: Hashable, function: Callable[[], object]) -> None:
        """Run a function, which is the same each time that it has this name."""
        if name in self._graphs:
            self._graphs[name].replay()
            return
        # The first run is an ordinary one: it compiles kernels and chooses products, which a
        # capture cannot, and a capture itself computes nothing.
        function()
        if self._stream is not None:
            if len(self._graphs) == _MOST:
                self.clear()
            self._graphs[name] = self._capture(function)

    def clear(self) -> None:
        """Forget all functions, and free what their graphs hold."""
        self._graphs.clear()

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
            function()
        return graph

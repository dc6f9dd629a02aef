"""Parameters from a trainer to servers: through memory of one host, or from GPU to GPU.

Both sides cut the parameters into the same buckets, one flat tensor of the engine's dtype each.
"""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl.generators.vllm_native import fused_name
from funcrl.types import Params

BUCKET_BYTES = 256 << 20
_MEMORY = Path("/dev/shm")


class Bucket(NamedTuple):
    """Parameters that travel together; those of one of vLLM's matrices always do."""

    names: list[str]
    shapes: list[list[int]]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return sum(map(prod, self.shapes))


def plan_buckets(params: Params, dtype: torch.dtype, most: int = BUCKET_BYTES) -> list[Bucket]:
    """Return what travels together: as much as `most` bytes hold, and at least one matrix.

    Args:
        params: what will travel.
        dtype: that it travels in.
        most: bytes of a bucket.

    Example:
        >>> import torch
        >>> from funcrl.generators.vllm_transport import plan_buckets
        >>> params = {"embed.weight": torch.zeros(7, 2), "norm.weight": torch.zeros(2)}
        >>> [bucket.names for bucket in plan_buckets(params, torch.float32, most=8)]
        [['embed.weight'], ['norm.weight']]
    """
    parts: dict[str, list[str]] = {}
    for name in params:
        parts.setdefault(fused_name(name)[0], []).append(name)
    made = [Bucket([], [])]
    for names in parts.values():
        size = sum(params[name].numel() for name in names)
        if made[-1].names and (made[-1].size + size) * dtype.itemsize > most:
            made.append(Bucket([], []))
        made[-1].names.extend(names)
        made[-1].shapes.extend(list(params[name].shape) for name in names)
    return made


def unpack(flat: Tensor, bucket: Bucket) -> Params:
    """Return a bucket's parameters, views of its flat tensor.

    Example:
        >>> import torch
        >>> from funcrl.generators.vllm_transport import Bucket, unpack
        >>> unpack(torch.arange(3.0), Bucket(["a", "b"], [[2], []]))
        {'a': tensor([0., 1.]), 'b': tensor(2.)}
    """
    parts = flat.split([prod(shape) for shape in bucket.shapes])
    named = zip(bucket.names, parts, bucket.shapes, strict=True)
    return {name: part.view(shape) for name, part, shape in named}


class SharedMemory:
    """The sending side of memory that processes of one host share.

    Args:
        count: how many numbers.
        dtype: of them.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        folder = _MEMORY if _MEMORY.is_dir() else None
        number, path = tempfile.mkstemp(prefix="funcrl-", dir=folder)
        self._path = Path(path)
        try:
            # Now, and as an error: memory that is not there would end the process when written to.
            os.posix_fallocate(number, 0, count * dtype.itemsize)
        except OSError as error:
            self.close()
            raise MemoryError(
                f"VLLM.push expects room for {count * dtype.itemsize} bytes in "
                f"{self._path.parent}, got none ({error}); enlarge it (docker run --shm-size), or "
                f"use --vllm.server.transfer nccl."
            ) from error
        finally:
            os.close(number)
        self._flat = _mapped(path, count, dtype)

    def open(self, post: Callable[[list[dict[str, Any]]], None], servers: int) -> None:
        """Tell every server where the memory is, and then nobody else."""
        facts = {
            "path": str(self._path),
            "count": len(self._flat),
            "dtype": _name(self._flat.dtype),
        }
        post([facts] * servers)
        # All who need it have it. It goes with the last of them, even if they are killed.
        self.close()

    def send(self, params: Params, buckets: Sequence[Bucket], post: Callable[[], None]) -> None:
        """Write the parameters down, then tell the servers."""
        start = 0
        for bucket in buckets:
            for name, leaf in unpack(self._flat[start : start + bucket.size], bucket).items():
                leaf.copy_(params[name])
            start += bucket.size
        post()

    def close(self) -> None:
        """Take the memory's name away: it is given back when nobody has it any more."""
        self._path.unlink(missing_ok=True)


class Broadcast:
    """The sending side from GPU to GPU: rank 0 of an NCCL group, of which servers are the others.

    Args:
        device: that the parameters are on.
        dtype: that they travel in.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._group: Any = None

    def open(self, post: Callable[[list[dict[str, Any]]], None], servers: int) -> None:
        """Form the group with all servers."""
        host, port, world = "127.0.0.1", free_port(), servers + 1
        common = {"host": host, "port": port, "world": world, "dtype": _name(self._dtype)}
        joined: Future[Any] = Future()

        def join() -> None:
            try:
                joined.set_result(join_group(host, port, 0, world, self._device))
            except Exception as error:
                joined.set_exception(error)

        # It waits without end for a server that dies now, and must not keep a run from ending.
        threading.Thread(target=join, daemon=True).start()
        try:
            post([common | {"rank": 1 + each} for each in range(servers)])
        except Exception:
            if joined.done():
                joined.result()  # what has failed here is why the servers did
            raise
        self._group = joined.result()

    def send(self, params: Params, buckets: Sequence[Bucket], post: Callable[[], None]) -> None:
        """Broadcast bucket after bucket while the servers receive."""
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(post)
            for bucket in buckets:
                leaves = [params[name].reshape(-1).to(self._dtype) for name in bucket.names]
                self._group.broadcast(torch.cat(leaves), src=0)
            received.result()

    def close(self) -> None:
        """Leave the group, also if others never came to receive: work on the GPU waits for them."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


def open_memory(path: str, count: int, dtype: str, device: torch.device) -> Callable[[int], Tensor]:
    """Return what gives the next so many numbers of shared memory, from the start after the last.

    Args:
        path: of the memory.
        count: how many numbers it holds.
        dtype: of them.
        device: to give them on.

    Example:
        >>> import tempfile, torch
        >>> from funcrl.generators.vllm_transport import open_memory
        >>> file = tempfile.NamedTemporaryFile()
        >>> _ = file.write(bytes(8)), file.flush()
        >>> open_memory(file.name, 2, "float32", torch.device("cpu"))(2)
        tensor([0., 0.])
    """
    flat, start = _mapped(path, count, getattr(torch, dtype)), 0

    def receive(size: int) -> Tensor:
        nonlocal start
        # A copy: the trainer will write the next parameters over these.
        taken = flat[start : start + size].to(device, copy=True)
        start = (start + size) % count
        return taken

    return receive


def join_group(host: str, port: int, rank: int, world: int, device: torch.device) -> Any:
    """Return vLLM's NCCL group of processes that know of each other no more than an address.

    Example:
        >>> from funcrl.generators.vllm_transport import join_group
        >>> join_group("127.0.0.1", 1, 0, 2, "cpu")  # doctest: +SKIP
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world)
    return PyNcclCommunicator(group, device=device)


def free_port() -> int:
    """Return a port of this host that nobody listens on.

    Example:
        >>> from funcrl.generators.vllm_transport import free_port
        >>> free_port() > 1023
        True
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _mapped(path: str, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=count, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Parameters from a trainer to servers: through memory of one host, or from GPU to GPU.

Both sides cut the parameters into the same buckets, one flat tensor of the engine's dtype each.
"""

import mmap
import os
import secrets
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl.core.process import ExplainedMemoryError
from funcrl.core.types import Params
from funcrl.generators.vllm.plugin.native import fused_name

BUCKET_BYTES = 256 << 20
RUN_VARIABLE = "FUNCRL_RUN"  # of the environment of a server: the name of its run
_MEMORY = Path("/dev/shm")
_PIECE_BYTES = 32 << 20


class Bucket(NamedTuple):
    """Parameters that travel together; those of one of vLLM's matrices always do."""

    names: list[str]
    shapes: list[list[int]]

    @property
    def size(self) -> int:
        """The number of numbers in it."""
        return sum(map(prod, self.shapes))


def plan_buckets(params: Params, dtype: torch.dtype, most: int = BUCKET_BYTES) -> list[Bucket]:
    """Return what travels together: as much as `most` bytes hold, and at least one matrix."""
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


def pack(params: Params, bucket: Bucket, dtype: torch.dtype) -> Tensor:
    """Return a bucket's parameters as one flat tensor, as they travel."""
    return torch.cat([params[name].reshape(-1).to(dtype) for name in bucket.names])


def unpack(flat: Tensor, bucket: Bucket) -> Params:
    """Return a bucket's parameters, views of its flat tensor."""
    parts = flat.split([prod(shape) for shape in bucket.shapes])
    named = zip(bucket.names, parts, bucket.shapes, strict=True)
    return {name: part.view(shape) for name, part, shape in named}


def new_run() -> str:
    """Return a name by which a trainer and its servers find each other, and nobody else does."""
    return secrets.token_hex(16)


class SharedMemory:
    """The sending side of memory that processes of one user on one host share."""

    def __init__(self, count: int, dtype: torch.dtype, run: str) -> None:
        self._path, size = _meeting_place(run), count * dtype.itemsize
        number = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Now, and as an error: memory that is not there would end the process when written to.
            os.posix_fallocate(number, 0, size)
            self._flat = torch.frombuffer(mmap.mmap(number, size), dtype=dtype)
        except OSError as error:
            self.close()
            raise ExplainedMemoryError(
                f"VLLM.push expects room for {size} bytes in "
                f"{self._path.parent}, got none ({error}); enlarge it (docker run --shm-size), or "
                f"use --vllm.server.transfer nccl."
            ) from error
        finally:
            os.close(number)

    def open(self, post: Callable[[list[dict[str, Any]]], None], servers: int) -> None:
        """Tell every server how much memory there is; where it is, they know by the run."""
        post([{"count": len(self._flat), "dtype": _name(self._flat.dtype)}] * servers)
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
    """The sending side from GPU to GPU: rank 0 of an NCCL group; servers are the others."""

    def __init__(self, device: torch.device, dtype: torch.dtype, run: str) -> None:
        self._device, self._dtype, self._run = device, dtype, run
        self._group: Any = None

    def open(self, post: Callable[[list[dict[str, Any]]], None], servers: int) -> None:
        """Form the group with all servers."""
        world, place = servers + 1, _meeting_place(self._run)
        os.close(os.open(place, os.O_CREAT | os.O_EXCL, 0o600))
        joined: Future[Any] = Future()

        def join() -> None:
            try:
                joined.set_result(join_group(self._run, 0, world, self._device))
            except Exception as error:
                joined.set_exception(error)

        # It waits without end for a server that dies now, and must not keep a run from ending.
        threading.Thread(target=join, daemon=True).start()
        try:
            facts = {"world": world, "dtype": _name(self._dtype)}
            post([facts | {"rank": 1 + each} for each in range(servers)])
            self._group = joined.result()
        except Exception:
            if joined.done():
                joined.result()  # what has failed here is why the servers did
            raise
        finally:
            place.unlink(missing_ok=True)

    def send(self, params: Params, buckets: Sequence[Bucket], post: Callable[[], None]) -> None:
        """Broadcast bucket after bucket while the servers receive."""
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(post)
            for bucket in buckets:
                self._group.broadcast(pack(params, bucket, self._dtype), src=0)
            received.result()

    def close(self) -> None:
        """Leave the group, also if others never came to receive: work on the GPU waits for them."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


def open_memory(run: str, count: int, dtype: str, device: torch.device) -> Callable[[int], Tensor]:
    """Return a function that reads the next numbers of shared memory; after the last, the first.

    The memory is the run's, of this user, and of `count` numbers; it is only read.
    """
    flat, start = _read_only(_meeting_place(run), count, getattr(torch, dtype)), 0

    def receive(size: int) -> Tensor:
        nonlocal start
        # A copy: the trainer will write the next parameters over these.
        taken = flat[start : start + size].to(device, copy=True)
        start = (start + size) % count
        return taken

    return receive


def join_group(run: str, rank: int, world: int, device: torch.device) -> Any:
    """Return vLLM's NCCL group of the processes that know the name of a run.

    They meet by a file of this user's, and not by a port: what vLLM reads there it unpickles, so
    whoever could write to it could run code.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    place = _meeting_place(run)
    _check_own(place, os.stat(place, follow_symlinks=False))
    distributed: Any = torch.distributed  # its stubs lack `FileStore`
    store = distributed.FileStore(str(place), world)
    return PyNcclCommunicator(StatelessProcessGroup(rank, world, store), device=device)


def fingerprint(flat: Tensor, key: int) -> int:
    """Return a number of 64 bits that another content, or the same in another order, changes.

    Every eight bytes of the contiguous tensor are mixed with the key and their place, and the
    results are added.
    """
    content = flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(content), _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        words = torch.nn.functional.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        places = torch.arange(start, start + 8 * len(words), 8, device=flat.device)
        total += _mixed(words ^ _mixed(places + _signed(key))).sum()
    return int(total)


def _mixed(words: Tensor) -> Tensor:
    """Return words of 64 bits each of whose bits depends on all, by multiplication (SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> shift)) * _signed(factor)
    return words ^ (words >> 31)


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


def _meeting_place(run: str) -> Path:
    """Return the file that the processes of a run share."""
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return folder / f"funcrl-{run}"


def _read_only(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    """Return shared memory as numbers, which must not be written to."""
    number, size = os.open(path, os.O_RDONLY | os.O_NOFOLLOW), count * dtype.itemsize
    try:
        found = os.fstat(number)
        _check_own(path, found)
        if found.st_size != size:
            raise ValueError(f"VLLM.push expects {path} of {size} bytes, got {found.st_size}.")
        memory = mmap.mmap(number, size, prot=mmap.PROT_READ)
    finally:
        os.close(number)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memory, dtype=dtype)


def _check_own(path: Path, found: os.stat_result) -> None:
    """Raise unless a file is this user's, and nobody else's to write."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"VLLM.push expects {path} to be a file of user {os.geteuid()} alone, got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Inside a server: where parameters arrive, by vLLM's own interface for transferring weights."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from funcrl.core import tree
from funcrl.core.types import Params
from funcrl.generators.vllm.plugin.native import load_checkpoint, write_params
from funcrl.generators.vllm.transport import (
    RUN_VARIABLE,
    Bucket,
    fingerprint,
    join_group,
    open_memory,
    unpack,
)


@dataclass
class Opened(WeightTransferInitInfo):
    """How parameters will come: `count` of them in the run's memory, or from rank 0 of its group.

    Where that is, only the trainer says that started this server, and no request.
    """

    dtype: str
    count: int = 0
    rank: int = 0
    world: int = 0


@dataclass
class Sent(WeightTransferUpdateInfo):
    """What comes, in this order: names, shapes and fingerprint of each bucket.

    And whether vLLM is to load it, as a checkpoint, and whether NaN is to go.
    """

    buckets: list[tuple[list[str], list[list[int]]]]
    fingerprints: list[int]
    key: int
    checkpoint: bool = False
    clear: bool = False


class Receiver(WeightTransferEngine[Any, Any]):
    """Writes what a trainer sends into the model, as a push within one process does."""

    init_info_cls = Opened
    update_info_cls = Sent

    def __init__(self, config: Any, *more: Any) -> None:
        super().__init__(config, *more)  # which differ between versions of vLLM
        self._receive: Any = None
        self._dtype = torch.float32

    def init_transfer_engine(self, init_info: Opened) -> None:
        """Open the way that parameters will come."""
        on_gpu = torch.cuda.is_available()
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        run, self._dtype = os.environ[RUN_VARIABLE], getattr(torch, init_info.dtype)
        if init_info.count:
            self._receive = open_memory(run, init_info.count, init_info.dtype, device)
            return
        group = join_group(run, init_info.rank, init_info.world, device)

        def receive(size: int) -> torch.Tensor:
            taken = torch.empty(size, dtype=self._dtype, device=device)
            group.broadcast(taken, src=0)
            return taken

        self._receive = receive

    def start_weight_update(self) -> None:
        """Do nothing: parameters are written where they belong as they come."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive parameters, and wait until they are there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: Sent, load_weights: Any = None) -> None:
        """Write parameters into the model; `load_weights` is vLLM's own way, which has no names
        for funcrl's network and fails on a CPU."""
        del load_weights
        if update_info.clear:
            _clear(self.model)
        parts = self._arriving(update_info)
        if update_info.checkpoint:
            load_checkpoint(self.model, self._dtype, parts)
        elif hasattr(self.model, "adopt"):  # funcrl's network refers to all of them at once
            self.model.adopt({name: leaf for part in parts for name, leaf in part.items()})
        else:
            for part in parts:
                write_params(self.model, part)

    def _arriving(self, update_info: Sent) -> Iterator[Params]:
        """Yield the parameters of each bucket; raise if they are not those that were sent."""
        expected = zip(update_info.buckets, update_info.fingerprints, strict=True)
        for number, (each, sent) in enumerate(expected):
            bucket = Bucket(*each)
            flat = self._receive(bucket.size)
            if (got := fingerprint(flat, update_info.key)) != sent:
                raise RuntimeError(
                    f"VLLM.push expects the parameters that the trainer sent in a server, got "
                    f"others in bucket {number}: fingerprint {got:x} and not {sent:x}."
                )
            yield unpack(flat, bucket)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: vLLM 0.24 has the trainer's side here, funcrl has it in `transport`."""
        raise NotImplementedError("Receiver expects a funcrl.generators.VLLM to send parameters.")

    def shutdown(self) -> None:
        """Let go of where parameters came from."""
        self._receive = None


@torch.inference_mode()
def _clear(model: Any) -> None:
    """Leave no NaN in the cache: vLLM multiplies what is past a sequence's end by zero."""
    for module in model.modules():
        for cache in tree.leaves(getattr(module, "kv_cache", ())):
            if isinstance(cache, torch.Tensor):
                cache.zero_()

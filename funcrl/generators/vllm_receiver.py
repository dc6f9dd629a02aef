"""Inside a server: where parameters arrive, by vLLM's own interface for transferring weights."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from funcrl.generators.vllm_native import write_params
from funcrl.generators.vllm_transport import Bucket, join_group, open_memory, unpack
from funcrl.types import Params


@dataclass
class Opened(WeightTransferInitInfo):
    """Where parameters will come from: shared memory at a path, or rank 0 of a group."""

    dtype: str
    path: str = ""
    count: int = 0
    host: str = ""
    port: int = 0
    rank: int = 0
    world: int = 0


@dataclass
class Sent(WeightTransferUpdateInfo):
    """What comes, in this order: names and shapes of each bucket; and whether NaN is to go."""

    buckets: list[tuple[list[str], list[list[int]]]]
    clear: bool = False


class Receiver(WeightTransferEngine[Any, Any]):
    """Writes what a trainer sends into the model, as a push within one process does."""

    init_info_cls = Opened
    update_info_cls = Sent

    def __init__(self, config: Any, *described: Any) -> None:
        super().__init__(config, *described)  # which differ between versions of vLLM
        self._receive: Any = None

    def init_transfer_engine(self, init_info: Opened) -> None:
        """Open the way that parameters will come."""
        on_gpu = torch.cuda.is_available()
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        if init_info.path:
            self._receive = open_memory(init_info.path, init_info.count, init_info.dtype, device)
            return
        where = init_info.host, init_info.port, init_info.rank, init_info.world
        group, dtype = join_group(*where, device), getattr(torch, init_info.dtype)

        def receive(size: int) -> torch.Tensor:
            taken = torch.empty(size, dtype=dtype, device=device)
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
        together: Params = {}
        for each in update_info.buckets:
            bucket = Bucket(*each)
            params = unpack(self._receive(bucket.size), bucket)
            if hasattr(self.model, "adopt"):  # funcrl's network refers to all of them at once
                together |= params
            else:
                write_params(self.model, params)
        if together:
            self.model.adopt(together)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: vLLM 0.24 has the trainer's side here, funcrl has it in `vllm_transport`."""
        raise NotImplementedError("Receiver expects a funcrl.generators.VLLM to send parameters.")

    def shutdown(self) -> None:
        """Let go of where parameters came from."""
        self._receive = None


@torch.inference_mode()
def _clear(model: Any) -> None:
    """Leave no NaN in the cache: vLLM multiplies what is past a sequence's end by zero."""
    for module in model.modules():
        cache = getattr(module, "kv_cache", None)
        if isinstance(cache, torch.Tensor):
            cache.zero_()

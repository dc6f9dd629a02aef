"""How a trainer's parameters get into servers."""

import secrets
from collections.abc import Sequence
from typing import Any

import torch

from funcrl.config.generation import ServerConfig
from funcrl.core.types import Params
from funcrl.generators.vllm.server.processes import Servers
from funcrl.generators.vllm.server.transport import (
    Broadcast,
    Bucket,
    SharedMemory,
    fingerprint,
    pack,
    plan_buckets,
)


class Link:
    """A way to servers, opened by the first push.

    Args:
        servers: that are ready.
        config: by which way.
        dtype: that parameters travel in.
    """

    def __init__(self, servers: Servers, config: ServerConfig, dtype: torch.dtype) -> None:
        self._servers, self._config, self._dtype = servers, config, dtype
        self._sender: SharedMemory | Broadcast | None = None

    def push(self, params: Params, clear: bool = False) -> None:
        """Send parameters to all servers, between two answers: none is of both policies.

        With `clear` they empty their caches, where a policy has left NaN.
        """
        servers = self._servers
        sender = self._sender or self._open(params)
        buckets = plan_buckets(params, self._dtype)
        sent = {"buckets": buckets, "clear": clear} | self._fingerprints(params, buckets)
        servers.all("/pause?mode=wait")  # what is under way is finished, what comes is held back
        # As they are, not as a checkpoint has them: the receiver has the names.
        servers.all("/start_weight_update", {"is_checkpoint_format": False})
        content = {"update_info": sent}
        sender.send(params, buckets, lambda: servers.all("/update_weights", content))
        servers.all("/finish_weight_update", {})
        # Keys and values of the old policy would answer for the new one.
        servers.all("/reset_prefix_cache")
        servers.all("/resume")

    def close(self) -> None:
        """Free what parameters were sent through."""
        if self._sender is not None:
            self._sender.close()

    def _fingerprints(self, params: Params, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Return by what the servers will know that they have what was sent."""
        key = secrets.randbits(63)
        found = [fingerprint(pack(params, each, self._dtype), key) for each in buckets]
        return {"key": key, "fingerprints": found}

    def _open(self, params: Params) -> SharedMemory | Broadcast:
        """Return a way that the servers know of."""
        device = next(iter(params.values())).device
        far = bool(self._config.devices) and device.type == "cuda"
        if self._config.transfer == "nccl" or (self._config.transfer == "auto" and far):
            self._sender = Broadcast(device, self._dtype, self._servers.run)
        else:
            count = sum(leaf.numel() for leaf in params.values())
            self._sender = SharedMemory(count, self._dtype, self._servers.run)

        def post(facts: list[dict[str, Any]]) -> None:
            path, infos = "/init_weight_transfer_engine", [{"init_info": each} for each in facts]
            self._servers.each(lambda index, server: server.post(path, infos[index]))

        self._sender.open(post, len(self._servers))
        return self._sender

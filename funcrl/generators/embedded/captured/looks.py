"""Numbers of a device, copied to the host while the device goes on."""

from typing import NamedTuple

import torch
from torch import Tensor


class Look(NamedTuple):
    """Numbers of a device on their way to the host, and the samples that they are of."""

    samples: list[int]
    numbers: Tensor  # [n, ...]
    event: torch.cuda.Event | None  # after which the numbers are there

    def wait(self) -> list[list[int]]:
        """Return the numbers, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        found: list[list[int]] = self.numbers.tolist()
        return found


def look_at(samples: list[int], numbers: Tensor) -> Look:
    """Start to copy integers [n, ...] of samples to the host."""
    if numbers.device.type != "cuda":
        return Look(samples, numbers.cpu().clone(), None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Look(samples, host, event)

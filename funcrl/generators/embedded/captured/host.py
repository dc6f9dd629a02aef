"""What the host reads while a GPU draws on: copies of numbers, and stop strings in them."""

from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.generators.embedded.drawn import Request
from funcrl.generators.stops import has_stop_string


class HostCopy(NamedTuple):
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


def copy_to_host(samples: list[int], numbers: Tensor) -> HostCopy:
    """Start to copy integers [n, ...] of samples to the host."""
    if numbers.device.type != "cuda":
        return HostCopy(samples, numbers.cpu().clone(), None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(samples, host, event)


class StopStrings:
    """The tokens of samples as the host knows them, and where a stop string ends one."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # the length of each sample that a stop string ends

    def read(self, sample: int, count: int, last: list[int]) -> bool:
        """Add a sample's new tokens; return whether a stop string has ended it.

        Args:
            sample: its number.
            count: of its tokens so far.
            last: the last ones of these, among them all that are new.
        """
        tokens = self._tokens.setdefault(sample, [])
        new = last[len(last) - (count - len(tokens)) :]
        for token in new:
            if sample in self.ends:
                break
            tokens.append(token)
            if has_stop_string(tokens, self._request.sampling, self._request.decode):
                self.ends[sample] = len(tokens)
        return sample in self.ends

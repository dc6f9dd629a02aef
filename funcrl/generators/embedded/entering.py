"""Prompts on their way into a batch: which ones enter, and how they are padded."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funcrl.generators.prompts import Prompts

# Padded prompt tokens in one forward pass, so that its activations stay bounded.
_PREFILL_TOKENS = 16384


def pad_prompts(prompts: Prompts, width: int) -> list[list[int]]:
    """Return the prompts padded on the right with a token of their own.

    Another token's keys must not touch a prompt, not even hidden: 0 times infinity is not 0.

    Args:
        prompts: lists of tokens.
        width: the length of each row.
    """
    return [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]


def padded_prompts(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [n, P], padded as `pad_prompts` does, and the length of each [n]."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor(pad_prompts(prompts, max(lengths)), device=device)
    return padded, torch.tensor(lengths, device=device)


def take_waiting(
    waiting: deque[int], lengths: Sequence[int], admit: Callable[[int], bool]
) -> list[int]:
    """Take the next prompts from the queue, as many as are admitted and one pass can have.

    Args:
        waiting: indices of prompts.
        lengths: of all prompts, in tokens that a pass has to read.
        admit: gives room to a prompt, and returns whether there was any.
    """
    entering: list[int] = []
    longest = 0
    while waiting:
        longest = max(longest, lengths[waiting[0]])
        if entering and longest * (len(entering) + 1) > _PREFILL_TOKENS:
            break
        if not admit(waiting[0]):
            break
        entering.append(waiting.popleft())
    return entering

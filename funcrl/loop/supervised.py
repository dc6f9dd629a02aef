"""Right answers in place of drawn ones: what supervised training and a warm start train on."""

from collections.abc import Sequence

import torch

from funcrl.core.types import Rollout
from funcrl.loop.episodes import Demonstration, Purpose, demonstration
from funcrl.rl.batching import pad_rows
from funcrl.tasks.contracts import Prompt, Task

_SFT = Purpose("sft")


def answers_of(task: Task, prompts: Sequence[Prompt], device: torch.device | str) -> Rollout:
    """Return the answers that a task demonstrates as a rollout."""
    return to_rollout([demonstration(task, prompt, _SFT) for prompt in prompts], device)


def to_rollout(rows: Sequence[Demonstration], device: torch.device | str) -> Rollout:
    """Return demonstrations as a rollout in which each earned 1."""
    length, count = max(len(row.tokens) for row in rows), len(rows)
    return Rollout(
        tokens=pad_rows([row.tokens for row in rows], torch.int64, device),
        mask=pad_rows([row.mask for row in rows], torch.bool, device),
        behavior_logprobs=torch.zeros(count, length, dtype=torch.float32, device=device),
        rewards=torch.ones(count, dtype=torch.float32, device=device),
        group=torch.arange(count, device=device),
        policy_version=torch.zeros(count, dtype=torch.int64, device=device),
    )

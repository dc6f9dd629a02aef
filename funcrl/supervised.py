"""The warm start: a few supervised steps, for policies that would earn no reward without."""

from collections.abc import Callable, Sequence

import torch

from funcrl import algorithms, optim, tree
from funcrl.batching import collate
from funcrl.config import WarmStartConfig
from funcrl.protocols import Prompt, Task
from funcrl.step import grpo_step
from funcrl.types import ModelFn, Params, Rollout


def warm_start(
    model_fn: ModelFn,
    params: Params,
    task: Task,
    config: WarmStartConfig,
    seed: int,
    accuracy: Callable[[Params], float],
) -> tuple[Params, dict[str, float]]:
    """Return parameters that have seen right answers, and what it took.

    Supervised learning is REINFORCE whose samples are the answers and whose reward is always 1:
    the same step, with the mean over tokens. It stops at the wanted accuracy.

    Args:
        model_fn: `(params, sample) -> TokenScores`.
        params: to start from.
        task: whose prompts have answers.
        config: how long, and how far.
        seed: of the prompts.
        accuracy: measures parameters on held-out prompts.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> params, numbers = funcrl.warm_start(
        ...     funcrl.logprob_fn(model), funcrl.init_params(model, seed=0), task,
        ...     funcrl.config.WarmStartConfig(steps=2), seed=0, accuracy=lambda params: 0.0)
        >>> numbers["warm_start/steps"]
        2
    """
    weight = algorithms.dapo().weight
    algorithm = algorithms.reinforce(weight=weight)
    step = grpo_step(
        model_fn, algorithm=algorithm, optimizer=optim.adamw(config.learning_rate, weight_decay=0.0)
    )
    state, done, reached = step.init(params), 0, accuracy(params)
    device = state.step.device
    while done < config.steps and reached < config.accuracy:
        prompts = task.prompts(seed, done * config.num_prompts, config.num_prompts)
        rollout = _demonstrations(task, prompts, device)
        state, _ = step(state, collate(rollout, algorithm))
        done += 1
        if done % config.every == 0 or done == config.steps:
            reached = accuracy(state.params)
    return state.params, {"warm_start/steps": done, "warm_start/accuracy": reached}


def _demonstrations(task: Task, prompts: Sequence[Prompt], device: torch.device) -> Rollout:
    """Return the prompts' own answers as a rollout in which each earned 1."""
    rows = []
    for prompt in prompts:
        if not prompt.answer:
            raise ValueError(
                f"warm_start expects prompts with answers, got none for {prompt.text[:80]!r} from "
                f"the task {task.name!r}; --warm-start.steps 0 goes without."
            )
        asked = task.tokenizer.encode(prompt.text)
        rows.append((asked, [*task.tokenizer.encode(prompt.answer), task.tokenizer.end]))
    width = max(len(asked) + len(answer) for asked, answer in rows)
    shape_ = (len(rows), width)
    tokens, mask = torch.zeros(shape_, dtype=torch.int64), torch.zeros(shape_, dtype=torch.bool)
    for row, (asked, answer) in enumerate(rows):
        tokens[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        mask[row, len(asked) : len(asked) + len(answer)] = True
    rollout: Rollout = tree.map(
        lambda leaf: leaf.to(device),
        Rollout(
            tokens=tokens,
            mask=mask,
            behavior_logprobs=torch.zeros(shape_),
            rewards=torch.ones(len(rows)),
            group=torch.arange(len(rows)),
            policy_version=torch.zeros(len(rows), dtype=torch.int64),
        ),
    )
    return rollout

"""Draws the completions of a step, and puts those that have a reward into rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.rows import row_ends
from funcrl.core.types import Rollout, Samples
from funcrl.generators import Generator
from funcrl.loop.episodes import Episode, play, read_turns
from funcrl.rl.batching import pad_rows
from funcrl.tasks.adapt import check_task
from funcrl.tasks.contracts import (
    Environment,
    Played,
    Prompt,
    TaskLike,
    Tokenizer,
    all_ends,
)


class Completed(NamedTuple):
    """Prompts and their completions: everything of length B is group-major."""

    prompts: list[Prompt]  # [B], each prompt once for each of its samples
    prompt_tokens: list[list[int]]  # [B]
    samples: Samples  # observations of an environment are among the tokens, outside the mask
    texts: list[str]  # [B] all that followed the prompt, for people to read
    outcomes: list[Any]  # [B] what is rewarded: the text, or the last state of an environment
    turns: list[int]  # [B] number of the policy's turns
    group_size: int

    def completion_ids(self) -> list[list[int]]:
        """Return the tokens of each completion, with those that an environment answered."""
        counts = row_ends(self.samples.mask).tolist()
        rows = zip(self.samples.tokens.tolist(), counts, strict=True)
        return [tokens[:count] for tokens, count in rows]

    def __repr__(self) -> str:
        count, group = len(self.texts), self.group_size
        length = self.samples.mask.sum().item() / max(count, 1)
        first = f": {self.texts[0][:40]!r} ..." if self.texts else ""
        return (
            f"Completed({count // group} prompts x {group} completions of {length:.1f} tokens"
            f"{first})"
        )


@checked
def complete(
    task: TaskLike,
    generator: Generator,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
) -> Completed:
    """Return `sampling.num_samples` completions of each prompt, or episodes of an environment.

    Args:
        task: whose tokenizer to use; its end tokens and its stop strings end a completion.
        generator: with parameters pushed.
        prompts: N of them.
        sampling: how to draw; `max_tokens` is a turn's.
        seed: of the draws.

    Example:
        >>> import funcrl
        >>> parts = funcrl.build(funcrl.config.TrainConfig(num_generations=3))
        >>> parts.generator.push(funcrl.init_params(parts.model, seed=0))
        >>> prompts = parts.task.prompts(seed=0, start=0, count=2)
        >>> completed = funcrl.rollouts.complete(
        ...     parts.task, parts.generator, prompts, parts.sampling, seed=0)
        >>> len(completed.texts)
        6
    """
    task = check_task("complete", task)
    if not prompts:
        raise ValueError(f"complete expects prompts, got none from the task {task.name!r}.")
    tokenizer, group_size = task.tokenizer, sampling.num_samples
    ends = (*sampling.stop_tokens, *all_ends(tokenizer))
    sampling = replace(
        sampling,
        stop_tokens=tuple(dict.fromkeys(ends)),
        stop=tuple(dict.fromkeys((*sampling.stop, *task.stop))),
    )
    # What it draws may not depend on what it drew before, or a run that resumes would differ from
    # one that was never stopped. A generator of one's own need not have this method.
    forget = getattr(generator, "forget", None)
    if forget is not None:
        forget()
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    if hasattr(task, "play_episodes"):
        episodes, last = task.play_episodes(generator, rows, sampling, seed)
        return _completed(rows, episodes, last, tokenizer, group_size)
    encoded = [tokenizer.encode(prompt.text) for prompt in prompts]
    samples = generator.generate(encoded, sampling, seed)
    contexts = [tokens for tokens in encoded for _ in range(group_size)]
    if isinstance(task, Environment):
        begun = [
            Episode(prompt, tokens, task.begin(prompt))
            for prompt, tokens in zip(rows, contexts, strict=True)
        ]
        last = play(task, generator, begun, samples, sampling, seed)
        return _completed(rows, [each.played() for each in begun], last, tokenizer, group_size)
    texts = [turn.text for turn in read_turns(samples, tokenizer, sampling)]
    return Completed(
        prompts=rows,
        prompt_tokens=contexts,
        samples=samples,
        texts=texts,
        outcomes=list(texts),
        turns=[1] * len(texts),
        group_size=group_size,
    )


def _completed(
    prompts: list[Prompt],
    episodes: Sequence[Played],
    last: Samples,
    tokenizer: Tokenizer,
    group_size: int,
) -> Completed:
    """Return episodes as completions, with samples such as those of their last turn."""
    return Completed(
        prompts=prompts,
        prompt_tokens=[each.prompt_tokens for each in episodes],
        samples=_samples_of(episodes, last),
        texts=[tokenizer.decode(each.tokens) for each in episodes],
        outcomes=[each.outcome for each in episodes],
        turns=[each.turns for each in episodes],
        group_size=group_size,
    )


def _samples_of(episodes: Sequence[Played], last: Samples) -> Samples:
    """Return episodes as samples of the dtypes, device and policy of the last turn's."""
    device = last.tokens.device
    return Samples(
        tokens=pad_rows([each.tokens for each in episodes], torch.int64, device),
        mask=pad_rows([each.mask for each in episodes], torch.bool, device),
        logprobs=pad_rows([each.logprobs for each in episodes], last.logprobs.dtype, device),
        policy_logprobs=pad_rows(
            [each.policy_logprobs for each in episodes], last.policy_logprobs.dtype, device
        ),
        finish_reasons=tuple(each.finish_reason for each in episodes),
        policy_version=last.policy_version,
    )


@checked
def to_rollout(completed: Completed, total: Tensor) -> Rollout:
    """Return the rollout of graded completions; those without a reward are left out.

    Its `behavior_logprobs` are `Samples.logprobs`, of the distribution that was sampled from: train
    with a `model_fn` at that temperature. Where a generator has none of those (vLLM with
    `VLLMConfig.logprobs="policy"` at another temperature than 1), they are
    `Samples.policy_logprobs`: train with a `model_fn` at temperature 1, so that both sides of the
    ratio are of one distribution.

    Args:
        completed: B completions.
        total: [B], of each what it is worth; NaN where there is no reward.

    Example:
        >>> import torch, funcrl
        >>> parts = funcrl.build(funcrl.config.TrainConfig(num_generations=3))
        >>> parts.generator.push(funcrl.init_params(parts.model, seed=0))
        >>> prompts = parts.task.prompts(seed=0, start=0, count=2)
        >>> completed = funcrl.rollouts.complete(
        ...     parts.task, parts.generator, prompts, parts.sampling, seed=0)
        >>> total = torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0, 1.0])
        >>> funcrl.rollouts.to_rollout(completed, total).group
        tensor([0, 0, 1, 1, 1])
    """
    samples = completed.samples
    device = samples.tokens.device
    rewarded = torch.Size([len(completed.prompts)])
    checks.check_shape("to_rollout", "total", total, "completed.prompts", rewarded)
    if total.isinf().any():
        row = int(total.isinf().nonzero()[0])
        raise ValueError(
            f"to_rollout expects total to be finite, or NaN where there is no reward, got "
            f"{total[row].item()} in row {row}."
        )
    rows = total.isfinite().nonzero().squeeze(-1).tolist()
    prompts = [completed.prompt_tokens[row] for row in rows]
    zeros = [[0] * len(prompt) for prompt in prompts]
    counts = row_ends(samples.mask)[rows].tolist()  # up to the last token that was sampled

    def joined(before: list[list[int]], values: Tensor, dtype: torch.dtype) -> Tensor:
        # As lists, moved once: on a GPU each row's copies would be launches.
        columns = zip(before, values[rows].tolist(), counts, strict=True)
        return pad_rows([[*b, *row[:n]] for b, row, n in columns], dtype, device)

    behavior = _behavior_logprobs(samples)
    return Rollout(  # a generator of the user's own may count in integers of other sizes
        tokens=joined(prompts, samples.tokens, torch.int64),
        mask=joined(zeros, samples.mask, torch.bool),
        behavior_logprobs=joined(zeros, behavior, behavior.dtype),
        rewards=total[rows].to(device),
        group=torch.tensor([row // completed.group_size for row in rows], device=device),
        policy_version=torch.full((len(rows),), samples.policy_version, device=device),
    )


def _behavior_logprobs(samples: Samples) -> Tensor:
    """Return the log-probabilities of the sampled distribution, or else those of the policy.

    All are of one kind, because the ratios of a mixture would be of two kinds.
    """
    of_draws = (samples.logprobs.isfinite() & samples.mask).any()
    return torch.where(of_draws, samples.logprobs, samples.policy_logprobs)

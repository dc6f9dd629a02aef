"""From prompts to a rollout: generate, reward, and put into rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.types import Rollout, Samples
from funcrl.generators import Generator
from funcrl.loop.episodes import Episode, play, read_turns
from funcrl.loop.rewarded import RewardError, batch_rewards
from funcrl.rl import rewards
from funcrl.rl.batching import pad_rows
from funcrl.run.runs import Completion
from funcrl.tasks.adapt import check_task
from funcrl.tasks.contracts import Environment, Prompt, Task, TaskLike, end_tokens
from funcrl.tasks.rewards.calls import RewardLimits


class Completed(NamedTuple):
    """Prompts and their completions: everything of length B is group-major."""

    prompts: list[Prompt]  # [B], each prompt once for each of its samples
    prompt_tokens: list[list[int]]  # [B]
    samples: Samples  # observations of an environment are among the tokens, outside the mask
    texts: list[str]  # [B] all that followed the prompt, for people to read
    outcomes: list[Any]  # [B] what is rewarded: the text, or the last state of an environment
    turns: list[int]  # [B] number of the policy's turns
    group_size: int


class Graded(NamedTuple):
    """Rewards of completions."""

    rewards: dict[str, Tensor]  # name -> [B], each reward function's own
    total: Tensor  # [B], weighted; NaN where there is none
    errors: list[str]  # what went wrong, one for each NaN of `total`


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
    encoded = [tokenizer.encode(prompt.text) for prompt in prompts]
    ends = (*sampling.stop_tokens, *end_tokens(tokenizer), *tokenizer.ends)
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
    samples = generator.generate(encoded, sampling, seed)
    rows = [
        (prompt, tokens)
        for prompt, tokens in zip(prompts, encoded, strict=True)
        for _ in range(group_size)
    ]
    if isinstance(task, Environment):
        episodes = [Episode(prompt, tokens, task.begin(prompt)) for prompt, tokens in rows]
        last = play(task, generator, episodes, samples, sampling, seed)
        texts = [tokenizer.decode(episode.tokens) for episode in episodes]
        samples = _samples_of(episodes, last)
        outcomes, turns = [each.state for each in episodes], [each.turns for each in episodes]
    else:
        texts = [turn.text for turn in read_turns(samples, tokenizer, sampling)]
        outcomes, turns = list(texts), [1] * len(texts)
    return Completed(
        prompts=[prompt for prompt, _ in rows],
        prompt_tokens=[tokens for _, tokens in rows],
        samples=samples,
        texts=texts,
        outcomes=outcomes,
        turns=turns,
        group_size=group_size,
    )


def _samples_of(episodes: Sequence[Episode], last: Samples) -> Samples:
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
def grade(
    task: TaskLike,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    weights: Mapping[str, float] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    limits: RewardLimits | None = None,
) -> Graded:
    """Return every completion's rewards, and their weighted sum.

    Args:
        task: whose `reward_batch` to call, which calls `reward` for each if it is not overridden.
        prompts: [B].
        outcomes: [B] the texts of completions, or an environment's last states.
        weights: name -> factor; of those left out, the task's `reward_weights`, or else 1.
        on_error: "stop" raises a `RewardError` at the first reward that raises or is not finite;
            "skip" gives that completion no total.
        limits: of rewards that are `async def`; 32 at a time and 30 s each when left out.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> prompt = funcrl.tasks.Prompt("1+2=", "3")
        >>> funcrl.rollouts.grade(task, [prompt, prompt], ["3", "4"]).total
        tensor([1., 0.])
    """
    task = check_task("grade", task)
    if len(prompts) != len(outcomes):
        raise ValueError(
            f"grade expects a prompt for each outcome, such as the prompts of what complete "
            f"returns, got {len(prompts)} prompts and {len(outcomes)} outcomes."
        )
    rows: list[Mapping[str, float]] = []
    errors: list[str] = []
    graded = batch_rewards(task, prompts, outcomes, limits or RewardLimits())
    for row, error, cause, is_number in graded:
        if error:
            if on_error == "stop":
                advice = " --on-reward-error skip leaves such samples out." if is_number else ""
                raise RewardError(f"{error}{advice}") from cause
            errors.append(error)
        rows.append(row)
    good = [row for row in rows if row]
    if not good:
        found = f"only errors: {errors[0]}" if errors else "no completions"
        raise RewardError(f"grade expects at least one reward, got {found}")
    names = list(good[0])
    for row in good:
        if set(row) != set(names):
            raise RewardError(
                f"grade expects the same rewards for every completion, got {sorted(names)} and "
                f"{sorted(row)} from the task {task.name!r}."
            )
    parts = {name: _float32([float(row.get(name, torch.nan)) for row in rows]) for name in names}
    failed = torch.tensor([not row for row in rows], device="cpu")
    kept = {name: values[~failed] for name, values in parts.items()}
    total = _float32([torch.nan] * len(rows))
    given = {**task.reward_weights, **(weights or {})}
    # `weighted_sum` refuses the names that are none.
    total[~failed] = rewards.weighted_sum(kept, dict.fromkeys(names, 1.0) | given)
    return Graded(parts, total, errors)


@checked
def punish_overlong(graded: Graded, lengths: Tensor, max_length: int, cache: int) -> Graded:
    """Return the rewards with DAPO's soft overlong punishment, `overlong`, among them.

    Args:
        graded: [B].
        lengths: [B] of the completions, in tokens.
        max_length: from here on the punishment is 1.
        cache: over how many tokens before it grows.

    Example:
        >>> import torch, funcrl
        >>> graded = funcrl.rollouts.Graded({"correct": torch.ones(2)}, torch.ones(2), [])
        >>> funcrl.rollouts.punish_overlong(graded, torch.tensor([5, 8]), 10, cache=4).total
        tensor([1.0000, 0.5000])
    """
    if "overlong" in graded.rewards:
        raise ValueError("punish_overlong expects no reward of that name, got 'overlong'.")
    checks.check_shape("punish_overlong", "lengths", lengths, "graded.total", graded.total.shape)
    punishment = rewards.soft_overlong(lengths, max_length, cache)
    named = {**graded.rewards, "overlong": punishment}
    return graded._replace(rewards=named, total=graded.total + punishment)


@checked
def accuracies(task: TaskLike, graded: Graded) -> Tensor:
    """Return the reward [B] that a task names as its accuracy; NaN where there is none.

    A task that names none has `correct`, or else the first reward: `is_accuracy` tells whether that
    is right or wrong.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> graded = funcrl.rollouts.grade(task, [funcrl.tasks.Prompt("1+2=", "3")], ["3"])
        >>> funcrl.rollouts.accuracies(task, graded)
        tensor([1.])
    """
    return graded.rewards[judging_reward(task, graded)]


@checked
def judging_reward(task: TaskLike, graded: Graded) -> str:
    """Return the name of the reward that an evaluation is about: the task's accuracy.

    Of a task that names none it is `correct`, or else the first.

    Example:
        >>> import torch, funcrl
        >>> graded = funcrl.rollouts.Graded({"correct": torch.ones(2)}, torch.ones(2), [])
        >>> funcrl.rollouts.judging_reward(funcrl.tasks.SumDigits(), graded)
        'correct'
    """
    task = check_task("judging_reward", task)
    correct = "correct" if "correct" in graded.rewards else next(iter(graded.rewards), "correct")
    name = task.accuracy or correct
    if name not in graded.rewards:
        raise ValueError(
            f"judging_reward expects the task {task.name!r} to have a reward {name!r}, the mean of "
            f"which is eval/accuracy, got {sorted(graded.rewards)}; name one as its `accuracy`."
        )
    return name


@checked
def is_accuracy(task: TaskLike, name: str, rewards: Tensor) -> bool:
    """Return whether a reward says what is right or wrong, so that its mean is an accuracy.

    One that the task names as its accuracy, or that is called `correct`, may be right in part. Any
    other one, such as the only reward function of a file of rows, is 0 or 1 throughout.

    Args:
        task: whose reward it is.
        name: of the reward.
        rewards: [B], NaN where there is none.

    Example:
        >>> import torch, funcrl
        >>> task = funcrl.tasks.from_rows([{"prompt": "1", "answer": "2"}])
        >>> lengths, matches = torch.tensor([0.3, 1.2]), torch.tensor([0.0, 1.0])
        >>> [funcrl.rollouts.is_accuracy(task, "mine", each) for each in (lengths, matches)]
        [False, True]
    """
    task = check_task("is_accuracy", task)
    found = rewards[rewards.isfinite()]
    if task.accuracy or name == "correct":
        return bool(((found >= 0) & (found <= 1)).all())
    return bool(((found == 0) | (found == 1)).all())


@checked
def to_completions(
    completed: Completed, graded: Graded, step: int, count: int, advantages: Tensor | None = None
) -> list[Completion]:
    """Return the first `count` completions as lines of completions.jsonl.

    Args:
        completed: B completions.
        graded: their rewards.
        step: of the run.
        count: how many; all of them where there are fewer.
        advantages: [B], NaN for a completion that is not trained on; none are recorded when left
            out.

    Example:
        >>> import funcrl
        >>> parts = funcrl.build(funcrl.config.TrainConfig())
        >>> parts.generator.push(funcrl.init_params(parts.model, seed=0))
        >>> prompts = parts.task.prompts(seed=0, start=0, count=2)
        >>> completed = funcrl.rollouts.complete(
        ...     parts.task, parts.generator, prompts, parts.sampling, seed=0)
        >>> graded = funcrl.rollouts.grade(parts.task, completed.prompts, completed.outcomes)
        >>> len(funcrl.rollouts.to_completions(completed, graded, step=3, count=1))
        1
    """
    unknown = [math.nan] * len(completed.texts)
    known = unknown if advantages is None else advantages.tolist()
    return [
        Completion(
            step=step,
            prompt=completed.prompts[row].text,
            completion=completed.texts[row],
            answer=completed.prompts[row].answer,
            reward=graded.total[row].item(),
            rewards={name: values[row].item() for name, values in graded.rewards.items()},
            finish_reason=completed.samples.finish_reasons[row],
            policy_version=completed.samples.policy_version,
            advantage=None if math.isnan(known[row]) else known[row],
        )
        for row in range(min(count, len(completed.texts)))
    ]


@checked
def comparable(total: Tensor, group_size: int) -> Tensor:
    """Return the totals [B] with NaN for a sample that is the only one of its group with a total.

    There is nothing to compare it with. In groups of one, each is.

    Example:
        >>> import torch, funcrl
        >>> nan = float("nan")
        >>> funcrl.rollouts.comparable(torch.tensor([1.0, nan, 0.0, 1.0]), group_size=2)
        tensor([nan, nan, 0., 1.])
    """
    graded = total.isfinite().view(-1, group_size).sum(dim=1).repeat_interleave(group_size)
    return total.masked_fill(graded < min(2, group_size), torch.nan)


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
    ends = torch.arange(1, samples.mask.shape[1] + 1, device=device) * samples.mask
    counts = ends.amax(dim=1)[rows].tolist()  # up to the last token that was sampled

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


def _float32(values: list[float]) -> Tensor:
    """Return numbers as a tensor on the CPU, where rewards are."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _behavior_logprobs(samples: Samples) -> Tensor:
    """Return the log-probabilities of the sampled distribution, or else those of the policy.

    All are of one kind, because the ratios of a mixture would be of two kinds.
    """
    of_draws = (samples.logprobs.isfinite() & samples.mask).any()
    return torch.where(of_draws, samples.logprobs, samples.policy_logprobs)


@checked
def named_rewards(task: Task, prompt: Prompt, outcome: Any) -> tuple[Mapping[str, float], str]:
    """Return a completion's named rewards, or none and what went wrong.

    Args:
        task: whose `reward` to call.
        prompt: that was completed.
        outcome: the text of the completion, or an environment's last state.

    Example:
        >>> import funcrl
        >>> prompt = funcrl.tasks.Prompt("1+2=", "3")
        >>> funcrl.rollouts.named_rewards(funcrl.tasks.SumDigits(), prompt, "3")
        ({'correct': 1.0}, '')
    """
    (rewarded,) = batch_rewards(task, [prompt], [outcome], RewardLimits())
    return rewarded.row, rewarded.error

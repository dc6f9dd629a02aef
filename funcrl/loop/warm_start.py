"""The warm start: a few supervised steps, for policies that would earn no reward without."""

from collections.abc import Callable, Sequence

from funcrl import optim
from funcrl.config import WarmStartConfig
from funcrl.core.arguments import checked
from funcrl.core.types import ModelFn, Params
from funcrl.loop.episodes import Demonstration, demonstration
from funcrl.loop.rollouts.grade import RewardError, batch_rewards
from funcrl.loop.supervised import to_rollout
from funcrl.rl import algorithms
from funcrl.rl.batching import collate
from funcrl.rl.step import grpo_step
from funcrl.tasks.adapt import check_task
from funcrl.tasks.contracts import Environment, Prompt, Task, TaskLike
from funcrl.tasks.reward_calls import RewardLimits
from funcrl.tasks.rewards import TrainerState


@checked
def warm_start(
    model_fn: ModelFn,
    params: Params,
    task: TaskLike,
    config: WarmStartConfig | None = None,
    seed: int = 0,
    accuracy: Callable[[Params], float] | None = None,
) -> tuple[Params, dict[str, float]]:
    """Return parameters trained on right answers, and numbers: the steps and the accuracy reached.

    It is `grpo_step` with `algorithm=funcrl.sft()`, and stops at the wanted accuracy.

    Args:
        model_fn: `(params, sample) -> TokenScores`.
        params: to start from.
        task: whose prompts have answers, or an environment that has demonstrations.
        config: the number of steps, and the accuracy to stop at; `WarmStartConfig()` when left out.
        seed: of the prompts.
        accuracy: measures parameters on held-out prompts; when left out, all steps are done.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> params, numbers = funcrl.warm_start(
        ...     funcrl.logprob_fn(model), funcrl.init_params(model, seed=0), task,
        ...     funcrl.config.WarmStartConfig(steps=2))
        >>> numbers
        {'warm_start/steps': 2}
    """
    task = check_task("warm_start", task)
    config = WarmStartConfig() if config is None else config
    algorithm = algorithms.sft()
    step = grpo_step(
        model_fn, algorithm=algorithm, optimizer=optim.adamw(config.learning_rate, weight_decay=0.0)
    )
    state, done = step.init(params), 0
    reached = 0.0 if accuracy is None else accuracy(params)
    device = state.step.device
    while done < config.steps and (accuracy is None or reached < config.accuracy):
        prompts = task.prompts(seed, done * config.num_prompts, config.num_prompts)
        demonstrations = [demonstration(task, prompt) for prompt in prompts]
        if not done:
            _check_right(task, prompts, demonstrations, TrainerState(0, config.steps))
        state, _ = step(state, collate(to_rollout(demonstrations, device), algorithm))
        done += 1
        if accuracy is not None and (done % config.every == 0 or done == config.steps):
            reached = accuracy(state.params)
    measured = {} if accuracy is None else {"warm_start/accuracy": reached}
    return state.params, {"warm_start/steps": done, **measured}


def beyond(task: Task, prompts: Sequence[Prompt], limit: int) -> str:
    """Return a sentence about right answers of more tokens than a limit, "" where there is none."""
    if isinstance(task, Environment):  # whose actions are short, and are several
        return ""
    lengths = [sum(sampled) for _, sampled, _ in (demonstration(task, each) for each in prompts)]
    too_long = [length for length in lengths if length > limit]
    if not too_long:
        return ""
    return (
        f"{len(too_long)} of {len(lengths)} right answers have more than {limit} tokens and are "
        f"cut off; --sampling.max-tokens {max(too_long)} has room for the longest."
    )


def _check_right(
    task: Task,
    prompts: Sequence[Prompt],
    rows: Sequence[Demonstration],
    trainer_state: TrainerState,
) -> None:
    """Raise if a demonstration is not right: a policy would learn what earns nothing."""
    outcomes, name = [outcome for _, _, outcome in rows], task.accuracy or "correct"
    ids = [each.completion() for each in rows]
    rewarded = batch_rewards(task, prompts, outcomes, RewardLimits(), ids, trainer_state).rows
    for prompt, outcome, found in zip(prompts, outcomes, rewarded, strict=True):
        row, error, cause = found[:3]
        if error:
            message = f"{error} A warm start checks that demonstrations are right."
            raise RewardError(message) from cause
        value = row.get(name, 1.0)
        if value < 1.0:
            raise ValueError(
                f"warm_start expects demonstrations that are right, got {repr(outcome)[:80]} for "
                f"{prompt.text[:80]!r}, for which the reward {name!r} of {task.name!r} is "
                f"{value}; give the task demonstrate(prompt), or use --warm-start.steps 0."
            )

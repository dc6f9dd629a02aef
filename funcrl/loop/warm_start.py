"""The warm start: a few supervised steps, for policies that would earn no reward without."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from funcrl import optim
from funcrl.config import TrainConfig, WarmStartConfig
from funcrl.core import rng
from funcrl.core.arguments import checked
from funcrl.core.printing import Note
from funcrl.core.types import ModelFn, Params
from funcrl.loop.build import Parts
from funcrl.loop.episodes import Demonstration, demonstration
from funcrl.loop.from_config import has_critic, plain_model_fn
from funcrl.loop.held_out import evaluated
from funcrl.loop.rollouts.grade import RewardError, batch_rewards
from funcrl.loop.rollouts.roll import EVALUATION, WARM_START
from funcrl.loop.supervised import to_rollout
from funcrl.rl import algorithms
from funcrl.rl.batching import collate
from funcrl.rl.step import grpo_step
from funcrl.run.accuracy import held_out
from funcrl.tasks.adapt import check_task
from funcrl.tasks.contracts import Environment, Prompt, Task, TaskLike
from funcrl.tasks.reward_calls import RewardLimits
from funcrl.tasks.rewards import TrainerState

_NOTE_EVERY = 10.0  # seconds between two lines of progress


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


def _beyond(task: Task, prompts: Sequence[Prompt], limit: int) -> str:
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


def warm_started(
    config: TrainConfig,
    parts: Parts,
    params: Params,
    eval_prompts: Sequence[Prompt],
    note: Note,
    stop: Callable[[], bool],
) -> tuple[Params, dict[str, float]]:
    """Return the parameters of a run after its warm start, and its numbers; note its progress."""
    # Without held-out prompts: some of the task's stream of another seed, which is not trained on.
    prompts = eval_prompts or parts.task.prompts(
        rng.fold_in(config.seed, EVALUATION), 0, config.evaluation.num_prompts
    )
    options, seed = config.warm_start, rng.fold_in(config.seed, WARM_START)
    name, last_note = "accuracy", time.perf_counter()

    def accuracy(params: Params) -> float:
        nonlocal name, last_note
        if stop():
            raise KeyboardInterrupt
        row = evaluated(config, parts, parts.policy(params), 0, prompts).row
        name, reached = held_out(row) or (name, 0.0)
        if time.perf_counter() > last_note + _NOTE_EVERY:
            last_note = time.perf_counter()
            note(f"Warm start: {name} {reached:.2f} so far.")
        # A reward that is not right or wrong does not say when a policy is good enough.
        return row.get("eval/accuracy", 0.0)

    note(
        f"Warm start: at most {options.steps} supervised steps, until {options.accuracy:.2f} of "
        f"the held-out prompts are answered rightly ..."
    )
    first = parts.task.prompts(seed, 0, options.num_prompts)
    cut_off = _beyond(parts.task, first, config.sampling.max_tokens)
    if cut_off:
        note(cut_off)
    model_fn = _of_all_tokens(config, parts)
    params, numbers = warm_start(model_fn, params, parts.task, options, seed, accuracy)
    steps = f"{numbers['warm_start/steps']} supervised steps"
    if name != "accuracy":
        del numbers["warm_start/accuracy"]
        note(
            f"Warm start: all {steps} were done, because the reward {name!r} is not right or "
            f"wrong and gives no accuracy to stop at."
        )
        return params, numbers
    reached = numbers["warm_start/accuracy"]
    wanted = f", where {options.accuracy:.2f} was wanted; rewards may stay 0."
    missed = reached < options.accuracy
    note(f"Warm start: accuracy {reached:.2f} after {steps}{wanted if missed else '.'}")
    return params, numbers


def _of_all_tokens(config: TrainConfig, parts: Parts) -> ModelFn:
    """Return the scores by all tokens, where what is trained may be the distribution that is drawn.

    An answer that would not be drawn has to become likelier than all tokens.
    """
    if config.behavior == "policy" or "model_fn" in parts.replaced:
        return parts.model_fn
    whole = replace(config, behavior="policy")
    return plain_model_fn("train", whole, parts.model, critic=has_critic(config))

"""Evaluates a policy on held-out prompts: accuracy with its interval, pass@k and majority@k."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from funcrl.config import EvalConfig, Sampling, TrainConfig
from funcrl.core import checks, rng
from funcrl.core.arguments import checked
from funcrl.core.files import write_whole
from funcrl.core.printing import Note, warn_safely
from funcrl.loop.build import Parts, build, first_params, trained_like
from funcrl.loop.data import check_data, is_data_of, limits_of
from funcrl.loop.episodes import Failure
from funcrl.loop.rollouts.draw import Completed, complete
from funcrl.loop.rollouts.grade import Graded, RewardError, grade, is_accuracy, judging_reward
from funcrl.loop.rollouts.log import to_completions
from funcrl.loop.sources import defaults, is_run, options_of_run, parts_of_network, trained_params
from funcrl.run import runs
from funcrl.run.accuracy import wilson
from funcrl.run.trust import check_run
from funcrl.tasks.contracts import Task, TaskOrRows, is_task
from funcrl.tasks.load import data_set, is_rows
from funcrl.tasks.rewards import TrainerState


def interval(values: Sequence[float], num_samples: int = 1) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean of independent values in [0, 1].

    Wilson's score interval for n tosses of a coin. Samples of one prompt are correlated, so n is
    the number of tosses whose mean has the variance of the values' mean. With p that mean, N
    values, s^2 their unbiased variance, and m samples in each,

        n = min(1 + N p (1 - p) / s^2, N m),    N if the values are all equal
    """
    checks.check_count("interval", "the number of values", len(values))
    checks.check_count("interval", "num_samples", num_samples)
    for value in values:
        checks.check_range("interval", "a value", value, 0.0, 1.0)
    count, p = len(values), math.fsum(values) / len(values)
    square_sum = math.fsum((value - p) ** 2 for value in values)
    n = float(count)
    if square_sum > 1e-12 * count:  # not only rounding
        n = min(1 + count * p * (1 - p) * (count - 1) / square_sum, count * num_samples)
    return wilson(p, n)


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right.

    Of n samples that were drawn for a prompt c are right:

        1 - C(n - c, k) / C(n, k)      (arXiv:2107.03374)
    """
    checks.check_range("pass_at", "num_right", num_right, 0, num_samples)
    checks.check_range("pass_at", "k", k, 1, num_samples)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Return how often the most frequent answer is right; of equally frequent ones, the mean.

    An empty answer has no vote.
    """
    if len(answers) != len(right):
        raise ValueError(f"majority expects {len(answers)} judgements, got {len(right)}.")
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    # A mean over samples, because one answer may be judged right once and wrong once.
    judged = [
        judgement for answer, judgement in zip(answers, right, strict=True) if answer in winners
    ]
    return sum(judged) / len(judged) if judged else 0.0


class Evaluation(NamedTuple):
    """The result of an evaluation: accuracies are means over prompts, the others over samples.

    The accuracy and its interval are None, and `pass_at` and `majority_at` empty, where the reward
    that judges is not right or wrong (`funcrl.rollouts.is_accuracy`).
    """

    task: str
    policy: str
    num_prompts: int
    num_samples: int
    accuracy: float | None
    low: float | None  # the accuracy's 95% confidence interval
    high: float | None
    pass_at: dict[int, float]
    majority_at: dict[int, float]
    mean_length: float
    clipped_ratio: float
    num_errors: int = 0  # samples without a reward: their prompts are left out
    rewards: Mapping[str, float] = MappingProxyType({})  # the mean of each, by name
    metrics: Mapping[str, float] = MappingProxyType({})  # that reward functions have logged


@checked
def evaluate(
    config: EvalConfig,
    *,
    task: TaskOrRows | None = None,
    parts: Parts | None = None,
    trust: bool = False,
    note: Note = warn_safely,
) -> Evaluation:
    """Evaluate a run's last checkpoint, or a model, on a task's held-out prompts.

    A completion is right when the reward that the task names as its `accuracy` is 1. Where a run
    skips rewards that raise, so does its evaluation: with all samples of that prompt. Completions
    are written to `config.out` and the result to `config.json`, where they are given.

    Args:
        config: what to evaluate, and how.
        task: in place of the one that the configuration names.
        parts: of a run that was given parts as objects: those that it was given. Their generator
            stays open.
        trust: run the code of the run's task although it is not what the run began with, or this
            account has not run it before (docs/security.md).
        note: is called with lines about the code that is run, and about what the task has changed.

    Example:
        >>> import funcrl
        >>> config = funcrl.config.EvalConfig(model="micro", num_prompts=5, max_tokens=2)
        >>> result = funcrl.evaluate(config)
        >>> result.num_prompts, 0 <= result.low <= result.accuracy <= result.high <= 1
        (5, True)
    """
    if task is not None and config.task is not None:
        raise ValueError(f"evaluate expects task= or --task, got both ({config.task}).")
    if parts is not None and (task is not None or config.task is not None):
        raise ValueError("evaluate expects parts=, which have a task, or another task, got both.")
    if config.out is not None and config.out.exists():
        raise FileExistsError(f"evaluate expects --out to be a new file, got {config.out}.")
    for file in (config.out, config.json):
        if file is not None:  # before hours of drawing, not after
            file.parent.mkdir(parents=True, exist_ok=True)
    # Absolute, so that a reward that changes the working directory does not move them.
    out, json_file = (file and file.absolute() for file in (config.out, config.json))
    options = _options(config, task)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    given = set() if parts is None else {*parts.replaced}
    if task is not None or config.task is not None:  # another task than the run's
        given.add("task")
    if config.run is not None:
        _check_can_evaluate(config, options, config.run, given, trust, note)
    own_generator = parts is None
    if parts is None:
        # A teacher is of no use here, and need not be there any more.
        parts = build(options, task, function="evaluate", trust=trust, teacher=None)
    facts = _facts(config, parts.task, task)
    prompts = parts.task.eval_prompts(config.num_prompts)
    if not prompts:
        raise ValueError(
            f"evaluate expects held-out prompts from the task {parts.task.name!r}, got none."
        )
    sampling = _sampling(config, options)
    if config.run is None:
        step, params = 0, first_params(parts)
    else:
        step, params = trained_params(config.run, trained_like(parts))
    with closing(parts.generator) if own_generator else nullcontext(parts.generator) as generator:
        generator.push(parts.policy(params), step)
        completed = complete(parts.task, generator, prompts, sampling, rng.fold_in(config.seed, 0))
    weights = options.reward_weights if _is_of_run(config, parts.task, facts) else None
    graded = _grade(out, step, parts.task, completed, weights, options)
    result = _summarise(config, parts.task, completed, graded)
    if json_file is not None:
        write_whole(json_file, json.dumps(result._asdict(), indent=1) + "\n")
    return result


def format_evaluation(result: Evaluation) -> str:
    """Return an evaluation as a few lines of text."""
    lines = [
        f"{result.task}, {result.policy}: {result.num_prompts} prompts x {result.num_samples} "
        f"samples",
    ]
    if result.accuracy is None:
        lines += [f"{name:<11} {mean:.3f}" for name, mean in result.rewards.items()]
    else:
        lines.append(
            f"accuracy    {result.accuracy:.3f}  (95%: {result.low:.3f} to {result.high:.3f})"
        )
    for label, values in (("pass", result.pass_at), ("majority", result.majority_at)):
        lines += [f"{f'{label}@{k}':<11} {value:.3f}" for k, value in values.items()]
    lines += [f"{name:<11} {value:.3f}" for name, value in result.metrics.items()]
    lines.append(f"length {result.mean_length:.1f} tokens, {result.clipped_ratio:.0%} cut off")
    if result.num_errors:
        lines.append(f"{result.num_errors} samples without a reward; their prompts are left out")
    return "\n".join(lines)


def _options(config: EvalConfig, task: TaskOrRows | None) -> TrainConfig:
    """Return the options of the run that is evaluated, or those of a new run with its model."""
    if config.run is None:
        options = defaults(config.model or TrainConfig.model)
    else:
        options = options_of_run("evaluate", "--run", config.run)
    system_prompt, thinking = config.system_prompt, config.enable_thinking
    if task is None or not is_task(task):  # which brings its own
        system_prompt = options.system_prompt if system_prompt is None else system_prompt
        thinking = options.enable_thinking if thinking is None else thinking
    name = config.task or options.task
    has_rows = is_rows(name) if task is None else not is_task(task)
    inherited = ["prompt_template", "prompt_column", "answer_column"] if has_rows else []
    inherited += ["split", "test_split"] if data_set(name) else []
    rows = {
        each: getattr(config, each) or getattr(options if each in inherited else TrainConfig, each)
        for each in ("prompt_template", "prompt_column", "answer_column", "split", "test_split")
    }
    # Of other rows all are asked.
    longest = options.max_prompt_length if has_rows and name == options.task else None
    chosen = replace(options, task=name, max_prompt_length=longest, **rows)
    share = TrainConfig.held_out if config.held_out is None else config.held_out
    if config.held_out is None and has_rows:
        share = options.held_out if task is not None else _held_out(config, options, chosen)
    return replace(
        chosen, system_prompt=system_prompt, enable_thinking=thinking, held_out=share,
        reward=config.reward or (options.reward if config.task is None else ()),
        reward_model=config.reward_model or (options.reward_model if config.task is None else None),
        device=config.device, dtype=config.dtype, threads=config.threads, slots=config.slots,
        # Nothing is trained, so neither flash attention nor compilation is needed.
        attend="native", compile=None,
    )  # fmt: skip


def _check_can_evaluate(
    config: EvalConfig,
    options: TrainConfig,
    run: Path,
    given: set[str],
    trust: bool,
    note: Note,
) -> None:
    """Raise unless a run can be evaluated: its code may run, and its rows and parts are there."""
    # Rewards that this evaluation names itself are the user's own choice.
    named = replace(options, reward=()) if config.reward else options
    for line in check_run("evaluate", named, run, given | {"teacher"}, trust):
        note(line)
    if "task" not in given:
        check_data("evaluate", options, run)
    runs.check_given("evaluate", run, {"task", *parts_of_network(options)} - given)


def _is_of_run(config: EvalConfig, task: Task, facts: Mapping[str, str]) -> bool:
    """Return whether a task is the run's own, whose rewards its weights are of."""
    if config.run is None or (config.task is not None and is_rows(config.task)):
        return False  # another file may have the name of the run's
    return task.name == facts.get("task", facts.get("task_object", task.name))


def _held_out(config: EvalConfig, options: TrainConfig, chosen: TrainConfig) -> float:
    """Return the share of the rows to ask; all of those that the run was not trained on."""
    run = config.run
    if run is None and is_run(Path(config.model or "")):
        run = Path(str(config.model))
        options = options_of_run("evaluate", "--model", run)
    given = config.task is not None
    trained_on = run is not None and given and is_data_of(chosen, run, "evaluate")
    return 1.0 if given and not trained_on else options.held_out


def _sampling(config: EvalConfig, options: TrainConfig) -> Sampling:
    """Return the run's sampling options, with those that the evaluation changes."""
    changes = {
        name: getattr(config, name)
        for name in ("max_tokens", "top_p", "top_k")
        if getattr(config, name) is not None
    }
    return replace(
        options.sampling, num_samples=config.num_samples, temperature=config.temperature, **changes
    )


def _facts(config: EvalConfig, task: Task, given: TaskOrRows | None) -> dict[str, str]:
    """Return the facts that the run has recorded, after checking that the task is the run's."""
    if config.run is None:
        return {}
    facts = runs.read_facts(config.run, "evaluate")
    if config.task is None and given is None and facts.get("task", task.name) != task.name:
        raise ValueError(
            f"evaluate expects the task {facts['task']!r}, which {config.run} was trained on, "
            f"got {task.name!r}; --task evaluates on another."
        )
    return facts


def _grade(
    out: Path | None,
    step: int,
    task: Task,
    completed: Completed,
    weights: Mapping[str, float] | None,
    options: TrainConfig,
) -> Graded:
    """Return the rewards of completions, which are written to `out` even if a reward raises."""
    unknown = torch.full((len(completed.texts),), torch.nan, dtype=torch.float32, device="cpu")
    graded = Graded({}, unknown, [])
    try:
        graded = grade(
            task,
            completed.prompts,
            completed.outcomes,
            weights,
            options.on_reward_error,
            limits_of(options),
            completed.completion_ids(),
            TrainerState(step, options.steps),
        )
    finally:
        if out is not None:
            rows = to_completions(completed, graded, step, count=len(completed.texts))
            runs.append_lines(out, [row.to_row() for row in rows])
    return graded


def _answers(task: Task, completed: Completed) -> list[str]:
    """Return the answer that each completion votes for."""
    answers = []
    for text, outcome in zip(completed.texts, completed.outcomes, strict=True):
        answer = "" if isinstance(outcome, Failure) else task.extract(outcome)
        answers.append(text.strip() if answer is None else str(answer))
    return answers


def _summarise(config: EvalConfig, task: Task, completed: Completed, graded: Graded) -> Evaluation:
    n = config.num_samples
    name = judging_reward(task, graded)
    judged = graded.rewards[name].view(-1, n)
    whole = judged.isfinite().all(dim=1)
    if not whole.any():
        found = graded.errors[0] if graded.errors else f"{name!r} judges none"
        raise RewardError(f"evaluate expects a prompt without errors, got none: {found}")
    judges = is_accuracy(task, name, judged)
    right = (judged[whole] >= 1.0).tolist()
    answers = _answers(task, completed)
    voted = [answers[row * n : row * n + n] for row in whole.nonzero().squeeze(1).tolist()]

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    shares = [sum(row) / n for row in right]
    low, high = interval(shares, n)
    ks = config.ks if judges else ()
    reasons = completed.samples.finish_reasons
    return Evaluation(
        task=task.name,
        policy=str(config.run or config.model or TrainConfig.model),
        num_prompts=len(right),
        num_samples=n,
        accuracy=mean(shares) if judges else None,
        low=low if judges else None,
        high=high if judges else None,
        pass_at={k: mean(pass_at(n, sum(row), k) for row in right) for k in ks},
        # The first k of each prompt's samples, which are drawn alike.
        majority_at={
            k: mean(majority(a[:k], r[:k]) for a, r in zip(voted, right, strict=True)) for k in ks
        },
        mean_length=float(completed.samples.mask.sum()) / len(answers),
        clipped_ratio=mean(float(reason == "length") for reason in reasons),
        num_errors=len(graded.errors),
        rewards={each: found.nanmean().item() for each, found in graded.rewards.items()},
        metrics=dict(graded.metrics),
    )

"""How good a policy is: accuracy with its interval, pass@k and majority@k, on held-out prompts."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from funcrl import rng, runs
from funcrl.checkpoint import restore
from funcrl.config import EvalConfig, Sampling, TrainConfig, read_config
from funcrl.estimates import interval, majority, pass_at
from funcrl.parts import Parts, build, defaults, empty_state, first_params
from funcrl.protocols import Environment, Task
from funcrl.rollouts import Completed, accuracies, complete, grade, to_completions
from funcrl.types import Params


class Evaluation(NamedTuple):
    """What an evaluation came to; every number is a mean over prompts."""

    task: str
    policy: str
    num_prompts: int
    num_samples: int
    accuracy: float
    low: float  # the accuracy's 95% confidence interval
    high: float
    pass_at: dict[int, float]
    majority_at: dict[int, float]
    mean_length: float
    clipped_ratio: float


def evaluate(config: EvalConfig) -> Evaluation:
    """Return how a run's last checkpoint, or a model, does on a task's held-out prompts.

    A completion is right when the reward that the task names as its `accuracy` is 1. Completions
    are written to `config.out`, where it is given.

    Args:
        config: what to evaluate, and how.

    Example:
        >>> import funcrl
        >>> config = funcrl.config.EvalConfig(model="micro", num_prompts=5, max_tokens=2)
        >>> result = funcrl.evaluate(config)
        >>> result.num_prompts, 0 <= result.low <= result.accuracy <= result.high <= 1
        (5, True)
    """
    if config.out is not None and config.out.exists():
        raise FileExistsError(f"evaluate expects --out to be a new file, got {config.out}.")
    options = _options(config)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    parts = build(options)
    prompts = parts.task.eval_prompts(config.num_prompts)
    if not prompts:
        raise ValueError(f"evaluate expects held-out prompts from --task {options.task}, got none.")
    parts.generator.push(parts.policy(_params(config, options, parts)))
    sampling = Sampling(
        num_samples=config.num_samples, max_tokens=options.sampling.max_tokens,
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k,
        stop=options.sampling.stop,
    )  # fmt: skip
    seed = rng.fold_in(config.seed, 0)
    completed = complete(parts.task, parts.generator, prompts, sampling, seed)
    parts.generator.close()
    graded = grade(parts.task, completed.prompts, completed.outcomes)
    right = (accuracies(parts.task, graded) >= 1.0).view(-1, config.num_samples).tolist()
    if config.out is not None:
        rows = to_completions(completed, graded, step=0, count=len(completed.texts))
        config.out.parent.mkdir(parents=True, exist_ok=True)
        runs.append_lines(config.out, [row._asdict() for row in rows])
    return _summarise(config, parts, completed, right)


def format_evaluation(result: Evaluation) -> str:
    """Return an evaluation as lines to read.

    Example:
        >>> from funcrl.evaluate import Evaluation, format_evaluation
        >>> result = Evaluation("sum", "run", 9, 2, 0.5, 0.25, 0.75, {2: 0.6}, {2: 0.5}, 3.0, 0.0)
        >>> print(format_evaluation(result))
        sum, run: 9 prompts x 2 samples
        accuracy    0.500  (95%: 0.250 to 0.750)
        pass@2      0.600
        majority@2  0.500
        length 3.0 tokens, 0% cut off
    """
    lines = [
        f"{result.task}, {result.policy}: {result.num_prompts} prompts x {result.num_samples} "
        f"samples",
        f"accuracy    {result.accuracy:.3f}  (95%: {result.low:.3f} to {result.high:.3f})",
    ]
    for label, values in (("pass", result.pass_at), ("majority", result.majority_at)):
        lines += [f"{f'{label}@{k}':<11} {value:.3f}" for k, value in values.items()]
    lines.append(f"length {result.mean_length:.1f} tokens, {result.clipped_ratio:.0%} cut off")
    return "\n".join(lines)


def _options(config: EvalConfig) -> TrainConfig:
    """Return the options of the run that is evaluated, or of a run that would begin so."""
    if config.run is not None:
        path = config.run / runs.CONFIG
        if not path.is_file():
            raise FileNotFoundError(
                f"evaluate expects --run to name the folder of a run, got {config.run} without a "
                f"{runs.CONFIG}."
            )
        options = read_config(TrainConfig, path)
    else:
        options = replace(defaults(config.model), system_prompt=config.system_prompt)
    changes: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    if config.task is not None:
        changes["task"] = config.task
    if config.max_tokens is not None:
        changes["sampling"] = replace(options.sampling, max_tokens=config.max_tokens)
    return replace(options, **changes, threads=config.threads, slots=config.slots)


def _params(config: EvalConfig, options: TrainConfig, parts: Parts) -> Params:
    if config.run is None:
        return first_params(options, parts)
    state, _ = restore(config.run / runs.CHECKPOINTS, empty_state(options, parts))
    return dict(state.params)


def _answers(task: Task | Environment, completed: Completed) -> list[str]:
    """Return what each completion votes for."""
    if hasattr(task, "extract"):
        return [str(task.extract(outcome)) for outcome in completed.outcomes]
    return [text.strip() for text in completed.texts]


def _summarise(
    config: EvalConfig, parts: Parts, completed: Completed, right: list[list[bool]]
) -> Evaluation:
    n = config.num_samples
    answers = _answers(parts.task, completed)
    voted = [answers[start : start + n] for start in range(0, len(answers), n)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    shares = [mean([float(each) for each in row]) for row in right]
    low, high = interval(shares)
    cut = [reason == "length" for reason in completed.samples.finish_reasons]
    return Evaluation(
        task=parts.task.name,
        policy=str(config.run or config.model),
        num_prompts=len(right),
        num_samples=n,
        accuracy=mean(shares),
        low=low,
        high=high,
        pass_at={k: mean([pass_at(n, sum(row), k) for row in right]) for k in config.ks},
        # The first k of each prompt's samples, which are drawn alike.
        majority_at={
            k: mean([majority(a[:k], r[:k]) for a, r in zip(voted, right, strict=True)])
            for k in config.ks
        },
        mean_length=float(completed.samples.mask.sum()) / len(answers),
        clipped_ratio=mean([float(each) for each in cut]),
    )

"""The loop, top to bottom: generate, reward, collate, step, push, evaluate, log, save."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from funcrl.config import TrainConfig
from funcrl.core import rng, tree
from funcrl.core.arguments import checked
from funcrl.core.types import Absent, Metrics, Params, Rollout, Sample, TrainState
from funcrl.loop.batches import laid_out
from funcrl.loop.opening import facts_of, open_run
from funcrl.loop.parts.build import Parts, build, empty_state, first_params
from funcrl.loop.parts.data import limits_of
from funcrl.loop.parts.sources import tokenizer_place
from funcrl.loop.recorded import advantages_of, tokens_of_first
from funcrl.loop.rollouts import (
    Completed,
    Graded,
    accuracies,
    comparable,
    complete,
    grade,
    punish_overlong,
    to_completions,
    to_rollout,
)
from funcrl.loop.trained import Trained
from funcrl.loop.warm_start import warm_start
from funcrl.models.logprobs import score
from funcrl.ops.exact.kernels import slow_products
from funcrl.rl import metrics
from funcrl.rl.batching import collate, drop_zero_variance, mask_truncated, minibatches, pad_length
from funcrl.run import runs
from funcrl.run.record import Record, reference_policy
from funcrl.run.runs import Completion
from funcrl.run.trackers import check_trackers
from funcrl.run.views import SilentView, View, view_for
from funcrl.tasks.contracts import Environment, Prompt, TaskLike
from funcrl.tasks.tokenizer_files import tokenizer_files

# Numbers that the run's seed is folded with, so that no two uses draw the same random numbers.
_PROMPTS, _DRAWS, _ORDER, _WARM_START, _EVALUATION = range(1, 6)  # 0 is for new weights


class Rolled(NamedTuple):
    """The completions of one step, their rewards and their metrics."""

    completed: Completed
    graded: Graded
    rollout: Rollout | None  # None where no completion has another one to be compared with
    numbers: dict[str, float]


@checked
def train(
    config: TrainConfig,
    *,
    task: TaskLike | None = None,
    parts: Parts | None = None,
    view: View | Literal["live"] | None = None,
    resume: bool = False,
    fork: str | Path | None = None,
    command: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    trust: bool = False,
) -> Trained:
    """Return the state and the metrics of a run, which `config.run_dir` holds as well.

    Everything that is drawn comes from `config.seed` and the number of the step, so that a run
    that was stopped, at any moment and by whatever, goes on to the same bits.

    Args:
        config: the whole configuration; its `run_dir` must be given.
        task: in place of the one that `config.task` names.
        parts: of `funcrl.build(config)`, with any of them replaced. A run that was given parts is
            resumed with the same ones. Their generator is not closed at the end.
        view: shows the run; nothing when left out. "live" shows it as the command line does: in a
            notebook or on a terminal an output that is drawn again, anywhere else plain lines.
        resume: go on with the run in `config.run_dir`; options that say what is trained must be
            those that it began with.
        fork: the folder of a run whose newest checkpoint this one begins as, with any options that
            fit it.
        command: what started the run, for its environment.json.
        stop: called after each step; True saves and raises `KeyboardInterrupt`.
        trust: go on with a run whose task's code is not what it began with, or that this account
            has not run before (docs/security.md).

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
        >>> config = TrainConfig(
        ...     run_dir=pathlib.Path(tempfile.mkdtemp()) / "run", steps=2, num_prompts=2,
        ...     num_generations=2, warm_start=WarmStartConfig(steps=1),
        ...     evaluation=EvaluationConfig(num_prompts=2))
        >>> [row["step"] for row in funcrl.train(config).history]
        [0, 1, 2]
    """
    started, process = time.perf_counter(), os.getpid()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_trackers(config.log.trackers)
    view = view_for(sys.stdout) if view == "live" else view or SilentView()
    start = open_run(config, task, parts, resume, fork)
    if not trust:
        start.check_code(config, view.note)
    own_generator = parts is None
    if parts is None:
        parts = build(config, task, note=view.note, trust=trust)
    facts = facts_of(config, parts, start.given, view.note)
    # What `export` writes beside a model that has no tokenizer of its own.
    kept = {} if tokenizer_place("train", config) else tokenizer_files(parts.task.tokenizer)
    record = Record(config, start.folder, parts.task.name, view, command, facts, kept)
    try:
        if start.parent is not None:
            record.forked(start.parent, empty_state(parts), needs_reference=parts.kl > 0)
        elif record.resumed(empty_state(parts), needs_reference=parts.kl > 0) is None:
            _begin(config, parts, record, started, stop)
        _loop(config, parts, record, stop)
        record.wait()
    except BaseException as error:
        if os.getpid() == process:
            record.save_unsaved(error)
        raise
    finally:
        if os.getpid() == process:  # and not a child that a reward forked
            try:
                record.close()
            finally:  # even where nobody reads what the view prints last
                if own_generator:
                    parts.generator.close()
    return Trained(record.progress.state, runs.read_history(start.folder), start.folder)


def _begin(
    config: TrainConfig,
    parts: Parts,
    record: Record,
    started: float,
    stop: Callable[[], bool],
) -> None:
    """Run the warm start, evaluate the policy, and record that as step 0."""

    def accuracy(params: Params) -> float:
        if stop():
            raise KeyboardInterrupt
        return _accuracy(config, parts, parts.policy(params), 0, prompts).get("eval/accuracy", 0.0)

    held_out = parts.task.eval_prompts(config.evaluation.num_prompts)
    # Without held-out prompts: some of the task's stream of another seed, which is not trained on.
    prompts = held_out or parts.task.prompts(
        rng.fold_in(config.seed, _EVALUATION), 0, config.evaluation.num_prompts
    )
    params = first_params(parts)
    row: dict[str, Any] = {"step": 0, "time/startup": time.perf_counter() - started}
    if config.warm_start.steps:
        clock = time.perf_counter()
        params, numbers = warm_start(
            parts.model_fn,
            params,
            parts.task,
            config.warm_start,
            rng.fold_in(config.seed, _WARM_START),
            accuracy,
        )
        row |= numbers | {"time/warm_start": time.perf_counter() - clock}
        record.note(
            f"Warm start: accuracy {row['warm_start/accuracy']:.2f} after "
            f"{row['warm_start/steps']} supervised steps."
        )
    if config.evaluation.every:
        row |= _accuracy(config, parts, parts.policy(params), 0, held_out)
    record.begin(parts.step.init(params, config.seed), row)


def _loop(config: TrainConfig, parts: Parts, record: Record, stop: Callable[[], bool]) -> None:
    """Run the remaining steps."""
    done, state, _ = record.progress
    reference = None
    if parts.kl:
        reference = reference_policy(record.folder, done, state.params)
        if parts.donates:  # the first step overwrites its state, which must not be the reference
            reference = tree.map(torch.clone, reference)
    held_out = parts.task.eval_prompts(config.evaluation.num_prompts)
    parts.generator.push(parts.policy(state.params), done)
    for index in range(done + 1, config.steps + 1):
        record.claim.check()  # a forked child must not compute: it has none of torch's threads
        start = time.perf_counter()
        rolled = _roll(config, parts, index)
        for line in _left_out(rolled, index):
            record.note(line)
        seen = _completions_to_record(config, parts, state.params, rolled, index)
        rewarded = time.perf_counter()
        if parts.donates:
            record.give_up_state()
        state, numbers = _update(config, parts, state, rolled.rollout, reference, index)
        trained = time.perf_counter()
        slow = slow_products(config.device) if parts.agrees and index == done + 1 else []
        if slow:
            record.note(f"Exact numerics use funcrl's own kernel for {'; '.join(slow)}.")
        policy = parts.policy(state.params)
        parts.generator.push(policy, index)
        pushed = time.perf_counter()
        row: dict[str, Any] = {"step": index, **rolled.numbers, **numbers}
        row |= {"time/train": trained - rewarded, "time/push": pushed - trained}
        row["step_time"] = pushed - start
        every = config.evaluation.every
        if every and (index % every == 0 or index == config.steps):
            row |= _accuracy(config, parts, policy, index, held_out)
        record.advance(state, row, seen)
        if stop() and index < config.steps:
            raise KeyboardInterrupt


def _roll(config: TrainConfig, parts: Parts, index: int) -> Rolled:
    """Generate and reward the step's rollout."""
    start = time.perf_counter()
    first = (index - 1) * config.num_prompts
    prompts = parts.task.prompts(rng.fold_in(config.seed, _PROMPTS), first, config.num_prompts)
    if len(prompts) != config.num_prompts:
        raise ValueError(
            f"train expects {config.num_prompts} prompts (--num-prompts) from the task "
            f"{parts.task.name!r} from number {first} on, got {len(prompts)}."
        )
    seed = rng.fold_in(config.seed, _DRAWS, index)
    completed = complete(parts.task, parts.generator, prompts, parts.sampling, seed)
    generated = time.perf_counter()
    graded = _grade(config, parts, completed)
    if config.overlong:
        most = config.sampling.max_tokens * parts.task.max_turns
        lengths = completed.samples.mask.sum(dim=1).cpu()
        graded = punish_overlong(graded, lengths, most, config.overlong)
    rollout, numbers = _compared(config, completed, graded)
    if isinstance(parts.task, Environment):
        numbers["completions/mean_turns"] = sum(completed.turns) / len(completed.turns)
    if graded.errors:
        numbers["num_reward_errors"] = len(graded.errors)
    numbers |= {"time/generate": generated - start, "time/reward": time.perf_counter() - generated}
    return Rolled(completed, graded, rollout, numbers)


def _grade(config: TrainConfig, parts: Parts, completed: Completed) -> Graded:
    """Return the rewards of completions, weighted as the run weights them."""
    prompts, outcomes = completed.prompts, completed.outcomes
    return grade(
        parts.task,
        prompts,
        outcomes,
        config.reward_weights,
        config.on_reward_error,
        limits_of(config),
    )


def _left_out(rolled: Rolled, index: int) -> Iterator[str]:
    """Yield lines that say which completions of a step are not trained on."""
    errors = rolled.graded.errors
    if errors:
        yield f"Step {index} left out {len(errors)}: {errors[0]}"
    if rolled.rollout is None:
        yield f"Step {index} trains on nothing: no group has two completions with a reward."


def _compared(
    config: TrainConfig, completed: Completed, graded: Graded
) -> tuple[Rollout | None, dict[str, float]]:
    """Return the rollout of the completions that can be compared, if any, and its metrics."""
    total = comparable(graded.total, completed.group_size)
    kept = total.isfinite()
    if not kept.any():
        return None, {}
    rollout = to_rollout(completed, total)
    device = rollout.tokens.device
    named = {name: values[kept].to(device) for name, values in graded.rewards.items()}
    reasons = completed.samples.finish_reasons
    cut = torch.tensor([reason == "length" for reason in reasons], device=kept.device)[kept]
    cut = cut.to(device)
    numbers = metrics.describe_rollout(rollout, named, cut)
    return mask_truncated(rollout, cut) if config.mask_truncated else rollout, numbers


def _update(
    config: TrainConfig,
    parts: Parts,
    state: TrainState,
    rollout: Rollout | None,
    reference: Params | None,
    index: int,
) -> tuple[TrainState, dict[str, float]]:
    """Train on a rollout: every pass over its mini-batches."""
    if rollout is not None and config.drop_zero_variance:
        rollout = drop_zero_variance(rollout)
    if rollout is None or not len(rollout.rewards):
        return state, {"num_tokens": 0.0}  # nothing differed, so there is nothing to learn
    rollout = pad_length(rollout, config.length_multiple)
    positions = torch.arange(rollout.tokens.shape[1], device=rollout.tokens.device)
    rows = Sample(rollout.tokens, positions.expand_as(rollout.tokens))
    if parts.sampling.truncates:
        # The sampler's log-probabilities are of a truncated and renormalised distribution, which is
        # not the one that is trained: the ratio would not be 1 before the first update.
        behavior = score(parts.model_fn, state.params, rows, config.microbatch).logprobs
        rollout = rollout._replace(behavior_logprobs=behavior.where(rollout.mask, 0.0))
    ref_logprobs: torch.Tensor | Absent = ()
    if reference is not None:
        ref_logprobs = score(parts.model_fn, reference, rows, config.microbatch).logprobs
    batch = collate(rollout, parts.algorithm, ref_logprobs)
    reports: list[Metrics] = []
    for iteration in range(config.num_iterations):
        order = rng.fold_in(config.seed, _ORDER, index, iteration)
        count = min(config.num_minibatches, batch.tokens.shape[0])
        for part in minibatches(batch, parts.algorithm, count, order):
            state, report = parts.step(state, laid_out(config, part))
            if parts.agrees and not reports:
                _check_agreement(report, index)
            reports.append(report)
    num_tokens = [report.sums["num_tokens"] for report in reports]
    return state, metrics.to_floats(metrics.merge(reports, weights=num_tokens))


def _check_agreement(report: Metrics, index: int) -> None:
    """Raise unless every ratio before a step's first update was exactly 1."""
    difference = report.maxes["sampling/sampling_logp_difference/max"].item()
    if difference != 0:
        raise RuntimeError(
            f"train expects the generator's log-probabilities to be the trainer's own, to the last "
            f"bit, with --numerics exact, got a difference of {difference:.3g} in step {index}; "
            f"funcrl parity --numerics exact --bisect names the operation that differs."
        )


def _accuracy(
    config: TrainConfig, parts: Parts, policy: Params, index: int, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Return metrics of a policy on prompts that are not trained on, if there are any."""
    start = time.perf_counter()
    if not prompts:
        return {}
    parts.generator.push(policy, index)
    sampling = replace(parts.sampling, num_samples=1, temperature=config.evaluation.temperature)
    seed = rng.fold_in(config.seed, _EVALUATION)
    completed = complete(parts.task, parts.generator, prompts, sampling, seed)
    graded = _grade(config, parts, completed)
    return {
        "eval/accuracy": accuracies(parts.task, graded).nanmean().item(),  # of those with one
        "eval/num_prompts": len(prompts) - len(graded.errors),
        "time/eval": time.perf_counter() - start,
    }


def _completions_to_record(
    config: TrainConfig, parts: Parts, params: Params, rolled: Rolled, index: int
) -> list[Completion]:
    """Return the completions to record: some of the first prompts, every few steps."""
    completed, graded, rollout, _ = rolled
    advantages = advantages_of(parts.algorithm, completed, graded, rollout)
    if index != 1 and index % config.log.completions_every and index != config.steps:
        return to_completions(completed, graded, index, 1, advantages)
    rows = to_completions(completed, graded, index, config.log.num_completions, advantages)
    tokens = tokens_of_first(parts, params, completed, rollout, config.length_multiple)
    return [rows[0]._replace(**tokens), *rows[1:]]

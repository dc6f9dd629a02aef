"""The loop, top to bottom: generate, reward, collate, step, push, evaluate, log, save."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from funcrl.config import AlgorithmConfig, OptimizerConfig, TrainConfig
from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.printing import warn_safely
from funcrl.core.types import Params, TrainState
from funcrl.loop.ahead import Rollouts, rollouts_of
from funcrl.loop.build import Parts, build, empty_state, first_params, whole_params
from funcrl.loop.data import check_row_lengths, num_left_out
from funcrl.loop.ending import Callback, EndFn, ends_with
from funcrl.loop.export import Trained
from funcrl.loop.held_out import eval_loss, evaluated
from funcrl.loop.opening import Start, check_teacher, facts_of, open_run, remember_code, with_folder
from funcrl.loop.pack import check_packing
from funcrl.loop.ranks import (
    agreed,
    check_ranks_agree,
    empty_values,
    go_on_together,
    of_first_rank,
    whole_like,
    whole_state_fn,
)
from funcrl.loop.reference import check_reference, first_reference, moved_reference, moves_reference
from funcrl.loop.rollouts.log import completions_to_record, with_logged
from funcrl.loop.rollouts.roll import (
    left_out,
    whole_policy,
    whole_trained,
)
from funcrl.loop.sources import tokenizer_place
from funcrl.loop.update import SkippedUpdates, check_updated, update
from funcrl.loop.warm_start import warm_started
from funcrl.models.networks import is_of_transformers, runs_under_vmap
from funcrl.ops.exact.linear import slow_products
from funcrl.parallel import Mesh, broadcast_tree
from funcrl.parallel.mesh import ALONE
from funcrl.run import runs
from funcrl.run.follower import Follower
from funcrl.run.record import Record
from funcrl.run.runs import Completion
from funcrl.run.trackers import check_trackers
from funcrl.run.views import SilentView, View, view_for
from funcrl.tasks.contracts import TaskOrRows
from funcrl.tasks.tokenizers import tokenizer_files


@checked
def train(
    config: TrainConfig,
    *,
    task: TaskOrRows | None = None,
    parts: Parts | None = None,
    view: View | Literal["live"] | None = None,
    resume: bool = False,
    fork: str | Path | None = None,
    command: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    trust: bool | Sequence[str] = False,
    mesh: Mesh = ALONE,
    callbacks: Sequence[Callback] = (),
    **given: Any,
) -> Trained:
    """Return the state and the metrics of a run, which the folder `config.run_dir` holds as well.

    Everything that is drawn comes from `config.seed` and the number of the step, so that a run
    that was stopped, at any moment and by whatever, goes on to the same bits.

    Args:
        config: the whole configuration; without a `run_dir` the run is in the first of
            runs/TASK-1, runs/TASK-2 ... that is free, which the result names.
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
        trust: run the code that a run's folder names although it is not what the run began with,
            or this account has not run it before (docs/security.md): all of it, also what the run
            in `config.model` names, or what these options name, such as "task".
        mesh: of the ranks that train this run together, from `funcrl.parallel.make_mesh()`: each
            calls `train` with the same arguments. The first one writes the folder and shows the
            run, and the others need only read it.
        callbacks: functions that are called with each step's row of metrics.jsonl, that of step 0
            too, after it is written; one that returns True ends the run there.
        given: other parts in place of those that the configuration names, as `funcrl.build` takes
            them: model, params, teacher, model_fn, algorithm, optimizer, per_sample, prepare, step,
            generator. The run is resumed with the same ones, and a generator that is given is not
            closed at the end.

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
    mesh = mesh if parts is None else parts.mesh
    if config.run_dir is None and not resume:
        with with_folder(config, task, parts, mesh) as config:
            return train(
                config, task=task, parts=parts, view=view, fork=fork, command=command, stop=stop,
                trust=trust, mesh=mesh, callbacks=callbacks, **given,
            )  # fmt: skip
    started = time.perf_counter()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_trackers(config.log.trackers)
    for each in callbacks:
        checks.check_callable("train", "callbacks", each, "functions of a step's row")
    is_first, stop = mesh.host.rank == 0, agreed(stop, mesh)
    view = view_for(sys.stdout) if view == "live" else view or SilentView()
    view = view if is_first else SilentView()
    objects = given if task is None else {"task": task, **given}
    start = open_run(config, objects, parts, resume, fork, mesh)
    if trust is not True:
        start.check_code(config, trust, view.note)
    own_generator = parts is None and "generator" not in given
    if parts is None:
        parts = build(config, trust=trust is True, mesh=mesh, **objects)
    begins_from_weights = parts.source.weights is not None
    if begins_from_weights and is_of_transformers(parts.model):
        view.note(_limits_of_class(parts.model))
    if begins_from_weights and not resume:
        _warn_of_defaults(config, parts)
    if not parts.is_supervised:
        check_row_lengths(parts.task, parts.generator.context_length)
    check_packing(config, parts)
    check_reference(config, parts)
    check_teacher(config, parts)
    facts = facts_of(config, parts, start.given) | {"ranks": str(mesh.all.size)}
    check_ranks_agree(config, facts, mesh)
    # What `export` writes beside a model that has no tokenizer of its own.
    kept = {} if tokenizer_place("train", config) else tokenizer_files(parts.task.tokenizer)
    whole = None if mesh.shard.size == 1 else whole_state_fn(parts)
    record = Follower(config, start.folder, whole)
    if is_first:
        remember_code(config, start.given, view.note)
        record = Record(config, start.folder, parts.task.name, view, command, facts, kept, whole)
    at_end = ExitStack()  # what is closed, last to first, whatever fails
    if own_generator:
        at_end.callback(parts.generator.close)
    at_end.callback(record.close)
    try:
        if of_first_rank(_goes_on(parts, record, start), mesh.host) is None:
            _begin(config, parts, record, started, stop)
        else:
            go_on_together(record, parts)
        rollouts = rollouts_of(config, parts, record)
        at_end.callback(rollouts.close)
        _loop(config, parts, record, rollouts, stop, ends_with(config, callbacks, mesh))
        record.wait()
        check_updated(record.progress.state, record.progress.row)
        # Before the generator is closed: vLLM's engine takes all process groups along.
        rows = runs.read_history(start.folder) if is_first else []
        history = of_first_rank(rows, mesh.host)
    except BaseException as error:
        record.save_unsaved(error)
        raise
    finally:
        at_end.close()
    return Trained(record.progress.state, history, start.folder)


def _warn_of_defaults(config: TrainConfig, parts: Parts) -> None:
    """Warn of weights that are about to be trained with the defaults of a new model."""
    are_defaults = (config.optimizer, config.algorithm) == (OptimizerConfig(), AlgorithmConfig())
    if are_defaults and not parts.replaced & {"algorithm", "optimizer", "step"}:
        warn_safely(
            f"train has the options of a model that starts from nothing for the weights of "
            f"{config.model}, such as a learning rate of {config.optimizer.learning_rate}; "
            f"dataclasses.replace(funcrl.config.PRETRAINED, model=...) begins from those that "
            f"`funcrl train` takes for weights.",
            stacklevel=5,
        )


def _limits_of_class(model: nn.Module) -> str:
    """Return what to say of a model that runs as its class in transformers."""
    by_row = "" if runs_under_vmap(model) else " It is trained one row after the other."
    return (
        f"{type(model).__name__} runs as its class in transformers: without exact numerics, "
        f"packing and .gguf files, and slower to draw from without vLLM.{by_row}"
    )


def _goes_on(parts: Parts, record: Follower, start: Start) -> int | None:
    """Return the step of the checkpoint that a run goes on from; None if it begins."""
    if not isinstance(record, Record):
        return None
    is_shared = parts.mesh.shard.size > 1
    like = empty_values(whole_like(parts)) if is_shared else empty_state(parts)
    needs_reference = parts.kl > 0
    if start.parent is not None:
        return record.forked(start.parent, like, needs_reference)
    return record.resumed(like, needs_reference)


def _begin(
    config: TrainConfig,
    parts: Parts,
    record: Follower,
    started: float,
    stop: Callable[[], bool],
) -> None:
    """Run the warm start, evaluate the policy, and record that as step 0."""
    prompts = parts.task.eval_prompts(config.evaluation.num_prompts)
    if left_out_rows := num_left_out(parts.task):
        record.note(
            f"Rows left out, whose prompts have more than {config.max_prompt_length} tokens: "
            f"{left_out_rows:,}."
        )
    params = first_params(parts)
    row: dict[str, Any] = {"step": 0, "time/startup": time.perf_counter() - started}
    if config.warm_start.steps:
        clock = time.perf_counter()
        params, numbers = warm_started(config, parts, params, prompts, record.note, stop)
        row |= numbers | {"time/warm_start": time.perf_counter() - clock}
    params = dict(broadcast_tree(dict(params), parts.mesh.all))
    if config.evaluation.every:
        row |= evaluated(config, parts, parts.policy(params), 0, prompts).row
        if parts.is_supervised:
            row |= eval_loss(config, parts, params, prompts)
    record.begin(parts.step.init(params, config.seed), row)


def _loop(
    config: TrainConfig,
    parts: Parts,
    record: Follower,
    rollouts: Rollouts,
    stop: Callable[[], bool],
    why_it_ends: EndFn,
) -> None:
    """Run the remaining steps."""
    done, state = record.progress.step, record.progress.state
    if not done and _ends(record, why_it_ends):
        return
    reference, moved = first_reference(parts, record), record.progress.reference
    prompts = parts.task.eval_prompts(config.evaluation.num_prompts)
    rollouts.give(done, state.params)
    skipped = SkippedUpdates(record.progress.row, state)
    for index in range(done + 1, config.steps + 1):
        state, row, seen = _step(config, parts, record, rollouts, reference, index)
        slow = slow_products(config.device) if parts.agrees and index == done + 1 else []
        if slow:
            record.note(f"Exact numerics use funcrl's own kernel for {'; '.join(slow)}.")
        every = config.evaluation.every
        if every and (index % every == 0 or index == config.steps):
            policy = whole_policy(parts, rollouts.newest)
            found = rollouts.run(partial(evaluated, config, parts, policy, index, prompts))
            row |= found.row
            if parts.is_supervised:  # the step drew nothing to look at
                seen = found.seen
                row |= eval_loss(config, parts, whole_trained(parts, rollouts.newest), prompts)
        if reference is not None and moves_reference(config, index):
            reference = moved_reference(config, reference, whole_params(parts, state.params))
            moved = (reference,)
        record.advance(state, row, seen, rollouts.older, moved)
        for line in skipped.lines(row, state):
            record.note(line)
        if _ends(record, why_it_ends):
            return
        if stop() and index < config.steps:
            record.save_together()  # while all ranks are here
            raise KeyboardInterrupt


def _ends(record: Follower, why_it_ends: EndFn) -> bool:
    """Return whether a run ends with its last finished step, which is then saved."""
    why = why_it_ends(record.progress.row)
    if why:
        record.note(f"Step {record.progress.step} is the last: {why}.")
        record.save_last()
    return bool(why)


def _step(
    config: TrainConfig,
    parts: Parts,
    record: Follower,
    rollouts: Rollouts,
    reference: Params | None,
    index: int,
) -> tuple[TrainState, dict[str, Any], list[Completion]]:
    """Train on the step's rollout; return the new state, its metrics and what is to be recorded."""
    start = time.perf_counter()
    rolled = rollouts.take(index)
    for line in left_out(rolled, index):
        record.note(line)
    seen = completions_to_record(config, parts, rolled, index)
    rewarded = time.perf_counter()
    old = record.progress.state
    if parts.donates:
        record.give_up_state()
    state, numbers = update(config, parts, old, rolled, reference, index)
    trained = time.perf_counter()
    rollouts.give(index, state.params)
    pushed = time.perf_counter()
    row: dict[str, Any] = {"step": index, **rolled.numbers, **numbers}
    row |= {"time/train": trained - rewarded, "time/push": pushed - trained}
    row["step_time"] = pushed - start
    logged = rolled.graded.metrics if rolled.graded is not None else {}
    return state, with_logged(row, logged), seen

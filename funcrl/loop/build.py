"""From a configuration to the parts of a run, each of which can be replaced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from funcrl.config import Sampling, TrainConfig
from funcrl.core import tree
from funcrl.core.arguments import check_value, checked
from funcrl.core.types import (
    Absent,
    Algorithm,
    GradientTransformation,
    ModelFn,
    Params,
    PrepareFn,
    Step,
    TrainState,
)
from funcrl.generators import Generator, Scorer
from funcrl.graph import compile_at_first, donate
from funcrl.loop import data, from_config, sources, teachers
from funcrl.loop.algorithm import algorithm_of, optimizer_of, prepare_of
from funcrl.loop.from_config import check_model
from funcrl.models import Transformer
from funcrl.models.initial import has_values, is_shape, without_critic
from funcrl.models.logprobs import Teacher
from funcrl.models.lora import Lora
from funcrl.models.networks import vocab_size_of
from funcrl.parallel import Layout, Mesh, layout_of, unshard
from funcrl.parallel.mesh import ALONE
from funcrl.rl.grads import PerSampleTransform, clip_per_sample
from funcrl.rl.step import grpo_step
from funcrl.tasks.adapt import guard
from funcrl.tasks.contracts import Task, TaskOrRows, is_task

REPLACEABLE = (
    "task", "model", "params", "teacher", "model_fn", "algorithm", "optimizer", "per_sample",
    "prepare", "step", "generator",
)  # fmt: skip


# What each part is, where a task is checked by itself.
_KINDS: dict[str, Any] = {
    "model": nn.Module, "params": Params, "model_fn": Callable, "algorithm": Algorithm,
    "optimizer": GradientTransformation, "per_sample": Callable | None,
    "prepare": PrepareFn | None, "step": Step,
}  # fmt: skip
# Arguments that are not parts, and where to give them instead.
_INSTEAD = {
    "reward": "; rewards belong to a task, which funcrl.tasks.from_rows(rows, reward=...) makes, "
    "and funcrl.tasks.with_rewards(task, {...}) of another",
    "tokenizer": "; a tokenizer belongs to a task, such as funcrl.tasks.from_rows(rows, "
    "tokenizer=funcrl.tasks.load_tokenizer(folder))",
}


class _Fields(NamedTuple):
    config: TrainConfig
    task: Task
    model: nn.Module
    params: Params | Absent  # to start from; () for those of the model
    teacher: Teacher | Scorer | None
    teacher_fn: ModelFn | None  # of what a batch's `teacher_logprobs` are, if it has any
    model_fn: ModelFn  # of what is trained: the parameters, or adapters
    algorithm: Algorithm
    optimizer: GradientTransformation
    per_sample: PerSampleTransform | None  # of the gradients of samples, before their sum
    prepare: PrepareFn | None
    layout: Layout | Absent  # of the whole parameters, where the state has this rank's rows alone
    step: Step
    generator: Generator
    lora: Lora | None  # where adapters are trained
    mesh: Mesh  # of the ranks that run these parts together
    trust: bool  # in the code that the folder of a run names
    source: sources.Source  # what the model's name means; of no use for a replaced model
    replaced: frozenset[str]  # the parts that were given, and not made of the configuration


class Parts(_Fields):
    """The parts of a run; `build` makes them of a configuration, and `train(parts=...)` runs them.

    `parts._replace(algorithm=...)` returns parts with another one. What depends on it is made anew
    unless it has been replaced as well: a step depends on model_fn, algorithm, optimizer,
    per_sample and prepare; a model_fn on the model and the teacher; a generator on the model and
    the task; a model that starts from nothing on the task, whose vocabulary it has. So no part is
    ever of an older one.

    Example:
        >>> import funcrl
        >>> parts = funcrl.build(funcrl.config.TrainConfig())
        >>> other = parts._replace(algorithm=funcrl.dapo())
        >>> other.step is parts.step, other.generator is parts.generator
        (False, True)
    """

    __slots__ = ()

    def _replace(self, **changes: Any) -> "Parts":
        """Return these parts with other ones, and what depends on them made anew."""
        return _made("Parts._replace", self.config, {**self._given(), **changes}, self)

    def __replace__(self, **changes: Any) -> "Parts":
        """Do what `_replace` does: `copy.replace` calls this."""
        return self._replace(**changes)

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.replaced}

    @property
    def sampling(self) -> Sampling:
        """How completions are drawn in training."""
        return replace(self.config.sampling, num_samples=self.config.num_generations)

    @property
    def donates(self) -> bool:
        """Whether the step writes its new state into the memory of the old one."""
        return self.config.compile is not None

    @property
    def kl(self) -> float:
        """The coefficient of the KL penalty, above 0 where a reference policy is needed.

        That of the algorithm's penalty if it says it, else that of the configuration.
        """
        return float(getattr(self.algorithm.penalty, "kl", self.config.algorithm.kl))

    @property
    def is_supervised(self) -> bool:
        """Whether a step trains on given answers, and on nothing that the policy draws."""
        return self.algorithm.weight == () and self.algorithm.ce_weight != ()

    @property
    def agrees(self) -> bool:
        """Whether the generator's log-probabilities are the trainer's own, to the last bit."""
        replaced = self.replaced & {"model", "model_fn", "step", "generator"}
        return not replaced and self.config.agrees

    def policy(self, trained: Params) -> Params:
        """Return the parameters to generate with, from what is trained, whole."""
        if self.lora is not None:
            return self.lora.merge(trained)
        return without_critic(trained) if from_config.has_critic(self.config) else trained


@checked
def build(
    config: TrainConfig,
    task: TaskOrRows | None = None,
    *,
    function: str = "train",
    trust: bool = False,
    mesh: Mesh = ALONE,
    **given: Any,
) -> Parts:
    """Return the task, the model, the step and the generator of a configuration.

    Args:
        config: the whole configuration.
        task: in place of the one that `config.task` names.
        function: for errors.
        trust: run a network of one's own that the folder of a run in `config.model` names.
        mesh: of the ranks that train together.
        given: other parts in place of those that the configuration names, by their names in
            `Parts`: model, params, teacher, model_fn, algorithm, optimizer, per_sample, prepare,
            step, generator.

    Example:
        >>> import funcrl
        >>> funcrl.build(funcrl.config.TrainConfig()).model.config.width
        64
        >>> parts = funcrl.build(funcrl.config.TrainConfig(), algorithm=funcrl.dapo())
        >>> sorted(parts.replaced)
        ['algorithm']
    """
    given = given if task is None else {**given, "task": task}
    return _made(function, config, given, trust=trust, mesh=mesh)


@dataclass(frozen=True)
class _Making:
    """What a part is made of: the configuration, and the parts that are made already."""

    function: str
    config: TrainConfig
    trust: bool
    given: Mapping[str, Any]
    parts: Mapping[str, Any]
    mesh: Mesh

    def __getitem__(self, name: str) -> Any:
        """Return a part that is made already."""
        return self.parts[name]


def _made(
    function: str,
    config: TrainConfig,
    given: Mapping[str, Any],
    before: Parts | None = None,
    trust: bool = False,
    mesh: Mesh = ALONE,
) -> Parts:
    """Return the given parts and those that are made of them; `before` are kept where they can."""
    _check_given(function, config, given)
    parts: dict[str, Any] = {"source": _source(function, config, given, before)}
    if before is not None:
        mesh, trust = before.mesh, before.trust
    making = _Making(function, config, trust, given, parts, mesh)
    new: set[str] = set()  # those that differ from `before`
    for name, (needs, make) in _MAKERS.items():
        if before is not None and _is_kept(name, given, before, new & {*needs}):
            parts[name] = getattr(before, name)
            continue
        parts[name] = given[name] if name in given and name != "task" else make(making)
        new.add(name)
    _check_vocabulary(function, config, parts["model"], parts["task"])
    if "model" in new and "model_fn" not in given:
        check_model(function, config, parts["model"], parts["task"].tokenizer.vocab_size)
    if "task" in new and parts["source"].run is not None:
        sources.check_tokenizer(function, parts["source"].run, parts["task"].tokenizer)
    return Parts(config=config, replaced=frozenset(given), mesh=mesh, trust=trust, **parts)


def _is_kept(name: str, given: Mapping[str, Any], before: Parts, changed: set[str]) -> bool:
    """Return whether a part stays: the same one is given, or nothing that it is made of changed."""
    return given[name] is getattr(before, name) if name in given else not changed


def _source(
    function: str, config: TrainConfig, given: Mapping[str, Any], before: Parts | None
) -> sources.Source:
    """Return what the model's name means; nothing where a model is given in its place."""
    if "model" in given:
        return sources.Source()
    return before.source if before is not None else sources.find_source(function, config.model)


def _check_given(function: str, config: TrainConfig, given: Mapping[str, Any]) -> None:
    unknown = sorted(given.keys() - {*REPLACEABLE})
    if unknown:
        advice = _INSTEAD.get(unknown[0], "")
        raise TypeError(f"{function} expects {', '.join(REPLACEABLE)}, got {unknown[0]!r}{advice}.")
    for name, kind in _KINDS.items():
        if name in given and not (name == "params" and given[name] == ()):
            check_value(function, name, kind, given[name])
    is_alone = "model" in given and given.get("params", ()) == ()
    if is_alone and sources.names_weights(config.model) and not has_values(given["model"]):
        raise ValueError(
            f"{function} expects params beside a model that has no values of its own, as the "
            f"weights of --model are not read where a model is given; funcrl.load_params returns "
            f"both, got a {type(given['model']).__name__} alone with {config.model}."
        )
    if given.get("teacher") is not None:
        teachers.check_kind(function, config, given["teacher"])
    if "generator" in given:
        from_config.check_generator(function, "generator to be", given["generator"])
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{function} expects --device cpu where torch sees no GPU, got cuda.")
    if "step" in given and config.shard != "none":
        raise ValueError(
            f"{function} expects --shard none with a step of one's own, got {config.shard}."
        )
    if "step" in given and config.compile is not None:
        raise ValueError(
            f"{function} expects --no-compile with a step of one's own, which "
            f"funcrl.compile_step compiles, got --compile."
        )
    if config.lora.rank and sources.is_run(Path(config.model)) and "model" not in given:
        raise ValueError(
            f"{function} expects --lora.rank 0 with --model {config.model}, a run, which may go on "
            f"while adapters need it as it is; funcrl export writes it as a folder to train on."
        )
    if "model_fn" in given and config.lora.rank:
        raise ValueError(
            f"{function} expects --lora.rank 0 with a model_fn of one's own, for which funcrl.lora "
            f"makes adapters, got {config.lora.rank}."
        )
    has_task = "task" in given and is_task(given["task"])
    of_rows = data.rows_options(config) != data.rows_options(TrainConfig())
    if of_rows and has_task:
        raise ValueError(
            f"{function} expects --prompt-template, --prompt-column, --answer-column, "
            f"--max-prompt-length, --held-out and splits with rows of data, got a task of its own "
            f"prompts."
        )
    if config.system_prompt is not None and (is_shape(config.model) or has_task):
        raise ValueError(
            f"{function} expects --system-prompt with pretrained weights and a --task, whose "
            f"tokenizer writes it, got {config.system_prompt!r} with "
            f"{'a task of its own tokenizer' if has_task else f'--model {config.model}'}."
        )


def _check_vocabulary(function: str, config: TrainConfig, model: nn.Module, task: Task) -> None:
    size, vocab_size = vocab_size_of(model), task.tokenizer.vocab_size
    if size is not None and vocab_size > size:
        raise ValueError(
            f"{function} expects a tokenizer of at most {size} tokens for --model "
            f"{config.model}, got {vocab_size} from the task {task.name!r}; "
            f"funcrl.tasks.load_tokenizer gives the model's own."
        )


def _task(making: _Making) -> Task:
    config, given = making.config, making.given.get("task")
    brings_its_own = given is not None and is_task(given)
    tokenizer = None if brings_its_own else sources.tokenizer_of(making.function, config)
    return guard(data.task_of(making.function, config, tokenizer, given))


def _model(making: _Making) -> nn.Module:
    tokenizer = making["task"].tokenizer
    size = tokenizer.vocab_size
    source = making["source"]
    return sources.network_of(making.function, making.config, source, size, tokenizer, making.trust)


def _adapters(making: _Making) -> Lora | None:
    """Return the model as a function of adapters, if such are trained."""
    config = making.config
    if not config.lora.rank:
        return None
    dtype = from_config.compute_dtype(config) or torch.float32
    score = partial(_plain_model_fn, making)
    return sources.adapters_of(
        config, score, making["model"], making["source"], dtype, making["params"]
    )


def _model_fn(making: _Making) -> ModelFn:
    adapters = making["lora"]
    if adapters is not None:
        found: ModelFn = adapters.model_fn
        return found
    return _plain_model_fn(making, making["model"])


def _plain_model_fn(making: _Making, network: nn.Module) -> ModelFn:
    config, critic = making.config, from_config.has_critic(making.config)
    from_config.check_remat(making.function, config, network)  # a teacher's is not trained
    return from_config.plain_model_fn(making.function, config, network, making["teacher"], critic)


def _teacher(making: _Making) -> Teacher | Scorer | None:
    """Return the model that a configuration learns from besides, with its trained parameters."""
    config, tokenizer = making.config, making["task"].tokenizer
    if config.teacher is None:
        return None
    return teachers.teacher_of(making.function, config, tokenizer, making.trust)


def _teacher_fn(making: _Making) -> ModelFn | None:
    config, teacher = making.config, making["teacher"]
    if not isinstance(teacher, Teacher) or config.algorithm.divergence != "sampled":
        return None
    if not isinstance(teacher.model, Transformer):  # it attends in its own way
        config = replace(config, attend="native")
    return from_config.plain_model_fn(making.function, config, teacher.model)


def _step(making: _Making) -> Step:
    config = making.config
    step = grpo_step(
        making["model_fn"],
        algorithm=making["algorithm"],
        optimizer=making["optimizer"],
        per_sample=making["per_sample"],
        prepare=making["prepare"],
        microbatch=config.microbatch,
        mesh=making.mesh,
        layout=making["layout"],
    )
    return step if config.compile is None else compile_at_first(donate(step), config.compile)


def _layout(making: _Making) -> Layout | Absent:
    """Return the whole shapes of what is trained, if the ranks share it."""
    if making.mesh.shard.size == 1 or making.config.shard != "state":
        return ()
    if making["lora"] is not None:
        return layout_of(making["lora"].init(0))
    model, params = making["model"], making["params"]
    whole = params or dict(sorted(model.named_parameters()))
    if "model_fn" not in making.given:
        whole = from_config.with_its_critic(making.config, model, whole)
    return layout_of(whole)


def _algorithm(making: _Making) -> Algorithm:
    return algorithm_of(making.config, making["teacher"] is not None)


def _per_sample(making: _Making) -> PerSampleTransform | None:
    max_norm = making.config.optimizer.clip_per_sample
    return None if max_norm is None else clip_per_sample(max_norm)


def _generator(making: _Making) -> Generator:
    model, task, num_ranks = making["model"], making["task"], making.mesh.all.size
    teacher = making["teacher"].model if isinstance(making["teacher"], Teacher) else None
    return from_config.generator_of(making.function, making.config, model, task, num_ranks, teacher)


# Each part, those before it that it is made of, and what makes it.
_MAKERS: dict[str, tuple[tuple[str, ...], Callable[[_Making], Any]]] = {
    "task": ((), _task),
    "model": (("task",), _model),
    "params": ((), lambda _: ()),
    "teacher": (("task",), _teacher),
    "teacher_fn": (("teacher",), _teacher_fn),
    "lora": (("model", "params", "teacher"), _adapters),
    "model_fn": (("model", "teacher", "lora"), _model_fn),
    "algorithm": (("teacher",), _algorithm),
    "optimizer": ((), lambda making: optimizer_of(making.config, making.mesh.shard)),
    "per_sample": ((), _per_sample),
    "prepare": ((), lambda making: prepare_of(making.config)),
    "layout": (("model", "params", "lora"), _layout),
    "step": (("model_fn", "algorithm", "optimizer", "per_sample", "prepare", "layout"), _step),
    "generator": (("model", "task"), _generator),
}


def whole_params(parts: Parts, trained: Params) -> Params:
    """Return what a state trains, put together from the shards of all ranks if they share it."""
    if isinstance(parts.layout, tuple):
        return trained
    return unshard(trained, parts.layout, parts.mesh.shard)


def first_params(parts: Parts) -> Params:
    """Return what a run trains, before any training: parameters, or adapters."""
    config = parts.config
    if parts.lora is not None:
        return sources.first_adapters(config, parts.lora)
    if not isinstance(parts.params, tuple):
        params: Params = tree.map(lambda leaf: leaf.to(config.device), parts.params)
    else:
        params = sources.base_params(config, parts.source, parts.model)
    return _with_critic(parts, params)


def _with_critic(parts: Parts, params: Params) -> Params:
    """Return what is trained: parameters, and a critic's if the parts have one of the options'."""
    if "model_fn" in parts.replaced:
        return params
    return from_config.with_its_critic(parts.config, parts.model, params)


def trained_like(parts: Parts) -> Params:
    """Return parameters or adapters of a run's structure, of any values."""
    if parts.lora is not None:
        return parts.lora.init(0)
    if not isinstance(parts.params, tuple):
        params: Params = tree.map(lambda leaf: leaf.to(parts.config.device), parts.params)
    else:
        params = sources.empty_params(parts.model, parts.config.device)
    return _with_critic(parts, params)


def empty_state(parts: Parts) -> TrainState:
    """Return a state of the run's structure, of any values, to restore a checkpoint into."""
    return parts.step.init(trained_like(parts), parts.config.seed)

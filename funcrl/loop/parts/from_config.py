"""The algorithm, the optimizer and the generator that a configuration names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcrl import optim
from funcrl.config import AlgorithmConfig, TrainConfig
from funcrl.config.sections import GENERATORS, is_own
from funcrl.core.types import Algorithm, GradientTransformation
from funcrl.generators import VLLM, Generator, HuggingFace, Recompute, Sampler
from funcrl.loop.parts import memory
from funcrl.models import Recurrent, Transformer
from funcrl.models.logits import forward_takes, is_of_transformers
from funcrl.rl import algorithms, ratios
from funcrl.tasks.contracts import Task
from funcrl.tasks.named import arguments_taken, call_with_known, import_named


def algorithm_of(config: TrainConfig) -> Algorithm:
    """Return the algorithm that a configuration names, with its numbers."""
    options, importance = config.algorithm, config.importance_cap
    tunables: dict[str, Any] = {
        "kl": options.kl,
        "kl_estimator": options.kl_estimator,
        "entropy": options.entropy,
        "correction": None if importance is None else ratios.truncated(importance),
    }
    of_some: dict[str, Any] = {"clip": options.clip or None, "scale_rewards": options.scale_rewards}
    tunables |= {name: value for name, value in of_some.items() if value is not None}
    if not is_own(options.name):
        if options.name == "dr_grpo":
            tunables["length"] = config.sampling.max_tokens
        made: Algorithm = getattr(algorithms, options.name)(**tunables)
        return made
    # Only what was asked for is refused, not what is left out.
    given = options.max_importance
    refusable: dict[str, Any] = {
        "kl": options.kl,
        "entropy": options.entropy,
        "max-importance": given,
    }
    refusable |= {name.replace("_", "-"): value for name, value in of_some.items()}
    left_out = AlgorithmConfig()
    for name in ("kl", "entropy"):
        if refusable[name] == getattr(left_out, name):
            refusable[name] = None
    taken = {"max-importance": "correction"}
    return _own("algorithm", options.name, tunables, refusable, taken, Algorithm)


def optimizer_of(config: TrainConfig) -> GradientTransformation:
    """Return the optimizer that a configuration names, after clipping to a global norm."""
    options = config.optimizer
    rate = _schedule(config)
    if is_own(options.name):
        known = {"learning_rate": rate, "weight_decay": options.weight_decay}
        refusable = {"weight-decay": options.weight_decay}
        made = _own("optimizer", options.name, known, refusable, {}, GradientTransformation)
    elif options.name == "muon":
        made = optim.chain(
            optim.masked(optim.muon(rate, weight_decay=options.weight_decay), _is_muons),
            optim.masked(
                optim.adamw(rate, weight_decay=options.weight_decay),
                lambda path, leaf: not _is_muons(path, leaf),
            ),
        )
    elif options.name == "sgd":
        made = optim.sgd(rate, weight_decay=options.weight_decay)
    else:
        made = optim.adamw(rate, weight_decay=options.weight_decay)
    return optim.chain(optim.clip_by_global_norm(options.max_grad_norm), made)


def _is_muons(path: str, leaf: Tensor) -> bool:
    """Return whether Muon updates a parameter: a matrix, but none of the vocabulary, and none
    whose rows are the weights of a convolution."""
    others = ("embed", "lm_head", "wte", "wpe", "delta.conv")
    return leaf.ndim == 2 and not any(part in path for part in others)


def _schedule(config: TrainConfig) -> Any:
    """Return the learning rate as a function of the number of updates."""
    options = config.optimizer
    falling = max(config.num_updates - options.warmup, 1)
    schedules = {
        "constant": optim.constant(options.learning_rate),
        "linear": optim.linear(options.learning_rate, 0.0, falling),
        "cosine": optim.cosine(options.learning_rate, 0.0, falling),
    }
    rate = schedules[options.schedule]
    return optim.warmup(options.warmup, rate) if options.warmup else rate


def generator_of(function: str, config: TrainConfig, model: nn.Module, task: Task) -> Generator:
    """Return the generator that a configuration names, for a network and the task's texts."""
    decode, dtype = task.tokenizer.decode, compute_dtype(config)
    given: dict[str, Any] = {"decode": decode, "slots": config.slots, "dtype": dtype}
    if config.generator not in GENERATORS:
        made = import_named("--generator", config.generator)
        found = call_with_known("--generator", config.generator, made, model=model, **given)
        return check_generator(function, f"--generator {config.generator} to make", found)
    if config.generator == "sampler":
        return _embedded(model)(model, **given)
    if not isinstance(model, Transformer):
        raise ValueError(
            f"{function} expects --generator sampler for a network that is no Transformer, which "
            f"vLLM does not know, got vllm for {type(model).__name__}."
        )
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


def _embedded(model: nn.Module) -> Any:
    """Return the generator in this process that draws from a network."""
    if isinstance(model, Transformer | Recurrent):
        return Sampler
    cached = is_of_transformers(model) and forward_takes(model, "past_key_values")
    return HuggingFace if cached else Recompute


def check_generator(function: str, what: str, found: Any) -> Generator:
    """Return an object that generates; raise in the name of `function` if it lacks a member.

    Args:
        function: for errors.
        what: what it is, up to the words "a funcrl.generators.Generator".
        found: any object.
    """
    for member in ("push", "generate", "close", "context_length"):
        if not hasattr(found, member):
            raise ValueError(
                f"{function} expects {what} a funcrl.generators.Generator, got "
                f"{type(found).__name__} without {member}."
            )
    generator: Generator = found
    return generator


def compute_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype to compute in, None for that of the parameters."""
    return None if config.dtype == "float32" else getattr(torch, config.dtype)


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


def _own(
    part: str,
    name: str,
    known: Mapping[str, Any],
    refusable: Mapping[str, Any],
    taken: Mapping[str, str],
    kind: type[Any],
) -> Any:
    """Return the part that a user's function makes of the known arguments that it takes, or is.

    Args:
        part: "algorithm" or "optimizer".
        name: file.py:name.
        known: argument -> value.
        refusable: option -> value; an error where it is set and the function does not take it.
        taken: option -> the argument that it is, where that has another name.
        kind: of what is wanted.
    """
    found = import_named(f"--{part}.name", name)
    takes = arguments_taken(found, known) if callable(found) else []
    unset = {}
    for option, value in refusable.items():
        argument, flag = taken.get(option, option.replace("-", "_")), f"--{part}.{option}"
        if value and argument not in takes:
            cleared = f"{flag} 0" if option in ("kl", "entropy", "weight-decay") else f"no {flag}"
            raise ValueError(
                f"train expects {cleared} for {name}, which takes no {argument}, got {value}."
            )
        if argument not in known:
            unset[argument] = flag
    made = (
        found
        if isinstance(found, kind)
        else call_with_known(f"--{part}.name", name, found, unset, **known)
    )
    if not isinstance(made, kind):
        raise ValueError(
            f"train expects --{part}.name {name} to name a function that returns a "
            f"{kind.__name__}, or one, got {type(made).__name__}."
        )
    return made

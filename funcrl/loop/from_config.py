"""The network and the generator that a configuration names."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.config import TrainConfig
from funcrl.config.sections import GENERATORS
from funcrl.core.rows import over_rows
from funcrl.core.types import ModelFn, Params, Sample
from funcrl.generators import VLLM, Generator, HuggingFace, Recompute, Sampler
from funcrl.generators.draw import truncation_of
from funcrl.graph.nodes import layer_of
from funcrl.loop import memory
from funcrl.loop.module_memory import Uncounted
from funcrl.loop.supervised import answers_of
from funcrl.models import Recurrent, Transformer, with_critic
from funcrl.models.initial import CRITIC, has_values
from funcrl.models.logprobs import Teacher, chunk_for, logprob_fn
from funcrl.models.lora import has_adapted_weights
from funcrl.models.networks import (
    LogitsFn,
    forward_takes,
    is_of_transformers,
    keeps_cache,
    logits_fn,
)
from funcrl.models.transformer import has_delta
from funcrl.ops import AttendFn, Truncation, attend_flash, attend_flash_segments
from funcrl.tasks.contracts import Task
from funcrl.tasks.named import call_with_known, import_named
from funcrl.tasks.reward_calls import describe_error, is_of_user


def check_model(function: str, config: TrainConfig, model: nn.Module, vocab_size: int) -> None:
    """Raise if a network, as it is, does not give causal logits of the task's tokens."""
    params: Params = dict(model.named_parameters())
    if not has_values(model):
        return
    what, kind = f"{function} expects --model {config.model}", type(model).__name__
    device = next((leaf.device for leaf in params.values()), torch.device("cpu"))
    tokens = torch.tensor([0, vocab_size - 1], device=device)  # the first and the last
    logits, sample = logits_fn(model), Sample(tokens, torch.arange(2, device=device))
    with torch.no_grad():
        found = _logits_of_two(f"{what} to give logits", kind, logits, params, sample, vocab_size)
        other = logits(params, sample._replace(tokens=tokens[:1].expand(2)))
        if not torch.allclose(found[0], other[0], rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{what} to be causal, so that the logits at a token depend on it and on those "
                f"before it, got {kind}, whose logits at the first of 2 tokens change with the "
                f"second; does its attention have a causal mask?"
            )
        if not is_of_transformers(model):  # its generator need not batch it by vmap
            _check_rows(function, logits, params, sample)


def _logits_of_two(
    what: str, kind: str, logits: LogitsFn, params: Params, sample: Sample, vocab_size: int
) -> Tensor:
    what = (
        f"{what} [T, at least {vocab_size}] of the tokens [T] of one sample, without a batch axis"
    )
    try:
        found = logits(params, sample)
    except Exception as error:
        of_torch = isinstance(error, IndexError | RuntimeError | AttributeError)
        if not of_torch and not is_of_user(error):  # funcrl's own says what is wrong
            raise
        raise ValueError(f"{what}. {describe_error(kind, error)}.") from error
    got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if not isinstance(got, list) or len(got) != 2 or got[0] != 2 or got[1] < vocab_size:
        raise ValueError(f"{what}, got {got} of 2 tokens.")
    return found


def _check_rows(function: str, logits: LogitsFn, params: Params, sample: Sample) -> None:
    """Raise if vmap cannot run the network over rows of samples."""
    rows = Sample(sample.tokens[None], sample.positions[None])
    try:
        over_rows(function, logits)(params, rows)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error


def plain_model_fn(
    function: str,
    config: TrainConfig,
    model: nn.Module,
    teacher: Teacher | None = None,
    critic: bool = False,
) -> ModelFn:
    """Return the scores of a network's own parameters, as the configuration computes them."""
    if critic:
        check_critic(function, model)
    taught_by = None if config.algorithm.divergence == "sampled" else teacher
    networks = [model] if taught_by is None else [model, taught_by.model]
    for network in networks:
        _check_packing(function, config, network)
    return logprob_fn(
        model,
        config.sampling.temperature or 1.0,
        chunk=chunk_for(config.logprob_chunk, networks),
        # A base that is not trained has dtypes of its own, which a cast would lose.
        dtype=None if has_adapted_weights(model) else compute_dtype(config),
        attend=_attend(function, config, model),
        attend_segments=attend_flash_segments if config.attend == "flash" else None,
        teacher=taught_by,
        critic=critic,
        truncation=trained_truncation(config),
    )


def trained_truncation(config: TrainConfig) -> Truncation | None:
    """Return which tokens the trained distribution leaves out, if any."""
    return None if config.behavior == "policy" else truncation_of(config.sampling)


def has_critic(config: TrainConfig) -> bool:
    """Return whether a critic is trained beside the network."""
    return config.algorithm.name == "ppo"


def with_its_critic(config: TrainConfig, model: nn.Module, params: Params) -> Params:
    """Return what a configuration trains: parameters, and those of a critic if it has one."""
    if not has_critic(config) or CRITIC[0] in params:
        return params
    return with_critic(params, check_critic("train", model).config.width)


def check_critic(function: str, model: nn.Module) -> Transformer | Recurrent:
    """Return a network that a critic can read; raise if it cannot."""
    if not isinstance(model, Transformer | Recurrent):
        raise ValueError(
            f"{function} expects a network of funcrl's own with ppo, whose critic reads its last "
            f"layer's output, got {type(model).__name__}; a model_fn of one's own can have one."
        )
    return model


def _check_packing(function: str, config: TrainConfig, model: nn.Module) -> None:
    """Raise if samples of a packed row would see each other."""
    carries = forward_takes(model, "resets") or has_delta(model)
    if config.packing != "none" and not (carries or forward_takes(model, "attend")):
        raise ValueError(
            f"{function} expects --packing none for a network whose forward takes neither attend= "
            f"nor resets=, and would let samples of a row see each other, got {config.packing} for "
            f"{type(model).__name__}."
        )
    if config.packing == "prefixes" and carries:
        raise ValueError(
            f"{function} expects --packing none or samples for a network that carries a state, "
            f"which does not fork behind a shared prompt, got prefixes for {type(model).__name__}."
        )


def check_remat(function: str, config: TrainConfig, model: nn.Module) -> None:
    """Raise if a compiled step is to compute layers again in a network without a list of them."""
    policy = "none" if config.compile is None else config.compile.remat
    if policy != "none" and not any(layer_of(name) for name, _ in model.named_modules()):
        raise ValueError(
            f"{function} expects --compile.remat none for a network without a list of layers, "
            f"whose activations it would compute again, got {policy} for {type(model).__name__}."
        )


def _attend(function: str, config: TrainConfig, model: nn.Module) -> AttendFn | None:
    """Return how heads attend; None is the network's own way."""
    if config.attend == "native":
        return None
    if not isinstance(model, Transformer):
        raise ValueError(
            f"{function} expects --attend native for a network of one's own, which attends in its "
            f"own way, got flash for {type(model).__name__}."
        )
    width = model.config.head_width
    if config.device == "cuda" and width % 8:
        raise ValueError(
            f"{function} expects --attend native for heads that are no multiple of 8 wide, on "
            f"cuda, got flash for heads of {width}."
        )
    return attend_flash


def generator_of(
    function: str,
    config: TrainConfig,
    model: nn.Module,
    task: Task,
    num_ranks: int,
    teacher: nn.Module | None = None,
) -> Generator:
    """Return the generator that a configuration names, for a network and the task's texts."""
    decode, dtype = task.tokenizer.decode, compute_dtype(config)
    given: dict[str, Any] = {"decode": decode, "slots": config.slots, "dtype": dtype}
    if config.generator not in GENERATORS:
        made = import_named("--generator", config.generator)
        found = call_with_known("--generator", config.generator, made, model=model, **given)
        return check_generator(function, f"--generator {config.generator} to make", found)
    if config.generator == "sampler":
        return embedded(model)(model, **given)
    if not (isinstance(model, Transformer) or is_of_transformers(model)):
        raise ValueError(
            f"{function} expects --generator sampler for a network that is no Transformer, which "
            f"vLLM does not know, got vllm for {type(model).__name__}."
        )
    # The ratio is of the distribution that was sampled from; vLLM keeps only one of the two.
    engine = config.vllm
    if config.sampling.temperature != 1 or trained_truncation(config):
        engine = replace(engine, logprobs="sampling")
    beside = 0
    shares_gpu = config.device == "cuda" and not (engine.form == "server" and engine.server.devices)
    if shares_gpu and not engine.cache_bytes:
        try:
            needs = estimate_memory(config, model, task, num_ranks, teacher)
        except Uncounted as error:
            raise ValueError(
                f"{function} expects --vllm.cache-bytes where it is not known how much of the GPU "
                f"an update needs, got none: {error}."
            ) from error
        # An engine that sleeps lends its memory to the update.
        beside = needs.state + (0 if engine.sleep else needs.training)
    return VLLM(
        model, config=engine, dtype=dtype or torch.float32, decode=decode, trainer_bytes=beside
    )


def embedded(model: nn.Module) -> Any:
    """Return the generator in this process that draws from a network."""
    if isinstance(model, Transformer | Recurrent):
        return Sampler
    return HuggingFace if keeps_cache(model) else Recompute


def check_generator(function: str, what: str, found: Any) -> Generator:
    """Return an object that generates; raise in the name of `function` if it lacks a member."""
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


def estimate_memory(
    config: TrainConfig,
    model: nn.Module,
    task: Task,
    num_ranks: int,
    teacher: nn.Module | None = None,
) -> memory.MemoryEstimate:
    """Return the memory that training will need, if the first prompts are as long as any.

    Args:
        config: the run's.
        model: a `Transformer`, or a model of transformers.
        task: that it is trained on.
        num_ranks: that train together.
        teacher: of a run that has one.
    """
    longest = longest_prompt(config, task)
    return memory.estimate_memory(config, model, longest, task.max_turns, num_ranks, teacher)


def longest_prompt(config: TrainConfig, task: Task) -> int:
    """Return the tokens of the longest of a task's first prompts that are not left out.

    In supervised training what of a given answer is longer than a drawn one is counted as its
    prompt's.
    """
    limit = config.max_prompt_length
    first = [
        (prompt, len(task.tokenizer.encode(prompt.text)))
        for prompt in task.prompts(config.seed, 0, config.num_prompts)
    ]
    kept = [(prompt, length) for prompt, length in first if limit is None or length <= limit]
    longest = max((length for _, length in kept), default=limit or 0)
    if not config.is_supervised or not kept:
        return longest
    rows = answers_of(task, [prompt for prompt, _ in kept], "cpu").tokens
    return max(longest, rows.shape[1] - config.sampling.max_tokens)

"""Estimates the memory that a configuration needs, before anything is loaded."""

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Size, nn

from funcrl.config import LoraConfig, OptimizerConfig, TrainConfig
from funcrl.config.sections import WITHOUT_REWARDS, is_own
from funcrl.core import tree
from funcrl.core.arguments import checked
from funcrl.loop.algorithm import optimizer_of
from funcrl.loop.block_memory import (
    FLOAT,
    Rows,
    logits_bytes,
    number_bytes,
    read_and_found,
    remat_of,
    work_of_shape,
)
from funcrl.loop.module_memory import work_of_module
from funcrl.models import Transformer, TransformerConfig
from funcrl.models.logprobs import chunk_for
from funcrl.models.lora import targets_of
from funcrl.ops.quantized import BLOCK

# Of what a step on a GPU makes and frees: by this much more four compiled runs on an H200 held
# (docs/benchmarks.md, "The memory estimate").
_RESERVE = 0.26
# A packed row whose length is not given is this many times as long as the longest sample: little
# of it is then left empty.
LONGEST = 4


# What an estimate is of: a network, or the shape of funcrl's own.
Network: TypeAlias = TransformerConfig | nn.Module

# What lowers each part, where memory runs out.
_LOWERED_BY = {
    "parameters": "--lora.rank 16 with --lora.base-dtype nf4",
    "optimizer": "--optimizer.moments 8bit",
    "reference": "--algorithm.kl 0",
    "teacher": "a teacher on another device (funcrl.ServedTeacher)",
    "older": "--max-staleness 0",
    "sampler": "--dtype bfloat16",
    "activations": "--microbatch, --attend flash or --compile.remat selective",
    "logits": "--logprob-chunk 256",
    "recomputed": "--microbatch",
    "per_sample": "--microbatch",
    "gradients": "--lora.rank 16",
    "accumulated": "a larger --microbatch with --compile.remat full, or --lora.rank 16",
    "first_state": "--compile",
    "updates": "--compile",
    "next_state": "--compile.backend inductor or --optimizer.moments 8bit",
    "checkpoint": "--optimizer.moments 8bit (or --checkpoint.every 0, without a resume)",
    "cache": "--slots",
    "kept_cache": "--slots",
}


class MemoryEstimate(NamedTuple):
    """The bytes of each part of a run."""

    parameters: int
    optimizer: int  # its state, such as AdamW's two moments
    reference: int  # the reference policy of a KL penalty
    teacher: int
    older: int  # the policies that rollouts are drawn with while others are trained
    sampler: int  # the sampler's copy of the weights, in its own layout or dtype
    activations: int  # of one micro-batch, kept for its backward pass
    logits: int  # of one chunk of tokens, or of all of a micro-batch; and their matrix's gradient
    recomputed: int  # of one block, while the gradient of that matrix is there
    per_sample: int  # what --optimizer.clip-per-sample keeps until the norms are known
    gradients: int
    accumulated: int  # gradients of earlier micro-batches, while one is differentiated
    first_state: int  # before the first of several updates, until the last one ends
    next_state: int  # new parameters and moments beside the old: an update is pure
    updates: int  # and the clipped gradients, until an update ends that is not compiled
    checkpoint: int  # an older state, while it is being written
    cache: int  # keys and values of the samples in progress
    kept_cache: int  # of these, what a captured sampler keeps while the step trains
    reserve: int = 0  # a GPU's context, and what its allocator and its graphs hold unused

    @property
    def advice(self) -> str:
        """Which part is the largest, and what lowers it."""
        parts = {name: value for name, value in self._asdict().items() if name in _LOWERED_BY}
        name = max(parts, key=parts.__getitem__)
        return (
            f"By the estimate the largest part is {name}, {parts[name] / 1e9:.3g} GB where the "
            f"peak is {self.peak / 1e9:.3g} GB; {_LOWERED_BY[name]} lowers it."
        )

    @property
    def state(self) -> int:
        """What the trainer holds all the time, without an engine."""
        kept = self.reference + self.teacher + self.older + self.checkpoint
        return self.parameters + self.optimizer + kept

    @property
    def resident(self) -> int:
        """What is alive all the time."""
        return self.state + self.sampler

    @property
    def training(self) -> int:
        """The largest of what the ends of a backward pass and the update need besides."""
        backward = max(self.at_its_start, self.gradients + self.per_sample)
        update = self.gradients + self.next_state + self.updates
        return self.first_state + max(self.accumulated + backward, update)

    @property
    def at_its_start(self) -> int:
        """What the backward pass of a micro-batch begins with."""
        return self.activations + max(self.logits, self.recomputed)

    @property
    def peak(self) -> int:
        """What is alive all the time, and the larger need of generation and training.

        Where older policies draw while others are trained, both needs at once.
        """
        if self.older:
            needs = self.cache + self.training
        else:
            needs = max(self.cache, self.kept_cache + self.training)
        return self.resident + needs + self.reserve


@checked
def num_params(config: Network) -> int:
    """Return the number of parameters of a shape, or of a model.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.shape("micro", vocab_size=13)
        >>> funcrl.memory.num_params(config)
        99520
    """
    return sum(size.numel() for size in _sizes(config).values())


def _sizes(network: Network) -> dict[str, Size]:
    """Return the size of each parameter of a network."""
    if isinstance(network, TransformerConfig):
        return _sizes_of_shape(network)
    return {name: leaf.shape for name, leaf in network.named_parameters()}


@lru_cache  # an estimate asks for them four times, and choosing options makes several estimates
def _sizes_of_shape(shape: TransformerConfig) -> dict[str, Size]:
    return _sizes(Transformer(shape))


@checked
def num_trained(config: TrainConfig, shape: Network) -> int:
    """Return how many numbers are trained: all parameters, or those of adapters.

    Example:
        >>> import funcrl
        >>> from funcrl.config import LoraConfig, TrainConfig
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> funcrl.memory.num_trained(TrainConfig(lora=LoraConfig(rank=4)), shape)
        9728
    """
    return sum(size.numel() for size in _trained(config.lora, shape).values())


def _trained(lora: LoraConfig, shape: Network) -> dict[str, Size]:
    """Return the size of each parameter that is trained: all, or those of adapters."""
    if not lora.rank:
        return _sizes(shape)
    adapters: dict[str, Size] = {}
    for name, (rows, columns) in _adapted(lora, shape).items():
        adapters |= {f"{name}.A": Size((lora.rank, columns)), f"{name}.B": Size((rows, lora.rank))}
    return adapters


def _adapted(lora: LoraConfig, shape: Network) -> dict[str, Size]:
    """Return the size of each matrix that has adapters."""
    sizes = _sizes(shape).items()
    adapts = targets_of(lora, shape) if isinstance(shape, nn.Module) else lora.adapts
    return {name: size for name, size in sizes if len(size) == 2 and adapts(name)}


# In bytes, a number of a matrix that is not trained, with its share of a scale.
_NUMBER_OF_BASE = {
    "float32": 4,
    "bfloat16": 2,
    "int8": 1 + FLOAT / BLOCK,
    "nf4": 0.5 + FLOAT / BLOCK,
}


def _base_and_merged(config: TrainConfig, shape: Network, compute: int) -> tuple[int, int]:
    """Return the bytes of a base that has adapters, and of the base with these added."""
    if not config.lora.rank:
        return 0, 0
    if config.numerics == "exact":
        return FLOAT * num_params(shape), FLOAT * num_params(shape)
    adapted = sum(size.numel() for size in _adapted(config.lora, shape).values())
    others = compute * (num_params(shape) - adapted)
    rounded = round(_NUMBER_OF_BASE[config.lora.base_dtype] * adapted)
    return rounded + others, compute * num_params(shape)


def _rows_of_training(
    config: TrainConfig, prompt: int, completion: int, num_ranks: int
) -> tuple[int, int]:
    """Return a rank's rows of an update, and their tokens, if all samples are of full length."""
    copies = 1 if config.is_supervised else config.num_generations
    samples = config.num_prompts * copies // config.num_minibatches
    length = prompt + completion
    width = length + -length % config.length_multiple
    if config.packing == "none":
        return -(-samples // num_ranks), width
    packed = config.pack_length or LONGEST * width
    total = samples * length
    if config.packing == "prefixes":
        total -= max(samples - config.num_prompts, 0) * max(prompt - 1, 0)
    rows = -(-total // packed)
    return -(-(rows + -rows % config.pack_rows) // num_ranks), packed


def _kind_of_optimizer(config: TrainConfig) -> OptimizerConfig:
    """Return the options that the size of its state depends on; for a user's own, AdamW's."""
    options = config.optimizer
    if is_own(options.name):
        return OptimizerConfig()
    return OptimizerConfig(name=options.name, moments=options.moments)


@lru_cache
def _optimizer_state(options: OptimizerConfig, sizes: tuple[tuple[str, Size], ...]) -> int:
    """Return the bytes of an optimizer's state of all that is trained."""
    trained = {name: torch.empty(size, device="meta") for name, size in sizes}
    state = optimizer_of(TrainConfig(optimizer=options)).init(trained)
    return sum(leaf.nbytes for leaf in tree.leaves(state) if leaf.ndim)  # without counts of steps


class _Shares(NamedTuple):
    """The bytes of float32 numbers of all that is trained, as a rank has them."""

    parameters: int
    gradients: int
    updated: int  # parameters that this rank's optimizer updates
    gathered: int  # whole parameters within a step, where a rank holds some rows of each


def _shares(config: TrainConfig, shape: Network, num_ranks: int) -> _Shares:
    whole = FLOAT * num_trained(config, shape)
    sharing = min(config.num_sharing(num_ranks), num_ranks)
    part = -(-whole // sharing)
    if sharing == 1:
        return _Shares(whole, whole, whole, gathered=0)
    # A compiled step scatters each gradient at once, and has two layers' parameters whole.
    is_late = config.compile is not None
    gradients = part if is_late else whole
    if config.shard == "optimizer":
        return _Shares(whole, gradients, part, gathered=0)
    return _Shares(part, gradients, part, 2 * whole // _num_layers(shape) if is_late else whole)


@checked
def estimate_memory(
    config: TrainConfig,
    shape: Network,
    prompt_tokens: int,
    num_turns: int = 1,
    num_ranks: int = 1,
    teacher: Network | None = None,
) -> MemoryEstimate:
    """Return what training with this configuration needs, on each rank.

    Args:
        config: the run's.
        shape: the model's, or the model. One that is no `Transformer` is run on meta tensors; what
            recomputation saves is not counted for it.
        prompt_tokens: of the longest prompt.
        num_turns: of an environment, whose observations are assumed no longer than completions.
        num_ranks: that train together; `config.shard` says what they share.
        teacher: the model that `config.teacher` names, or its shape.

    Example:
        >>> import funcrl
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> estimate = funcrl.memory.estimate_memory(funcrl.config.TrainConfig(), shape, 8)
        >>> estimate.optimizer == 2 * estimate.parameters
        True
    """
    shape = shape.config if isinstance(shape, Transformer) else shape
    trained = FLOAT * num_trained(config, shape)
    has_policy_gradient = config.algorithm.name not in WITHOUT_REWARDS
    share = _shares(config, shape, num_ranks)
    on_gpu, is_half = config.device == "cuda", config.dtype == "bfloat16"
    compute = number_bytes(config)
    base, merged = _base_and_merged(config, shape, compute)
    # Within an exact step the merged parameters have a gradient as large as they.
    merged_within = merged if config.numerics == "exact" else 0
    completion = config.sampling.max_tokens * (2 * num_turns - 1)
    all_rows, padded = _rows_of_training(config, prompt_tokens, completion, num_ranks)
    rows = min(config.microbatch or all_rows, all_rows)
    slots = min(config.slots, -(-config.num_prompts // num_ranks) * config.num_generations)
    length = prompt_tokens + completion
    sizes = Rows(rows, padded, slots, length, _shared_tokens(config, slots, length, num_turns))
    networks = [shape] if config.algorithm.divergence == "sampled" else [shape, teacher]
    chunk = chunk_for(
        config.logprob_chunk, (each for each in networks if isinstance(each, nn.Module))
    )
    logits = logits_bytes(config, rows * padded, chunk)
    if isinstance(shape, TransformerConfig):
        work = work_of_shape(config, shape, sizes, logits)
    else:
        work = work_of_module(config, shape, sizes, logits)
    # The sampler has a layout of its own on a CPU, and whole parameters where ranks share them.
    has_copy = is_half or bool(share.gathered) or work.has_layout
    # What ranks share is put together for a checkpoint on the first one's host.
    is_put_together = num_ranks > 1 and config.shard != "none" and on_gpu
    moves = config.algorithm.reference_every is not None  # the reference is part of a checkpoint
    saves = bool(config.checkpoint.every) and not is_put_together
    is_in_place = config.compile is not None and config.compile.backend == "inductor"
    keeps_first = config.compile is None and config.num_iterations * config.num_minibatches > 1
    trained_sizes = tuple(_trained(config.lora, shape).items())
    moments = _optimizer_state(_kind_of_optimizer(config), trained_sizes)
    own_moments = round(moments * share.updated / trained)
    updates = share.updated * (2 if moments or config.optimizer.weight_decay else 1)
    estimate = MemoryEstimate(
        parameters=share.parameters + base + merged,
        optimizer=own_moments,
        reference=trained if config.algorithm.kl and has_policy_gradient else 0,
        teacher=0 if teacher is None else num_params(teacher) * compute,
        older=_num_older(config) * (trained + merged),
        sampler=num_params(shape) * compute if has_copy else 0,
        activations=work.kept + _cast(config, shape, share),
        # A teacher has as many of its own.
        logits=work.logits + (0 if teacher is None else work.of_teacher),
        recomputed=work.recomputed,
        per_sample=_per_sample(config, shape, rows, padded, compute),
        gradients=share.gradients + share.gathered + merged_within,
        accumulated=_accumulated(config, shape, share, -(-all_rows // rows)),
        first_state=(share.parameters + own_moments) * keeps_first,
        # Inductor's pieces write over the old state layer by layer.
        next_state=(share.parameters + own_moments) * (not is_in_place),
        updates=updates if config.compile is None else 0,
        checkpoint=saves * ((1 + config.max_staleness + moves) * trained + moments),
        cache=work.cache,
        kept_cache=work.cache if work.is_captured else 0,
    )
    return estimate._replace(reserve=round(_RESERVE * estimate.at_its_start) if on_gpu else 0)


def _shared_tokens(config: TrainConfig, slots: int, length: int, num_turns: int) -> int:
    """Return how many tokens of a paged cache are also those of another sample of its prompt.

    An evaluation draws one sample of each prompt, and later turns have prompts of their own.
    """
    if num_turns > 1:
        return 0
    completion, prompts = config.sampling.max_tokens, -(-slots // config.num_generations)
    evaluated = min(config.slots, config.evaluation.num_prompts) if config.evaluation.every else 0
    needed = slots * completion + prompts * (length - completion)
    return max(0, slots * length - max(needed, evaluated * length))


def _accumulated(config: TrainConfig, shape: Network, share: _Shares, num_microbatches: int) -> int:
    """Return the bytes of the gradients of earlier micro-batches.

    Exact numerics add micro-batches up in pairs: sums of 1, 2, 4 and so on of them wait for one of
    as many, and a tied matrix has two gradients until the end.
    """
    if num_microbatches == 1:
        return 0
    in_pairs = config.numerics == "exact" and not config.lora.rank
    clips = config.optimizer.clip_per_sample is not None
    if not in_pairs or clips or not isinstance(shape, TransformerConfig):
        return share.updated
    second = FLOAT * shape.vocab_size * shape.width * shape.tied
    whole = FLOAT * num_trained(config, shape) + second
    return (num_microbatches.bit_length() - 1) * whole


def _num_layers(network: Network) -> int:
    if isinstance(network, TransformerConfig):
        return network.num_layers
    return int(getattr(getattr(network, "config", None), "num_hidden_layers", 1))


def _cast(config: TrainConfig, shape: Network, share: _Shares) -> int:
    """Return the bytes of the parameters that a step has in half precision besides."""
    has_adapters = config.lora.rank > 0
    if config.dtype != "bfloat16" or (has_adapters and config.numerics != "exact"):
        return 0
    cast = 2 * num_params(shape)
    if share.gathered and not has_adapters:
        cast = min(cast, share.gathered)
    recomputes = remat_of(config) in ("selective", "full")  # with those of a block cast again
    if isinstance(shape, TransformerConfig) and recomputes:
        cast = min(cast, 2 * shape.vocab_size * shape.width * (1 if shape.tied else 2))
    return cast


def _per_sample(config: TrainConfig, shape: Network, rows: int, tokens: int, compute: int) -> int:
    """Return the bytes that clipping each of some rows keeps until all norms are known.

    Those of gradients, once as they are and once clipped. A compiled step does not make them: it
    keeps what each parameter is multiplied with, and the gradient of the result, whose place the
    parameters' gradients then take.
    """
    if config.optimizer.clip_per_sample is None:
        return 0
    is_fused = config.compile is not None and config.compile.fuse != "none"
    if not is_fused or not isinstance(shape, TransformerConfig):
        return 2 * rows * FLOAT * num_trained(config, shape)
    kept = rows * tokens * compute * sum(read_and_found(shape, kind) for kind in shape.kinds)
    return max(0, kept - FLOAT * num_trained(config, shape))


def _num_older(config: TrainConfig) -> int:
    """Return how many policies are alive besides the one that a step trains."""
    if not config.max_staleness:
        return 0
    # A compiled step writes over the parameters that it gets, so that a copy of them is kept, too.
    return config.max_staleness + (config.compile is not None)

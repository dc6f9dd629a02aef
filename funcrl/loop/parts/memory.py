"""Estimates the memory that a configuration needs, before anything is loaded."""

from typing import NamedTuple

from funcrl.config import TrainConfig
from funcrl.core.arguments import checked
from funcrl.models import Transformer, TransformerConfig

_FLOAT = 4


class MemoryEstimate(NamedTuple):
    """The bytes of each part of a run."""

    parameters: int
    optimizer: int  # AdamW's two moments
    reference: int  # the reference policy of a KL penalty
    older: int  # the policies that rollouts are drawn with while others are trained
    sampler: int  # the sampler's copy of the weights, in its own layout or dtype
    activations: int  # of one micro-batch, kept for its backward pass
    logits: int  # of one chunk of tokens
    gradients: int
    next_state: int  # new parameters and moments beside the old: an update is pure
    checkpoint: int  # an older state, while it is being written
    cache: int  # keys and values of the samples in progress

    @property
    def state(self) -> int:
        """What the trainer holds all the time, without an engine."""
        kept = self.reference + self.older + self.checkpoint
        return self.parameters + self.optimizer + kept

    @property
    def resident(self) -> int:
        """What is alive all the time."""
        return self.state + self.sampler

    @property
    def training(self) -> int:
        """The larger of what differentiation and the update need besides."""
        differentiate = self.activations + self.logits + self.gradients
        return max(differentiate, self.gradients + self.next_state)

    @property
    def peak(self) -> int:
        """What is alive all the time, and the larger need of generation and training.

        Where older policies draw while others are trained, both needs at once.
        """
        needs = self.cache, self.training
        return self.resident + (sum(needs) if self.older else max(needs))


@checked
def num_params(config: TransformerConfig) -> int:
    """Return the number of parameters of a shape.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.shape("micro", vocab_size=13)
        >>> model = funcrl.models.Transformer(config)
        >>> counted = sum(leaf.numel() for leaf in model.parameters())
        >>> funcrl.memory.num_params(config) == counted
        True
    """
    c = config
    heads, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    attention = 2 * c.width * heads + 2 * c.width * kv
    attention += (heads + 2 * kv) * c.qkv_bias + 2 * c.head_width * c.qk_norm
    block = attention + 3 * c.width * c.mlp_width + 2 * c.width
    return c.num_layers * block + c.width + c.vocab_size * c.width * (1 if c.tied else 2)


@checked
def num_trained(config: TrainConfig, shape: TransformerConfig) -> int:
    """Return how many numbers are trained: all parameters, or those of adapters.

    Example:
        >>> import funcrl
        >>> from funcrl.config import LoraConfig, TrainConfig
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> funcrl.memory.num_trained(TrainConfig(lora=LoraConfig(rank=4)), shape)
        9728
    """
    lora = config.lora
    if not lora.rank:
        return num_params(shape)
    return sum(
        lora.rank * sum(leaf.shape)
        for name, leaf in Transformer(shape).named_parameters()
        if leaf.ndim == 2 and lora.adapts(name)
    )


@checked
def estimate_memory(
    config: TrainConfig, shape: TransformerConfig, prompt_tokens: int, num_turns: int = 1
) -> MemoryEstimate:
    """Return what training with this configuration needs.

    Args:
        config: the run's.
        shape: the model's.
        prompt_tokens: of the longest prompt.
        num_turns: of an environment, whose observations are assumed no longer than completions.

    Example:
        >>> import funcrl
        >>> shape = funcrl.models.shape("micro", vocab_size=13)
        >>> estimate = funcrl.memory.estimate_memory(funcrl.config.TrainConfig(), shape, 8)
        >>> estimate.optimizer == 2 * estimate.parameters
        True
    """
    c, params, trained = shape, _FLOAT * num_params(shape), _FLOAT * num_trained(config, shape)
    merged = params if config.lora.rank else 0  # the base, and the base with the adapters merged
    compute = 2 if config.dtype == "bfloat16" else _FLOAT
    completion = config.sampling.max_tokens * (2 * num_turns - 1)
    length = prompt_tokens + completion
    padded = length + -length % config.length_multiple  # in training alone
    all_rows = config.num_prompts * config.num_generations // config.num_minibatches
    rows = min(config.microbatch or all_rows, all_rows)
    heads, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    # A token's tensors that a block keeps for its backward pass: two norms (the input, widened,
    # squared and scaled), the projections before and after rotation, and the gated MLP; scores and
    # weights of attention are a row of `padded` a head, and one number by the flash kernel.
    widened = 4 * c.width + heads + kv + (2 * heads if c.qk_norm else 0)  # float32 in any case
    block = 4 * c.width + 2 * heads + 3 * kv + (2 * heads if c.qk_norm else 0) + 4 * c.mlp_width
    block += 3 * c.num_heads * (padded if config.attend == "native" else 1)
    block_bytes = block * compute + widened * _FLOAT
    copies = num_params(shape) * compute if config.dtype == "bfloat16" else 0
    slots = min(config.slots, config.num_prompts * config.num_generations)
    return MemoryEstimate(
        parameters=trained + 2 * merged if merged else params,
        optimizer=2 * trained,
        reference=trained if config.algorithm.kl else 0,
        older=_num_older(config) * (trained + merged),
        sampler=num_params(shape) * compute if config.device == "cpu" or copies else 0,
        activations=rows * padded * c.num_layers * block_bytes + copies,
        logits=4 * min(config.logprob_chunk, rows * padded) * c.vocab_size * _FLOAT,
        gradients=trained + merged,
        # With several updates a step, the state before the first is kept.
        next_state=3 * trained * min(config.num_iterations * config.num_minibatches, 2),
        checkpoint=(3 + config.max_staleness) * trained,
        cache=2 * c.num_layers * kv * slots * length * compute,
    )


def _num_older(config: TrainConfig) -> int:
    """Return how many policies are alive besides the one that a step trains."""
    if not config.max_staleness:
        return 0
    # A compiled step writes over the parameters that it gets, so that a copy of them is kept, too.
    return config.max_staleness + (config.compile is not None)

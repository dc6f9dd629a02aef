"""The embedded sampler: funcrl's own networks, in this process, on any device."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from funcrl.config import Sampling
from funcrl.core.arguments import checked
from funcrl.core.types import Params, Samples
from funcrl.generators.contract import Prompts
from funcrl.generators.embedded.batch import Batch
from funcrl.generators.embedded.cache import CachedTransformer
from funcrl.generators.embedded.captured import Captured, is_captured
from funcrl.generators.embedded.engine import (
    DrawFn,
    EmbeddedGenerator,
    LayOutFn,
    Network,
    cast,
)
from funcrl.generators.embedded.recurrent import RecurrentDraw
from funcrl.generators.embedded.schedule import Completions, Request, completions
from funcrl.generators.packed import pack_weights
from funcrl.generators.stops import DecodeFn
from funcrl.models import Recurrent, Transformer
from funcrl.models.functional import bind, check_params
from funcrl.models.logprobs import logprob_fn


@checked
def sample(
    model: nn.Module,
    params: Params,
    prompts: Prompts,
    sampling: Sampling,
    seed: int,
    *,
    decode: DecodeFn | None = None,
    slots: int = 256,
) -> Samples:
    """Return `sampling.num_samples` completions of each prompt.

    A sample is a function of the parameters, its prompt, the seed and its number among the samples
    of that prompt: what else is in the batch, and in which order, does not matter, up to the
    rounding of products of other shapes.

    Args:
        model: a `funcrl.models.Transformer` or `funcrl.models.Recurrent`.
        params: its parameters; their dtype is the one computed in.
        prompts: N lists of tokens.
        sampling: how to draw.
        seed: of all the draws.
        decode: from tokens to text, for `sampling.stop`.
        slots: samples drawn at a time, which bounds the memory of the cache; at least
            `sampling.num_samples`.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> sampling = funcrl.generators.Sampling(num_samples=2, max_tokens=5)
        >>> samples = funcrl.generators.sample(model, params, [[1, 2], [3]], sampling, seed=0)
        >>> samples.tokens.shape, samples.finish_reasons
        (torch.Size([4, 5]), ('length', 'length', 'length', 'length'))
    """
    generator = Sampler(model, decode=decode, slots=slots)
    generator.push(params)
    return generator.generate(prompts, sampling, seed)


class Sampler(EmbeddedGenerator):
    """The generator that needs nothing but torch: `push` parameters, then `generate`.

    Args:
        model: a `funcrl.models.Transformer`, whose samples have a cache of keys and values, or a
            `funcrl.models.Recurrent`, whose samples carry a state.
        decode: from tokens to text, for stop strings.
        slots: samples drawn at a time, by continuous batching: a finished one is evicted at once,
            and waiting prompts are admitted.
        dtype: to compute in; that of the parameters when left out.

    A push copies nothing: if the pushed tensors are changed in place, the new values are used.

    Of a recurrent network the states of a call's samples are kept until the next call, `forget`, or
    a push that names no version or another one: a prompt that continues one of these samples, as
    the turns of an environment do, costs its new tokens alone. Such states are of the parameters as
    they were: after a write that torch does not count (see `push`), push them without a version.

    In half precision on a GPU the tokens of a `Transformer` with full attention are drawn by CUDA
    graphs, with the exact kernels: the first completions wait for their capture, and `sleep`
    frees what is kept for the next call.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> sampler = funcrl.generators.Sampler(model)
        >>> sampler.push(funcrl.init_params(model, seed=0), version=3)
        >>> samples = sampler.generate([[1, 2]], funcrl.generators.Sampling(max_tokens=4), seed=0)
        >>> samples.tokens.shape, samples.policy_version
        (torch.Size([1, 4]), 3)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: DecodeFn | None = None,
        slots: int = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        own = _own_network(model)
        lay_out, free = _laying_out(own)
        network = Network(
            vocab_size=own.config.vocab_size,
            context_length=own.config.context_length,
            model_fn=logprob_fn(model, dtype=dtype),
            check_params=lambda params: check_params(model, params),
            lay_out=lay_out,
            free=free,
            forget=RecurrentDraw.forget if isinstance(own, Recurrent) else lambda _: None,
        )
        super().__init__(network, decode=decode, slots=slots, dtype=dtype)


def _own_network(model: nn.Module) -> Transformer | Recurrent:
    """Return a network of funcrl's; raise if it is another one."""
    if isinstance(model, Transformer | Recurrent):
        return model
    raise TypeError(
        f"Sampler expects a funcrl.models.Transformer or Recurrent, got {type(model).__name__}; "
        f"funcrl.generators.HuggingFace(model) draws from a model of transformers, and "
        f"funcrl.generators.Recompute(model) from any other network or function of logits."
    )


def _laying_out(model: Transformer | Recurrent) -> tuple[LayOutFn, Callable[[], None]]:
    """Return what makes a network's `DrawFn` of parameters, and what frees what that keeps."""
    if isinstance(model, Recurrent):
        return partial(_lay_out_recurrent, model), lambda: None
    captured = Captured(model.config)

    def lay_out(params: Params, dtype: torch.dtype | None) -> DrawFn:
        if is_captured(model, params, dtype):
            return captured.lay_out(params, dtype)
        captured.free()
        return partial(_draw, pack_weights(model, cast(params, dtype)))

    return lay_out, captured.free


def _lay_out_recurrent(model: Recurrent, params: Params, dtype: torch.dtype | None) -> DrawFn:
    return RecurrentDraw(bind(model, cast(params, dtype)))


def _draw(network: Transformer, request: Request) -> Completions:
    def open_decoder(rows: int, places: int) -> CachedTransformer:
        return CachedTransformer(network, rows, places)

    leaf = network.norm.weight
    batch = Batch(open_decoder, request, leaf.device, network.ops.log_softmax)
    return completions(batch.run(), leaf)

"""The KV cache: prefill, then decode token by token, on a CPU with weights laid out for it."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl import ops
from funcrl.core.numerics import at_least_float32
from funcrl.core.types import Params
from funcrl.generators.contract import Prompts, padded_prompts
from funcrl.generators.embedded.schedule import Drawn
from funcrl.models import MLP, Attention, GatedDelta, Linear, Memory, Past, Transformer
from funcrl.models.functional import bind
from funcrl.models.layers import MixFn
from funcrl.models.transformer import LayerFn
from funcrl.ops import LinearFn, Weights
from funcrl.ops.exact import EXACT_FORWARD

# Smaller matrices stay in the cache, where the plain product is at least as fast (measured).
_SMALLEST = 1 << 18
_DTYPES = (torch.float32, torch.bfloat16)


def pack_weights(model: Transformer, params: Params) -> Transformer:
    """Return the model bound to `params`, on a CPU with copies laid out for products of few rows.

    Matrices that multiply the same input are joined to one, and large ones take oneDNN's blocked
    layout, which halves the time of a product with a few rows. A model of exact numerics calls its
    kernels directly. One with operations of its own, other dtypes, and other devices get the plain
    bound model.
    """
    if model.ops == ops.EXACT:
        return bind(Transformer(model.config, EXACT_FORWARD), params)
    first = next(iter(params.values()))
    plain = model.ops is not ops.NATIVE or first.device.type != "cpu" or first.dtype not in _DTYPES
    if plain or not torch.backends.mkldnn.is_available():
        return bind(model, params)
    # By the id of a weight, which stays its own because the network keeps the weight alive.
    products: dict[int, LinearFn] = {}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return products[id(weight)](x, weight, bias)

    def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
        first, bias = weights[0]
        return products[id(first)](x, first, bias).split([len(w) for w, _ in weights], dim=-1)

    fast = ops.NATIVE._replace(linear=linear, project=project)
    network = bind(Transformer(model.config, fast), params)
    for child in network.modules():
        if isinstance(child, Attention | GatedDelta):
            parts = child.projections()
            products[id(parts[0].weight)] = _joined(parts)
            products[id(child.o.weight)] = _product(child.o.weight)
        if isinstance(child, MLP):
            products[id(child.gate.weight)] = _joined([child.gate, child.up])
            products[id(child.down.weight)] = _product(child.down.weight)
    products[id(network.unembed.weight)] = _product(network.unembed.weight)
    return network


def _joined(parts: Sequence[Linear]) -> LinearFn:
    """Return the product with all the parts' matrices, one above the other."""
    product = _product(torch.cat([part.weight for part in parts]))
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = [part.weight.new_zeros(len(part.weight)) for part in parts]
        pairs = zip(parts, zeros, strict=True)
        bias = torch.cat([zero if part.bias is None else part.bias for part, zero in pairs])
    return lambda x, _weight, _bias: product(x, _weight, bias)


def _product(weight: Tensor) -> LinearFn:
    """Return the fastest product with a matrix; it ignores the weight that it is called with."""
    if weight.numel() < _SMALLEST:
        return lambda x, _, bias: nn.functional.linear(x, weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x, _, bias: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


# What a layer keeps of M samples: [M, K, S, 2 C], a key and its value side by side; or a memory,
# whose parts have M rows.
Kept: TypeAlias = Tensor | Memory


class Prefix(NamedTuple):
    """What N prompts leave behind, and what comes next."""

    kept: list[Kept]  # of each layer
    logits: Tensor  # [N, V] after each prompt's last token


class CachedTransformer:
    """A `Transformer` bound to its parameters, and what its layers keep of the samples."""

    def __init__(self, model: Transformer, rows: int, places: int) -> None:
        self._model = model
        self._cache = empty_cache(model, rows, places, model.norm.weight)

    def prefill(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Run the prompts once, and share what they leave with their samples."""
        tokens, lengths = padded_prompts(prompts, self._model.norm.weight.device)
        prefix = prefill(self._model, tokens, lengths)
        write_prefix(self._cache, prefix, rows, group)
        return prefix.logits.repeat_interleave(group, dim=0)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Run one more token of each sample."""
        return extend(self._model, self._cache, tokens, positions, longest)

    def evict(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep nothing of samples that have ended."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy what is kept of some samples to other rows."""
        for layer in self._cache:
            if isinstance(layer, Memory):
                for part in layer:
                    part[to] = part[origin]
            else:
                layer[to, :, places] = layer[origin, :, places]


def empty_cache(model: Transformer, samples: int, places: int, like: Tensor) -> list[Kept]:
    """Return what each layer keeps of so many samples, zeros on the device of `like`.

    Keys and values are in its dtype. Place s of S holds the token at position s; a key and its
    value lie side by side, so that both are written at once.
    """
    c = model.config
    zeros = like.new_zeros

    def of_layer(kind: str) -> Kept:
        if kind != "delta":
            return zeros(samples, c.num_kv_heads, places, 2 * c.head_width)
        state = samples, c.delta_heads, c.delta_key_width, c.delta_value_width
        history = zeros(samples, c.delta_conv - 1, c.delta_channels)
        return Memory(history, zeros(state, dtype=at_least_float32(like.dtype)))

    return [of_layer(kind) for kind in c.kinds]


def write_prefix(cache: Sequence[Kept], prefix: Prefix, rows: slice, group: int) -> None:
    """Write what prompts leave into some rows of a cache, each prompt's `group` times."""
    for layer, kept in zip(cache, prefix.kept, strict=True):
        if isinstance(layer, Memory):
            for whole, part in zip(layer, kept, strict=True):
                whole[rows] = part.repeat_interleave(group, dim=0)
        else:
            assert isinstance(kept, Tensor)
            layer[rows, :, : kept.shape[2]] = kept.repeat_interleave(group, dim=0)


def prefill(model: Transformer, prompts: Tensor, lengths: Tensor) -> Prefix:
    """Return the prefix of each prompt [N, P], padded on the right, in one forward pass.

    Args:
        model: bound to its parameters.
        prompts: [N, P] tokens.
        lengths: [N] each prompt's own length.
    """
    kept: list[Kept] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
        kept.append(torch.cat([k, v], dim=-1))
        # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
        return model.ops.attend_prompts(q, k, v, **window)

    def recur(mix: MixFn) -> Tensor:
        outputs, memory = mix(Past(lengths=lengths))
        kept.append(memory)
        return outputs

    def next_logits(x: Tensor, _weight: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        return model.logits(x[rows, lengths - 1])

    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    layers = model.each_layer(attend, recur)
    logits: Tensor = model(prompts, positions, attend=layers, head=next_logits)
    return Prefix(kept, logits)


def extend(
    model: Transformer, cache: Sequence[Kept], tokens: Tensor, positions: Tensor, longest: int
) -> Tensor:
    """Return logits [n, V] after one more token of the cache's first n samples.

    Writes what the tokens leave into the cache, which belongs to the caller.

    Args:
        model: bound to its parameters.
        cache: of at least n samples.
        tokens: [n].
        positions: [n], where each token stands in its sample.
        longest: the highest of the positions.
    """
    layers = _layers(model, cache, positions, longest)

    def last_logits(x: Tensor, _weight: Tensor) -> Tensor:
        return model.logits(x[:, -1])

    logits: Tensor = model(tokens[:, None], positions[:, None], attend=layers, head=last_logits)
    return logits


def _layers(
    model: Transformer, cache: Sequence[Kept], positions: Tensor, longest: int
) -> list[LayerFn]:
    """Return the function of each layer for one token of each sample, which it writes."""
    keys_of_layers = [layer for layer in cache if isinstance(layer, Tensor)]
    attends = iter(_attends(model, keys_of_layers, positions, longest))
    return [
        _recur_on(layer, len(positions)) if isinstance(layer, Memory) else next(attends)
        for layer in cache
    ]


def _attends(
    model: Transformer, layers: Sequence[Tensor], positions: Tensor, longest: int
) -> list[LayerFn]:
    """Return the attention of one token of each sample on each of these layers."""
    if not layers:
        return []
    num_heads, num_places, width = layers[0].shape[1:]
    starts = torch.arange(len(positions) * num_heads, device=positions.device) * num_places
    written = starts + positions.repeat_interleave(num_heads)
    attend_last = model.ops.attend_last(positions, layers[0], longest + 1)

    def on_layer(layer: Tensor) -> LayerFn:
        rows = layer.view(-1, width)  # one for each sample, head and place
        keys, values = layer[: len(positions), :, : longest + 1].chunk(2, dim=-1)

        def attend(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
            rows.index_copy_(0, written, torch.cat([k, v], dim=-1).view(-1, width))
            return attend_last(q, keys, values, **window)

        return attend

    return [on_layer(layer) for layer in layers]


def _recur_on(layer: Memory, count: int) -> LayerFn:
    """Return the recurrence of the first `count` samples, whose memory it writes."""
    memory = Memory(*(part[:count] for part in layer))

    def recur(mix: MixFn) -> Tensor:
        outputs, after = mix(Past(memory))
        for part, new in zip(memory, after, strict=True):
            part.copy_(new)
        return outputs

    return recur

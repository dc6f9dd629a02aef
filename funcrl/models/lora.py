"""Low-rank adapters (LoRA): small matrices that are trained in the place of large ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from funcrl import ops
from funcrl.config.sections import BaseDtype, LoraConfig
from funcrl.core import rng
from funcrl.core.arguments import Count, Positive, checked
from funcrl.core.numerics import at_least_float32
from funcrl.core.types import ModelFn, Params, TokenScores
from funcrl.models.functional import without_weights
from funcrl.models.layers import Linear
from funcrl.models.logprobs import logprob_fn
from funcrl.models.networks import is_linear, is_of_transformers
from funcrl.ops import NATIVE, Ops, Quantized, ops_of, quantize
from funcrl.ops.choice import replace_ops
from funcrl.ops.contract import Weights

Frozen: TypeAlias = Quantized | Tensor  # a matrix that is not trained
_DOWN, _UP = ".lora_down", ".lora_up"


class Lora(NamedTuple):
    """A model as a function of its low-rank adapters."""

    model_fn: ModelFn  # (adapters, sample) -> TokenScores
    init: Callable[[int], Params]  # seed -> adapters, under which the model is the base itself
    merge: Callable[[Params], Params]  # adapters -> the base's parameters with them added


def _is_of_a_layer(name: str) -> bool:
    return LoraConfig().adapts(name)


@checked
def lora(
    model_fn: ModelFn,
    base: Params,
    *,
    rank: Count = 8,
    alpha: Positive = 16.0,
    targets: Callable[[str], bool] = _is_of_a_layer,
) -> Lora:
    """Return a model whose parameters are low-rank changes of some matrices (arXiv:2106.09685).

        W = W_base + alpha / rank * up down

    The base is a constant. Any step trains the adapters as it trains all parameters, and
    `merge` makes parameters to push into a generator or to save.

    Args:
        model_fn: `(params, sample) -> TokenScores`.
        base: its parameters; they are referred to, never changed.
        rank: of each change.
        alpha: scales the change.
        targets: of a parameter's name, whether it gets an adapter; vectors never do. When left out,
            those of attention and MLPs, as funcrl's own networks name them.

    Example:
        >>> import funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> base = funcrl.init_params(model, seed=0)
        >>> small = funcrl.lora(funcrl.logprob_fn(model), base, rank=4)
        >>> step = funcrl.grpo_step(small.model_fn)
        >>> state = step.init(small.init(0))
        >>> sum(leaf.numel() for leaf in state.params.values())
        9728
        >>> params = small.merge(state.params)  # for a generator, or funcrl.save_params
    """
    base = dict(base)  # a copy, so that later changes of the caller's dict do not matter
    adapted = _adapted("lora", base, rank, targets)

    @checked
    def init(seed: int) -> Params:
        return _first_adapters(adapted, rank, seed)

    @checked
    def merge(adapters: Params) -> Params:
        _check_adapters(adapters, adapted, rank)
        changed = {name: base[name] + _change(adapters, name, alpha / rank) for name in adapted}
        return {**base, **changed}

    @checked
    def scores(adapters: Params, sample: Any) -> TokenScores:
        return model_fn(merge(adapters), sample)

    return Lora(scores, init, merge)


@checked
def qlora(
    model: nn.Module,
    base: Params,
    *,
    base_dtype: BaseDtype = "nf4",
    rank: Count = 8,
    alpha: Positive = 16.0,
    targets: Callable[[str], bool] = _is_of_a_layer,
    dtype: torch.dtype = torch.float32,
    score: Callable[[nn.Module], ModelFn] = logprob_fn,
    device: torch.device | str | None = None,
) -> Lora:
    """Return `lora` of a network's linear layers, in less memory, on a base in any number of bits.

        W = W_rounded + alpha / rank * up down

    W is written out for one product at a time (`funcrl.ops.adapted_linear`), so that between the
    two passes the base takes no more memory than its bits, and no gradient is as large as a matrix.
    `merge` writes out all of them, for a generator, with the same bits. Scores are those of `lora`
    on the rounded base, and so are gradients, up to rounding. (QLoRA, arXiv:2305.14314.)

    Args:
        model: a network of native operations; only its structure is used.
        base: its parameters. They are rounded one after the other, and not kept.
        base_dtype: that of the adapted matrices: "nf4", "int8" (`funcrl.ops.quantize`), "bfloat16"
            or "float32". All other parameters are kept in `dtype`.
        rank: of each change.
        alpha: scales the change.
        targets: of a parameter's name, whether it gets an adapter; vectors never do, and a matrix
            must be the weight of an `nn.Linear`.
        dtype: to compute in, and that of merged parameters; the adapters are at least float32.
        score: makes a model function of a network, which leaves the dtypes of its parameters.
        device: for the rounded base, that of `base` when left out.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> base = funcrl.init_params(model, seed=0)
        >>> small = funcrl.models.qlora(model, base, base_dtype="int8", rank=4)
        >>> sample = funcrl.types.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
        >>> small.model_fn(small.init(0), sample).logprobs.shape
        torch.Size([3])
    """
    if ops_of(model).exact:
        raise ValueError("qlora expects a network of native operations, got exact ones.")
    adapted = _adapted("qlora", base, rank, targets)
    adapted = {name: like._replace(dtype=at_least_float32(dtype), device=device or like.device)
               for name, like in adapted.items()}  # fmt: skip
    rounded: dict[str, Frozen] = {}
    others: dict[str, Tensor] = {}
    for name, leaf in base.items():
        leaf = leaf.detach().to(device or leaf.device)
        if name in adapted:
            rounded[name] = _frozen(leaf, base_dtype)
        else:
            others[name] = leaf.to(dtype) if leaf.is_floating_point() else leaf
    network = without_weights(model)
    constants = dict(others)
    for name, frozen in rounded.items():
        parts = _parts(frozen)
        constants |= {f"{name}.{part}": leaf for part, leaf in parts.items()}
        _adapt(network, name, AdaptedWeight(parts, adapted[name].shape, rank, alpha / rank))
    replace_ops(network, lambda _, own: _with_adapted_weights(own))
    model_fn = score(network)

    @checked
    def init(seed: int) -> Params:
        return _first_adapters(adapted, rank, seed)

    @checked
    def merge(adapters: Params) -> Params:
        _check_adapters(adapters, adapted, rank)
        merged = dict(others)
        for name, frozen in rounded.items():
            down, up = adapters[name + _DOWN], adapters[name + _UP]
            merged[name] = ops.adapted(frozen, down, up, alpha / rank).to(dtype)
        return merged

    @checked
    def scores(adapters: Params, sample: Any) -> TokenScores:
        _check_adapters(adapters, adapted, rank)
        return model_fn({**constants, **adapters}, sample)

    return Lora(scores, init, merge)


def _frozen(weight: Tensor, base_dtype: BaseDtype) -> Frozen:
    if base_dtype in ("nf4", "int8"):
        return quantize(weight, base_dtype)
    return weight.to(getattr(torch, base_dtype))


def _parts(frozen: Frozen) -> dict[str, Tensor]:
    return {"frozen": frozen} if isinstance(frozen, Tensor) else frozen._asdict()


class AdaptedWeight(nn.Module):
    """What a layer has in the place of its weight: a matrix that is not trained, and a change."""

    def __init__(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], rank: int, scale: float
    ) -> None:
        super().__init__()
        rows, columns = shape
        shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in parts.items()}
        shapes["lora_down"] = torch.Size([rank, columns]), torch.float32
        shapes["lora_up"] = torch.Size([rows, rank]), torch.float32
        for name, (size, dtype) in shapes.items():
            empty = torch.empty(size, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.scale = scale

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x (W + scale up down)^T + b`."""
        part = dict(self.named_parameters())
        down, up = part.pop("lora_down"), part.pop("lora_up")
        frozen = part["frozen"] if "frozen" in part else Quantized(**part)
        product = ops.adapted_linear(x, frozen, down, up, self.scale)
        return product if bias is None else product + bias

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the product with columns, for a network that multiplies by the matrix itself."""
        product: Tensor = self(columns.mT, None)
        return product.mT

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in, for a network that casts to that of the matrix."""
        down: Any = self.lora_down  # a call puts a tensor in the place of the parameter
        return down.dtype


def layer_weights(network: nn.Module, rank: int) -> set[str]:
    """Return the names of the matrices that get adapters where no others are asked for.

    Of a transformers model, whose names are not those of funcrl's layers, all linear layers but
    the head, and but those with fewer outputs than the rank, such as a gate or a router.
    """
    if not is_of_transformers(network):
        return {name for name, _ in network.named_parameters() if _is_of_a_layer(name)}
    shapes = {
        f"{name}.weight": module.weight.shape
        for name, module in network.named_modules()
        if is_linear(module)
    }
    fitting = {name for name, shape in shapes.items() if not min(shape) < rank <= max(shape)}
    return fitting - {head_weight(network)}


def targets_of(options: LoraConfig, network: nn.Module) -> Callable[[str], bool]:
    """Return whether a matrix, by its name, gets an adapter: as asked, or as the network has it."""
    if options.targets == LoraConfig.targets:
        return layer_weights(network, options.rank).__contains__
    return options.adapts


def head_weight(network: Any) -> str:
    """Return the name of a network's output matrix, which is no parameter where it is tied."""
    if not is_of_transformers(network):
        return "unembed.weight"
    head, modules = network.get_output_embeddings(), network.named_modules()
    return next((f"{name}.weight" for name, module in modules if module is head), "")


def adapts_linear(network: nn.Module, targets: Callable[[str], bool]) -> bool:
    """Return whether all matrices that get an adapter are weights of linear layers."""
    named = network.named_parameters()
    return all(
        _is_linear(network, name) for name, leaf in named if leaf.ndim == 2 and targets(name)
    )


def has_adapted_weights(network: nn.Module) -> bool:
    """Return whether a network is one that `qlora` has made."""
    return any(isinstance(module, AdaptedWeight) for module in network.modules())


def _is_linear(network: nn.Module, name: str) -> bool:
    """Return whether a parameter is the weight of a linear layer that does nothing else."""
    path, _, attribute = name.rpartition(".")
    forward = type(network.get_submodule(path)).forward
    return attribute == "weight" and forward in (nn.Linear.forward, Linear.forward)


def _adapt(network: nn.Module, name: str, weight: AdaptedWeight) -> None:
    """Put an adapted weight into the place of a network's own, which is the caller's alone."""
    path = name.rpartition(".")[0]
    layer = network.get_submodule(path)
    if not isinstance(layer, nn.Linear) or not _is_linear(network, name):
        raise ValueError(
            f"qlora expects matrices that are the weight of an nn.Linear without a forward of its "
            f"own, got {name!r} of {type(layer).__name__}."
        )
    if not isinstance(layer, Linear):  # torch's own would read it as a tensor
        bias = layer.bias
        layer = Linear(layer.in_features, layer.out_features, False, NATIVE)
        layer.bias = bias
        parent, _, child = path.rpartition(".")
        setattr(network.get_submodule(parent), child, layer)
    del layer.weight
    layer.add_module("weight", weight)


def _with_adapted_weights(own: Ops) -> Ops:
    """Return operations whose linear maps take an `AdaptedWeight` as well as a tensor."""

    def linear(x: Tensor, weight: Tensor | AdaptedWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, AdaptedWeight):
            found: Tensor = weight(x, bias)
            return found
        return own.linear(x, weight, bias)

    def project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
        if any(isinstance(weight, AdaptedWeight) for weight, _ in weights):
            return [linear(x, weight, bias) for weight, bias in weights]
        return own.project(x, weights)

    return own._replace(linear=linear, project=project)


class _Like(NamedTuple):
    """What an adapter must know of its matrix."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | str


def _adapted(
    function: str, base: Params, rank: int, targets: Callable[[str], bool]
) -> dict[str, _Like]:
    """Return the matrices of the base that get an adapter, in the order of their names."""
    adapted = {
        name: _Like(leaf.shape, leaf.dtype, leaf.device)
        for name, leaf in sorted(base.items())
        if leaf.ndim == 2 and targets(name)
    }
    if not adapted:
        raise ValueError(
            f"{function} expects targets among the matrices of the base, got none of {len(base)} "
            f"parameters."
        )
    for name, like in adapted.items():
        if rank > min(like.shape):
            raise ValueError(
                f"{function} expects a rank of at most {min(like.shape)} for {name!r} of shape "
                f"{list(like.shape)}, got {rank}."
            )
    return adapted


def _first_adapters(adapted: Mapping[str, _Like], rank: int, seed: int) -> Params:
    """Return adapters that change nothing: one factor is drawn, and the other is 0."""
    adapters = {}
    for index, (name, like) in enumerate(adapted.items()):
        rows, columns = like.shape
        # Uniform with the deviation of a linear layer's weights.
        generator = rng.generator(seed, index)
        drawn = torch.rand(rank, columns, generator=generator, dtype=torch.float32, device="cpu")
        down = (drawn * 2 - 1) / math.sqrt(columns)
        adapters[name + _DOWN] = down.to(like.device, like.dtype)
        adapters[name + _UP] = torch.zeros(rows, rank, dtype=like.dtype, device=like.device)
    return dict(sorted(adapters.items()))


def _change(adapters: Params, name: str, scale: float) -> Tensor:
    return scale * (adapters[name + _UP] @ adapters[name + _DOWN])


def _check_adapters(adapters: Params, adapted: Mapping[str, _Like], rank: int) -> None:
    """Raise unless the adapters have the rank of this model: others would be scaled wrongly."""
    wanted = {}
    for name, like in adapted.items():
        wanted[name + _DOWN] = (rank, like.shape[1]), like.dtype
        wanted[name + _UP] = (like.shape[0], rank), like.dtype
    if adapters.keys() != wanted.keys():
        odd = min(adapters.keys() ^ wanted.keys())
        problem = f"got none for {odd!r}" if odd in wanted else f"got {odd!r} besides"
        raise ValueError(f"lora expects the adapters that its init makes, {problem}.")
    for name, (shape, dtype) in wanted.items():
        found = adapters[name]
        if (found.shape, found.dtype) != (shape, dtype):
            raise ValueError(
                f"lora expects {name!r} of shape {list(shape)} and {dtype}, got "
                f"{list(found.shape)} and {found.dtype}."
            )

"""Any `nn.Module` as a pure function of its parameters."""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from funcrl.core import checks, tree
from funcrl.core.arguments import checked
from funcrl.core.types import Params
from funcrl.core.unbatched import Unbatched, reads_a_value, value_was_read, why_not_batched

# torch's hooks that set a weight before each forward: their names, and their replacements.
_HOOKS = {
    WeightNorm: ("weight_norm", "use torch.nn.utils.parametrizations.weight_norm"),
    SpectralNorm: (
        "spectral_norm", "use torch.nn.utils.parametrizations.spectral_norm and module.eval()",
    ),
    BasePruningMethod: ("prune", "make its weights parameters by torch.nn.utils.prune.remove"),
}  # fmt: skip
Bound = TypeVar("Bound", bound=nn.Module)


@checked
def functional(module: nn.Module) -> Callable[..., Any]:
    """Return `apply(params, *args, **kwargs)`, the module's forward as a function of `params`.

    `apply` calls a skeleton on the meta device, which holds no weights: every parameter must come
    from `params`, and a missing, extra or misshaped one is an error that names its path. Tied
    parameters are given once, under the name that `named_parameters()` lists. Buffers are
    constants, copied now; they may be overridden by name in `params`.

    A module that would not be a function is refused by name: active dropout, running statistics,
    weights that a hook computes before each forward (the old `weight_norm`), a forward that changes
    a buffer, or a number, text or tensor kept in an attribute. What it keeps in a list, and random
    numbers that it draws by other means, cannot be seen. `nn.RNN`, `nn.GRU` and `nn.LSTM` are
    refused under `torch.vmap`, which every step and gradient of funcrl uses.

    Under `vmap` and `funcrl.trace` a tensor has no value that Python could read, so a forward that
    reads one is refused there. transformers' models read masks and positions in some calls:
    docs/models.md shows the calls that work.

    Args:
        module: any module, one from transformers too. It is not changed, and not kept.

    Example:
        >>> import torch, funcrl
        >>> apply = funcrl.functional(torch.nn.Linear(2, 1))
        >>> params = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.zeros(1)}
        >>> apply(params, torch.tensor([3.0, 4.0]))
        tensor([11.])
        >>> apply({"weight": torch.zeros(1, 2)}, torch.zeros(2))
        Traceback (most recent call last):
        ValueError: functional expects all parameters of Linear, got none for 'bias'.
    """
    _refuse_impure(module)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ValueError(
                f"functional expects buffers with values, got a meta tensor for {name!r}."
            )
    skeleton = _on_meta(module, [*module.parameters(), *module.buffers()])
    shapes = {name: leaf.shape for name, leaf in skeleton.named_parameters()}
    first_names = {id(leaf): name for name, leaf in skeleton.named_parameters()}
    tied = {
        name: first_names[id(leaf)]
        for name, leaf in skeleton.named_parameters(remove_duplicate=False)
        if name not in shapes
    }
    kind = type(module).__name__
    recurrent = [name for name, child in module.named_modules() if isinstance(child, nn.RNNBase)]
    attributes = _attributes(skeleton)
    one_at_a_time = threading.RLock()  # a call puts its parameters into the skeleton
    shapes |= {name: buffer.shape for name, buffer in buffers.items()}

    @checked
    def apply(params: Params, *args: Any, **kwargs: Any) -> Any:
        before = {**buffers, **params}
        _check_params("functional", kind, before, shapes, tied)
        if recurrent and _is_batched((before, args, kwargs)):
            layer = type(skeleton.get_submodule(recurrent[0])).__name__
            raise NotImplementedError(
                f"functional expects modules that torch.vmap can run, got nn.{layer} at "
                f"{recurrent[0] or layer!r}, which it cannot; write the recurrence as a loop over "
                f"the tokens, as docs/models.md does."
            )
        versions = {name: _version(before[name]) for name in buffers}
        after = dict(before)  # functional_call writes the buffers that the forward replaced here
        try:
            with one_at_a_time:
                result = functional_call(skeleton, after, args, kwargs, strict=True)
        except RuntimeError as error:
            if reads_a_value(error):
                raise value_was_read("functional", f"a forward of {kind}", error) from error
            if reason := why_not_batched(error):
                raise Unbatched(
                    f"functional expects a forward of {kind} that torch.vmap can run, got one that "
                    f"{reason}."
                ) from error
            raise
        changed = [name for name, leaf in before.items() if after[name] is not leaf]
        changed += [name for name in buffers if _version(before[name]) != versions[name]]
        changed += _changed_attributes(attributes, _attributes(skeleton))
        if changed:
            raise ValueError(
                f"functional expects a forward that changes nothing, got a new value of "
                f"{changed[0]!r} from {kind}."
            )
        return result

    return apply


def bind(module: Bound, params: Params) -> Bound:
    """Return a copy of the module whose weights are `params` themselves, by reference.

    For code that only runs forward, again and again: a call costs a module's call, where
    `functional` checks and swaps all parameters. The tensors do not require gradients.
    """
    return fill(without_weights(module), params)


def fill(module: Bound, params: Params) -> Bound:
    """Make `params` themselves the weights of a module that was made for them, and return it."""
    check_params(module, params)
    owners, filled = dict(module.named_modules(remove_duplicate=False)), {}
    for name, leaf in list(module.named_parameters(remove_duplicate=False)):
        if id(leaf) not in filled:  # the first name of a tied one
            filled[id(leaf)] = nn.Parameter(params[name].detach(), requires_grad=False)
        owner, _, last = name.rpartition(".")
        setattr(owners[owner], last, filled[id(leaf)])
    return module


def check_params(
    module: nn.Module, params: Mapping[str, Tensor], function: str = "functional"
) -> None:
    """Raise, in the name of `function`, unless `params` are exactly the module's parameters.

    Tied ones are given once.
    """
    kind, shapes = type(module).__name__, {n: leaf.shape for n, leaf in module.named_parameters()}
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{function} expects parameters of {kind} by name, got {type(params).__name__}; "
            f"funcrl.init_params(model, seed=0) draws them."
        )
    _check_params(function, kind, params, shapes, {})


def without_weights(module: Bound) -> Bound:
    """Return a copy of the module whose parameters are on the meta device."""
    return _on_meta(module, module.parameters())


def _on_meta(module: Bound, tensors: Iterable[Tensor]) -> Bound:
    """Return a copy of the module with these on the meta device, made without copying them."""
    # deepcopy takes what the memo has for an id, so tied parameters stay tied.
    memo: dict[int, Any] = {}
    for tensor in tensors:
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(meta, False) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(module, memo)


def _refuse_impure(module: nn.Module) -> None:
    for name, child in module.named_modules():
        path = name or type(module).__name__
        _refuse_hooks(path, child)
        for attribute in _active_dropouts(child):
            raise ValueError(
                f"functional expects a forward without random numbers, got dropout "
                f"{attribute}={getattr(child, attribute)} at {path!r}; call module.eval() first."
            )
        if isinstance(child, _NormBase) and child.training and child.track_running_stats:
            raise ValueError(
                f"functional expects a forward that changes no buffer, got running statistics at "
                f"{path!r}; call module.eval() first."
            )


def _refuse_hooks(path: str, module: nn.Module) -> None:
    """Raise if a hook computes weights before each forward: they are no parameters."""
    for hook in module._forward_pre_hooks.values():
        for kind, (name, instead) in _HOOKS.items():
            if isinstance(hook, kind):
                raise ValueError(
                    f"functional expects weights that no hook computes, got those of "
                    f"torch.nn.utils.{name} at {path!r}; {instead}."
                )
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ValueError(
                f"functional expects the tensors in attributes to be constants, got {name!r} at "
                f"{path!r}, which was computed from parameters; compute it in the forward."
            )


def _is_batched(values: Any) -> bool:
    """Return whether a tensor has a batch axis of `torch.vmap`, which its shape does not show."""
    return any(isinstance(leaf, Tensor) and is_batchedtensor(leaf) for leaf in tree.leaves(values))


def _active_dropouts(module: nn.Module) -> list[str]:
    """Return the names of the attributes that hold rates of dropout which is active."""
    if not module.training:
        return []
    if isinstance(module, nn.RReLU):
        return ["upper"]  # it draws slopes between any two bounds
    if isinstance(module, _DropoutNd):
        rates: dict[str, float] = {"p": module.p}
    else:
        # A module of others, such as one of transformers', calls the function with a rate of its
        # own: a float like any other, which has nothing but its name to tell it by.
        rates = {name: value for name, value in vars(module).items()
                 if "drop" in name and isinstance(value, float)}  # fmt: skip
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            rates["dropout"] = module.dropout  # an integer, too
    return [name for name, rate in rates.items() if rate > 0]


def _attributes(skeleton: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return the numbers, texts and tensors in attributes by path, each with its version."""
    return {
        f"{path}.{name}".lstrip("."): (value, _version(value) if isinstance(value, Tensor) else 0)
        for path, child in skeleton.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, bool | int | float | str | Tensor)
    }


def _changed_attributes(
    before: dict[str, tuple[Any, int]], after: dict[str, tuple[Any, int]]
) -> list[str]:
    """Return the paths of attributes that are new, gone or different."""
    changed = sorted(before.keys() ^ after.keys())
    for path in before.keys() & after.keys():
        (old, version), (new, now) = before[path], after[path]
        tensors = isinstance(old, Tensor) or isinstance(new, Tensor)
        if version != now or (old is not new and (tensors or old != new)):
            changed.append(path)
    return changed


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check_params(
    function: str,
    kind: str,
    params: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    tied: Mapping[str, str],
) -> None:
    """Raise unless `params` have these shapes and no other names; `tied` has each one's first."""
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"{function} expects all parameters of {kind}, got none for {name!r}.")
        checks.check_tensor(function, repr(name), params[name])
        if params[name].shape != shape:
            raise ValueError(
                f"{function} expects {name!r} of shape {list(shape)}, "
                f"got {list(params[name].shape)}."
            )
    for name in params:
        if name in shapes:
            continue
        if name in tied:
            raise ValueError(
                f"{function} expects tied parameters once, as {tied[name]!r}, got {name!r} too."
            )
        raise ValueError(
            f"{function} expects parameters of {kind}, got {name!r}, which it does not have."
        )

"""A network that keeps the result of each of its operations, in their order."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl.models.transformer import Transformer
from funcrl.ops import AttendFn, Ops
from funcrl.ops.choice import replace_ops

_OF_THE_WHOLE = {"embed": "embed", "linear": "unembed"}  # which the network calls by itself


class Operation(NamedTuple):
    """The result of one operation."""

    name: str  # such as "layer 0, attention: project"
    result: Tensor  # [..., T, F], all that belongs to a token side by side


def recording(network: Transformer, operations: list[Operation]) -> Transformer:
    """Return a copy of the network, with the same weights, whose operations are appended to a list.

    The list belongs to the caller, who may empty it between two calls. Under `vmap` its tensors are
    of that `vmap`, and leave it as results of the mapped function.

    Args:
        network: bound to its parameters or not.
        operations: what each call of the copy adds to.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.models.recording import recording
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> operations = []
        >>> apply = funcrl.functional(recording(model, operations))
        >>> logits = apply(funcrl.init_params(model, seed=0), torch.arange(3), torch.arange(3))
        >>> [each.name for each in operations[:3]]
        ['embed: embed', 'layer 0, attention_norm: rms_norm', 'layer 0, attention: project']
    """
    shared = {id(weight): weight for weight in network.parameters()}
    copied = copy.deepcopy(network, shared)  # which takes what it finds there for an id
    last_place = [""]
    replace_ops(copied, lambda path, ops: _recording_ops(ops, path, operations, last_place))
    return copied


def _recording_ops(ops: Ops, path: str, operations: list[Operation], last_place: list[str]) -> Ops:
    """Return the same operations, which also append to the list, of a module at `path`."""
    of_heads = path.endswith(("q_norm", "k_norm", "delta.norm"))

    def keep(operation: str, result: Any, place: str) -> None:
        parts = [result] if isinstance(result, Tensor) else list(result)
        by_head = of_heads or (path.endswith("delta") and operation == "rms_norm")
        flat = [part.flatten(-2) if by_head else part for part in parts]
        operations.append(Operation(f"{_title(place)}: {operation}", torch.cat(flat, dim=-1)))
        last_place[0] = place

    def kept(operation: str) -> Callable[..., Any]:
        function = getattr(ops, operation)

        def call(*inputs: Any) -> Any:
            result = function(*inputs)
            keep(operation, result, path or _OF_THE_WHOLE[operation])
            return result

        return call

    def rotate(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
        turned = ops.rotate(parts, factors)
        keep("rotate", [_by_token(part) for part in turned], path)
        return turned

    def norm_rotate(*inputs: Any) -> tuple[Tensor, Tensor]:
        assert ops.norm_rotate is not None
        turned = ops.norm_rotate(*inputs)
        keep("norm_rotate", [_by_token(part) for part in turned], path)
        return turned

    def gated_delta(*inputs: Any) -> tuple[Tensor, Tensor]:
        outputs, state = ops.gated_delta(*inputs)
        keep("gated_delta", [_by_token(outputs)], path)
        return outputs, state

    def attending(attend: AttendFn) -> AttendFn:
        def call(q: Tensor, k: Tensor, v: Tensor, **window: int) -> Tensor:
            attended = attend(q, k, v, **window)
            # The network hands `attend` down to its layers, which have just rotated q and k.
            keep("attend", _by_token(attended), last_place[0])
            return attended

        return call

    plain = (
        "embed", "linear", "project", "rms_norm", "add_rms_norm", "swiglu", "geglu", "sigmoid_gate",
    )  # fmt: skip
    recorded: dict[str, Any] = {
        operation: kept(operation) for operation in plain if getattr(ops, operation) is not None
    }
    return ops._replace(
        **recorded,
        rotate=rotate,
        norm_rotate=None if ops.norm_rotate is None else norm_rotate,
        gated_delta=gated_delta,
        attend_causal=attending(ops.attend_causal),
        attend_prompts=attending(ops.attend_prompts),
        attend_segments=lambda *ids: attending(ops.attend_segments(*ids)),
        attend_last=lambda *cache: attending(ops.attend_last(*cache)),
    )


def _by_token(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [..., T, H C]."""
    return x.transpose(-2, -3).flatten(-2)


def _title(place: str) -> str:
    """Return the path of a module in words: "layer 0, attention.q_norm"."""
    first, *rest = place.split(".")
    if first != "blocks":
        return place
    return ", ".join([f"layer {rest[0]}", *([".".join(rest[1:])] if rest[1:] else [])])

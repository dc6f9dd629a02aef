"""What a node of a graph is: where it came from, and what its operator costs."""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

Phase: TypeAlias = Literal["input", "forward", "backward", "optimizer", "output"]
_KEY = "origin"


class Origin(NamedTuple):
    """The part of a step that a node belongs to; a field is empty where nothing was recorded."""

    phase: Phase  # "optimizer" is all that follows a backward pass
    microbatch: int = 0  # how many backward passes ended before: the number of the micro-batch
    layer: str = ""  # such as "blocks.3": the path of the outermost module that has a number
    module: str = ""  # the path of the module, such as "blocks.3.attention.q"
    forward: str = ""  # on a backward node, the name of the node that it differentiates
    is_seed: bool = False  # what a backward pass begins with, such as the `ones_like` of a loss
    path: str = ""  # on an input, its place in the arguments: "0.params.norm.weight"


def origin_of(node: Node) -> Origin:
    """Return a node's origin, or that of its first input if a pass has given it none."""
    while _KEY not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return recorded_origin(node)


def recorded_origin(node: Node) -> Origin:
    """Return a node's own origin: the forward pass where nothing was recorded."""
    origin: Origin = node.meta.get(_KEY, Origin("forward"))
    return origin


def set_origin(node: Node, origin: Origin) -> None:
    """Set a node's origin."""
    node.meta[_KEY] = origin


def copy_origin(node: Node, source: Node) -> None:
    """Give a new node the origin of the node that it is made for."""
    if _KEY in source.meta:
        node.meta[_KEY] = source.meta[_KEY]


def is_late(node: Node) -> bool:
    """Return whether a node belongs to a backward pass or to what follows one."""
    return origin_of(node).phase in ("backward", "optimizer")


def layer_of(module: str) -> str:
    """Return a module's path up to its first number, which is its place in a list of modules."""
    names = module.split(".")
    numbers = [place for place, name in enumerate(names) if name.isdigit()]
    return ".".join(names[: numbers[0] + 1]) if numbers else ""


aten = torch.ops.aten
# Attention in one kernel, and how many products it does: torch counts some of them, and with as
# many keys as queries alone in older versions.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: 2,
    aten._scaled_dot_product_flash_attention_for_cpu: 2,
    aten._scaled_dot_product_cudnn_attention: 2,
    aten._scaled_dot_product_flash_attention_backward: 5,
    aten._scaled_dot_product_cudnn_attention_backward: 5,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}


def has_flops(node: fx.Node) -> bool:
    """Return whether a node is a product, as torch's flop counter says, or attention."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in flop_registry or packet in _ATTENTION


def count_flops(node: fx.Node) -> int:
    """Return the operations of a product, a causal one counted in full, and 0 for other nodes."""
    if not has_flops(node):
        return 0
    values: Any = fx.node.map_arg((node.args, node.kwargs, node), lambda read: read.meta["val"])
    args, kwargs, result = values
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION:
        q, k = args[:2] if _ATTENTION[packet] == 2 else args[1:3]
        return _ATTENTION[packet] * 2 * q.numel() * k.shape[-2]
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def draws(node: fx.Node) -> bool:
    """Return whether an op draws numbers; attention without dropout draws none, despite its tag."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(given)
    return True

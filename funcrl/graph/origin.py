"""Where each node of a graph comes from: the tracer writes it once, and passes copy it.

It is under one key of a node's `meta`, beside torch's `val` (a tensor without data):

    >>> import torch, funcrl
    >>> graph = funcrl.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
    >>> [node.meta["origin"].layer for node in graph.graph.nodes]
    ['', '0', '']
"""

from typing import Literal, NamedTuple, TypeAlias

from torch.fx import Node

Phase: TypeAlias = Literal["input", "forward", "backward", "optimizer", "output"]
_KEY = "origin"


class Origin(NamedTuple):
    """The part of a step that a node belongs to; a field is empty where nothing was recorded."""

    phase: Phase  # "optimizer" is all that follows a backward pass
    turn: int = 0  # how many backward passes ended before: the number of the micro-batch
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

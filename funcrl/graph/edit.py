"""What every pass needs to rewrite a graph."""

from collections.abc import Callable
from typing import Any

from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def copied(graph: Graph) -> Graph:
    """Return a copy to rewrite, which takes and returns the same trees.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.edit import copied
        >>> module = funcrl.trace(lambda x: {"y": x + 1}, torch.ones(1))
        >>> torch.fx.GraphModule(module, copied(module.graph))(torch.ones(1))
        {'y': tensor([2.])}
    """
    new = Graph()
    result = new.graph_copy(graph, {})
    new.output(result).meta = dict(graph.output_node().meta)
    new.set_codegen(graph._codegen)
    return new


def arguments(node: Node) -> tuple[Any, ...]:
    """Return what a node is called with, without torch's type of it, which names every type.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.edit import arguments
        >>> arguments(list(funcrl.trace(lambda x: x.sum(0), torch.ones(1)).graph.nodes)[1])
        (arg0_1, [0])
    """
    return node.args


def example_of(operation: Callable[..., Any], args: Any, kwargs: Any, like: Node) -> Any:
    """Return what an operation gives for nodes: tensors without data, as in `node.meta["val"]`.

    Args:
        operation: of the arguments.
        args: of the operation, nodes among them.
        kwargs: likewise, by name.
        like: a node of the same trace.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.edit import example_of
        >>> x = next(iter(funcrl.trace(lambda x: x.exp(), torch.ones(2, 3)).graph.nodes))
        >>> example_of(torch.ops.aten.t.default, (x,), {}, like=x).shape
        torch.Size([3, 2])
    """
    mode: Any = detect_fake_mode(like.meta["val"])
    with mode:
        values, options = map_arg((args, kwargs), lambda node: node.meta["val"])
        return operation(*values, **options)


def describe_like(node: Node, source: Node) -> None:
    """Give a new node the phase, the module and the forward node of the one that it is made for.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.edit import describe_like
        >>> graph = funcrl.trace(lambda x: x.exp(), torch.ones(1)).graph
        >>> new = graph.create_node("call_function", torch.ops.aten.sin.default)
        >>> describe_like(new, list(graph.nodes)[1])
        >>> new.meta
        {'phase': 'forward'}
    """
    for key in ("phase", "module", "forward_node"):
        if key in source.meta:
            node.meta[key] = source.meta[key]

"""What an operator costs, and whether it draws random numbers."""

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

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

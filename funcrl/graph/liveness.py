"""How many bytes a flat graph keeps alive, node by node, before it is ever run.

A graph runs one node after the other and frees a tensor after the last node that reads it. Its
inputs belong to the caller and its outputs go there, so both stay. What one op allocates for itself
while it runs is in no graph: the prediction knows nothing of such workspace.
"""

from itertools import accumulate

from torch import fx

from funcrl.core.arguments import checked
from funcrl.graph.aliases import find_storages


@checked
def predict_peak(gm: fx.GraphModule) -> int:
    """Return the most bytes alive at once while a graph runs, its inputs and outputs included.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`, as `make_fx` leaves it.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.predict_peak(gm)  # x, x + 1 and its exponential, 400 bytes each
        1200
    """
    return max(live_bytes(gm))


@checked
def live_bytes(gm: fx.GraphModule) -> list[int]:
    """Return the bytes alive while each node runs, in the order of `gm.graph.nodes`.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.live_bytes(gm)  # x, add, exp, sum, output
        [400, 800, 1200, 804, 404]
    """
    storages = find_storages(gm)
    end = len(gm.graph.nodes) - 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        stays = node.op in ("placeholder", "get_attr")
        for storage in storages.of[node]:
            first.setdefault(storage, 0 if stays else place)
        for touched in (node, *node.all_input_nodes):
            for storage in storages.of[touched]:
                last[storage] = end if stays else max(place, last.get(storage, 0))
    changes = [0] * (end + 2)
    for storage, place in first.items():
        changes[place] += storages.num_bytes[storage]
        changes[last[storage] + 1] -= storages.num_bytes[storage]
    return list(accumulate(changes[:-1]))

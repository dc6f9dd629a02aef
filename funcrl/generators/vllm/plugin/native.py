"""Parameters into vLLM's own class of a model: fused, and written where they are read."""

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core.types import Params

# vLLM's matrices that hold several of Hugging Face's, one above the other in this order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def fused_name(name: str) -> tuple[str, int]:
    """Return the name of vLLM's tensor that holds one of Hugging Face's, and its place in it."""
    for fused, parts in _FUSED.items():
        for place, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(part, fused), place
    return name, 0


def write_params(model: nn.Module, tensors: Params) -> None:
    """Write parameters into vLLM's model: in place, or anew where it keeps packed copies.

    Args:
        model: vLLM's.
        tensors: the parameters as a Hugging Face folder has them, by their names there.
    """
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, leaf in tensors.items():
        where, place = fused_name(name)
        parts[where][place] = leaf
    targets, sources = [], []
    packed: dict[nn.Module, Tensor] = {}
    for where, leaves in parts.items():
        path, _, kind = where.rpartition(".")
        module = model.get_submodule(path)
        rows = [leaves[place] for place in sorted(leaves)]
        target = getattr(module, kind).data
        if target.ndim != rows[0].ndim or not target.numel():
            packed[module] = torch.cat(rows).to(target.dtype)
            continue
        # A vocabulary is padded there: its first rows are ours.
        into = target[: sum(len(leaf) for leaf in rows)].split([len(leaf) for leaf in rows])
        targets += into
        sources += rows
    torch._foreach_copy_(targets, sources)
    for module, weight in packed.items():
        module.weight = nn.Parameter(weight, requires_grad=False)
    modules: list[Any] = list(model.modules())
    for module in modules:
        # vLLM lays matrices and filters out anew for a CPU, and drops what it was given.
        if hasattr(module, "cpu_linear") or module in packed:
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def load_checkpoint(model: Any, dtype: torch.dtype, parts: Iterable[Params]) -> None:
    """Have vLLM load a checkpoint into a model that runs, of whatever class.

    It loads a layer's tensors, lays them out for its kernels, and copies them to where they were,
    where CUDA graphs look for them.

    Args:
        model: vLLM's.
        dtype: that the model computes in.
        parts: the tensors as a Hugging Face folder has them, some at a time.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    device = next(model.parameters()).device
    modules: list[Any] = list(model.modules())
    if device.type == "cpu":  # where vLLM lays experts out for a new kernel only
        for module in modules:
            if hasattr(module, "quant_method") and hasattr(module.quant_method, "moe_kernel"):
                module.quant_method.moe_kernel = None
    with device:
        initialize_layerwise_reload(model)
        for part in parts:
            model.load_weights(part.items())
        finalize_layerwise_reload(model, SimpleNamespace(dtype=dtype))
    for module in modules:
        # On a CPU an embedding that is the output layer, too, has been laid out for that before.
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)

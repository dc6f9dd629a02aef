"""Adapters as the `peft` package writes them, merged into the model that they are of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core.files import brief, read_json
from funcrl.core.types import Params
from funcrl.models import Transformer
from funcrl.models.networks import is_transposed
from funcrl.weights.names import FusedTensor, fused_tensors_of, name_alone
from funcrl.weights.tensors import LONGEST_HEADER, Stored, read_safetensors, read_tensor

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# What peft puts between the name of a layer and that of its weight.
_WRAPPERS = (".base_layer", ".modules_to_save")
# Options by which an adapter is more than alpha / rank times B A, each off where it says nothing.
_OF_OTHER_ADAPTERS = (
    "use_dora", "use_qalora", "use_bdlora", "alpha_pattern", "layer_replication",
    "alora_invocation_tokens", "monteclora_config", "kasa_config", "arrow_config",
)  # fmt: skip
# How adapters began, where the base stays as it is: "pissa" and others take their start off it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_ADVICE = "peft's merge_and_unload() and save_pretrained() write a whole model"


def is_adapters(folder: Path) -> bool:
    """Return whether a folder has adapters of another model, and no weights of its own."""
    if not (folder / ADAPTER_FILES[0]).is_file():
        return False
    return not (any(folder.glob("model*.safetensors*")) or any(folder.glob("*.gguf")))


def described(folder: Path) -> dict[str, Any]:
    """Return the description of adapters; raise for any but plain low-rank ones."""
    config = read_json("load_params", folder / ADAPTER_FILES[0], LONGEST_HEADER)
    kind, start = config.get("peft_type"), config.get("init_lora_weights")
    other = next((name for name in _OF_OTHER_ADAPTERS if config.get(name)), "")
    if kind != "LORA" or other or start not in _PLAIN_STARTS:
        got = f"init_lora_weights {brief(start)}" if kind == "LORA" else brief(kind)
        raise ValueError(
            f"load_params expects plain low-rank adapters (LORA) in {folder}, got {other or got}; "
            f"{_ADVICE}."
        )
    return config


def merge(folder: Path, model: nn.Module, params: Params) -> None:
    """Add the adapters in a folder to the parameters of the model that they are of, in place.

    Args:
        folder: of adapters.
        model: as `load_params` returns it.
        params: its parameters.
    """
    base = _Base(folder, described(folder), params, _tensors_of(model, params))
    if not (folder / ADAPTER_FILES[1]).is_file():
        raise FileNotFoundError(
            f"load_params expects adapters in {folder / ADAPTER_FILES[1]}, got no such file."
        )
    left = {
        base.name(name): each for name, each in read_safetensors(folder / ADAPTER_FILES[1]).items()
    }
    modules = dict(model.named_modules())
    for layer in [name.removesuffix(_DOWN) for name in left if name.endswith(_DOWN)]:
        change = base.change(layer, left.pop(layer + _DOWN), left.pop(layer + _UP, None))
        module = modules.get(layer)  # of a class; Transformer has other names
        is_mirrored = module is not None and is_transposed(module)
        for name, leaf in base.parts(f"{layer}.weight", change.mT if is_mirrored else change):
            params[name].add_(leaf.to(params[name].device))
    for name, stored in left.items():  # what was trained as a whole beside adapters
        for part, leaf in base.parts(name, read_tensor(stored, base.dtype)):
            new = leaf.to(params[part])
            if name == _tied_embedding(model) and not torch.equal(new, params[part]):
                raise ValueError(
                    f"load_params expects {name!r} in {folder} as the base has it, which reads it "
                    f"as its head too, got another; {_ADVICE}."
                )
            params[part].copy_(new)


@dataclass(frozen=True)
class _Base:
    """The model that adapters are of, as peft names its parameters."""

    folder: Path  # of the adapters
    config: Mapping[str, Any]  # their description
    params: Params
    tensors: Mapping[str, FusedTensor]  # that hold the parameters, by their names in transformers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.promote_types(next(iter(self.params.values())).dtype, torch.float32)

    def name(self, theirs: str) -> str:
        """Return the name of a tensor of adapters without what peft has put around it."""
        name = theirs.removeprefix(_PREFIX)
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        weight = f"{name.removesuffix(_DOWN).removesuffix(_UP)}.weight"
        return name if {name, weight} & self.tensors.keys() else name_alone(name)

    def change(self, layer: str, down: Stored, up: Stored | None) -> Tensor:
        """Return what an adapter adds to the weight [out, in] of its layer."""
        if up is None or len(down.shape) != 2 or up.shape[1:] != down.shape[:1]:
            raise ValueError(
                f"load_params expects lora_A [rank, in] and lora_B [out, rank] of {layer!r} in "
                f"{self.folder / ADAPTER_FILES[1]}, got {list(down.shape)} and "
                f"{'none' if up is None else list(up.shape)}."
            )
        rank, alpha = down.shape[0], self.config.get("lora_alpha")
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(
                f"load_params expects a number as lora_alpha in {self.folder / ADAPTER_FILES[0]}, "
                f"got {brief(alpha)}."
            )
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return scale * (read_tensor(up, self.dtype) @ read_tensor(down, self.dtype))

    def parts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return the parameters that a tensor is of, each with its part of it."""
        if name not in self.tensors:
            raise ValueError(
                f"load_params expects adapters of linear layers, and parameters, of the base model "
                f"in {self.folder}, got {name!r}; {_ADVICE}."
            )
        fused = self.tensors[name]
        wanted = fused.join([self.params[part] for part in fused.parts]).shape
        if tensor.shape != wanted:
            raise ValueError(
                f"load_params expects {name!r} of shape {list(wanted)} in {self.folder}, as the "
                f"base has it, got {list(tensor.shape)}; {_ADVICE}."
            )
        return list(zip(fused.parts, fused.split(tensor), strict=True))


def _tensors_of(model: nn.Module, params: Params) -> dict[str, FusedTensor]:
    """Return the tensors that hold a model's parameters in transformers, by their names there."""
    if isinstance(model, Transformer):
        return {fused.name: fused for fused in fused_tensors_of(params, model.config)}
    return {
        name: FusedTensor(name, (name,), lambda leaves: leaves[0], lambda tensor: [tensor])
        for name in params
    }


def _tied_embedding(model: Any) -> str:
    """Return the name in transformers of an embedding that is the head too, "" without one."""
    if isinstance(model, Transformer):
        return "model.embed_tokens.weight" if model.config.tied else ""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is embedding)
    return f"{next(names)}.weight" if head is not None and head.weight is embedding.weight else ""

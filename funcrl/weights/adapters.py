"""Low-rank adapters in the format of the `peft` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from funcrl.core.types import Params
from funcrl.models import Transformer
from funcrl.models.networks import is_linear, is_transposed
from funcrl.weights.merge import ADAPTER_FILES
from funcrl.weights.names import translate
from funcrl.weights.save import atomic_folder, json_bytes
from funcrl.weights.tensors import write_safetensors

_DOWN, _UP = ".lora_down", ".lora_up"


class _Layer(NamedTuple):
    """A linear layer of transformers' network."""

    path: str
    is_transposed: bool  # its weight is [in, out], as that of GPT-2's `Conv1D`


def save_adapters(path: Path, model: nn.Module, adapters: Params, alpha: float, base: str) -> Path:
    """Write adapters that `peft` loads onto the base model, and return the folder.

    Args:
        path: a new folder, or one of adapters.
        model: the network that is adapted.
        adapters: as `funcrl.lora` makes them: `NAME.lora_down` [rank, columns] and `NAME.lora_up`
            [rows, rank] of each matrix.
        alpha: scales the change, by alpha / rank.
        base: where the base model is, for peft.
    """
    names = sorted(name.removesuffix(_DOWN) for name in adapters if name.endswith(_DOWN))
    layers = {name: _layer(model, name) for name in names}
    _check_free(path)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(adapters[names[0] + _DOWN]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(layer.is_transposed for layer in layers.values()),
        "inference_mode": True,
        "target_modules": sorted(layer.path for layer in layers.values()),
    }
    with atomic_folder(path) as draft:
        (draft / ADAPTER_FILES[0]).write_bytes(json_bytes(config))
        write_safetensors(draft / ADAPTER_FILES[1], _as_peft(adapters, layers))
    return path


def _as_peft(adapters: Mapping[str, Tensor], layers: Mapping[str, _Layer]) -> dict[str, Tensor]:
    """Return the factors of each layer's change: lora_A [rank, in] and lora_B [out, rank]."""
    tensors = {}
    for name, layer in layers.items():
        first, second = adapters[name + _DOWN], adapters[name + _UP]
        if layer.is_transposed:
            first, second = second.mT, first.mT
        tensors[f"base_model.model.{layer.path}.lora_A.weight"] = first
        tensors[f"base_model.model.{layer.path}.lora_B.weight"] = second
    return tensors


def _layer(model: nn.Module, name: str) -> _Layer:
    """Return the layer whose weight a parameter is; raise where it is none, or a part of one."""
    if isinstance(model, Transformer):
        theirs = translate(name, model.config).hugging_face
        is_part = model.config.attention_gate and name.rpartition(".attention.")[2].startswith(
            ("q.", "gate.")  # which are one matrix there
        )
        is_whole, transposed = not is_part and not name.startswith("embed."), False
    else:
        theirs, layer = name, model.get_submodule(name.rpartition(".")[0])
        is_whole, transposed = is_linear(layer), is_transposed(layer)
    path, _, leaf = theirs.rpartition(".")
    if leaf != "weight" or not is_whole:
        raise ValueError(
            f"export expects adapters of whole linear layers with --adapters, as peft has them, "
            f"got one of {name!r}; without it the merged model is written."
        )
    return _Layer(path, transposed)


def _check_free(path: Path) -> None:
    """Raise if a folder has anything but adapters, which would be lost."""
    there = list(path.iterdir()) if path.is_dir() else []
    others = [each for each in there if each.name not in ADAPTER_FILES]
    if others or (path.exists() and not path.is_dir()):
        got = f"{path} with {others[0].name}" if others else f"the file {path}"
        raise ValueError(
            f"export expects --out with --adapters to be a new folder, or one of adapters, got "
            f"{got}."
        )

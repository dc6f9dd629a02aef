"""Parameters from files, and back: `load_params` and `save_params`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrl.functional import check_params
from funcrl.models import Transformer, TransformerConfig
from funcrl.runs import write_whole
from funcrl.types import Params
from funcrl.weights.gguf import gguf_config, read_gguf
from funcrl.weights.hugging_face import from_hugging_face, to_hugging_face
from funcrl.weights.names import translate
from funcrl.weights.safetensors import read_safetensors, write_safetensors
from funcrl.weights.tensors import Stored, read_tensor

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def load_params(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Transformer, Params]:
    """Return the model and the parameters of a Hugging Face folder or of a GGUF file.

    Llama, Qwen2 and Qwen3 dense, SmolLM2 among them. Everything is checked before the first
    number is read; numbers are cast on the way, a slice of the file at a time.

    Args:
        path: a folder with config.json and safetensors, or a .gguf file.
        dtype: of the parameters.
        device: of the parameters.

    Example:
        >>> import pathlib, tempfile, torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> params = funcrl.init_params(model, seed=0)
        >>> folder = funcrl.save_params(pathlib.Path(tempfile.mkdtemp()) / "model", model, params)
        >>> again, loaded = funcrl.load_params(folder)
        >>> again.config == model.config, torch.equal(loaded["norm.weight"], params["norm.weight"])
        (True, True)
    """
    if not dtype.is_floating_point:
        raise ValueError(f"load_params expects a floating-point dtype, got {dtype}.")
    config, stored, by_neighbours = _look(Path(path))
    params = {}
    for name, each in sorted(stored.items()):
        leaf = read_tensor(each, dtype)
        if by_neighbours and name.endswith(("attention.q.weight", "attention.k.weight")):
            leaf = _rotated_by_halves(leaf, config.head_width)
        params[name] = leaf.to(device)
    return Transformer(config), params


def load_config(path: str | Path) -> TransformerConfig:
    """Return the shape of the model in a folder or a file, which `load_params` would load.

    Args:
        path: as for `load_params`.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.weights import load_config
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> _ = funcrl.save_params(folder, model, funcrl.init_params(model, seed=0))
        >>> load_config(folder).vocab_size
        13
    """
    return _look(Path(path))[0]


def find_model(path: Path) -> Path:
    """Return the model in a folder: itself, or the only one that is somewhere inside.

    Example:
        >>> import pathlib
        >>> from funcrl.weights import find_model
        >>> find_model(pathlib.Path("model.gguf")).name
        'model.gguf'
    """
    if not path.is_dir() or (path / CONFIG).exists():
        return path
    found = [each.parent for each in path.rglob(CONFIG)] + list(path.rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in sorted(found)) or "none"
        raise FileNotFoundError(
            f"load_params expects one model in {path}, a {CONFIG} or a .gguf file, got {names}."
        )
    return found[0]


def save_params(
    path: str | Path,
    model: Transformer,
    params: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a Hugging Face folder that transformers, vLLM and `load_params` read; return it.

    Args:
        path: the folder, made when it is missing.
        model: whose parameters they are.
        params: in the dtype to be written.
        max_shard_bytes: larger models are spread over several files.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> params = funcrl.init_params(model, seed=0)
        >>> folder = funcrl.save_params(pathlib.Path(tempfile.mkdtemp()) / "model", model, params)
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    path = Path(path)
    check_params(model, dict(params))
    dtypes = {leaf.dtype for leaf in params.values()}
    if len(dtypes) != 1:
        raise TypeError(
            f"save_params expects parameters of one dtype, got {sorted(map(str, dtypes))}."
        )
    described = to_hugging_face(model.config, str(dtypes.pop()).removeprefix("torch."))
    path.mkdir(parents=True, exist_ok=True)
    # Until the description is there, the folder is not a model: it goes first and comes last.
    for name in (CONFIG, INDEX):
        (path / name).unlink(missing_ok=True)
    shards = _shards(
        {translate(name).hugging_face: leaf for name, leaf in params.items()}, max_shard_bytes
    )
    if len(shards) == 1:
        write_safetensors(path / SINGLE, shards[0])
    else:
        files = [
            f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
        ]
        for file, shard in zip(files, shards, strict=True):
            write_safetensors(path / file, shard)
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(path / INDEX, {"metadata": {}, "weight_map": places})
    _write_json(path / CONFIG, described)
    return path


def _look(path: Path) -> tuple[TransformerConfig, dict[str, Stored], bool]:
    """Return the shape, where each parameter lies, and whether rotation pairs neighbours there."""
    path = find_model(path)
    if path.is_dir():
        return *_from_folder(path), False
    if path.suffix == ".gguf" and path.is_file():
        gguf = read_gguf(path)
        config, by_neighbours = gguf_config(gguf, path)
        # Frequencies of rotation, which some files carry, follow from the configuration.
        names = {name: each for name, each in gguf.tensors.items() if name != "rope_freqs.weight"}
        return config, _named(config, names, "gguf", path), by_neighbours
    raise FileNotFoundError(
        f"load_params expects a folder with {CONFIG} or a .gguf file, got {path}"
        f"{'' if path.exists() else ', which does not exist'}."
    )


def _from_folder(path: Path) -> tuple[TransformerConfig, dict[str, Stored]]:
    config = from_hugging_face(_read_json(path / CONFIG), str(path / CONFIG))
    if (path / INDEX).exists():
        places = _read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"load_params expects a weight_map in {path / INDEX}, got none.")
        files = sorted(set(places.values()))
    else:
        files = [SINGLE]
    found: dict[str, Stored] = {}
    for file in files:
        if not (path / file).is_file():
            raise FileNotFoundError(
                f"load_params expects weights in {path / file}, got no such file."
            )
        found |= read_safetensors(path / file)
    if config.tied:
        found.pop("lm_head.weight", None)  # some files have it twice
    return config, _named(config, found, "hugging_face", path)


def _named(
    config: TransformerConfig, found: Mapping[str, Stored], vocabulary: str, path: Path
) -> dict[str, Stored]:
    """Return what is stored under our names; every parameter must be there, and nothing else."""
    left = dict(found)
    stored = {}
    for name, leaf in Transformer(config).named_parameters():
        theirs = getattr(translate(name), vocabulary)
        if theirs not in left:
            raise ValueError(f"load_params expects {theirs!r} in {path}, got none.")
        stored[name] = left.pop(theirs)
        if stored[name].shape != tuple(leaf.shape):
            raise ValueError(
                f"load_params expects {theirs!r} of shape {list(leaf.shape)} in {path}, got "
                f"{list(stored[name].shape)}."
            )
    if left:
        raise ValueError(
            f"load_params expects the parameters of a {config.num_layers}-layer model in {path}, "
            f"got {min(left)!r} besides."
        )
    return stored


def _rotated_by_halves(weight: Tensor, head_width: int) -> Tensor:
    """Return rows of q or k so that rotation pairs (i, i + C/2), where it was (2 i, 2 i + 1)."""
    heads = weight.unflatten(0, (-1, head_width // 2, 2))
    return heads.transpose(1, 2).reshape(weight.shape)


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        if shards[-1] and size > most:
            shards.append({})
            size = tensor.numel() * tensor.element_size()
        shards[-1][name] = tensor
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"load_params expects {path}, got no such file.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_params expects JSON in {path}, got {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"load_params expects an object in {path}, got {type(values).__name__}.")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")

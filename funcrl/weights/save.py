"""Parameters to files: `save_params` writes Hugging Face folders and GGUF files."""

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.files import read_json, sync, whole_file
from funcrl.models import Transformer, TransformerConfig
from funcrl.models.functional import bind, check_params
from funcrl.models.networks import is_of_transformers
from funcrl.weights.gguf import BY_NEIGHBOURS, SIZES, gguf_config, read_gguf
from funcrl.weights.hub import no_progress_bar
from funcrl.weights.hugging_face import (
    family_of,
    from_hugging_face,
    same_module,
    same_network,
    to_hugging_face,
)
from funcrl.weights.load import CONFIG, INDEX, SINGLE, is_rotated, regrouped
from funcrl.weights.names import as_stored, translate
from funcrl.weights.tensors import LONGEST_HEADER, NAMES, as_bytes, write_safetensors
from funcrl.weights.tokenizer import GENERATION, special_tokens, tokenizer_files, tokenizer_metadata

# By dtype: the number of the storage, and that of a file that is mostly of it.
GGUF_DTYPES = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}
_ALIGNMENT = 32  # of each tensor; what a reader assumes


def gguf_architecture(config: TransformerConfig) -> str:
    """Return the name of a network's architecture in GGUF files."""
    family = family_of(config)
    if family.model_type not in BY_NEIGHBOURS:
        raise ValueError(
            f"save_params supports {', '.join(BY_NEIGHBOURS)} in a .gguf file, got a network of "
            f"{family.architecture}: save a folder, which llama.cpp's convert_hf_to_gguf.py reads."
        )
    return family.model_type


def write_gguf(
    path: Path,
    config: TransformerConfig,
    params: Mapping[str, Tensor],
    tokenizer: Sequence[bytes] = (),
) -> None:
    """Write a model to a GGUF file that is there whole or not at all.

    The parameters are of one dtype among `GGUF_DTYPES`; vectors are always written in float32, as
    llama.cpp wants them. `tokenizer` are metadata as they are in another file.
    """
    dtype = next(iter(params.values())).dtype
    metadata = [
        _key(name) + _value(value) for name, value in _metadata(path, config, dtype).items()
    ]
    header, offset = [], 0
    for name, leaf in params.items():
        kind = torch.float32 if leaf.ndim == 1 else dtype
        shape = leaf.shape[::-1]  # the fastest axis comes first
        header.append(_key(str(translate(name).gguf)) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_DTYPES[kind][0], offset
        ))  # fmt: skip
        offset += _padded(leaf.numel() * kind.itemsize)
    with whole_file(path) as file:
        counts = struct.pack("<IQQ", 3, len(params), len(metadata) + len(tokenizer))
        file.writelines([b"GGUF", counts, *metadata, *tokenizer, *header])
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for name, leaf in params.items():
            file.writelines(_numbers(name, leaf, config))
            file.write(bytes(_padded(file.tell()) - file.tell()))
        file.flush()
        _check_reread(Path(file.name), config)


def _check_reread(path: Path, config: TransformerConfig) -> None:
    """Raise if the metadata of a GGUF file do not say all that this network is."""
    found, _ = gguf_config(read_gguf(path), path)
    if _as_in_gguf(found) != _as_in_gguf(config):
        raise ValueError(f"save_params expects a network that GGUF describes, got {config}.")


def _as_in_gguf(config: TransformerConfig) -> TransformerConfig:
    """Return the one config of a network whose numbers are float32, as they are in a file."""
    theta, eps = (_in_float32(number) for number in (config.rope_theta, config.norm_eps))
    return same_network(replace(config, rope_theta=theta, norm_eps=eps))


def _in_float32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _metadata(path: Path, config: TransformerConfig, dtype: torch.dtype) -> dict[str, Any]:
    kind = gguf_architecture(config)
    described = {
        **{name: getattr(config, field) for field, name in SIZES.items()},
        "attention.value_length": config.head_width,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_width,
        "vocab_size": config.vocab_size,
    }
    general = {
        "general.architecture": kind,
        "general.name": path.stem,
        "general.file_type": GGUF_DTYPES[dtype][1],
    }
    return general | {f"{kind}.{name}": value for name, value in described.items()}


def _numbers(name: str, leaf: Tensor, config: TransformerConfig) -> Iterable[memoryview]:
    if leaf.ndim == 1:
        leaf = leaf.to(torch.float32)
    if BY_NEIGHBOURS[gguf_architecture(config)] and is_rotated(name):
        # Rotation shall pair (2 i, 2 i + 1), where it is (i, i + C/2).
        leaf = regrouped(leaf, (2, config.head_width // 2))
    return as_bytes(leaf)


def _key(name: str) -> bytes:
    raw = name.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: str | int | float) -> bytes:
    """Return a value after the number of its type: text, float32 or uint32."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _key(value)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<2I", 4, value)
    )


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@checked
def save_params(
    path: str | Path,
    model: nn.Module,
    params: Mapping[str, Tensor],
    *,
    tokenizer: str | Path | None = None,
    ends: Sequence[int] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a model that transformers, llama.cpp or vLLM and `load_params` read; return its path.

    Everything is checked first. A crash leaves the model that was there, or the new one: a folder
    is written over only if it holds the same network, or none.

    Args:
        path: a .gguf file, or a Hugging Face folder; made when it is missing.
        model: whose parameters they are: a `Transformer`, or for a folder a model of transformers,
            whose own `save_pretrained` writes it.
        params: in the dtype to be written.
        tokenizer: the folder or the .gguf file whose tokenizer goes along, such as the one that
            the parameters were loaded from, or RUN/tokenizer of a run that began from nothing.
            Without one, llama.cpp does not run a .gguf file.
        ends: the tokens that end a completion, besides those that the files of the `tokenizer`
            name. With neither, what transformers generates does not end by itself.
        max_shard_bytes: larger models are spread over several files of a folder.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> params = funcrl.init_params(model, seed=0)
        >>> folder = funcrl.save_params(pathlib.Path(tempfile.mkdtemp()) / "model", model, params)
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'model.safetensors']
        >>> funcrl.save_params(folder / "model.gguf", model, params).name
        'model.gguf'
    """
    path, to_gguf = Path(path), Path(path).suffix == ".gguf"
    source = None if tokenizer is None else Path(tokenizer)
    if is_of_transformers(model) and not to_gguf:
        _check(model, params, NAMES)
        files = _files_beside(source, ends, special_tokens(source, ends))
        _check_same_module(path, model)
        module: Any = bind(model, dict(params))
        with atomic_folder(path) as draft, no_progress_bar():
            module.save_pretrained(draft, max_shard_size=max_shard_bytes)
            _write_files(draft, files)
        return path
    if not isinstance(model, Transformer):
        raise TypeError(
            f"save_params expects model to be one of transformers and path a folder, or model to "
            f"be a Transformer, got {type(model).__name__} and {path}."
        )
    dtype = _check(model, params, GGUF_DTYPES if to_gguf else NAMES)
    config = model.config
    hf_config = to_hugging_face(config, str(dtype).removeprefix("torch."))
    hf_config |= special_tokens(source, ends)
    if to_gguf:
        gguf_architecture(config)
        metadata = [] if source is None else tokenizer_metadata(source, config.vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(path, config, params, metadata)
        return path
    files = _files_beside(source, ends, special_tokens(source, ends))
    _check_same_network(path, config)
    with atomic_folder(path) as draft:
        _write_weights(draft, as_stored(params, config), max_shard_bytes)
        _write_files(draft, {**files, CONFIG: json_bytes(hf_config)})
    return path


def _files_beside(
    source: Path | None, ends: Sequence[int], tokens: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return what goes along with the weights, by name: a tokenizer, and where completions end."""
    files = {} if source is None else tokenizer_files(source)
    if ends:
        before = json.loads(files[GENERATION]) if GENERATION in files else tokens
        files[GENERATION] = json_bytes({**before, "eos_token_id": tokens["eos_token_id"]})
    return files


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _check(
    model: nn.Module, params: Mapping[str, Tensor], dtypes: Mapping[torch.dtype, Any]
) -> torch.dtype:
    """Return the dtype of parameters that can be written."""
    check_params(model, params, "save_params")
    found = {leaf.dtype for leaf in params.values()}
    if len(found) != 1:
        raise TypeError(
            f"save_params expects parameters of one dtype, got {sorted(map(str, found))}."
        )
    checks.check_choice("save_params", "parameters", dtype := found.pop(), dtypes)
    for name, leaf in params.items():
        if leaf.is_meta:
            raise ValueError(
                f"save_params expects parameters with values, got a meta tensor for {name!r}."
            )
    return dtype


def _check_same_network(path: Path, config: TransformerConfig) -> None:
    """Raise unless the folder holds this network, or none.

    Weights and their description are two files, which cannot be exchanged at once; they need not
    be, as long as the description is the same before and after.
    """
    with _describing(path) as hf_config:
        if hf_config is None:
            return
        there = from_hugging_face(hf_config, str(path / CONFIG))
        if "text_config" in hf_config:
            raise ValueError("it has parts besides the text model")
        if same_network(there) != same_network(config):
            raise ValueError(f"{there} is not {config}")


def _check_same_module(path: Path, module: nn.Module) -> None:
    """Raise unless the folder holds this model of transformers, or none."""
    with _describing(path) as hf_config:
        if hf_config is not None and not same_module(hf_config, module):
            raise ValueError(f"its {CONFIG} is not that of this {type(module).__name__}")


@contextmanager
def _describing(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the config.json of a folder, if it has one; say what to do if it is another's."""
    try:
        there = (path / CONFIG).exists()
        yield read_json("save_params", path / CONFIG, LONGEST_HEADER) if there else None
    except ValueError as error:
        raise ValueError(
            f"save_params expects a new folder, or one with a model of the same shape, got {path} "
            f"with another; remove it first ({error})."
        ) from error


def _write_weights(path: Path, tensors: dict[str, Tensor], most: int) -> None:
    """Write tensors into one file, or into several and an index of them."""
    shards = _shards(tensors, most)
    if len(shards) == 1:
        write_safetensors(path / SINGLE, shards[0])
        return
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(path / name, shard)
    places = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
    (path / INDEX).write_bytes(json_bytes({"metadata": {}, "weight_map": places}))


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


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder for a model, which becomes that of `path` at the end, unless one raises.

    It lies inside, as `path` may be where a disk is mounted, and files move within one disk only.
    """
    draft = path / ".draft"
    shutil.rmtree(draft, ignore_errors=True)  # of a save that was killed
    draft.mkdir(parents=True)
    try:
        yield draft
        _move(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()


def _move(draft: Path, path: Path) -> None:
    """Replace the model of a folder by a draft, in an order that keeps it whole at every moment.

    One step makes the weights the model: that which replaces or removes the one whole file, which
    readers prefer, or replaces the index. The config.json, which says the same before and after,
    comes last: where there was no model, it makes the folder one.
    """
    _keep_apart(draft, path)
    weights = {file.name for file in draft.glob("model*.safetensors*")}
    names = sorted(file.name for file in draft.iterdir())
    names.sort(key=lambda name: (name == CONFIG, name not in weights, name == INDEX))
    for name in names:
        sync(draft / name)
        (draft / name).replace(path / name)
        if name == INDEX:
            (path / SINGLE).unlink(missing_ok=True)
    for pattern in ("model*.safetensors*", ".model*.safetensors*"):
        for file in path.glob(pattern):  # of earlier saves: readers may prefer it
            if weights and file.name not in weights:
                file.unlink()


def _keep_apart(draft: Path, path: Path) -> None:
    """Rename the files of a draft's index if the index that is there has the same names."""
    shards = sorted(draft.glob("model-*.safetensors"))
    if not (shards and (path / INDEX).exists() and shards[0].name in (path / INDEX).read_text()):
        return
    names = {shard.name: shard.name.replace("model-", "model-b-") for shard in shards}
    for old, new in names.items():
        (draft / old).replace(draft / new)
    index = json.loads((draft / INDEX).read_text())
    index["weight_map"] = {each: names[file] for each, file in index["weight_map"].items()}
    (draft / INDEX).write_bytes(json_bytes(index))

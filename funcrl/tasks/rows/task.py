"""A task whose prompts are rows of data."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from funcrl.core import checks, rng
from funcrl.core.arguments import Fraction, checked
from funcrl.tasks.adapt import check_tokenizer
from funcrl.tasks.answers import number_of
from funcrl.tasks.compose import with_rewards
from funcrl.tasks.contracts import Prompt, Task, Tokenizer, TokenizerLike
from funcrl.tasks.rewards.functions import form_of
from funcrl.tasks.rows.prompts import read_prompts
from funcrl.tasks.rows.reading import Table, to_table
from funcrl.tasks.tokenizers import ByteTokenizer

Item = TypeVar("Item")


def hold_out(contents: Sequence[str], share: float) -> list[bool]:
    """Return which problems are held out: the share of those with the lowest hash.

    The hash is of a problem's content alone, so that it does not matter what else there is, in
    which order, or where. Where chance would leave one of the sides empty, it gets the problem
    whose hash is the nearest, unless all are alike.

    Args:
        contents: of each problem; equal ones are on one side.
        share: from 0 to 1.
    """
    hashes = [_hash(each) for each in contents]
    bound = share * 2.0**64
    if 0 < share < 1 and len({*hashes}) > 1:
        bound = max(bound, min(hashes) + 1)
        bound = min(bound, max(hashes))
    return [each < bound for each in hashes]


def epochs(problems: Sequence[Item], seed: int, start: int, count: int) -> list[Item]:
    """Return the problems number start, start + 1, ... of a stream of permutations of them all."""
    orders: dict[int, list[int]] = {}
    chosen = []
    for index in range(start, start + count):
        epoch, place = divmod(index, len(problems))
        if epoch not in orders:
            orders[epoch] = rng.permutation(len(problems), seed, epoch).tolist()
        chosen.append(problems[orders[epoch][place]])
    return chosen


def spread(problems: Sequence[Item], count: int) -> list[Item]:
    """Return `count` problems at pseudo-random places of the sequence, always the same."""
    return [problems[row] for row in rng.permutation(len(problems), 1)[:count].tolist()]


def _hash(content: str) -> int:
    # A lone surrogate, which JSON can hold, is no UTF-8.
    raw = content.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")


HELD_OUT = 0.1  # the share of rows that is held out, if nothing else is said
Rewards: TypeAlias = Mapping[str, Callable[..., Any]]


class RowsTask(Task):
    """Prompts from rows, without a reward; `from_rows` adds what rewards them."""

    accuracy = ""  # `correct` if there is such a reward, or else the first

    def __init__(
        self,
        name: str,
        train: Sequence[Prompt],
        test: Sequence[Prompt],
        tokenizer: Tokenizer,
        finish: Callable[[Prompt], Prompt],
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self._train, self._test, self._finish = train, test, finish

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return rows to train on: every epoch is a permutation of them."""
        found = epochs(self._train, seed, start, count) if self._train else []
        return [self._finish(each) for each in found]

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out rows, spread over them."""
        return [self._finish(each) for each in spread(self._test, count)]

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return no reward of the task's own."""
        del prompt, completion
        return {}


class AnsweredRows(RowsTask):
    """Rows with an answer, which a completion is compared with: the reward `correct`."""

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return 1 for the answer, or for the same number in another way of writing it."""
        return {"correct": float(_plain(completion) == _plain(prompt.answer))}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for, a number in one way of writing it."""
        return _plain(completion)


@checked
def from_rows(
    rows: Any,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | Rewards | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    tokenizer: TokenizerLike | None = None,
    prompt_template: str | None = None,
    held_out: Fraction = HELD_OUT,
    name: str = "rows",
) -> Task:
    """Return a task of rows: mappings with `prompt` or `messages`, and whatever rewards need.

    `prompt` is a text; `messages` are a conversation that the chat template of the tokenizer
    writes. `answer` is for the warm start, and for the reward `correct` where no other is given.
    The row is the `data` of its prompt.

    Args:
        rows: a list of mappings, a `datasets.Dataset`, or what is like these.
        reward: a function as `with_rewards` takes it, several, or name -> function; the rewards of
            functions have their names. When left out, a completion that is the answer earns 1.
        weights: name -> factor, 1 when left out.
        tokenizer: the model's; of bytes when left out.
        prompt_template: such as "Question: {question}", of any columns; braces are doubled.
        held_out: share of the rows that is not trained on: which, is a hash of their prompts.
        name: of the task.

    Example:
        >>> from funcrl.tasks import from_rows
        >>> rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)]
        >>> task = from_rows(rows, held_out=0.2)
        >>> prompt = task.prompts(seed=0, start=0, count=1)[0]
        >>> task.reward(prompt, prompt.answer), len(task.eval_prompts(100)) < 20
        ({'correct': 1.0}, True)
    """
    own = ByteTokenizer() if tokenizer is None else check_tokenizer("from_rows", tokenizer)
    table = to_table("from_rows", rows, name)
    functions = _by_name(reward)
    task = rows_task("from_rows", table, functions, own, name, prompt_template, held_out)
    if functions:
        return with_rewards(task, functions, weights)
    if weights:
        raise ValueError(f"from_rows expects weights with rewards, got {min(weights)!r} alone.")
    return task


def rows_task(
    function: str,
    table: Table,
    rewards: Rewards,
    tokenizer: Tokenizer,
    name: str,
    template: str | None,
    share: float,
) -> Task:
    """Return the task of a table, without the rewards that it gets besides.

    Args:
        function: for errors.
        table: its rows.
        rewards: that it gets besides, which are compared with the columns.
        tokenizer: the model's.
        name: of the task.
        template: of the prompts.
        share: of the rows that is held out.
    """
    table = table.checked(function)
    for each, called in rewards.items():
        form_of(each, called, table.rows[0])
    found = read_prompts(function, table, tokenizer, template)
    if not rewards:
        _check_answers(function, table)
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, is_test in zip(found.prompts, hold_out(found.contents, share), strict=True):
        sides[is_test].append(prompt)
    made = RowsTask if rewards else AnsweredRows
    return made(name, *sides, found.tokenizer, found.finish)


def _check_answers(function: str, table: Table) -> None:
    for index, row in enumerate(table.rows):
        if row.get("answer") in (None, ""):
            raise ValueError(
                f"{function} expects --reward, or an answer in every row to compare completions "
                f"with, got none in {table.place(index)}."
            )


def _by_name(reward: Any) -> Rewards:
    """Return reward functions by their names."""
    if reward is None or isinstance(reward, Mapping):
        return reward or {}
    functions = [reward] if callable(reward) else list(reward)
    named: dict[str, Callable[..., Any]] = {}
    for function in functions:
        checks.check_callable("from_rows", "reward", function, "a function, or several")
        name = getattr(function, "__name__", "")
        if not name.isidentifier() or name in named:
            raise ValueError(
                f"from_rows expects reward functions with names of their own, or name -> function, "
                f"got {name or function!r}{' twice' if name in named else ''}."
            )
        named[name] = function
    return named


def _plain(text: str) -> str:
    """Return an answer without space around it, a number in one way of writing it."""
    number = number_of(text)
    return text.strip() if number is None else f"{number.normalize():f}"

"""A task whose prompts are rows of data, with an answer or with rewards of one's own."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import compress
from typing import Any, TypeAlias, TypeVar

from funcrl.core import checks, rng
from funcrl.core.arguments import Count, Fraction, checked
from funcrl.core.files import brief
from funcrl.tasks.adapt import check_tokenizer, with_rewards
from funcrl.tasks.answers import number_of
from funcrl.tasks.contracts import Prompt, Reward, Task, Tokenizer, TokenizerLike
from funcrl.tasks.read_rows import Table, to_table
from funcrl.tasks.rewards import form_of
from funcrl.tasks.row_prompts import (
    HELD_OUT,
    Prompts,
    RowsOptions,
    answer_of,
    is_text_or_number,
    read_prompts,
    with_answers,
)
from funcrl.tasks.tokenizers import ByteTokenizer

Item = TypeVar("Item")
Sides: TypeAlias = tuple[list[Prompt], list[Prompt]]  # to train on, and held out


def divided(prompts: Sequence[Prompt], contents: Sequence[str], share: float) -> Sides:
    """Return prompts to train on, and those that are held out; see `hold_out`."""
    sides: Sides = ([], [])
    for prompt, is_test in zip(prompts, hold_out(contents, share), strict=True):
        sides[is_test].append(prompt)
    return sides


def hold_out(contents: Sequence[str], share: float) -> list[bool]:
    """Return which problems are held out: the share of those with the lowest hash.

    The hash is of a problem's content alone, so that it does not matter what else there is, in
    which order, or where. Where chance would leave one of the sides empty, it gets the problem
    whose hash is the nearest, unless all are alike.
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
        num_left_out: int = 0,
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.num_left_out = num_left_out  # rows whose prompt is longer than it may be
        self._train, self._test, self._finish = train, test, finish

    @property
    def num_train(self) -> int:
        """The number of rows that are trained on."""
        return len(self._train)

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return rows to train on: every epoch is a permutation of them."""
        found = epochs(self._train, seed, start, count) if self._train else []
        return [self._finish(each) for each in found]

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out rows, spread over them."""
        return [self._finish(each) for each in spread(self._test, count)]

    def check_row_lengths(self, function: str, context_length: int) -> None:
        """Raise for a prompt after which a generator's context has no room for a completion.

        One that has fewer characters than the context has tokens is taken to be short enough.
        """
        for prompt in (*self._train, *self._test):
            if len(prompt.text) < context_length:
                continue
            finished = self._finish(prompt)
            length = len(self.tokenizer.encode(finished.text))
            if length >= context_length:
                raise ValueError(
                    f"{function} expects prompts of fewer tokens than the {context_length} of the "
                    f"generator's context, got {length} in {brief(finished.text)} of {self.name}; "
                    f"--max-prompt-length leaves rows with longer prompts out."
                )

    def reward(self, prompt: Prompt, completion: Any) -> Reward | Awaitable[Reward]:
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
    prompt_column: str | None = None,
    answer_column: str | None = None,
    held_out: Fraction = HELD_OUT,
    max_prompt_length: Count | None = None,
    name: str = "rows",
) -> Task:
    """Return a task of rows: mappings with `prompt` or `messages`, and whatever rewards need.

    `prompt` is a text; `messages` are a conversation that the chat template of the tokenizer
    writes. `answer` is for supervised training, and for the reward `correct` where no other is
    given; without that column it is `completion`, or the last of the messages, if that is the
    assistant's. The row is the `data` of its prompt.

    Args:
        rows: a list of mappings, a `datasets.Dataset`, or what is like these.
        reward: a function as `with_rewards` takes it, several, or name -> function; the rewards of
            functions have their names. When left out, a completion that is the answer earns 1.
        weights: name -> factor, 1 when left out.
        tokenizer: the model's; of bytes when left out.
        prompt_template: such as "Question: {question}", of any columns; braces are doubled.
        prompt_column: has the prompts, in place of `prompt` and `messages`.
        answer_column: has the answers, in place of `answer`.
        held_out: share of the rows that is not trained on: which, is a hash of their prompts.
        max_prompt_length: rows whose prompt has more tokens are left out.
        name: of the task.

    Example:
        >>> from funcrl.tasks import from_rows
        >>> rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)]
        >>> task = from_rows(rows, held_out=0.2)
        >>> prompt = task.prompts(seed=0, start=0, count=1)[0]
        >>> task.reward(prompt, prompt.answer), len(task.eval_prompts(100)) < 20
        ({'correct': 1.0}, True)
    """
    own = None if tokenizer is None else check_tokenizer("from_rows", tokenizer)
    functions = reward_functions("from_rows", reward)
    options = RowsOptions(
        prompt_template, prompt_column, answer_column, held_out, max_prompt_length=max_prompt_length
    )
    if weights and not functions:
        raise ValueError(f"from_rows expects weights with rewards, got {min(weights)!r} alone.")
    return task_of_rows("from_rows", rows, functions, own, options, name, weights)


def task_of_rows(
    function: str,
    rows: Any,
    rewards: Rewards,
    tokenizer: Tokenizer | None,
    options: RowsOptions,
    name: str = "rows",
    weights: Mapping[str, float] | None = None,
) -> Task:
    """Return what `from_rows` does; errors name the public function that was given the rows."""
    table, own = to_table(function, rows, name), tokenizer or ByteTokenizer()
    task = rows_task(function, table, rewards, own, name, options)
    return with_rewards(task, rewards, weights) if rewards else task


def rows_task(
    function: str,
    table: Table,
    rewards: Rewards,
    tokenizer: Tokenizer,
    name: str,
    options: RowsOptions,
    test: Table | None = None,
) -> Task:
    """Return the task of a table, without the rewards that it gets besides.

    A table `test` is held out, if there is one, and nothing of the other.
    """
    found, *of_test = (
        _read(function, each, rewards, tokenizer, options)
        for each in (table, test)
        if each is not None
    )
    if of_test:
        sides = found.prompts, of_test[0].prompts
    else:
        sides = divided(found.prompts, found.contents, options.held_out)
    made = RowsTask if rewards else AnsweredRows
    num_left_out = sum(map(len, (table.rows, test.rows if test else ()))) - sum(map(len, sides))
    return made(name, *sides, found.tokenizer, found.finish, num_left_out)


def _read(
    function: str, table: Table, rewards: Rewards, tokenizer: Tokenizer, options: RowsOptions
) -> Prompts:
    table = with_answers(options.named(function, table.checked(function)))
    for each, called in rewards.items():
        form_of(each, called, table.rows[0])
    found = read_prompts(function, table, tokenizer, options.prompt_template)
    if not rewards:
        _check_answers(function, table)
    longest = options.max_prompt_length
    return found if longest is None else _without_long(function, table.name, found, longest)


def _without_long(function: str, name: str, found: Prompts, longest: int) -> Prompts:
    """Return the prompts that have at most so many tokens."""
    lengths = [found.length(each) for each in found.prompts]
    if min(lengths) > longest:
        raise ValueError(
            f"{function} expects --max-prompt-length to leave rows of {name}, got {longest} where "
            f"the shortest prompt has {min(lengths)} tokens."
        )
    kept = [length <= longest for length in lengths]
    return found._replace(
        prompts=list(compress(found.prompts, kept)), contents=list(compress(found.contents, kept))
    )


def _check_answers(function: str, table: Table) -> None:
    for index, row in enumerate(table.rows):
        answer = row.get("answer")
        if answer is not None and not is_text_or_number(answer):
            raise ValueError(
                f"{function} expects --reward, or a text or a number as answer, got "
                f"{brief(answer)} in {table.place(index)}."
            )
        if not answer_of(row):
            raise ValueError(
                f"{function} expects --reward, or an answer in every row to compare completions "
                f"with (--answer-column names its column), got {', '.join(row)[:300]} in "
                f"{table.place(index)}."
            )


def reward_functions(function: str, reward: Any) -> Rewards:
    """Return reward functions by their names."""
    if reward is None or isinstance(reward, Mapping):
        return reward or {}
    functions = [reward] if callable(reward) else list(reward)
    named: dict[str, Callable[..., Any]] = {}
    for each in functions:
        checks.check_callable(function, "reward", each, "a function, or several")
        name = getattr(each, "__name__", "")
        if not name.isidentifier() or name in named:
            raise ValueError(
                f"{function} expects reward functions with names of their own, or name -> "
                f"function, got {name or each!r}{' twice' if name in named else ''}."
            )
        named[name] = each
    return named


def _plain(text: str) -> str:
    """Return an answer without space around it, a number in one way of writing it."""
    number = number_of(text)
    return text.strip() if number is None else f"{number.normalize():f}"

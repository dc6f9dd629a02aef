"""A task whose prompts are rows of data: a text, messages or a template, and an answer."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from funcrl.core import checks, rng
from funcrl.core.arguments import CheckedFields, Fraction, checked
from funcrl.core.files import brief
from funcrl.tasks.adapt import TokenizerStandIn, check_tokenizer, with_rewards
from funcrl.tasks.answers import number_of
from funcrl.tasks.contracts import Prompt, Reward, Task, Tokenizer, TokenizerLike
from funcrl.tasks.read_rows import Table, to_table
from funcrl.tasks.rewards import Conversation, form_of
from funcrl.tasks.tokenizers import ByteTokenizer


class Template:
    """A text with `{column}` in place of what a row has there; `{{` and `}}` are braces."""

    def __init__(self, function: str, text: str) -> None:
        self._function = function
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"{function} expects --prompt-template with columns in braces, and other braces "
                f"doubled, got {brief(text)}: {error}."
            ) from error
        for _, column, form, conversion in parts:
            plain = column is None or column.isidentifier() or column.replace(" ", "").isalnum()
            if form or conversion or not plain or column == "":
                raise ValueError(
                    f"{function} expects --prompt-template to have names of columns in braces, and "
                    f"other braces doubled, got {brief(column)} in {brief(text)}."
                )
        self._parts = [(literal, column) for literal, column, _, _ in parts]

    def fill(self, row: Mapping[str, Any], place: str) -> str:
        """Return the text for a row, which stands at `place`."""
        return "".join(literal + self._value(row, column, place) for literal, column in self._parts)

    def _value(self, row: Mapping[str, Any], column: str | None, place: str) -> str:
        if column is None:
            return ""
        if column not in row:
            raise ValueError(
                f"{self._function} expects the column {column!r} of --prompt-template, got "
                f"{', '.join(row)[:300]} in {place}."
            )
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(
                f"{self._function} expects text or a number in the column {column!r} of "
                f"--prompt-template, got {brief(value)} in {place}."
            )
        return str(value)


class Prompts(NamedTuple):
    """The prompts of a table."""

    prompts: list[Prompt]
    contents: list[str]  # of each, what it says, before a chat template is put around it
    tokenizer: Tokenizer  # that encodes their texts
    finish: Callable[[Prompt], Prompt]  # writes the text of a prompt that is drawn


def read_prompts(
    function: str, table: Table, tokenizer: Tokenizer, template: str | None
) -> Prompts:
    """Return the prompts of a table's rows."""
    column = _column(function, table, template)
    if column == "messages":
        return _conversations(function, table, tokenizer, _messages_column(table))
    filled = None if template is None else Template(function, template)
    texts = []
    for index, row in enumerate(table.rows):
        place = table.place(index)
        text = row["prompt"] if filled is None else filled.fill(row, place)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{function} expects a text as prompt, got {brief(text)} in {place}.")
        texts.append(text)
    return Prompts(_prompts(function, table, texts), texts, tokenizer, lambda prompt: prompt)


def _column(function: str, table: Table, template: str | None) -> str:
    """Return what prompts are made of: the column prompt, messages, or a template."""
    if template is not None:
        return "template"
    columns = table.rows[0]
    found = [name for name in ("prompt", "messages") if name in columns]
    if len(found) != 1:
        raise ValueError(
            f"{function} expects either a column prompt or a column messages in {table.name}, or "
            f"--prompt-template, got {', '.join(columns)[:300]}."
        )
    return "messages" if isinstance(columns[found[0]], list | tuple) else found[0]


def _messages_column(table: Table) -> str:
    return "messages" if "messages" in table.rows[0] else "prompt"  # TRL has them there


def _conversations(function: str, table: Table, tokenizer: Tokenizer, column: str) -> Prompts:
    """Return prompts that the model's chat template writes, and that are encoded as they are."""
    render = getattr(tokenizer, "render", None)
    if render is None:
        raise ValueError(
            f"{function} expects a pretrained model, whose chat template writes messages, or "
            f"--prompt-template for {table.name}, got a tokenizer without a template."
        )
    contents = [
        json.dumps(messages_of(function, row[column], table.place(index)), sort_keys=True)
        for index, row in enumerate(table.rows)
    ]

    def finish(prompt: Prompt) -> Prompt:  # a template takes a while for all the rows of a file
        return prompt._replace(text=render(prompt.data[column]))

    prompts = [
        each._replace(data=Conversation(each.data, column))
        for each in _prompts(function, table, contents)
    ]
    finish(prompts[0])  # so that a template that does not take the messages fails at once
    # The texts hold the template's marks already.
    whole = TokenizerStandIn(tokenizer, encode=tokenizer.encode_answer)
    return Prompts(prompts, contents, whole, finish)


def messages_of(function: str, value: Any, place: str) -> list[dict[str, str]]:
    """Return the messages of a row, each with its role and its content; raise for anything else."""
    good = isinstance(value, list | tuple) and bool(value)
    for each in value if good else ():
        fields = each if isinstance(each, Mapping) else {}
        good = good and all(isinstance(fields.get(name), str) for name in ("role", "content"))
    if not good or value[-1]["role"] == "assistant":
        raise ValueError(
            f"{function} expects messages with a role and a content, texts, of which the last is "
            f"not the assistant's, got {brief(value)} in {place}."
        )
    return [{name: str(each[name]) for name in ("role", "content")} for each in value]


def _prompts(function: str, table: Table, texts: Sequence[str]) -> list[Prompt]:
    return [
        Prompt(text, answer_of(function, row, table.place(index)), row)
        for index, (text, row) in enumerate(zip(texts, table.rows, strict=True))
    ]


def answer_of(function: str, row: Mapping[str, Any], place: str) -> str:
    """Return a row's answer as a text, "" for none."""
    answer = row.get("answer")
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(
            f"{function} expects a text or a number as answer, got {brief(answer)} in {place}."
        )
    return str(answer)


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


HELD_OUT = 0.1  # the share of rows that is held out, if nothing else is said


@dataclass(frozen=True)
class RowsOptions(CheckedFields):
    """How rows are made prompts; the arguments of `from_rows` say what each is."""

    prompt_template: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    held_out: Fraction = HELD_OUT
    split: str = "train"  # of a data set
    test_split: str | None = None  # what is held out in place of a share

    def named(self, function: str, table: Table) -> Table:
        """Return a table whose columns prompt and answer are those that the options name."""
        if self.prompt_column is not None and self.prompt_template is not None:
            raise ValueError(
                f"{function} expects --prompt-column or --prompt-template, got both: "
                f"{self.prompt_column!r} and {brief(self.prompt_template)}."
            )
        columns = {"prompt": self.prompt_column, "answer": self.answer_column}
        wanted = {name: column for name, column in columns.items() if column is not None}
        for name, column in wanted.items():
            if column not in table.rows[0]:
                raise ValueError(
                    f"{function} expects --{name}-column to be a column of {table.name}, got "
                    f"{column!r} among {', '.join(table.rows[0])[:300]}."
                )
        replaced = {"prompt", "messages"} if "prompt" in wanted else set()
        rows = [
            {name: value for name, value in row.items() if name not in replaced}
            | {name: row[column] for name, column in wanted.items()}
            for row in table.rows
        ]
        return table._replace(rows=rows) if wanted else table


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
    options = RowsOptions(prompt_template, prompt_column, answer_column, held_out)
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
    return made(name, *sides, found.tokenizer, found.finish)


def _read(
    function: str, table: Table, rewards: Rewards, tokenizer: Tokenizer, options: RowsOptions
) -> Prompts:
    table = _with_answers(options.named(function, table.checked(function)))
    for each, called in rewards.items():
        form_of(each, called, table.rows[0])
    found = read_prompts(function, table, tokenizer, options.prompt_template)
    if not rewards:
        _check_answers(function, table)
    return found


def _with_answers(table: Table) -> Table:
    """Return a table of the forms that supervised training is used to, with a column answer.

    Those are a column completion, and messages of which the last is the assistant's.
    """
    columns = table.rows[0]
    if "answer" in columns:
        return table
    talk = _messages_column(table)
    return table._replace(rows=[_with_answer(row, talk) for row in table.rows])


def _with_answer(row: Mapping[str, Any], talk: str) -> dict[str, Any]:
    """Return a row with its answer, if it has one by another name; `talk` has its messages."""
    completion, messages = row.get("completion"), row.get(talk)
    if isinstance(completion, list | tuple) and len(completion) == 1:  # TRL's, of messages
        completion = _said(completion)
    if isinstance(completion, str):
        return {**row, "answer": completion}
    if isinstance(messages, list | tuple) and (said := _said(messages)) is not None:
        return {**row, talk: messages[:-1], "answer": said}
    return dict(row)


def _said(messages: Sequence[Any]) -> str | None:
    """Return what the assistant says last, None if it does not."""
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return None
    content = last.get("content")
    return content if isinstance(content, str) else None


def _check_answers(function: str, table: Table) -> None:
    for index, row in enumerate(table.rows):
        if row.get("answer") in (None, ""):
            raise ValueError(
                f"{function} expects --reward, or an answer in every row to compare completions "
                f"with, got none in {table.place(index)}."
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

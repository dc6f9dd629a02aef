"""From rows of data to prompts: columns, a template or messages, and answers."""

import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from funcrl.core.arguments import CheckedFields, Count, Fraction
from funcrl.core.files import brief
from funcrl.tasks.adapt import TokenizerStandIn
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.read_rows import Table
from funcrl.tasks.rewards import Conversation

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
    max_prompt_length: Count | None = None  # in tokens; rows with a longer prompt are left out

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
        if not is_text_or_number(value):
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

    def length(self, prompt: Prompt) -> int:
        """Return the number of a prompt's tokens."""
        return len(self.tokenizer.encode(self.finish(prompt).text))


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
    return Prompts(_prompts(table, texts), texts, tokenizer, lambda prompt: prompt)


def _column(function: str, table: Table, template: str | None) -> str:
    """Return what prompts are made of: the column prompt, messages, or a template."""
    if template is not None:
        return "template"
    columns = table.rows[0]
    found = [name for name in ("prompt", "messages") if name in columns]
    if len(found) != 1:
        raise ValueError(
            f"{function} expects either a column prompt or a column messages in {table.name}, or "
            f"--prompt-column or --prompt-template, got {', '.join(columns)[:300]}."
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
        each._replace(data=Conversation(each.data, column)) for each in _prompts(table, contents)
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


def _prompts(table: Table, texts: Sequence[str]) -> list[Prompt]:
    return [Prompt(text, answer_of(row), row) for text, row in zip(texts, table.rows, strict=True)]


def answer_of(row: Mapping[str, Any]) -> str:
    """Return a row's answer as a text, "" for none and for one that rewards alone can read."""
    answer = row.get("answer")
    return str(answer) if is_text_or_number(answer) else ""


def is_text_or_number(value: object) -> bool:
    """Return whether a value, which may be NumPy's, is written as its `str`."""
    return isinstance(value, str | numbers.Real) and not isinstance(value, bool)


def with_answers(table: Table) -> Table:
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

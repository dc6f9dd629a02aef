"""Texts of prompts that are written from the columns of a row."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from funcrl.core.reading import brief


class Template:
    """A text with `{column}` in place of what a row has there; `{{` and `}}` are braces.

    Args:
        function: that is given the template, for errors.
        text: of the template.
    """

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

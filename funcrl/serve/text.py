"""Conversations as tokens, and the text of a completion while its tokens come."""

from collections.abc import Mapping, Sequence
from typing import Any

from funcrl.config import Sampling
from funcrl.generators.stops import cut_at_stop
from funcrl.tasks.chat import has_template
from funcrl.tasks.contracts import Tokenizer, end_tokens

_CUT = "\ufffd"  # what a part of a character decodes to


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation up to the start of the model's answer.

    Without a chat template the user and the model take turns, and the user begins.
    """
    if has_template(tokenizer):
        return tokenizer.encode_answer(tokenizer.render(messages, (), chat_template_kwargs))
    if chat_template_kwargs:
        names = ", ".join(chat_template_kwargs)
        raise ValueError(f"expected a model with a chat template for {names}, got one without")
    wanted = ["user", "assistant"] * (len(messages) // 2) + ["user"]
    roles = [each["role"] for each in messages]
    if roles != wanted:
        raise ValueError(
            f"expected messages of user and assistant in turn, from a user to a user, for a model "
            f"without a chat template, got {', '.join(roles) or 'none'}"
        )
    tokens = tokenizer.encode(messages[0]["content"])
    for answer, reply in zip(messages[1::2], messages[2::2], strict=True):
        tokens = [*tokens, *tokenizer.encode_answer(answer["content"]), *end_tokens(tokenizer)]
        tokens += tokenizer.encode_reply(reply["content"])
    return tokens


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that is to be continued, without a chat template around it."""
    return list((tokenizer.inner if has_template(tokenizer) else tokenizer).encode(text))


class GrowingText:
    """The text of a completion while it is drawn: of whole characters, without its stop string."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._decode, self._sampling = tokenizer.decode, sampling
        self._tokens: list[int] = []
        self._read = self._settled = 0  # tokens whose text is known, and those decoded before them
        self._pending = ""  # may be the start of a stop string
        self._given = 0  # characters

    def add(self, token: int) -> str:
        """Return the text that a token adds for certain."""
        self._tokens.append(token)
        if not self._sampling.stop:
            return self._give(self._new_text(len(self._tokens)), kept=0)
        # The last token may end a stop string, those before it do not.
        return self._give(self._new_text(len(self._tokens) - 1), kept=self._longest_start())

    def end(self) -> str:
        """Return the rest of the text."""
        tokens = self._tokens
        ended = bool(tokens) and tokens[-1] in self._sampling.stop_tokens
        text, _ = cut_at_stop(tokens[:-1] if ended else tokens, self._sampling, self._decode)
        return text[self._given :]

    def _longest_start(self) -> int:
        return max(map(len, self._sampling.stop)) - 1

    def _new_text(self, stop: int) -> str:
        """Return the text of the tokens before `stop` that are not read yet, if it is whole.

        A token's text may depend on the one before it: both are decoded, and the first's is taken
        off.
        """
        before = self._decode(self._tokens[self._settled : self._read])
        text = self._decode(self._tokens[self._settled : stop])
        if text.endswith(_CUT) or len(text) <= len(before):
            return ""
        self._settled, self._read = self._read, stop
        return text[len(before) :]

    def _give(self, new: str, kept: int) -> str:
        text = self._pending + new
        size = max(len(text) - kept, 0)
        self._pending = text[size:]
        self._given += size
        return text[:size]

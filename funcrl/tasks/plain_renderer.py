"""For the renderers package: messages are their texts, one after another, without a template."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import BaseRendererConfig, ParsedResponse, RenderedTokens

Messages = Sequence[Mapping[str, Any]]


class PlainRendererConfig(BaseRendererConfig):
    """There is nothing to configure."""


class PlainRenderer:
    """A renderer for models that begin from nothing; see `renderers.Renderer`."""

    config_class = PlainRendererConfig
    supports_tools = False
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: PlainRendererConfig | None = None) -> None:
        self.config = config or PlainRendererConfig()
        self._tokenizer = tokenizer

    def render(self, messages: Messages, **_: Any) -> RenderedTokens:
        """Return the tokens of messages, each text encoded alone."""
        return self._rendered([], messages)

    def render_ids(self, messages: Messages, **_: Any) -> list[int]:
        """Return the same tokens alone."""
        return self.render(messages).token_ids

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        """Return the text of an answer."""
        return ParsedResponse(content=self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def get_stop_token_ids(self) -> list[int]:
        """Return the token that ends an answer, if there is one."""
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], new_messages: Messages, **_: Any
    ) -> RenderedTokens:
        """Return the tokens so far, as they are, and those of more messages."""
        return self._rendered([*prompt_ids, *completion_ids], new_messages)

    def _rendered(self, before: list[int], messages: Messages) -> RenderedTokens:
        texts = [
            self._tokenizer.encode(each["content"], add_special_tokens=False) for each in messages
        ]
        owners = [index for index, text in enumerate(texts) for _ in text]
        return RenderedTokens(
            token_ids=[*before, *(token for text in texts for token in text)],
            message_indices=[*(-1 for _ in before), *owners],
            sampled_mask=[False] * (len(before) + len(owners)),
            is_content=[*(False for _ in before), *(True for _ in owners)],
            message_roles=[str(each["role"]) for each in messages],
        )

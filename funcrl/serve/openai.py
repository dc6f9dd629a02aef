"""OpenAI's routes for completions and chat, so that its clients draw from a model here."""

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.types import Samples
from funcrl.loop.episodes import Turn, read_turns
from funcrl.serve.http import Request, RequestError, Response, Routes, as_json, refusing
from funcrl.serve.jobs import Failure, SharedGenerator
from funcrl.serve.served import Served, check_tokens
from funcrl.serve.text import GrowingText, encode_messages, encode_text
from funcrl.tasks.contracts import all_ends

_BASE = ""  # the name of the served parameters among those that are pushed
_TEXT = "expected a text that the tokenizer reads: "
_MAX_TOKENS = 16  # of a completion that says nothing; OpenAI's own
# The fields that are read, besides the prompt or the messages.
_READ = {
    "model", "stream", "stream_options", "logprobs", "chat_template_kwargs", "max_tokens",
    "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p", "stop", "seed",
    "min_tokens", "prompt_logprobs",
}  # fmt: skip
# What says nothing about the answer, or nothing with these values.
_OF_NO_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier"}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "logit_bias": ({}, None),
    "best_of": (1, None), "echo": (False, None), "suffix": ("", None), "top_logprobs": (0, None),
    "tools": ([], None), "tool_choice": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """What one request wants drawn."""

    prompts: list[list[int]]
    sampling: Sampling
    seed: int
    scores_prompts: bool = False
    tokens: "queue.Queue[tuple[int, int] | None] | None" = None  # of a stream: (choice, token)
    is_over: threading.Event = field(default_factory=threading.Event)  # nobody reads the stream

    @property
    def size(self) -> int:
        """The number of completions."""
        return len(self.prompts) * self.sampling.num_samples


class Drawn(NamedTuple):
    """What one request gets."""

    turns: list[Turn]
    prompt_scores: list[list[float]]  # of each prompt's tokens from the second on, if asked for


class ClientsGone(Exception):
    """Nobody waits for what is drawn."""


class Form(NamedTuple):
    """How a route writes a choice: completions and chat differ in it."""

    object: str
    of_parts: str  # the object of a stream's parts
    prefix: str  # of an answer's id
    choice: Callable[[str], dict[str, Any]]  # from the text of a whole answer
    part: Callable[[str], dict[str, Any]]  # from a part of it
    logprobs: Callable[[Sequence[str], Sequence[float]], dict[str, Any]]


def _completion_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    offsets = [0, *accumulate(map(len, texts))][:-1]
    return {
        "tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets
    }  # fmt: skip


def _chat_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
        for text, value in zip(texts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


_COMPLETION = Form(
    "text_completion", "text_completion", "cmpl",
    lambda text: {"text": text}, lambda text: {"text": text}, _completion_logprobs,
)  # fmt: skip
_CHAT = Form(
    "chat.completion", "chat.completion.chunk", "chatcmpl",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"content": text}}, _chat_logprobs,
)  # fmt: skip


class OpenAI:
    """Answers of one model, drawn together for all requests that wait."""

    def __init__(self, served: Served, shared: SharedGenerator) -> None:
        self._served, self._shared = served, shared
        self._num_asks, self._seed = 0, secrets.randbits(32)

    def routes(self) -> Routes:
        """Return what answers each path."""
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "funcrl"}
        return {
            "GET /v1/models": lambda _: as_json({"object": "list", "data": [model]}),
            "POST /tokenize": self._tokenize,
            "POST /v1/completions": self._completions,
            "POST /v1/chat/completions": self._chat,
        }

    def _completions(self, request: Request) -> Response:
        asked = self._checked(request.json(), "prompt")
        prompt = asked["prompt"]
        is_list = isinstance(prompt, list) and not all(type(each) is int for each in prompt)
        tokenizer = self._served.tokenizer
        with refusing(400, _TEXT):
            prompts = [
                encode_text(tokenizer, each) if isinstance(each, str) else each
                for each in (prompt if is_list else [prompt])
            ]
        return self._answer(asked, prompts, _COMPLETION)

    def _tokenize(self, request: Request) -> Response:
        """Answer as vLLM's route of this name does, without special tokens."""
        text = request.json().get("prompt")
        if not isinstance(text, str):
            raise RequestError(400, f"expected a prompt of text, got {text!r}")
        with refusing(400, _TEXT):
            tokens = self._served.tokenizer.encode_answer(text)
        return as_json({"tokens": tokens, "count": len(tokens)})

    def _chat(self, request: Request) -> Response:
        asked = self._checked(request.json(), "messages")
        with refusing(400, "expected messages: "):
            messages = [_message(each) for each in asked["messages"]]
            options = asked.get("chat_template_kwargs")
            prompt = encode_messages(self._served.tokenizer, messages, options)
        return self._answer(asked, [prompt], _CHAT)

    def _checked(self, asked: dict[str, Any], wanted: str) -> dict[str, Any]:
        """Return a request's fields; raise unless each is one that is acted upon."""
        if asked.get("model") != self._served.name:
            raise RequestError(
                404, f"expected the model {self._served.name!r}, got {asked.get('model')!r}"
            )
        if not asked.get(wanted):
            raise RequestError(400, f"expected {wanted}, got none")
        for name, value in asked.items():
            if name in _PLAIN and value not in _PLAIN[name]:
                raise RequestError(400, f"expected no {name}, which is not known here, got {value}")
            if name not in {wanted, *_READ, *_OF_NO_EFFECT, *_PLAIN}:
                raise RequestError(400, f"expected fields that are known here, got {name!r}")
        return {name: value for name, value in asked.items() if value is not None}

    def _answer(self, asked: dict[str, Any], prompts: list[list[int]], form: Form) -> Response:
        self._check_prompts(prompts)
        longest = max(map(len, prompts))
        sampling = self._sampling(asked, longest, _MAX_TOKENS if form is _COMPLETION else None)
        self._num_asks += 1
        given = asked.get("seed")
        seed = rng.fold_in(self._seed, self._num_asks) if given is None else given
        if type(seed) is not int:
            raise RequestError(400, f"expected a seed that is an integer, got {seed!r}")
        is_stream = bool(asked.get("stream"))
        with refusing(400, "expected stream_options with include_usage: "):
            wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        logprobs = asked.get("logprobs", False)  # 0 is a number of alternatives
        if logprobs not in (False, True) or (is_stream and logprobs is not False):
            raise RequestError(
                400, f"expected logprobs of the drawn tokens alone, of no stream, got {logprobs}"
            )
        wants_scores = asked.get("prompt_logprobs") is not None
        if wants_scores and (asked["prompt_logprobs"] != 0 or is_stream or form is _CHAT):
            raise RequestError(
                400,
                f"expected prompt_logprobs 0, of the prompt's own tokens, of completions without "
                f"a stream, got {asked['prompt_logprobs']}",
            )
        ask = Ask(prompts, sampling, seed, wants_scores, queue.Queue() if is_stream else None)
        # Equal prompts of one call are drawn differently, and of one seed they should not be.
        joins = sampling if given is None else None
        number = self._shared.jobs.add(self._draw, ask, None, joins)
        head = {
            "id": f"{form.prefix}-{secrets.token_hex(12)}",
            "object": form.of_parts if is_stream else form.object,
            "created": int(time.time()),
            "model": self._served.name,
        }
        if is_stream:
            body = self._events(ask, number, form, head, wants_usage)
            return Response(body, kind="text/event-stream")
        turns, scores = self._result(number)
        choices = [
            self._choice(index, turn, form, logprobs is not False)
            for index, turn in enumerate(turns)
        ]
        for index, choice in enumerate(choices if wants_scores else []):
            of_prompt = index // sampling.num_samples
            choice["prompt_logprobs"] = _prompt_logprobs(prompts[of_prompt], scores[of_prompt])
        return as_json({**head, "choices": choices, "usage": _usage(ask, turns)})

    def _choice(self, index: int, turn: Turn, form: Form, wants_logprobs: bool) -> dict[str, Any]:
        logprobs = None
        if wants_logprobs:
            decode = self._served.tokenizer.decode
            texts = [decode([token]) for token in turn.tokens]
            logprobs = form.logprobs(texts, turn.policy_logprobs)
        end = {"index": index, "logprobs": logprobs, "finish_reason": turn.finish_reason}
        return {**form.choice(turn.text), **end}

    def _check_prompts(self, prompts: Sequence[Any]) -> None:
        for prompt in prompts:
            if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
                raise RequestError(400, f"expected a prompt of text or tokens, got {prompt!r}")
        check_tokens(self._served, prompts, self._shared.generator.context_length, 400)

    def _sampling(self, asked: Mapping[str, Any], length: int, most: int | None) -> Sampling:
        room = self._shared.generator.context_length - length
        most = asked.get("max_completion_tokens", asked.get("max_tokens", most))
        stop = asked.get("stop") or []
        with refusing(400):
            return Sampling(
                num_samples=asked.get("n", 1),
                max_tokens=room if most is None else min(most, room),
                min_tokens=asked.get("min_tokens", 0),
                temperature=float(asked.get("temperature", 1.0)),
                top_p=float(asked.get("top_p", 1.0)),
                top_k=max(asked.get("top_k", 0), 0),
                min_p=float(asked.get("min_p", 0.0)),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_tokens=tuple(all_ends(self._served.tokenizer)),
            )

    def _draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """Draw for several requests in one call: they are drawn alike."""
        streams = [(ask, index) for ask in asks for index in range(ask.size)]

        def listen(sample: int, token: int) -> None:
            ask, index = streams[sample]
            if ask.tokens is not None:
                ask.tokens.put((index, token))
                if all(each.is_over.is_set() for each in asks):
                    raise ClientsGone

        sampling = asks[0].sampling
        try:
            self._shared.push(_BASE, lambda: self._served.params)
            prompts = [prompt for ask in asks for prompt in ask.prompts]
            generator = self._shared.generator
            samples = generator.generate(prompts, sampling, asks[0].seed, listen)
            scores = [generator.score(ask.prompts) if ask.scores_prompts else [] for ask in asks]
            return [Drawn(*each) for each in zip(self._turns(samples, asks), scores, strict=True)]
        except ClientsGone:
            return [Drawn([], []) for _ in asks]
        finally:
            for ask in asks:
                if ask.tokens is not None:
                    ask.tokens.put(None)

    def _turns(self, samples: Samples, asks: Sequence[Ask]) -> list[list[Turn]]:
        turns = read_turns(samples, self._served.tokenizer, asks[0].sampling)
        return [[next(turns) for _ in range(ask.size)] for ask in asks]

    def _result(self, number: int) -> Drawn:
        """Return what a job has drawn, once it has; raise what it failed with."""
        found: Drawn | Failure | None = None
        while found is None:
            found = self._shared.jobs.result(number, timeout=1.0, keep=False)
            if found is None and self._shared.jobs.is_closed:
                raise RequestError(503, "the server ends")
        if isinstance(found, Failure):
            raise RequestError(400 if found.is_of_user else 500, found.message)
        return found

    def _events(
        self, ask: Ask, number: int, form: Form, head: dict[str, Any], wants_usage: bool
    ) -> Generator[bytes]:
        """Yield the events of a stream: the texts as they grow, and why each ends."""
        assert ask.tokens is not None
        texts = [GrowingText(self._served.tokenizer, ask.sampling) for _ in range(ask.size)]
        try:
            if form is _CHAT:
                for index in range(ask.size):
                    first = {"delta": {"role": "assistant", "content": ""}}
                    yield _event(head, index, first)
            for index, token in iter(ask.tokens.get, None):
                text = texts[index].add(token)
                if text:
                    yield _event(head, index, form.part(text))
            try:
                turns = self._result(number).turns
            except RequestError as error:
                yield _data(error_fields(str(error)))
                return
            last: dict[str, Any] = {"delta": {}} if form is _CHAT else {"text": ""}
            for index, turn in enumerate(turns):
                rest = texts[index].end()
                if rest:
                    yield _event(head, index, form.part(rest))
                yield _event(head, index, last, turn.finish_reason)
            if wants_usage:
                yield _data({**head, "choices": [], "usage": _usage(ask, turns)})
            yield b"data: [DONE]\n\n"
        finally:
            ask.is_over.set()


def error_fields(message: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": None}}


def _message(given: Any) -> dict[str, Any]:
    """Return a message of text; its content may be a list of parts of text."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ValueError(f"objects with a role and a content, got {given!r}")
    content = given.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError(f"contents of text, got {content!r}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"contents of text, got {content!r}")
    return {"role": given["role"], "content": content}


def _prompt_logprobs(prompt: Sequence[int], scores: Sequence[float]) -> list[Any]:
    """Return what a prompt's tokens score, as vLLM writes it: nothing of the first."""
    pairs = zip(prompt[1:], scores, strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


def _usage(ask: Ask, turns: Sequence[Turn]) -> dict[str, int]:
    prompts = sum(map(len, ask.prompts))
    drawn = sum(len(turn.tokens) for turn in turns)
    return {
        "prompt_tokens": prompts, "completion_tokens": drawn, "total_tokens": prompts + drawn
    }  # fmt: skip


def _event(
    head: dict[str, Any], index: int, part: dict[str, Any], reason: str | None = None
) -> bytes:
    choice = {"index": index, **part, "logprobs": None, "finish_reason": reason}
    return _data({**head, "choices": [choice]})


def _data(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()

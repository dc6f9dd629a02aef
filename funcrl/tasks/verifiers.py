"""Environments of the verifiers package (v1), whose rollouts ask funcrl's generator for tokens."""

import asyncio
import math
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from funcrl.config import Sampling
from funcrl.core import checks, rng
from funcrl.core.arguments import Fraction, checked
from funcrl.core.types import Samples
from funcrl.generators import Generator
from funcrl.tasks.adapt import check_tokenizer
from funcrl.tasks.chat import has_template
from funcrl.tasks.contracts import Played, Prompt, Task, Tokenizer, TokenizerLike
from funcrl.tasks.row_prompts import HELD_OUT
from funcrl.tasks.rows import RowsTask, Sides, divided
from funcrl.tasks.tool_calls import renderers_for

_MODEL = "policy"  # what the rollouts call it
_SESSION = "X-Session-ID"  # the header that says whose request it is
# What a request has besides its stop tokens when it leaves sampling to the run.
_NO_SAMPLING = {"logprobs", "skip_special_tokens", "routed_experts_prompt_start"}


class _Request(NamedTuple):
    """Tokens that a rollout asks for."""

    row: int
    tokens: list[int]
    stop_tokens: list[int]
    answer: "asyncio.Future[_Answer]"


class _Answer(NamedTuple):
    """A completion that was drawn for it."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str

    def fields(self) -> dict[str, Any]:
        """Return it as vLLM's route does."""
        pairs = zip(self.tokens, self.logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
        choice = {"token_ids": self.tokens, "finish_reason": self.finish_reason}
        return {"choices": [{**choice, "logprobs": {"content": content}}]}


class VerifiersTask(RowsTask):
    """The tasks of an environment of verifiers. `from_verifiers` makes it.

    Args:
        env: the environment.
        sides: its tasks, as the data of prompts.
        tokenizer: the model's.
        files: of the tokenizer, by which transformers reads it.
        renderer: the config of the renderer, if one is given.
    """

    def __init__(
        self,
        env: Any,
        sides: Sides,
        tokenizer: Tokenizer,
        files: Mapping[str, bytes],
        renderer: Any,
    ) -> None:
        super().__init__(env.config.taskset.id, *sides, tokenizer, lambda prompt: prompt)
        self._env, self._renderer = env, renderer
        self._folder = Path(tempfile.mkdtemp(prefix="funcrl-tokenizer-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        for name, content in files.items():
            (self._folder / name).write_bytes(content)

    def reward(self, prompt: Prompt, trace: Any) -> Mapping[str, float]:
        """Return the rewards that the environment gave, each times its weight."""
        del prompt
        problem = _problem(trace)
        if problem:
            raise RuntimeError(f"the rollout in verifiers {problem}")
        return {name: float(each.value) for name, each in trace.rewards.items()}

    def play_episodes(
        self, generator: Generator, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> tuple[list[Played], Samples]:
        """Return an episode of each prompt, as the environment plays it, and the last samples.

        All go on side by side. When each of them waits for tokens, these are drawn together, so
        that what is drawn does not depend on which of them was the fastest.
        """
        rounds: SimpleQueue[list[_Request] | None] = SimpleQueue()
        server = _Server(len(prompts), generator.context_length, rounds)
        playing = asyncio.run_coroutine_threadsafe(
            self._traces(server, [prompt.data for prompt in prompts]), _event_loop()
        )
        playing.add_done_callback(lambda _: rounds.put(None))
        number, samples = 0, None
        try:  # drawn in this thread, in which the generator is called everywhere else
            while (requests := rounds.get()) is not None:
                samples = _draw(generator, requests, sampling, rng.fold_in(seed, number))
                server.answer(requests, _answers(samples))
                number += 1
        except BaseException:
            playing.cancel()
            raise
        traces = playing.result()
        if samples is None:
            why = _problem(traces[0])
            raise RuntimeError(f"No rollout of {self.name!r} asked for tokens, the first {why}.")
        # What verifiers keeps is of the distribution that was drawn from.
        is_policy = sampling.temperature == 1.0 and not sampling.truncates
        return [_played(trace, is_policy) for trace in traces], samples

    async def _traces(self, server: "_Server", tasks: Sequence[Any]) -> list[Any]:
        """Play the tasks, and return the trace of each."""
        from verifiers import v1 as vf

        async with server.listening() as address:
            client = vf.TrainClientConfig(
                base_url=f"{address}/v1", api_key_var="NONE", renderer=self._renderer,
                renderer_model_name=str(self._folder),
            )  # fmt: skip
            context = vf.ModelContext(model=_MODEL, client=client)
            async with self._env.serving():
                return await asyncio.gather(
                    *(self._trace(server, row, task, context) for row, task in enumerate(tasks))
                )

    async def _trace(self, server: "_Server", row: int, task: Any, context: Any) -> Any:
        try:
            episode = await self._env.run_episode(
                task, context, on_trace=lambda trace: server.begin(row, trace.id)
            )
        finally:
            server.end(row)
        if len(episode.traces) != 1:
            errors = "; ".join(each.message for each in episode.errors)
            raise RuntimeError(
                f"from_verifiers expects an environment of one agent, got {len(episode.traces)} "
                f"traces in an episode of {self.name!r}: {errors or 'no error'}."
            )
        (trace,) = episode.traces
        if episode.errors:  # such as of what judges the finished episode
            trace.ok, trace.errors = False, [*trace.errors, *episode.errors]
        return trace


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread; renderers' locks allow of one in a process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="funcrl-verifiers", daemon=True).start()
    return loop


class _Server:
    """What verifiers' client for training speaks to: vLLM's route from tokens to tokens."""

    def __init__(
        self, count: int, context_length: int, rounds: "SimpleQueue[list[_Request] | None]"
    ) -> None:
        self._live, self._rounds = set(range(count)), rounds
        self._rows: dict[str, int] = {}  # of each trace
        self._waiting: list[_Request] = []
        self._longest = context_length - 1

    def begin(self, row: int, trace: str) -> None:
        """Take note of whose trace that is."""
        self._rows[trace] = row

    def end(self, row: int) -> None:
        """Wait no longer for a row."""
        self._live.discard(row)
        self._draw_if_all_wait()

    def _draw_if_all_wait(self) -> None:
        if self._waiting and self._live <= {each.row for each in self._waiting}:
            requests, self._waiting = sorted(self._waiting, key=lambda each: each.row), []
            self._rounds.put(requests)

    def answer(self, requests: Sequence[_Request], answers: Sequence[_Answer]) -> None:
        """Hand out what was drawn; called from another thread."""
        for request, found in zip(requests, answers, strict=True):
            request.answer.get_loop().call_soon_threadsafe(_set, request.answer, found)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen at an address of this machine, which is yielded."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _models(self, _: Any) -> Any:
        from aiohttp import web

        return web.json_response({"data": [{"id": _MODEL, "max_model_len": self._longest}]})

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        asked = await request.json()
        params = dict(asked["sampling_params"])
        stops = params.pop("stop_token_ids", [])
        row = self._rows.get(request.headers.get(_SESSION, ""))
        unknown = sorted(set(params) - _NO_SAMPLING)
        if row is None or unknown:
            what = "the run's own options to say how to sample" if unknown else "a known trace"
            message = f"from_verifiers expects {what}, got {', '.join(unknown) or 'another one'}"
            return web.json_response({"error": {"message": message}}, status=400)
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(row, asked["token_ids"], stops, future))
        self._draw_if_all_wait()
        return web.json_response((await future).fields())


def _set(future: "asyncio.Future[_Answer]", found: _Answer) -> None:
    if not future.done():  # as it is where a rollout ran out of time meanwhile
        future.set_result(found)


def _draw(
    generator: Generator, requests: Sequence[_Request], sampling: Sampling, seed: int
) -> Samples:
    """Return a completion of each request."""
    stops = [token for each in requests for token in each.stop_tokens]
    one_each = replace(
        sampling, num_samples=1, stop_tokens=tuple(dict.fromkeys((*sampling.stop_tokens, *stops)))
    )
    return generator.generate([each.tokens for each in requests], one_each, seed)


def _answers(samples: Samples) -> list[_Answer]:
    has_own = bool((samples.logprobs.isfinite() & samples.mask).any())
    logprobs = (samples.logprobs if has_own else samples.policy_logprobs).tolist()
    lengths = samples.mask.sum(dim=1).tolist()
    columns = zip(samples.tokens.tolist(), logprobs, lengths, samples.finish_reasons, strict=True)
    return [_Answer(row[:n], values[:n], reason) for row, values, n, reason in columns]


def _branches(trace: Any) -> list[Any]:
    return [each for each in trace.branches if each.trainable and any(each.sampled_mask)]


def _problem(trace: Any) -> str:
    """Return what is wrong with a rollout, "" if it can be trained on."""
    if not trace.ok:
        error = trace.errors[-1] if trace.errors else None
        return "did not complete" if error is None else f"failed: {error.type}: {error.message}"
    count = len(_branches(trace))
    if count != 1:
        return (
            f"has {count} sequences of tokens, and one is expected: a renderer of the model's own "
            f"goes on from what was sampled, where a chat template writes it anew"
        )
    return ""


def _played(trace: Any, is_policy: bool) -> Played:
    """Return the tokens of a trace; of one that is not trained on, those of its last branch."""
    branches = _branches(trace) or trace.branches
    tokens, mask, logprobs = (
        (list(branches[-1].token_ids), list(branches[-1].sampled_mask), branches[-1].logprobs)
        if branches
        else ([], [], [])
    )
    start = mask.index(True) if True in mask else len(tokens)
    own = logprobs[start:]
    reason = trace.calls[-1].finish_reason if trace.calls else None
    return Played(
        prompt_tokens=tokens[:start],
        tokens=tokens[start:],
        mask=mask[start:],
        logprobs=own,
        policy_logprobs=own if is_policy else [math.nan] * len(own),
        outcome=trace,
        turns=len(trace.calls),
        finish_reason="length" if reason == "length" else "stop",
    )


@checked
def from_verifiers(
    env: Any,
    tokenizer: TokenizerLike,
    *,
    renderer: Any = None,
    held_out: Fraction = HELD_OUT,
) -> Task:
    """Return the task of an environment of the verifiers package (v1).

    The environment plays its episodes, by its own harness, tools and users; the tokens that it asks
    for are drawn by the run's generator, and its traces say which tokens were drawn, and with what
    log-probability: nothing is tokenised again. Rewards are those of its tasks, by name. Sampling
    options are the run's, `--sampling.max-tokens` of each answer.

    Args:
        env: a `verifiers.v1.Env` of one agent, whose taskset ends.
        tokenizer: the model's, with the files by which transformers reads it.
        renderer: a config of the renderers package, such as `renderers.Qwen3RendererConfig()`.
            When left out it is the one that the package knows for the tokenizer's name, else the
            chat template alone, which several turns seldom survive; without a template, messages
            are their texts.
        held_out: share of the tasks that is not trained on: which, is a hash of a task.

    Example:
        >>> from funcrl.tasks import ByteTokenizer, from_verifiers
        >>> from_verifiers("gsm8k-v1", ByteTokenizer())
        Traceback (most recent call last):
        TypeError: from_verifiers expects env to be a verifiers.v1.Env, got str.
    """
    own = check_tokenizer("from_verifiers", tokenizer)
    vf = checks.import_extra("from_verifiers", "verifiers.v1", "for env", "'funcrl[verifiers]'")
    if not isinstance(env, vf.Env):
        raise TypeError(
            f"from_verifiers expects env to be a verifiers.v1.Env, got {type(env).__name__}."
        )
    if renderer is not None:
        renderers_for("from_verifiers", renderer)
    if not env.taskset.bounded:
        raise ValueError("from_verifiers expects a taskset that ends, got one without end.")
    files = own.files()
    if "tokenizer.json" not in files:
        raise ValueError(
            f"from_verifiers expects a tokenizer with files for transformers, got "
            f"{type(own).__name__} without."
        )
    tasks = list(env.taskset)
    if not tasks:
        raise ValueError("from_verifiers expects tasks in the taskset, got none.")
    prompts = [Prompt(task.data.prompt_text, data=task) for task in tasks]
    sides = divided(prompts, [task.hash for task in tasks], held_out)
    if renderer is None and not has_template(own):
        from renderers import CustomRendererConfig  # a part of verifiers

        plain = "funcrl.tasks.plain_renderer:PlainRenderer"
        renderer = CustomRendererConfig(import_path=plain)
    return VerifiersTask(env, sides, own, files, renderer)

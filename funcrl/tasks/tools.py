"""Environments by TRL's convention: an object with `reset` and methods that a policy calls."""

import asyncio
import inspect
import json
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from funcrl.core.arguments import Count, Fraction, checked
from funcrl.core.files import brief
from funcrl.tasks.adapt import TaskError, TokenizerStandIn, check_tokenizer, with_rewards
from funcrl.tasks.chat import has_template
from funcrl.tasks.contracts import (
    Environment,
    Prompt,
    Reward,
    Tokenizer,
    TokenizerLike,
    ToolResults,
    ToolState,
)
from funcrl.tasks.read_rows import to_table
from funcrl.tasks.rewards import Conversation, form_of
from funcrl.tasks.row_prompts import HELD_OUT, answer_of, messages_of
from funcrl.tasks.rows import Rewards, RowsTask, Sides, divided, reward_functions
from funcrl.tasks.tokenizers import ByteTokenizer
from funcrl.tasks.tool_calls import ReadCalls, ToolCall, json_calls, python_calls, xml_calls

_NO_TOOLS = ("reset", "get_reward")
Factory: TypeAlias = Callable[[], Any]


class _Tools(NamedTuple):
    """How to make an environment, and the methods that a policy may call in it."""

    make: Factory
    names: tuple[str, ...]
    rewards: bool  # whether the environment has a reward of its own
    free: list[Any]  # objects that no rollout holds

    def take(self, kind: str) -> ToolState:
        """Return a state with an object that is free, or a new one.

        It is free again when the last state of its rollout is gone: an object may be dear, such as
        a connection, so it is made once and reset often.
        """
        environment = self.free.pop() if self.free else self.make()
        lease = _Lease()
        weakref.finalize(lease, self.free.append, environment).atexit = False
        return ToolState(environment, kind, lease)


class _Lease:
    """Held by the states of one rollout."""


class ToolEnvironment(RowsTask, Environment):
    """Rows, and for each rollout an object of its own whose methods the policy calls.

    `from_environment` makes it.
    """

    def __init__(
        self,
        name: str,
        sides: Sides,
        tokenizer: Tokenizer,
        tools: Mapping[str, _Tools],
        read_calls: ReadCalls,
    ) -> None:
        self._chat = tokenizer if has_template(tokenizer) else None
        # The template's marks are in the texts already.
        whole = TokenizerStandIn(tokenizer, encode=tokenizer.encode_answer)
        super().__init__(name, *sides, whole, self._with_observation)
        self._tools, self._read_calls = tools, read_calls
        self.reward_weights = {"calls": 0.0, "failed_calls": 0.0}

    def begin(self, prompt: Prompt) -> ToolState:
        """Return the state of a new object that was reset with the prompt's row."""
        state, observation = self._reset(prompt)
        if self._text(prompt, state, observation) != prompt.text:
            raise ValueError(
                f"from_environment expects reset of {type(state.environment).__name__} to return "
                f"the same text for the same row, as all samples of a group answer one prompt, got "
                f"{brief(observation)} and another text before; draw from a seed in the row."
            )
        return state

    def act(self, state: ToolState, completion: str) -> ToolState:
        """Return the state after the calls of a completion; one without calls is the answer."""
        calls = list(self._read_calls(completion))
        said = {"role": "assistant", "content": completion}
        if not calls:
            return state._replace(messages=(*state.messages, said), results=None)
        names = self._tools[state.kind].names
        results = [_result(state.environment, names, each) for each in calls]
        answers = [
            {"role": "tool", "name": call.name, "content": result.text}
            for call, result in zip(calls, results, strict=True)
        ]
        return state._replace(
            messages=(*state.messages, said, *answers),
            results=ToolResults(tuple(each.text for each in results)),
            calls=state.calls + len(calls),
            failed_calls=state.failed_calls + sum(each.failed for each in results),
        )

    def observe(self, state: ToolState) -> ToolResults | None:
        """Return what the tools returned; None after an answer."""
        return state.results

    def reward(self, prompt: Prompt, state: ToolState) -> Reward | Awaitable[Reward]:
        """Return what the object itself rewards, and how many calls there were, and failed."""
        del prompt
        counts = {"calls": float(state.calls), "failed_calls": float(state.failed_calls)}
        if not self._tools[state.kind].rewards:
            return counts
        value = state.environment.get_reward()
        if inspect.isawaitable(value):
            return _when_rewarded(value, counts)
        return {"environment": value, **counts}

    def extract(self, state: ToolState) -> str | None:
        """Return the last message, which votes in majority@k."""
        return state.messages[-1]["content"] if state.messages else None

    def _reset(self, prompt: Prompt) -> tuple[ToolState, Any]:
        row = dict(prompt.data)
        kind = "" if "" in self._tools else row.pop("environment")
        state = self._tools[kind].take(kind)
        try:
            return state, state.environment.reset(**row)
        except Exception as error:
            raise TaskError(
                f"reset of {type(state.environment).__name__}, an environment of the task "
                f"{self.name!r}, raised {type(error).__name__}: {error} for the row {brief(row)}."
            ) from error

    def _with_observation(self, prompt: Prompt) -> Prompt:
        return prompt._replace(text=self._text(prompt, *self._reset(prompt)))

    def _text(self, prompt: Prompt, state: ToolState, observation: Any) -> str:
        """Return what a policy reads first: the row's prompt, and what `reset` returned."""
        if observation is not None and not isinstance(observation, str):
            raise ValueError(
                f"from_environment expects reset of {type(state.environment).__name__} to return a "
                f"text or None, got {brief(observation)}."
            )
        given = prompt.data.get("prompt", "")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        content = f"{messages[-1]['content']}{observation or ''}"
        if not content:
            raise ValueError(
                f"from_environment expects a prompt in the row, or a text from reset of "
                f"{type(state.environment).__name__}, got neither for {brief(prompt.data)}."
            )
        if self._chat is None:
            return content
        names = self._tools[state.kind].names
        methods = [getattr(state.environment, name) for name in names]
        return self._chat.render([*messages[:-1], {**messages[-1], "content": content}], methods)


class _Result(NamedTuple):
    """What a call returned, or why it failed."""

    text: str
    failed: bool = False


def _result(environment: Any, names: Sequence[str], call: ToolCall) -> _Result:
    """Call a tool. What it raises is what the policy reads, as in TRL: most often its own fault."""
    if call.name not in names:
        found = f"no tool {call.name!r}" if call.name else "no call that can be read"
        return _Result(str({"error": f"{found}; there is {', '.join(names)}."}), failed=True)
    try:
        value = getattr(environment, call.name)(**call.arguments)
        return _Result(str(_awaited(value) if inspect.iscoroutine(value) else value))
    except Exception as error:
        return _Result(str({"error": str(error)}), failed=True)


def _awaited(value: Coroutine[Any, Any, Any]) -> Any:
    """Return what an `async def` tool returns, also within an event loop, as a notebook is."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, value).result()


async def _when_rewarded(value: Awaitable[float], counts: Mapping[str, float]) -> Reward:
    return {"environment": await value, **counts}


@checked
def from_environment(
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
    rows: Any,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | Rewards | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    tokenizer: TokenizerLike | None = None,
    read_calls: Callable[[str], Sequence[ToolCall]] | None = None,
    stop: Sequence[str] = (),
    max_turns: Count = 8,
    held_out: Fraction = HELD_OUT,
    name: str = "environment",
) -> Environment:
    """Return the task of an environment by TRL's convention, `GRPOTrainer(environment_factory=)`.

    The factory makes an object for each rollout, which serves another one when that is gone.
    `reset(**row)` begins a rollout, and may return a text, which goes behind the row's prompt. Its
    other public methods are tools: a policy that calls one reads what it returns, or the message of
    what it raised, and goes on; an answer without a call is the last. `get_reward()` is the reward
    `environment`. The rewards `calls` and `failed_calls` count and weigh nothing.

    Unlike other environments' states the object changes when a method is called.

    Args:
        environment_factory: a class, or another function of no arguments; name -> factory where
            the column `environment` of a row says which is meant.
        rows: as for `from_rows`; a `prompt`, a text or messages, may be left out where `reset`
            returns one.
        reward: as for `from_rows`. A function may take `environments`, of each rollout the object,
            and gets messages as `completions`.
        weights: name -> factor, 1 when left out.
        tokenizer: the model's; of bytes when left out. Its chat template tells a policy of the
            tools, by their names, types and docstrings.
        read_calls: answer -> calls, such as `renderer_calls` returns. When left out, calls are read
            as the chat template writes them, JSON or Qwen3.5's form; `python_calls` without one.
        stop: strings that end a call; what tools return follows right behind it, where it is else
            a message of its own.
        max_turns: of a policy in an episode, the answer included.
        held_out: share of the rows that is not trained on: which, is a hash of a row.
        name: of the task.

    Example:
        >>> from funcrl.tasks import from_environment
        >>> class Guess:
        ...     def reset(self, secret, **row):
        ...         self.secret, self.found = secret, False
        ...         return "Which digit?"
        ...     def guess(self, digit: int) -> str:
        ...         self.found = digit == self.secret
        ...         return "yes" if self.found else "more" if digit < self.secret else "less"
        ...     def get_reward(self) -> float:
        ...         return float(self.found)
        >>> task = from_environment(Guess, [{"secret": digit} for digit in range(10)])
        >>> prompt = task.prompts(seed=0, start=0, count=1)[0]
        >>> state = task.act(task.begin(prompt), f"guess(digit={prompt.data['secret']})")
        >>> prompt.text, task.observe(state), task.reward(prompt, state)["environment"]
        ('Which digit?', ToolResults(texts=('yes',)), 1.0)
    """
    function = "from_environment"
    own = ByteTokenizer() if tokenizer is None else check_tokenizer(function, tokenizer)
    functions = reward_functions(function, reward)
    given = environment_factory
    factories = given if isinstance(given, Mapping) else {"": given}
    tools = {kind: _tools_of(make) for kind, make in factories.items()}
    _check_rewards(tools, functions, weights)
    if read_calls is None and has_template(own):
        _check_template(own, tools)
    if not stop and has_template(own):
        _check_results(own)
    table = to_table(function, rows, name).checked(function)
    for each, called in functions.items():
        form_of(each, called, table.rows[0])
    prompts = [_prompt(row, table.place(index), tools) for index, row in enumerate(table.rows)]
    contents = [json.dumps(row, sort_keys=True, default=str) for row in table.rows]
    sides = divided(prompts, contents, held_out)
    task = ToolEnvironment(name, sides, own, tools, read_calls or _reader(own, tools))
    task.stop, task.max_turns = tuple(stop), max_turns
    found = with_rewards(task, functions, weights) if functions else task
    assert isinstance(found, Environment)
    return found


def _tools_of(make: Factory) -> _Tools:
    """Return the tools of an environment, of which one is made to look at."""
    example = make()
    kind = type(example)
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    if "reset" not in methods:
        raise ValueError(
            f"from_environment expects an environment with a method reset, got none in "
            f"{kind.__name__}."
        )
    names = tuple(each for each in methods if not each.startswith("_") and each not in _NO_TOOLS)
    if not names:
        raise ValueError(
            f"from_environment expects public methods of {kind.__name__} for a policy to call, got "
            f"none."
        )
    return _Tools(make, names, "get_reward" in methods, [example])


def _check_rewards(
    tools: Mapping[str, _Tools], functions: Rewards, weights: Mapping[str, float] | None
) -> None:
    without = [kind or "the environment" for kind, each in tools.items() if not each.rewards]
    if without and (not functions or len(without) < len(tools)):
        raise ValueError(
            f"from_environment expects a method get_reward of each environment, or of none with "
            f"reward functions instead, got none of {without[0]}."
        )
    if weights and not functions:
        raise ValueError(
            f"from_environment expects weights with reward functions, got {min(weights)!r} alone."
        )


def _check_template(tokenizer: Any, tools: Mapping[str, _Tools]) -> None:
    """Raise if the chat template does not tell a policy of each tool."""
    question = [{"role": "user", "content": "?"}]
    for each in tools.values():
        (environment,) = each.free
        for name in each.names:
            try:
                shown = tokenizer.render(question, [getattr(environment, name)])
            except Exception as error:
                raise ValueError(
                    f"from_environment expects types and a docstring with Args of each method, for "
                    f"the chat template, got {type(environment).__name__}.{name}: {error}"
                ) from error
            if name not in shown:
                raise ValueError(
                    "from_environment expects a chat template with a place for tools, got one "
                    "without; say in the prompts what a call looks like, and pass read_calls."
                )


def _reader(tokenizer: Tokenizer, tools: Mapping[str, _Tools]) -> ReadCalls:
    """Return what reads calls as the chat template writes them; raise if nothing here does."""
    if not has_template(tokenizer):
        return python_calls
    methods = {name: getattr(each.free[0], name) for each in tools.values() for name in each.names}
    call = ToolCall(next(iter(methods)), {"argument": "of a call"})
    try:
        written = tokenizer.written_call(*call)
    except Exception as error:  # of whatever kind a template raises
        written = f"{type(error).__name__}: {error}"
    for read in (json_calls, xml_calls(methods)):
        if list(read(written)) == [call]:
            return read
    raise ValueError(
        f"from_environment expects read_calls= for a chat template whose calls are neither JSON "
        f"nor in Qwen3.5's form, such as funcrl.tasks.renderer_calls, got none for {written!r}."
    )


def _check_results(tokenizer: Any) -> None:
    """Raise if the chat template has no message in which a policy reads what a tool returned."""
    try:
        tokenizer.encode_results(["?"])
    except Exception as error:
        raise ValueError(
            f"from_environment expects a chat template with messages of tools, got {error} With "
            f"stop= results follow within the answer."
        ) from error


def _prompt(row: Mapping[str, Any], place: str, tools: Mapping[str, _Tools]) -> Prompt:
    kind = row.get("environment")
    if "" not in tools and kind not in tuple(tools):
        raise ValueError(
            f"from_environment expects {', '.join(tools)} in the column environment, got "
            f"{brief(kind)} in {place}."
        )
    given = row.get("prompt", "")
    if isinstance(given, list | tuple):
        messages_of("from_environment", given, place)
        row = Conversation(row, "prompt")
    elif not isinstance(given, str):
        raise ValueError(
            f"from_environment expects a text or messages as prompt, got {brief(given)} in {place}."
        )
    return Prompt("", answer_of(row), row)

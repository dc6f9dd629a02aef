"""What a task, an environment and a tokenizer are."""

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from funcrl.tasks.reward_calls import RewardLimits, run_calls

# What rewards a completion: numbers by name, or one, which has the name of the task's accuracy.
Reward: TypeAlias = Mapping[str, float] | float
_LIMITS = RewardLimits()


class Prompt(NamedTuple):
    """A question of a task."""

    text: str
    answer: str = ""  # for the reward and the warm start; a generator never sees it
    data: Any = None  # whatever else a reward needs


class Tokenizer:
    """Base class of tokenizers. A subclass has `vocab_size`, `end`, `encode` and `decode`.

    The other members have defaults. Any object with the four members will do as well.
    """

    vocab_size: int
    end: int | None  # the token that ends a completion; None if only its length ends one
    ends: Sequence[int] = ()  # further tokens that end one

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, up to where it is answered."""
        raise NotImplementedError

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; the end token has none."""
        raise NotImplementedError

    def encode_answer(self, text: str) -> list[int]:
        """Return the tokens of a text within an answer."""
        return self.encode(text)

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens from the end of one answer to the start of the next.

        They hold the message `text`, to which the next answer replies.
        """
        return self.encode(text)

    def encode_results(self, results: Sequence[str]) -> list[int]:
        """Return the tokens from the end of an answer that calls tools to the start of the next.

        They hold what each of the calls returned.
        """
        return self.encode_reply("".join(results))

    def files(self) -> Mapping[str, bytes]:
        """Return the files by which transformers reads this tokenizer, by name; none if it cannot.

        A run that begins from nothing keeps them, and `funcrl.export` puts them beside the model.
        """
        return {}


def end_tokens(tokenizer: "TokenizerLike") -> list[int]:
    """Return the token that ends a completion as a list, which is empty if none does."""
    return [] if tokenizer.end is None else [tokenizer.end]


def all_ends(tokenizer: Tokenizer) -> list[int]:
    """Return every token that ends a completion, each once."""
    return list(dict.fromkeys([*end_tokens(tokenizer), *tokenizer.ends]))


class Played(NamedTuple):
    """An episode that a task has played by itself, with what a generator drew for it."""

    prompt_tokens: list[int]
    tokens: list[int]  # all that follow
    mask: list[bool]  # [tokens] those that were drawn
    logprobs: list[float]  # [tokens] of the distribution that was drawn from, 0 where none was
    policy_logprobs: list[float]  # [tokens] of the policy; NaN where they are not known
    outcome: Any  # what is rewarded
    turns: int
    finish_reason: str  # "stop" or "length"


class Task:
    """Base class of what a policy is trained on.

    A subclass has `tokenizer`, `prompts` and `reward`. The other members have defaults; `name` is
    that of the class. Any object with the three members will do as well.

    A task that plays in its own way has `play_episodes(generator, prompts, sampling, seed)`, which
    returns a `Played` of each prompt, and the last `Samples` that the generator drew.

    Example:
        >>> import funcrl
        >>> class Echo(funcrl.tasks.Task):
        ...     name = "echo"
        ...     tokenizer = funcrl.tasks.CharTokenizer("ab")
        ...     def prompts(self, seed, start, count):
        ...         return [funcrl.tasks.Prompt("ab", answer="ab")] * count
        ...     def reward(self, prompt, completion):
        ...         return {"correct": float(completion == prompt.answer)}
        >>> Echo().reward(funcrl.tasks.Prompt("ab", "ab"), "b"), Echo().eval_prompts(3)
        ({'correct': 0.0}, [])
    """

    name: str
    tokenizer: Tokenizer
    # The reward whose mean is `eval/accuracy`; "" is `correct`, or else the first of them.
    accuracy: str = "correct"
    reward_weights: Mapping[str, float] = MappingProxyType(
        {}
    )  # reward -> factor, 1 for those left out
    stop: Sequence[str] = ()  # strings that end a completion
    max_turns: int = 1

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return the training prompts number start, start + 1, ... of the seed's stream."""
        raise NotImplementedError

    def reward(self, prompt: Prompt, completion: Any) -> Reward | Awaitable[Reward]:
        """Return the named rewards of one completion, which is a text; it may be `async def`."""
        raise NotImplementedError

    def reward_batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Any],
        limits: RewardLimits = _LIMITS,
    ) -> Sequence[Reward | BaseException]:
        """Return the rewards of many completions; in place of each that raised, the exception."""
        pairs = zip(prompts, completions, strict=True)
        return run_calls([partial(self.reward, *pair) for pair in pairs], limits)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return at most `count` held-out prompts, always the same; none if there are none."""
        del count
        return []

    def extract(self, completion: Any) -> str | None:
        """Return the answer that a text votes for in majority@k; None is all of the text."""
        del completion
        return None

    def demonstrate(self, prompt: Prompt) -> str | Sequence[str]:
        """Return a right completion, for a warm start."""
        return prompt.answer


class ToolResults(NamedTuple):
    """What an environment observes after an answer that called tools: what they returned."""

    texts: tuple[str, ...]


class ToolState(NamedTuple):
    """The state of an environment whose methods a policy calls; see `from_environment`."""

    environment: Any  # the object of this rollout, which changes when it is called
    kind: str = ""  # which factory made it
    lease: Any = None  # while there is one, the object is this rollout's
    messages: tuple[Mapping[str, str], ...] = ()  # of the policy and of the tools
    results: ToolResults | None = None  # of the last answer's calls; None after the last answer
    calls: int = 0
    failed_calls: int = 0


class Environment(Task):
    """Base class of tasks of several turns: the policy acts, reads an observation, and acts again.

    A subclass has `tokenizer`, `max_turns`, `prompts`, `begin`, `act`, `observe` and `reward`. Any
    object with these members will do as well.

    A state is a value: `act` returns the next one and does not change the one that it is given.
    The policy's first action is its completion of the prompt. Only its own tokens are trained on.

    After a completion that ends with one of the `stop` strings, the observation follows in the
    same turn of the conversation, as the result of a tool does. After any other completion the
    observation is the next message. A completion that was cut off is acted with, too, and is the
    last of its episode.
    """

    max_turns: int = 0  # a subclass sets it

    def begin(self, prompt: Prompt) -> Any:
        """Return the state before the first action."""
        raise NotImplementedError

    def act(self, state: Any, completion: str) -> Any:
        """Return the state after an action, whose text ends with the stop string that ended it."""
        raise NotImplementedError

    def observe(self, state: Any) -> "str | ToolResults | None":
        """Return what the policy reads next; None when the episode is over."""
        raise NotImplementedError

    def reward(self, prompt: Prompt, state: Any) -> Reward | Awaitable[Reward]:
        """Return the named rewards of the last state; it may be `async def`."""
        raise NotImplementedError

    def extract(self, state: Any) -> str | None:
        """Return the answer that an episode votes for in majority@k; None is all of its text."""
        del state
        return None

    def demonstrate(self, prompt: Prompt) -> str | Sequence[str]:
        """Return the texts of the actions of a right episode, for a warm start."""
        del prompt
        return []


class TaskLike(Protocol):
    """The members that every task has, be it a `Task`, an `Environment` or another object."""

    tokenizer: Any

    def prompts(self, seed: int, start: int, count: int, /) -> Sequence[Prompt]:
        """Return training prompts; see `Task.prompts`."""

    def reward(self, prompt: Prompt, outcome: Any, /) -> Reward | Awaitable[Reward]:
        """Return the named rewards of a completion, or of the last state of an environment."""


class RowsLike(Protocol):
    """Rows of data, each a mapping from columns: a list of dicts, or a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return a row."""


TaskOrRows: TypeAlias = TaskLike | RowsLike


def is_task(value: TaskOrRows) -> TypeGuard[TaskLike]:
    """Return whether a value is a task, and not rows that one is made of."""
    is_list = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)
    return hasattr(value, "reward") or not is_list


class TokenizerLike(Protocol):
    """The members that every tokenizer has, be it a `Tokenizer` or another object."""

    vocab_size: int
    end: int | None

    def encode(self, text: str, /) -> list[int]:
        """Return the tokens of a prompt."""

    def decode(self, tokens: list[int], /) -> str:
        """Return the text of tokens."""

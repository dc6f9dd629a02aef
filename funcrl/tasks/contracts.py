"""What a loop is put together from: a task, its tokenizer, a generator. Any object will do."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from funcrl.config import Sampling
from funcrl.core.types import Params, Samples


class Prompt(NamedTuple):
    """What a task asks."""

    text: str
    answer: str = ""  # for the reward, and for a warm start; a generator never sees it
    data: Any = None  # what else a reward needs


class Tokenizer(Protocol):
    """Text to tokens and back.

    Two more methods are optional, for a tokenizer that writes prompts as conversations:
    `encode_answer(text)`, the tokens of a text within an answer, and `encode_reply(text)`, those
    that follow an answer's end when a message comes next, up to where it is answered. Both are
    `encode` when left out. So is `ends`, all tokens that end a completion, where there are several.
    """

    vocab_size: int
    end: int  # the token that ends a completion

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, up to where it is answered."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; the end token has none."""


class Task(Protocol):
    """What a policy is trained on.

    Five more attributes are optional: `reward_weights`, name -> factor (1 each when left out);
    `accuracy`, the name of the reward that `eval/accuracy` is the mean of ("correct");
    `extract(completion)`, the answer that a completion votes for in majority@k (all of its text);
    `demonstrate(prompt)`, the text of a right completion, for a warm start (the prompt's answer);
    and `stop`, strings that end a completion.
    """

    name: str
    tokenizer: Tokenizer

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return the training prompts number start, start + 1, ... of the seed's stream."""

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return named rewards of one completion."""

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out prompts, at most `count` and always the same; none if there are none."""


@runtime_checkable
class Environment(Protocol):
    """A task of several turns: the policy acts, reads what comes of it, and acts again.

    A state is a value: `act` returns the next one and leaves the one it was given as it is. The
    policy acts on the prompt first. Only its own tokens are trained on.

    A completion that ends at one of the optional `stop` strings is still the policy's turn: the
    observation is put right behind it, as a tool's result is. After any other, the observation is
    the next message. A completion that was cut off is acted with, too, and is the last.

    The other attributes that `Task` has are optional here too; `extract` gets the last state, and
    `demonstrate(prompt)` returns the texts of a right episode's actions.
    """

    name: str
    tokenizer: Tokenizer
    max_turns: int

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return the training prompts number start, start + 1, ... of the seed's stream."""

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out prompts, at most `count` and always the same; none if there are none."""

    def begin(self, prompt: Prompt) -> Any:
        """Return the state before the first action."""

    def act(self, state: Any, completion: str) -> Any:
        """Return the state after an action; its text ends with the stop string that ended it."""

    def observe(self, state: Any) -> str | None:
        """Return what the policy reads next; None when the episode is over."""

    def reward(self, prompt: Prompt, state: Any) -> Mapping[str, float]:
        """Return named rewards of the last state."""


def is_environment(task: Task | Environment) -> TypeGuard[Environment]:
    """Return whether a task answers what the policy does.

    Example:
        >>> import funcrl
        >>> from funcrl.tasks.contracts import is_environment
        >>> is_environment(funcrl.tasks.Calculator()), is_environment(funcrl.tasks.SumDigits())
        (True, False)
    """
    # By what it has, as any object will do; `isinstance` would not see what a wrapper passes on.
    return hasattr(task, "act")


class Generator(Protocol):
    """What draws completions: the embedded sampler, or an engine."""

    context_length: int  # tokens of a prompt and its completion together, at most

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""

    def close(self) -> None:
        """Free what the generator holds."""

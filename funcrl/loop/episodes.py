"""Episodes: an environment and a policy in turns, and what a task demonstrates."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, compress
from operator import or_
from typing import Any, NamedTuple

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.types import Samples
from funcrl.generators import Generator
from funcrl.generators.stops import cut_at_stop
from funcrl.tasks.adapt import TaskError
from funcrl.tasks.contracts import (
    Environment,
    Played,
    Prompt,
    Task,
    Tokenizer,
    ToolResults,
    end_tokens,
)


class Failure(NamedTuple):
    """The outcome of an episode in which the environment raised."""

    message: str


class Turn(NamedTuple):
    """What the policy generated in one turn."""

    tokens: list[int]
    logprobs: list[float]
    policy_logprobs: list[float]
    text: str  # without the end token, and up to the stop string
    stop: str  # the stop string that ended it, "" if none did
    finish_reason: str


@dataclass
class Episode:
    """A sample of an environment, growing turn by turn."""

    prompt: Prompt
    prompt_tokens: list[int]
    state: Any
    tokens: list[int] = field(default_factory=list)  # all that follow the prompt
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    finish_reason: str = ""  # "" while the episode goes on

    def append_turn(self, turn: Turn) -> None:
        """Add the tokens of the policy's turn."""
        self.turns += 1
        self._append(turn.tokens, True, turn.logprobs, turn.policy_logprobs)

    def append_observation(self, tokens: list[int]) -> None:
        """Add tokens of the environment, which are not trained on."""
        zeros = [0.0] * len(tokens)
        self._append(tokens, False, zeros, zeros)

    def played(self) -> Played:
        """Return it as it ended."""
        return Played(
            self.prompt_tokens,
            self.tokens,
            self.mask,
            self.logprobs,
            self.policy_logprobs,
            self.state,
            self.turns,
            self.finish_reason,
        )

    def _append(
        self, tokens: list[int], sampled: bool, logprobs: list[float], policy: list[float]
    ) -> None:
        self.tokens += tokens
        self.mask += [sampled] * len(tokens)
        self.logprobs += logprobs
        self.policy_logprobs += policy


def play(
    task: Environment,
    generator: Generator,
    episodes: list[Episode],
    samples: Samples,
    sampling: Sampling,
    seed: int,
) -> Samples:
    """Play episodes, one for each of the first turn's samples, and return the last turn's samples.

    The episodes are extended in place.
    """
    running, turn_number = episodes, 1
    while True:
        turns = read_turns(samples, task.tokenizer, sampling)
        for episode, turn in zip(running, turns, strict=True):
            _take_turn(task, episode, turn, generator.context_length)
        running = [episode for episode in running if not episode.finish_reason]
        if not running:
            return samples
        contexts = [episode.prompt_tokens + episode.tokens for episode in running]
        one_each = replace(sampling, num_samples=1)
        samples = generator.generate(contexts, one_each, rng.fold_in(seed, turn_number))
        turn_number += 1


def read_turns(samples: Samples, tokenizer: Tokenizer, sampling: Sampling) -> Iterator[Turn]:
    """Yield each row of samples as a turn."""
    lengths = samples.mask.sum(dim=1).tolist()
    columns = zip(
        samples.tokens.tolist(), samples.logprobs.tolist(), samples.policy_logprobs.tolist(),
        lengths, samples.finish_reasons, strict=True,
    )  # fmt: skip
    for row, logprobs, policy_logprobs, length, reason in columns:
        tokens = row[:length]
        ended = tokens[-1] in sampling.stop_tokens
        text, stop = cut_at_stop(tokens[:-1] if ended else tokens, sampling, tokenizer.decode)
        yield Turn(tokens, logprobs[:length], policy_logprobs[:length], text, stop, reason)


def _take_turn(task: Environment, episode: Episode, turn: Turn, context_length: int) -> None:
    """Act with the policy's turn, and append the observation if the episode goes on."""
    episode.append_turn(turn)
    observed: list[int] | None = None
    try:
        episode.state = task.act(episode.state, turn.text + turn.stop)
        observation = task.observe(episode.state)
        if observation is not None:
            observed = _observation_tokens(task.tokenizer, observation, inline=bool(turn.stop))
    except (Exception, SystemExit) as error:  # sys.exit would end the run
        what = f"The environment {task.name!r} raised {type(error).__name__}: {error}"
        episode.state = Failure(f"{what} after {turn.text[:80]!r} of {episode.prompt.text[:80]!r}.")
    if observed is None or turn.finish_reason == "length":
        episode.finish_reason = turn.finish_reason
        return
    end = end_tokens(task.tokenizer)
    if not turn.stop and turn.tokens[-1:] != end:
        observed = [*end, *observed]
    length = len(episode.prompt_tokens) + len(episode.tokens) + len(observed)
    if episode.turns >= task.max_turns or length >= context_length:
        episode.finish_reason = "length"
    else:
        episode.append_observation(observed)


def _observation_tokens(
    tokenizer: Tokenizer, observation: str | ToolResults, inline: bool
) -> list[int]:
    """Return an observation's tokens: within the policy's turn, or as the message after it."""
    if isinstance(observation, ToolResults):
        if not inline:
            return list(tokenizer.encode_results(observation.texts))
        observation = "".join(observation.texts)
    encode = tokenizer.encode_answer if inline else tokenizer.encode_reply
    return list(encode(observation))


class Demonstration(NamedTuple):
    """A right completion of a prompt."""

    tokens: list[int]  # the prompt's, and all that follow
    mask: list[bool]  # True for those that a policy would generate
    outcome: Any  # what is rewarded: the text, or the last state of an environment

    def completion(self) -> list[int]:
        """Return the tokens that follow the prompt."""
        follows = accumulate(self.mask, or_)
        return list(compress(self.tokens, follows))

    def extended(self, tokens: list[int], sampled: bool) -> "Demonstration":
        """Return this demonstration with more tokens."""
        mask = [*self.mask, *[sampled] * len(tokens)]
        return self._replace(tokens=[*self.tokens, *tokens], mask=mask)


class Purpose(NamedTuple):
    """What demonstrations are for, as an error says it."""

    function: str
    advice: str = ""


_FOR_WARM_START = Purpose("warm_start", "; --warm-start.steps 0 goes without")


def demonstration(task: Task, prompt: Prompt, purpose: Purpose = _FOR_WARM_START) -> Demonstration:
    """Return the right completion of a prompt that a task demonstrates.

    The actions that an environment demonstrates are played, and the environment answers them.
    """
    tokens = task.tokenizer.encode(prompt.text)
    start = Demonstration(tokens, [False] * len(tokens), None)
    if isinstance(task, Environment):
        return _demonstrated_episode(task, prompt, start, purpose)
    text = _call(task, purpose, "demonstrate", prompt)
    if not text:
        raise ValueError(
            f"{purpose.function} expects prompts with answers, got none for {prompt.text[:80]!r} "
            f"from the task {task.name!r}{purpose.advice}."
        )
    answer = [*task.tokenizer.encode_answer(text), *end_tokens(task.tokenizer)]
    return start.extended(answer, True)._replace(outcome=text)


def _demonstrated_episode(
    task: Environment, prompt: Prompt, episode: Demonstration, purpose: Purpose
) -> Demonstration:
    call = partial(_call, task, purpose)
    actions = call("demonstrate", prompt)
    if not actions:
        raise ValueError(
            f"{purpose.function} expects the environment {task.name!r} to have "
            f"demonstrate(prompt), got none{purpose.advice}."
        )
    state = call("begin", prompt)
    for action in actions:
        inline = action.endswith(tuple(task.stop))
        end = [] if inline else end_tokens(task.tokenizer)
        episode = episode.extended([*task.tokenizer.encode_answer(action), *end], True)
        state = call("act", state, action)
        observation = call("observe", state)
        if observation is not None:
            observed = _observation_tokens(task.tokenizer, observation, inline)
            episode = episode.extended(observed, False)
    return episode._replace(outcome=state)


def _call(task: Task, purpose: Purpose, method: str, *args: Any) -> Any:
    """Return what a method of the task returns; an error says that it was demonstrating."""
    try:
        return getattr(task, method)(*args)
    except TaskError:
        raise
    except Exception as error:
        given = ", ".join(repr(each)[:80] for each in args)
        raise TaskError(
            f"The task {task.name!r} raised {type(error).__name__}: {error} from {method}({given}) "
            f"in a demonstration{purpose.advice}."
        ) from error

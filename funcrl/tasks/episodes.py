"""What a policy says: completions of prompts, and of what an environment answers to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.types import Samples
from funcrl.generators.stops import cut_at_stop
from funcrl.rl.batching import pad_rows
from funcrl.tasks.contracts import Environment, Generator, Prompt, Task, Tokenizer, is_environment
from funcrl.tasks.watch import TaskError


class Completed(NamedTuple):
    """Prompts and what followed them: everything of length B is group-major."""

    prompts: list[Prompt]  # [B], each prompt once for each of its samples
    prompt_tokens: list[list[int]]  # [B]
    samples: Samples  # of an environment, what it said is among the tokens, outside the mask
    texts: list[str]  # [B] all that followed the prompt, to look at
    outcomes: list[Any]  # [B] what is rewarded: the text, or an environment's last state
    turns: list[int]  # [B] how often the policy spoke
    group_size: int


class Failure(NamedTuple):
    """The outcome of an episode in which the environment raised."""

    message: str


class Said(NamedTuple):
    """What the policy said in one turn."""

    tokens: list[int]
    logprobs: list[float]
    policy_logprobs: list[float]
    text: str  # without the end token and from a stop string on
    stop: str  # the stop string that ended it, "" if none did
    finish_reason: str


@dataclass
class Episode:
    """A sample of an environment, growing turn by turn."""

    prompt: Prompt
    asked: list[int]
    state: Any
    tokens: list[int] = field(default_factory=list)  # all that follow the prompt
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    reason: str = ""  # why it ended, "" while it goes on

    def append(self, tokens: list[int], sampled: Said | None = None) -> None:
        """Add what the environment said, or the policy, if `sampled` is given."""
        nothing = [0.0] * len(tokens)
        self.tokens += tokens
        self.mask += [sampled is not None] * len(tokens)
        self.logprobs += nothing if sampled is None else sampled.logprobs
        self.policy_logprobs += nothing if sampled is None else sampled.policy_logprobs


def complete(
    task: Task | Environment,
    generator: Generator,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
) -> Completed:
    """Return `sampling.num_samples` completions of each prompt, or episodes of an environment.

    Args:
        task: whose tokenizer to use; its end tokens and its stop strings end a completion.
        generator: with parameters pushed.
        prompts: N of them.
        sampling: how to draw; `max_tokens` is a turn's.
        seed: of the draws.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> sampler = funcrl.generators.Sampler(model)
        >>> sampler.push(funcrl.init_params(model, seed=0))
        >>> prompts = task.prompts(seed=0, start=0, count=2)
        >>> sampling = funcrl.config.Sampling(num_samples=3, max_tokens=4)
        >>> len(funcrl.rollouts.complete(task, sampler, prompts, sampling, seed=0).texts)
        6
    """
    if not prompts:
        raise ValueError(f"complete expects prompts, got none from the task {task.name!r}.")
    asked = [task.tokenizer.encode(prompt.text) for prompt in prompts]
    sampling = replace(
        sampling,
        stop_tokens=_together(sampling.stop_tokens, _ends(task.tokenizer)),
        stop=_together(sampling.stop, getattr(task, "stop", ())),
    )
    samples = generator.generate(asked, sampling, seed)
    copies = range(sampling.num_samples)
    rows = [(prompt, row) for prompt, row in zip(prompts, asked, strict=True) for _ in copies]
    if is_environment(task):
        episodes = [Episode(prompt, row, task.begin(prompt)) for prompt, row in rows]
        last = _play(task, generator, episodes, samples, sampling, seed)
        return _collect(task.tokenizer, episodes, last, sampling.num_samples)
    texts = [said.text for said in _read(samples, task.tokenizer, sampling)]
    return Completed(
        prompts=[prompt for prompt, _ in rows],
        prompt_tokens=[row for _, row in rows],
        samples=samples,
        texts=texts,
        outcomes=list(texts),
        turns=[1] * len(texts),
        group_size=sampling.num_samples,
    )


class Demonstration(NamedTuple):
    """A right completion of a prompt."""

    tokens: list[int]  # the prompt's, and all that follow
    mask: list[bool]  # which of them a policy would say
    outcome: Any  # what is rewarded: the text, or an environment's last state


def demonstration(task: Task | Environment, prompt: Prompt) -> Demonstration:
    """Return a right completion of a prompt: what the task demonstrates, or the prompt's answer.

    For an environment, what `demonstrate` does is played, and answered by the environment.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> found = funcrl.tasks.episodes.demonstration(task, funcrl.tasks.Prompt("1+2=", "3"))
        >>> found.tokens, found.mask
        ([2, 11, 3, 12, 4, 0], [False, False, False, False, True, True])
    """
    tokenizer = task.tokenizer
    tokens = tokenizer.encode(prompt.text)
    mask = [False] * len(tokens)

    def extend(more: list[int], said: bool) -> None:
        tokens.extend(more)
        mask.extend([said] * len(more))

    if not is_environment(task):
        shown = prompt.answer
        if hasattr(task, "demonstrate"):
            shown = _demonstrated(task, "demonstrate", prompt)
        if not shown:
            raise ValueError(
                f"warm_start expects prompts with answers, got none for {prompt.text[:80]!r} from "
                f"the task {task.name!r}; --warm-start.steps 0 goes without."
            )
        extend([*_plain(tokenizer, shown), tokenizer.end], True)
        return Demonstration(tokens, mask, shown)
    if not hasattr(task, "demonstrate"):
        raise ValueError(
            f"warm_start expects the environment {task.name!r} to have demonstrate(prompt), got "
            f"none; --warm-start.steps 0 goes without."
        )
    state = _demonstrated(task, "begin", prompt)
    for action in _demonstrated(task, "demonstrate", prompt):
        inline = any(action.endswith(stop) for stop in getattr(task, "stop", ()))
        extend(_plain(tokenizer, action) + ([] if inline else [tokenizer.end]), True)
        state = _demonstrated(task, "act", state, action)
        observation = _demonstrated(task, "observe", state)
        if observation is not None:
            extend(_answer(tokenizer, observation, inline), False)
    return Demonstration(tokens, mask, state)


def _demonstrated(task: Task | Environment, method: str, *args: Any) -> Any:
    """Return what a method of the task returns, for a demonstration."""
    try:
        return getattr(task, method)(*args)
    except TaskError:
        raise
    except Exception as error:
        given = ", ".join(repr(each)[:80] for each in args)
        raise TaskError(
            f"The task {task.name!r} raised {type(error).__name__}: {error} from {method}({given}) "
            f"in a demonstration; --warm-start.steps 0 goes without."
        ) from error


def _play(
    task: Environment,
    generator: Generator,
    episodes: list[Episode],
    samples: Samples,
    sampling: Sampling,
    seed: int,
) -> Samples:
    """Play episodes to their ends from what was said first; return what was drawn last."""
    going, turn = episodes, 1
    while True:
        for episode, said in zip(going, _read(samples, task.tokenizer, sampling), strict=True):
            _step(task, episode, said, generator.context_length)
        going = [episode for episode in going if not episode.reason]
        if not going:
            return samples
        contexts = [episode.asked + episode.tokens for episode in going]
        alone = replace(sampling, num_samples=1)
        samples = generator.generate(contexts, alone, rng.fold_in(seed, turn))
        turn += 1


def _step(task: Environment, episode: Episode, said: Said, context_length: int) -> None:
    """Act with what the policy said, and add what the environment answers, if it goes on."""
    episode.append(said.tokens, said)
    episode.turns += 1
    heard: list[int] | None = None
    try:
        episode.state = task.act(episode.state, said.text + said.stop)
        observation = task.observe(episode.state)
        if observation is not None:
            heard = _answer(task.tokenizer, observation, inline=bool(said.stop))
    except (Exception, SystemExit) as error:  # sys.exit would end the run
        what = f"The environment {task.name!r} raised {type(error).__name__}: {error}"
        episode.state = Failure(f"{what} after {said.text[:80]!r} of {episode.prompt.text[:80]!r}.")
    if heard is None or said.finish_reason == "length":
        episode.reason = said.finish_reason
        return
    tokenizer = task.tokenizer
    closing = [] if said.stop or said.tokens[-1] == tokenizer.end else [tokenizer.end]
    heard = closing + heard
    length = len(episode.asked) + len(episode.tokens) + len(heard)
    if episode.turns >= task.max_turns or length >= context_length:
        episode.reason = "length"
    else:
        episode.append(heard)


def _answer(tokenizer: Tokenizer, observation: str, inline: bool) -> list[int]:
    """Return an observation's tokens: within the policy's turn, or as the message after it."""
    if inline:
        return _plain(tokenizer, observation)
    encode = getattr(tokenizer, "encode_reply", tokenizer.encode)
    return list(encode(observation))


def _ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(getattr(tokenizer, "ends", (tokenizer.end,)))


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text within the policy's turn."""
    encode = getattr(tokenizer, "encode_answer", tokenizer.encode)
    return list(encode(text))


def _read(samples: Samples, tokenizer: Tokenizer, sampling: Sampling) -> Iterator[Said]:
    """Give what each row said."""
    lengths = samples.mask.sum(dim=1).tolist()
    columns = zip(
        samples.tokens.tolist(), samples.logprobs.tolist(), samples.policy_logprobs.tolist(),
        lengths, samples.finish_reasons, strict=True,
    )  # fmt: skip
    for tokens, logprobs, policy_logprobs, length, reason in columns:
        kept = tokens[:length]
        text, stop = _text(kept, tokenizer, sampling)
        yield Said(kept, logprobs[:length], policy_logprobs[:length], text, stop, reason)


def _text(tokens: list[int], tokenizer: Tokenizer, sampling: Sampling) -> tuple[str, str]:
    """Return the text before what ended it, and the stop string, if that did."""
    ended = tokens[-1] in sampling.stop_tokens
    return cut_at_stop(tokens[:-1] if ended else tokens, sampling, tokenizer.decode)


def _collect(
    tokenizer: Tokenizer, episodes: list[Episode], last: Samples, group_size: int
) -> Completed:
    def padded(name: str, dtype: torch.dtype) -> torch.Tensor:
        rows = [getattr(episode, name) for episode in episodes]
        return pad_rows(rows, dtype, last.tokens.device)

    samples = Samples(
        tokens=padded("tokens", torch.int64),
        mask=padded("mask", torch.bool),
        logprobs=padded("logprobs", last.logprobs.dtype),
        policy_logprobs=padded("policy_logprobs", last.policy_logprobs.dtype),
        finish_reasons=tuple(episode.reason for episode in episodes),
        policy_version=last.policy_version,
    )
    return Completed(
        prompts=[episode.prompt for episode in episodes],
        prompt_tokens=[episode.asked for episode in episodes],
        samples=samples,
        texts=[tokenizer.decode(episode.tokens) for episode in episodes],
        outcomes=[episode.state for episode in episodes],
        turns=[episode.turns for episode in episodes],
        group_size=group_size,
    )


def _together(first: tuple[Any, ...], second: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *second)))

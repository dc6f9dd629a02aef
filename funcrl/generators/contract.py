"""What a generator is: its methods and state, and the prompts that it takes."""

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import checks, rng
from funcrl.core.types import Params, Samples
from funcrl.generators.stops import DecodeFn

Prompts: TypeAlias = Sequence[Sequence[int]]  # the tokens of each
Hash: TypeAlias = hashlib.blake2b


def check_prompts(
    prompts: Prompts,
    sampling: Sampling,
    vocab_size: int | None,
    decode: DecodeFn | None,
    context_length: int,
) -> None:
    """Raise if a generator cannot complete these prompts."""
    if len(prompts) == 0:
        raise ValueError("generate expects at least one prompt, got none.")
    if sampling.stop and decode is None:
        raise ValueError(
            f"generate expects a decode function for stop strings, got stop={sampling.stop} and no "
            f"decode; make the generator with decode=tokenizer.decode."
        )
    above = math.inf if vocab_size is None else vocab_size
    if len(set(sampling.stop_tokens)) >= above:
        raise ValueError("generate expects a token that is not a stop token, got none.")
    for token in sampling.stop_tokens:
        checks.check_range("generate", "stop_tokens", token, 0, above - 1)
    for index, prompt in enumerate(prompts):
        _check_tokens(index, prompt)
        if not 0 < len(prompt) < context_length:
            raise ValueError(
                f"generate expects prompts of 1 to {context_length - 1} tokens, fewer than "
                f"the generator's context_length, got {len(prompt)} in prompt {index}."
            )
        # Of the different tokens first: the contexts of long episodes repeat few, each turn anew.
        if any(not 0 <= token < above for token in {*prompt}):
            wrong = next(token for token in prompt if not 0 <= token < above)
            raise ValueError(
                f"generate expects tokens from 0 on, below vocab_size={vocab_size}, got "
                f"{wrong} in prompt {index}."
            )


def _check_tokens(index: int, prompt: Any) -> None:
    """Raise unless a prompt is a sequence of integers."""
    if isinstance(prompt, str | bytes) or not hasattr(prompt, "__len__"):
        got = "a text, which tokenizer.encode turns into tokens"
        got = got if isinstance(prompt, str | bytes) else type(prompt).__name__
        raise TypeError(f"generate expects lists of tokens, got {got}, as prompt {index}.")
    # Of the different ones: the contexts of long episodes repeat few, each turn anew.
    for token in {*prompt}:
        if type(token) is not int and not _is_integer(token):
            raise TypeError(
                f"generate expects tokens that are integers, got {token!r} in prompt {index}."
            )


def _is_integer(token: Any) -> bool:
    try:
        operator.index(token)
    except TypeError:
        return False
    return True


def sample_seeds(prompts: Prompts, num_samples: int, seed: int) -> list[int]:
    """Return the seed of each sample, group-major: of the prompt's tokens, not of its place.

    The k-th copy of a prompt goes on where the one before ended, so that copies differ.
    """
    return seeds_of([hashed(prompt) for prompt in prompts], num_samples, seed)


def hashed(tokens: Sequence[int], before: Hash | None = None) -> Hash:
    """Return the hash of a sequence's tokens, of which some may have been hashed before."""
    content = ",".join(str(operator.index(token)) for token in tokens).encode()
    if before is None:
        return hashlib.blake2b(content, digest_size=8)
    found = before.copy()
    if content:
        found.update(b"," + content)
    return found


def seeds_of(hashes: Sequence[Hash], num_samples: int, seed: int) -> list[int]:
    """Return what `sample_seeds` does, of the hashes of the prompts."""
    seen: Counter[bytes] = Counter()
    seeds = []
    for each in hashes:
        content = each.digest()
        first = seen[content] * num_samples
        seen[content] += 1
        of_prompt = rng.fold_in(seed, int.from_bytes(content))
        seeds += [rng.fold_in(of_prompt, first + number) for number in range(num_samples)]
    return seeds


def pad_prompts(prompts: Prompts, width: int) -> list[list[int]]:
    """Return the prompts padded on the right with a token of their own.

    Another token's keys must not touch a prompt, not even hidden: 0 times infinity is not 0.
    """
    return [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]


def padded_prompts(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [n, P], padded as `pad_prompts` does, and the length of each [n]."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor(pad_prompts(prompts, max(lengths)), device=device)
    return padded, torch.tensor(lengths, device=device)


class Scorer(Protocol):
    """What scores given tokens: every generator, and a teacher that is none of funcrl's."""

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens, from the second on."""


class Generator(Scorer, Protocol):
    """All that the loop knows of what draws completions."""

    context_length: int  # tokens of a prompt and its completion together, at most

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on."""

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""

    def close(self) -> None:
        """Free what the generator holds."""


class State(Enum):
    """What an engine can do now; the value says it in an error."""

    EMPTY = "with no parameters; call push first"
    READY = "with parameters"
    ASLEEP = "that sleeps"
    FAILED = "that has failed"
    CLOSED = "that is closed"


class Pushed(NamedTuple):
    """Parameters that were pushed, with the number of torch's writes to each until then."""

    params: Params
    version: int
    write_counts: list[tuple[int, int] | None]

    def is_written(self) -> bool:
        """Return whether a parameter may have been written to since the push.

        Torch counts the writes to a tensor, but not to those made in inference mode: these count as
        written to, always.
        """
        return None in self.write_counts or _write_counts(self.params) != self.write_counts

    def holds(self, params: Params, version: int | None) -> bool:
        """Return whether these very parameters were pushed as this version, unwritten since.

        A push that names no version is always a new one: torch does not count every write (not
        those of its fused optimizers and collectives, through `.data`, or by others' kernels).
        """
        return (
            version is not None
            and version == self.version
            and params.keys() == self.params.keys()
            and all(leaf is self.params[name] for name, leaf in params.items())
            and not self.is_written()
        )


def pushed(params: Params, version: int | None) -> Pushed:
    """Return what is remembered of a push: it refers to the parameters."""
    return Pushed(dict(params), version or 0, _write_counts(params))


def _write_counts(params: Params) -> list[tuple[int, int] | None]:
    """Return each parameter's number of writes and address; None where torch does not count."""
    return [
        None if leaf.is_inference() else (leaf._version, leaf.data_ptr())
        for leaf in params.values()
    ]


class Engine(Generator, Protocol):
    """A generator of funcrl's: the sampler, or vLLM in this process or as servers."""

    def push(self, params: Params, version: int | None = None) -> None:
        """Sample from these parameters from now on."""

    @property
    def state(self) -> State:
        """What the engine can do now."""

    @property
    def pushed(self) -> Pushed | None:
        """The parameters that it samples from."""

    def sleep(self) -> None:
        """Give memory up until the next call needs it."""


class Lifecycle:
    """The state of an engine, and how it changes."""

    def __init__(self) -> None:
        self.state = State.EMPTY

    @contextmanager
    def transition_to(self, state: State) -> Iterator[None]:
        """Run what leads to a state; any error in it, an interrupt too, is a failed engine."""
        self.state = State.FAILED
        yield
        self.state = state

    def check_pushed(self, method: str) -> None:
        """Raise unless the engine has parameters."""
        if self.state not in (State.READY, State.ASLEEP):
            raise RuntimeError(
                f"{method} expects an engine with parameters, got one {self.state.value}."
            )

"""What a generator is: its methods, its state, and the parameters that it holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from funcrl.config import Sampling
from funcrl.core.types import Params, Samples
from funcrl.generators.prompts import Prompts


class Generator(Protocol):
    """All that the loop knows of what draws completions."""

    context_length: int  # tokens of a prompt and its completion together, at most

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on."""

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, group-major."""

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens, from the second on."""

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
    """Parameters that were pushed, with a mark on each that changes when torch writes to it."""

    params: Params
    version: int
    marks: list[tuple[int, int] | None]

    def is_written(self) -> bool:
        """Return whether a parameter has been written to since the push."""
        return _marks(self.params) != self.marks

    def holds(self, params: Params, version: int) -> bool:
        """Return whether these very parameters were pushed as this version, unwritten since."""
        return (
            version == self.version
            and params.keys() == self.params.keys()
            and all(leaf is self.params[name] for name, leaf in params.items())
            and None not in self.marks
            and not self.is_written()
        )


def pushed(params: Params, version: int) -> Pushed:
    """Return what is remembered of a push: it refers to the parameters."""
    return Pushed(dict(params), version, _marks(params))


def _marks(params: Params) -> list[tuple[int, int] | None]:
    """Return a mark of each parameter; None where torch does not count writes."""
    return [
        None if leaf.is_inference() else (leaf._version, leaf.data_ptr())
        for leaf in params.values()
    ]


class Engine(Generator, Protocol):
    """A generator of funcrl's: the sampler, or vLLM in this process or as servers."""

    @property
    def state(self) -> State:
        """What the engine can do now."""

    @property
    def pushed(self) -> Pushed | None:
        """The parameters that it samples from."""

    def sleep(self) -> None:
        """Give memory up until the next call needs it."""


class Life:
    """The state of an engine, and how it changes."""

    def __init__(self) -> None:
        self.state = State.EMPTY

    def enter(self, state: State) -> None:
        """Change the state."""
        self.state = state

    @contextmanager
    def becomes(self, state: State) -> Iterator[None]:
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

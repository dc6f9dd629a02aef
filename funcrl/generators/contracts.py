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

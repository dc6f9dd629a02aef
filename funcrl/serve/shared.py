"""The one generator of a server, which requests use one after another."""

from collections.abc import Callable
from typing import Any

from funcrl.core.types import Params
from funcrl.generators.embedded.engine import EmbeddedGenerator
from funcrl.serve.jobs import Jobs


class SharedGenerator:
    """A generator, and the jobs that use it: only these push to it and draw from it."""

    def __init__(self, generator: EmbeddedGenerator) -> None:
        self.generator = generator
        self.jobs: Jobs[Any] = Jobs()
        self._pushed: str | None = None

    def push(self, name: str, params: Callable[[], Params]) -> None:
        """Draw from parameters of a name, which are made only if others were pushed last."""
        if self._pushed != name:
            self.generator.push(params())
            self._pushed = name

    def close(self) -> None:
        """Finish the job that is under way, and free what the generator holds."""
        self.jobs.close()
        self.generator.close()

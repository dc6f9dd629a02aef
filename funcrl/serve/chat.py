"""`funcrl chat`: a conversation with a model, whose answers are shown while they are drawn."""

from collections.abc import Callable, Iterable
from contextlib import closing

from funcrl.config import ChatConfig, Sampling
from funcrl.core import rng
from funcrl.generators.embedded.engine import EmbeddedGenerator
from funcrl.serve.served import Served, drawing
from funcrl.serve.text import GrowingText
from funcrl.tasks.contracts import all_ends, end_tokens

NEW = "/new"
"""The line that begins a new conversation."""
_FULL = f"[The model reads no more than its context: {NEW} begins a new conversation.]"


class Conversation:
    """The tokens of a conversation: what was drawn is never encoded again.

    Args:
        served: the model that answers.
        generator: with its parameters.
        sampling: how answers are drawn.
        seed: of all of them.
    """

    def __init__(
        self, served: Served, generator: EmbeddedGenerator, sampling: Sampling, seed: int
    ) -> None:
        self._tokenizer, self._generator = served.tokenizer, generator
        self._sampling, self._seed = sampling, seed
        self._tokens: list[int] = []
        self._num_answers = 0

    def answer(self, message: str, write: Callable[[str], None]) -> None:
        """Write the answer to a message, piece by piece; the conversation goes on behind it.

        An interrupt leaves the conversation as it was before the message.
        """
        tokenizer, sampling = self._tokenizer, self._sampling
        new = tokenizer.encode_reply(message) if self._tokens else tokenizer.encode(message)
        prompt = [*self._tokens, *new]
        if len(prompt) >= self._generator.context_length:
            write(_FULL)
            return
        text, drawn = GrowingText(tokenizer, sampling), list[int]()

        def listen(sample: int, token: int) -> None:
            del sample
            drawn.append(token)
            write(text.add(token))

        seed = rng.fold_in(self._seed, self._num_answers)
        self._generator.generate([prompt], sampling, seed, listen)
        write(text.end())
        ended = drawn[-1] in sampling.stop_tokens
        # A reply comes after the token that ends an answer, also after one that was cut off.
        self._tokens = [*prompt, *(drawn[:-1] if ended else drawn), *end_tokens(tokenizer)]
        self._num_answers += 1

    def restart(self) -> None:
        """Forget the conversation."""
        self._tokens = []


def chat(
    config: ChatConfig,
    lines: Iterable[str],
    write: Callable[[str], None],
    note: Callable[[str], None],
    trust: bool = False,
) -> None:
    """Answer the lines of a user, one after another.

    Args:
        config: which model, and how to draw.
        lines: of the user; "/new" begins a new conversation.
        write: is called with the pieces of each answer, and a newline at its end.
        note: is called with lines about the code that is run.
        trust: run the code that a run's folder names, even if this account has not run it before.
    """
    served, generator = drawing("chat", config, trust, note)
    with closing(generator):
        sampling = config.sampling(1, all_ends(served.tokenizer))
        conversation = Conversation(served, generator, sampling, config.seed)
        for line in lines:
            message = line.strip()
            if message == NEW:
                conversation.restart()
            elif message:
                try:
                    conversation.answer(message, write)
                except KeyboardInterrupt:
                    write("[interrupted]")
                except ValueError as error:  # such as a character that the tokenizer lacks
                    write(f"[{error}]")
                write("\n")

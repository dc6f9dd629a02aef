"""`funcrl generate`: a model's answers to prompts."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from funcrl.config import GenerateConfig
from funcrl.loop.episodes import read_turns
from funcrl.serve.served import drawing
from funcrl.tasks.contracts import all_ends


class Answer(NamedTuple):
    """What a model answered to a prompt."""

    prompt: str
    text: str
    finish_reason: str  # "stop" or "length"


def generate(
    config: GenerateConfig, prompts: Sequence[str], note: Callable[[str], None], trust: bool = False
) -> list[Answer]:
    """Return a model's answers, `config.num_samples` to each prompt in turn.

    Args:
        config: which model, and how to draw.
        prompts: texts, each of which the chat template of a pretrained model writes as a message.
        note: is called with lines about the code that is run.
        trust: run the code that a run's folder names, even if this account has not run it before.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            "generate expects prompts behind the options, or one in standard input, got none."
        )
    served, generator = drawing("generate", config, trust, note)
    tokenizer = served.tokenizer
    sampling = config.sampling(config.num_samples, all_ends(tokenizer))
    with closing(generator):
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
        samples = generator.generate(encoded, sampling, config.seed)
    asked = [prompt for prompt in prompts for _ in range(config.num_samples)]
    return [
        Answer(prompt, turn.text, turn.finish_reason)
        for prompt, turn in zip(asked, read_turns(samples, tokenizer, sampling), strict=True)
    ]

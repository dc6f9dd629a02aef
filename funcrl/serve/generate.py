"""`funcrl generate`: a model's answers to prompts."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from funcrl.config import GenerateConfig, Sampling
from funcrl.loop.episodes import read_turns
from funcrl.loop.from_config import embedded
from funcrl.serve.served import load_served
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
    if config.model is None:
        raise ValueError("generate expects --model, the folder of a run or weights, got none.")
    if not prompts or not all(prompts):
        raise ValueError(
            "generate expects prompts behind the options, or one in standard input, got none."
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    served = load_served("generate", config.model, config.device, trust, note, config.system_prompt)
    tokenizer = served.tokenizer
    sampling = Sampling(
        config.num_samples, max_tokens=config.max_tokens, temperature=config.temperature,
        top_p=config.top_p, top_k=config.top_k, stop_tokens=tuple(all_ends(tokenizer)),
    )  # fmt: skip
    generator = embedded(served.model)(
        served.model, decode=tokenizer.decode, dtype=getattr(torch, config.dtype)
    )
    with closing(generator):
        generator.push(served.params)
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
        samples = generator.generate(encoded, sampling, config.seed)
    asked = [prompt for prompt in prompts for _ in range(config.num_samples)]
    return [
        Answer(prompt, turn.text, turn.finish_reason)
        for prompt, turn in zip(asked, read_turns(samples, tokenizer, sampling), strict=True)
    ]

"""The model that a server has: its network, parameters and tokenizer, by the name of a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from funcrl.config import ChatConfig, GenerateConfig
from funcrl.core.types import Params
from funcrl.generators.embedded.engine import EmbeddedGenerator
from funcrl.loop.export import load_run
from funcrl.loop.from_config import embedded
from funcrl.loop.sources import (
    Device,
    base_params,
    defaults,
    find_source,
    is_run,
    network_of,
    tokenizer_of,
    tokenizer_place,
)
from funcrl.models.networks import vocab_size_of
from funcrl.run import runs
from funcrl.serve.http import RequestError
from funcrl.tasks.contracts import Tokenizer
from funcrl.weights.tokenizer import tokenizer_home


class Served(NamedTuple):
    """What is served."""

    name: str  # as `--model` says it
    model: nn.Module
    params: Params
    tokenizer: Tokenizer
    place: Path | None  # the folder or file by which transformers reads the tokenizer


def check_tokens(
    served: Served, sequences: Sequence[Sequence[int]], context_length: int, status: int
) -> None:
    """Raise, with the status of a response, unless the model can read these tokens and answer."""
    size = vocab_size_of(served.model) or served.tokenizer.vocab_size
    for tokens in sequences:
        wrong = [token for token in tokens if not 0 <= token < size]
        if wrong or not 0 < len(tokens) < context_length:
            got = f"the token {wrong[0]}" if wrong else f"{len(tokens)} tokens"
            raise RequestError(
                status, f"expected 1 to {context_length - 1} tokens below {size}, got {got}"
            )


def load_served(
    function: str,
    name: str,
    device: Device,
    trust: bool,
    note: Callable[[str], None],
    system_prompt: str | None = None,
    enable_thinking: bool | None = None,
) -> Served:
    """Return a trained run's model, or pretrained weights.

    Args:
        function: the public function that wants it, for errors.
        name: of a model: a run's folder or weights.
        device: of the parameters.
        trust: run the code that a run names, even if this account has not run it before.
        note: is called with lines about the code that is run.
        system_prompt: the system's message of pretrained weights; a run has its own.
        enable_thinking: whether their chat template lets them think first, likewise.
    """
    if is_run(Path(name)):
        if system_prompt is not None or enable_thinking is not None:
            raise ValueError(
                f"{function} expects --system-prompt and --enable-thinking with pretrained "
                f"weights, got the run {name}."
            )
        loaded = load_run(name, device=device, trust=trust, note=note)
        own = Path(name) / runs.TOKENIZER
        place = own if own.is_dir() else tokenizer_place(function, defaults(name))
        return Served(name, loaded.model, loaded.params, loaded.task.tokenizer, place)
    options = replace(
        defaults(name),
        device=device,
        system_prompt=system_prompt,
        enable_thinking=enable_thinking,
    )
    source = find_source(function, name)
    tokenizer = None if source.weights is None else tokenizer_of(function, options)
    if tokenizer is None or source.weights is None:
        raise ValueError(
            f"{function} expects --model to be the folder of a run, or pretrained weights, got "
            f"{name!r}, which has learned nothing."
        )
    model = network_of(function, options, source, None)
    params = base_params(options, source, model)
    return Served(name, model, params, tokenizer, tokenizer_home(source.weights))


def drawing(
    function: str, config: GenerateConfig | ChatConfig, trust: bool, note: Callable[[str], None]
) -> tuple[Served, EmbeddedGenerator]:
    """Return the model that a configuration names, and a generator with its parameters."""
    if config.model is None:
        raise ValueError(f"{function} expects --model, the folder of a run or weights, got none.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    served = load_served(
        function, config.model, config.device, trust, note, config.system_prompt,
        config.enable_thinking,
    )  # fmt: skip
    generator: EmbeddedGenerator = embedded(served.model)(
        served.model, decode=served.tokenizer.decode, dtype=getattr(torch, config.dtype)
    )
    generator.push(served.params)
    return served, generator

"""The teacher of a run by its name: its network, and the parameters that it has learned."""

import json
from dataclasses import replace
from pathlib import Path

from torch import nn

from funcrl.config import LoraConfig, TrainConfig
from funcrl.config.sections import is_own
from funcrl.core import tree
from funcrl.loop import sources
from funcrl.loop.from_config import compute_dtype
from funcrl.models.initial import is_shape
from funcrl.models.logprobs import Teacher
from funcrl.run import runs
from funcrl.run.checkpoint import numbered
from funcrl.tasks import load_tokenizer
from funcrl.tasks.contracts import Tokenizer

_FILE = "tokenizer.json"
_SAME = 0.99  # of the tokens of two tokenizers that count as one


def teacher_of(
    function: str, config: TrainConfig, tokenizer: Tokenizer, trust: bool = False
) -> Teacher:
    """Return the teacher that a configuration names.

    Args:
        function: the public function that wants it, for errors.
        config: of the run that it teaches.
        tokenizer: of the run's task, which must be the teacher's too.
        trust: run a network of one's own that a run's folder names, whosever it is.
    """
    own, source = _as_model(function, config)
    _check_tokenizer(function, own.model, source, tokenizer)
    network = sources.network_of(function, own, source, tokenizer.vocab_size, tokenizer, trust)
    params, dtype = sources.base_params(own, source, network), compute_dtype(config)
    return Teacher(
        network,
        params if dtype is None else tree.cast(params, dtype),  # float32 would be of no use
        "reverse" if config.algorithm.divergence == "sampled" else config.algorithm.divergence,
    )


def network_of_teacher(
    function: str, config: TrainConfig, tokenizer: Tokenizer, trust: bool = False
) -> nn.Module:
    """Return the network of the teacher that a configuration names, without its parameters."""
    own, source = _as_model(function, config)
    return sources.network_of(function, own, source, tokenizer.vocab_size, tokenizer, trust)


def _as_model(function: str, config: TrainConfig) -> tuple[TrainConfig, sources.Source]:
    """Return options whose model is the teacher, and what its name means.

    Raise if it has not been trained.
    """
    name = str(config.teacher)
    if is_shape(name) or is_own(name):
        raise ValueError(
            f"{function} expects --teacher to be pretrained weights or the folder of a run, got "
            f"{name!r}; in Python, teacher=funcrl.Teacher(model, params) is any network."
        )
    source = sources.find_source(function, name, "--teacher")
    return replace(config, model=name, lora=LoraConfig()), source


def teacher_facts(name: str) -> dict[str, str]:
    """Return the step of a teacher that is a run, which may go on; nothing of weights."""
    run = Path(name)
    steps = numbered(run / runs.CHECKPOINTS) if sources.is_run(run) else {}
    return {"teacher_step": str(max(steps))} if steps else {}


def _check_tokenizer(
    function: str, name: str, source: sources.Source, tokenizer: Tokenizer
) -> None:
    """Raise if the teacher reads other tokens than the run's."""
    if source.run is not None:
        sources.check_tokenizer(function, source.run, tokenizer, "--teacher")
        place = sources.tokenizer_place(
            function, sources.options_of_run(function, "--teacher", source.run)
        )
    else:
        place = source.weights
    if place is None:
        return
    own, other = _ids(tokenizer), _ids(load_tokenizer(place))
    different = [token for token in own.keys() & other.keys() if own[token] != other[token]]
    # Networks of one family name some of their special tokens otherwise.
    if different or len(own.keys() & other.keys()) < _SAME * max(len(own), len(other)):
        raise ValueError(
            f"{function} expects a --teacher with the tokenizer of what it teaches, of {len(own)} "
            f"tokens, got another one of {len(other)} from {name}."
        )


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the numbers of a tokenizer's tokens, as its file says them; none without a file."""
    files = tokenizer.files()
    if _FILE not in files:
        return {}
    read = json.loads(files[_FILE])
    vocab = read["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((v[0], n) for n, v in enumerate(vocab))
    return {**dict(pairs), **{each["content"]: each["id"] for each in read["added_tokens"]}}

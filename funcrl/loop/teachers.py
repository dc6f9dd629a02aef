"""The teacher of a run by its name: a network with learned parameters, or what scores tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from funcrl.config import LoraConfig, TrainConfig
from funcrl.config.sections import is_own
from funcrl.core import tree
from funcrl.core.files import brief
from funcrl.generators import Scorer, ServedTeacher
from funcrl.loop import sources
from funcrl.loop.from_config import compute_dtype, trained_truncation
from funcrl.models.initial import is_shape
from funcrl.models.logprobs import Teacher
from funcrl.run import runs
from funcrl.run.checkpoint import numbered
from funcrl.tasks import load_tokenizer
from funcrl.tasks.contracts import Task, Tokenizer
from funcrl.tasks.named import call_with_known, import_named

_FILE = "tokenizer.json"
_SAME = 0.99  # of the tokens of two tokenizers that count as one


def teacher_of(
    function: str, config: TrainConfig, tokenizer: Tokenizer, trust: bool = False
) -> Teacher | Scorer:
    """Return the teacher that a configuration names.

    Args:
        function: the public function that wants it, for errors.
        config: of the run that it teaches.
        tokenizer: of the run's task, which must be the teacher's too.
        trust: run a network of one's own that a run's folder names, whosever it is.
    """
    name = str(config.teacher)
    if is_own(name):
        found = import_named("--teacher", name)
        if callable(found):
            known = {"tokenizer": tokenizer, "device": config.device}
            found = call_with_known("--teacher", name, found, **known)
        return check_kind(function, config, found)
    own, source = _as_model(function, config)
    _check_tokenizer(function, own.model, source, tokenizer)
    network = sources.network_of(function, own, source, tokenizer.vocab_size, tokenizer, trust)
    params, dtype = sources.base_params(own, source, network), compute_dtype(config)
    return Teacher(
        network,
        params if dtype is None else tree.cast(params, dtype),  # float32 would be of no use
        "reverse" if config.algorithm.divergence == "sampled" else config.algorithm.divergence,
    )


def check_kind(function: str, config: TrainConfig, teacher: Any) -> Teacher | Scorer:
    """Return a teacher; raise unless it is one whose scores the configuration learns from."""
    if isinstance(teacher, Teacher):
        return teacher
    if not callable(getattr(teacher, "score", None)):
        raise TypeError(
            f"{function} expects teacher to be a funcrl.Teacher, or an object that scores tokens "
            f"by score(prompts), as generators and funcrl.ServedTeacher do, got "
            f"{type(teacher).__name__}."
        )
    if config.algorithm.divergence != "sampled":
        raise ValueError(
            f"{function} expects --algorithm.divergence sampled with a teacher that scores tokens "
            f"and has no distributions, got {config.algorithm.divergence} for "
            f"{type(teacher).__name__}."
        )
    temperature = config.sampling.temperature or 1.0
    if temperature != 1 or trained_truncation(config) is not None:
        raise ValueError(
            f"{function} expects --sampling.temperature 1 and --behavior policy with a teacher "
            f"that scores tokens, which are of its whole distribution, got {temperature} and "
            f"{config.behavior} for {type(teacher).__name__}."
        )
    scorer: Scorer = teacher
    return scorer


def check_served(function: str, teacher: Teacher | Scorer | None, task: Task, seed: int) -> None:
    """Raise unless a teacher behind an address answers, and reads a text as the task's tokens."""
    if not isinstance(teacher, ServedTeacher):
        return
    text = task.prompts(seed, 0, 1)[0].text
    own, other = task.tokenizer.encode_answer(text), teacher.tokenize(text)
    if own != other:
        raise ValueError(
            f"{function} expects {teacher} to have the tokenizer of what it teaches, which gives "
            f"the first prompt {brief(str(own))}, got {brief(str(other))}."
        )


def network_of_teacher(
    function: str, config: TrainConfig, tokenizer: Tokenizer, trust: bool = False
) -> nn.Module | None:
    """Return the network of the teacher that a configuration names, without its parameters.

    None where it names none, or a teacher of the user's own, whose memory is not known.
    """
    if config.teacher is None or is_own(config.teacher):
        return None
    own, source = _as_model(function, config)
    return sources.network_of(function, own, source, tokenizer.vocab_size, tokenizer, trust)


def _as_model(function: str, config: TrainConfig) -> tuple[TrainConfig, sources.Source]:
    """Return options whose model is the teacher, and what its name means.

    Raise if it has not been trained.
    """
    name = str(config.teacher)
    if is_shape(name):
        raise ValueError(
            f"{function} expects --teacher to be pretrained weights, the folder of a run, or one's "
            f"own as file.py:Name, got {name!r}; in Python, teacher=funcrl.Teacher(model, params) "
            f"is any network, and funcrl.ServedTeacher a model behind an address."
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

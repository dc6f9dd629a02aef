"""Writes the model that a run has trained."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from funcrl.config import TrainConfig
from funcrl.core.arguments import checked
from funcrl.core.files import read_json, read_text
from funcrl.core.terminal import Note, warn_safely
from funcrl.loop.parts import sources
from funcrl.models import Transformer
from funcrl.models.logits import is_of_transformers
from funcrl.run import runs
from funcrl.tasks import check_task, is_built_in, load, load_tokenizer
from funcrl.tasks.contracts import TaskLike
from funcrl.tasks.tokenizers import tokenizer_files
from funcrl.weights import save_params
from funcrl.weights.tokenizer import FILES, GENERATION, has_tokenizer

_OWN = (runs.CHECKPOINTS, runs.REFERENCE, runs.TOKENIZER)  # folders of a run that only it writes to
_MOST_BYTES = 1 << 28  # of a file of a tokenizer


@checked
def export(
    run: str | Path, out: str | Path, task: TaskLike | None = None, note: Note = warn_safely
) -> Path:
    """Write the model of a run's newest checkpoint, adapters merged, and return its path.

    The run's task is not loaded.

    Args:
        run: the folder of a run.
        out: a .gguf file, or a Hugging Face folder, which is no run's. The tokenizer of the model
            that the run began with goes along, or the one that its task had.
        task: of a run of a version that did not write down its vocabulary and its tokenizer.
        note: is called with a line about what is missing.

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

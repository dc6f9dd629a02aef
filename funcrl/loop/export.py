"""Writes the model that a run has trained."""

from pathlib import Path
from typing import Any

from funcrl.core.arguments import checked
from funcrl.loop import sources
from funcrl.models import Transformer
from funcrl.models.functional import bind
from funcrl.models.logits import is_of_transformers
from funcrl.tasks.contracts import TaskLike
from funcrl.weights import save_params


@checked
def export(run: Path, out: Path, task: TaskLike | None = None) -> Path:
    """Write the model of a run's newest checkpoint, adapters merged, and return its path.

    The run's task is not loaded.

    Args:
        run: the folder of a run.
        out: a .gguf file, or a Hugging Face folder. The tokenizer of the model that the run began
            with goes along, where it had one.
        task: of a run of a version that did not write down its vocabulary's size.

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
    network = sources.network_of_run("export", run, task)
    _, params = sources.params_of_run("export", run, network)
    options = sources.options_of_run("export", "--run", run)
    tokenizer = sources.tokenizer_place("export", options)
    if isinstance(network, Transformer):
        return save_params(out, network, params, tokenizer=tokenizer)
    if is_of_transformers(network) and out.suffix != ".gguf":
        saved: Any = bind(network, params)
        saved.save_pretrained(out)
        return out
    raise ValueError(
        f"export expects a Transformer, or a folder for a model of transformers, got "
        f"{type(network).__name__} and {out}; funcrl.load_run({str(run)!r}) gives its parameters."
    )

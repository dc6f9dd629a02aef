"""Writes the model that a run has trained."""

from dataclasses import replace
from pathlib import Path

from funcrl.config import TrainConfig
from funcrl.core.arguments import checked
from funcrl.loop.build import learner, options_of_run, trained_params
from funcrl.models import SHAPES
from funcrl.run import runs
from funcrl.tasks import is_built_in, load
from funcrl.tasks.contracts import TaskLike
from funcrl.weights import save_params


@checked
def export(run: str | Path, out: str | Path, task: TaskLike | None = None) -> Path:
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
    run = Path(run)
    # Nothing is generated or compiled here, and no GPU is needed.
    config = replace(options_of_run("export", "--run", run), device="cpu", compile=None)
    parts = learner(config, _vocab_size(config, run, task), function="export")
    _, trained = trained_params(config, parts, run)
    return save_params(out, parts.model, parts.policy(trained), tokenizer=parts.weights)


def _vocab_size(config: TrainConfig, run: Path, task: TaskLike | None) -> int | None:
    """Return the size of the run's vocabulary, without running a user's task."""
    if config.model not in SHAPES:
        return None  # the weights say it
    if task is not None:
        return task.tokenizer.vocab_size
    recorded = runs.recorded_count(run, "vocab_size", "export")
    if recorded is None and is_built_in(config.task):
        runs.check_task_named("export", run)
        return load(config.task).tokenizer.vocab_size
    if recorded is None:
        raise ValueError(
            f"export expects vocab_size in {run / runs.ENVIRONMENT}, as runs write it since 0.1.0, "
            f"got none; in Python, task= gives the run's task."
        )
    return recorded

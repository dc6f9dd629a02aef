"""What a run has trained, as a model for others to load."""

from dataclasses import replace
from pathlib import Path

from funcrl import runs
from funcrl.arguments import checked
from funcrl.config import TrainConfig, read_config
from funcrl.parts import build, trained_params
from funcrl.protocols import Environment, Task
from funcrl.weights import save_params


@checked
def export(run: Path, out: Path, task: Task | Environment | None = None) -> Path:
    """Write the model of a run's newest checkpoint, adapters merged, and return its path.

    Args:
        run: the folder of a run.
        out: a .gguf file, or a Hugging Face folder. The tokenizer of the model that the run began
            with goes along, where it had one.
        task: of a run whose task was an object.

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
    path = run / runs.CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"export expects the folder of a run, got {run} without a {runs.CONFIG}."
        )
    if task is None:
        runs.check_task_named("export", run)
    # Nothing is generated here, and no GPU is needed.
    config = replace(read_config(TrainConfig, path), generator="sampler", device="cpu")
    parts = build(config, task, function="export")
    _, trained = trained_params(config, parts, run)
    return save_params(out, parts.model, parts.policy(trained), tokenizer=parts.weights)

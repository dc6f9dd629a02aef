"""The README.md of an exported model: what it was trained on and how, for a hub."""

from pathlib import Path
from typing import Any

import yaml

from funcrl.core.files import whole_file
from funcrl.core.printing import printable
from funcrl.core.process import VERSION
from funcrl.loop.sources import options_of_run
from funcrl.run import runs
from funcrl.run.accuracy import held_out

CARD = "README.md"


def write_card(run: Path, folder: Path) -> None:
    """Write a model's README.md beside it, unless it has one: of its base, for example."""
    if (folder / CARD).exists():
        return
    options = options_of_run("export", "--run", run)
    is_name = "/" in options.model and not Path(options.model).expanduser().exists()
    head: dict[str, Any] = {"library_name": "transformers"}
    head["tags"] = ["funcrl", options.algorithm.name]
    if is_name:
        head["base_model"] = options.model
    base = options.model if is_name else Path(options.model).name  # not where it lies
    history = runs.read_history(run)
    rows = [row for row in history if held_out(row) is not None]
    evaluated = ""
    if rows:
        (name, before), (_, after) = (held_out(row) or ("", 0.0) for row in (rows[0], rows[-1]))
        evaluated = f"Held-out {name}: {before:.3f} before, {after:.3f} after.\n"
    body = (
        f"Trained with funcrl {VERSION}: `{base}` by "
        f"{options.algorithm.name} on `{options.task}`, {history[-1]['step']} steps of "
        f"{options.num_prompts} prompts x {options.num_generations} completions.\n{evaluated}"
    )
    with whole_file(folder / CARD) as file:
        file.write(f"---\n{yaml.safe_dump(head)}---\n\n{printable(body)}".encode())

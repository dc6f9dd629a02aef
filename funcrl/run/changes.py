"""What a run changed on its way: refused, or written to RUN/changes.jsonl with the step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl.config import Change, TrainConfig, changed_options, read_config
from funcrl.core.files import write_whole
from funcrl.core.terminal import escaped
from funcrl.run import runs

# Facts of a run's environment whose change is written down, too.
_FACTS = ("funcrl", "commit", "torch")


def check_options_kept(function: str, config: TrainConfig, folder: Path) -> None:
    """Raise if a configuration changes what a run was trained with.

    Nothing was, as long as it has no checkpoint.

    Args:
        function: the public function that is to go on with the run, for errors.
        config: to go on with.
        folder: the run's.
    """
    places = folder / runs.CHECKPOINTS
    if not places.is_dir() or not any(each.name.isdigit() for each in places.iterdir()):
        return
    refused = [each for each in changed_options(_recorded(folder), config) if not each.is_allowed]
    if refused:
        shown = [shown_change(*each) for each in refused]
        got = ", ".join(f"--{option} {after} (was {before})" for option, before, after in shown)
        raise ValueError(
            f"{function} expects the options that {folder} was trained with, got {got}; "
            f"--fork NEW_FOLDER (in Python fork=) starts a run with them from its newest "
            f"checkpoint."
        )


def changes_since(
    folder: Path, config: TrainConfig, facts: Mapping[str, str], step: int
) -> list[dict[str, Any]]:
    """Return lines about what a run goes on with that is not what its folder has recorded.

    Args:
        folder: of the run that is gone on with.
        config: to go on with.
        facts: of the environment to go on in.
        step: the last one that was done before.
    """
    was = runs.read_facts(folder, "train")
    changes = changed_options(_recorded(folder), config)
    changes += [
        Change(name, was.get(name), facts.get(name))
        for name in _FACTS
        if name in was and was[name] != facts.get(name)
    ]
    return [
        {"step": step, "option": each.option, "from": each.before, "to": each.after}
        for each in changes
    ]


def write_changes(folder: Path, earlier: Path, step: int, new: Sequence[Mapping[str, Any]]) -> None:
    """Write changes.jsonl: the changes that an earlier run of the folder recorded, and new ones.

    Args:
        folder: of the run.
        earlier: the folder with the earlier ones, `folder` itself or that of the run it began from.
        step: after which the run goes on. An earlier change of a later step holds from here on.
        new: as `changes_since` returns them.
    """
    path = earlier / runs.CHANGES
    rows = [
        {**row, "step": min(step, runs.step_of("train", path, number, row))}
        for number, row in runs.each_line("train", path)
    ]
    # A process that was killed here may have written some of them.
    rows = [row for row in rows if row not in new] + [dict(row) for row in new]
    if rows:
        write_whole(folder / runs.CHANGES, "".join(f"{json.dumps(row)}\n" for row in rows))


def describe_changes(config: TrainConfig, new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines for the screen about what changes in a run."""
    lines = []
    for row in new:
        option, before, after = shown_change(row["option"], row["from"], row["to"])
        lines.append(f"From step {row['step'] + 1} on: {option} {after} (was {before}).")
    longer = any(row["option"] == "steps" for row in new)
    if longer and config.optimizer.schedule != "constant":
        lines.append(
            f"The {config.optimizer.schedule} schedule of the learning rate ends at the new "
            f"--steps {config.steps}, so the next update's rate is not the last one's."
        )
    return lines


def shown_change(option: Any, before: Any, after: Any) -> list[str]:
    """Return the name of an option or fact, and its values before and after a change, as texts."""
    absent = "unknown" if option in _FACTS else "left out"
    return [absent if each is None else _shown(each) for each in (option, before, after)]


def _recorded(folder: Path) -> TrainConfig:
    return read_config(TrainConfig, folder / runs.CONFIG)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return escaped(text if len(text) <= 60 else f"{text[:60]}...")

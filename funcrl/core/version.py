"""Which funcrl this is."""

import subprocess
from pathlib import Path

VERSION = "0.1.0"


def commit() -> str | None:
    """Return the commit of funcrl's own files, "+changes" added where they differ from it.

    None where they are in no git checkout, or git cannot be asked.
    """
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():  # a checkout of others that funcrl lies in
        return None
    head = _git(package.parent, "rev-parse", "HEAD")
    changed = _git(package.parent, "status", "--porcelain", "--", package.name)
    if not head or changed is None:
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *command: str) -> str | None:
    """Return what git prints, None where it fails."""
    try:
        # No lock is taken, nothing of the user's configuration is run, and nobody is asked.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *command],
            cwd=folder, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

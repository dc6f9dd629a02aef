"""The command line: `funcrl train`, `eval` and the others."""

from funcrl.cli.commands import read_train_config
from funcrl.cli.program import main

__all__ = ["main", "read_train_config"]

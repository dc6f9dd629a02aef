"""The command line: `funcrl train`, `eval` and the others."""

from funcrl.cli.program import main, read_train_config

__all__ = ["main", "read_train_config"]

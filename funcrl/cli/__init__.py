"""The command line: `funcrl train`, `eval`, `bench` and the others."""

from funcrl.cli.commands import main

__all__ = ["main"]

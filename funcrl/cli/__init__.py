"""The command line: `funcrl train`, `eval`, `bench` and the others."""

from funcrl.cli.program import main

__all__ = ["main"]

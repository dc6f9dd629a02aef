"""Runs a benchmark: `python examples/benchmarks step --help`."""

import sys
from pathlib import Path

# The folder above, not this one, whose files have names such as vllm.py.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.command_line import main

if __name__ == "__main__":  # a process of a benchmark's own imports this file, too
    main()

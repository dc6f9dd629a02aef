"""A long run holds no more than a short one: objects, threads and files are counted exactly."""

import subprocess
import sys
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "helpers" / "long_run.py"


@pytest.mark.slow
def test_what_a_run_holds_does_not_grow(tmp_path):
    steps = 200
    command = [sys.executable, str(HELPER), str(tmp_path / "run"), str(steps), "--backend", "eager"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [[float(cell) for cell in line.split()] for line in done.stdout.splitlines()[1:]]
    # By the middle every shape is traced and every library loaded.
    middle, last = (next(line for line in lines if line[0] == step) for step in (100, steps))
    resident, open_files, files, threads, objects = (
        after - before for before, after in zip(middle[1:], last[1:], strict=True)
    )
    assert (open_files, files) == (0, 0)
    assert threads <= 0
    assert objects < (steps - 100) / 2  # a leak is at least one object a step
    assert resident < 2

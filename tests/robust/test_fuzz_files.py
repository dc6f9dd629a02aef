"""Broken weights and run folders from seeds: read, or refused by one clear error, within bounds."""

import json
import subprocess
import sys
from pathlib import Path

import fuzz_files
import pytest


@pytest.mark.slow
def test_a_broken_file_is_read_or_refused_within_bounds(tmp_path):
    """One child reads them all: five seconds of the processor and a bound of memory for each."""
    program = Path(fuzz_files.__file__)
    made = subprocess.run(
        [sys.executable, program, tmp_path / "files"], capture_output=True, text=True,
        timeout=300, check=False, cwd=program.parents[2],
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert result["wrong"] == {}
    for kind, (read, refused) in result["counts"].items():
        assert read + refused == fuzz_files.NUM_CASES[kind]
        assert refused, kind  # the child ends with an error if it cannot read the whole files

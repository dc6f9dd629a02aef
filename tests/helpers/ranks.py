"""Several processes that work together, and end together."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(command, size, seconds=300.0):
    """Run a command in so many processes; none is left, also where one of them fails."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}", "OMP_NUM_THREADS": "1"}
    ranks, end = [], time.monotonic() + seconds
    try:
        for rank in range(size):
            full = [sys.executable, "-W", "ignore", *map(str, command), str(rank), str(size)]
            ranks.append(subprocess.Popen(full, env=os.environ | environment))
        codes = [None] * size
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
        assert codes == [0] * size, codes
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

"""Arrays on disk: what the disk refuses is one error, raised when nothing is being written."""

import subprocess
import sys

import numpy as np
import pytest

from funcrl.run.storage import read_arrays, write_arrays

FULL = """
import errno, logging, pathlib, resource, signal, sys, time
import numpy as np
from funcrl.run.storage import write_arrays
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
noise = np.random.default_rng(0)
arrays = {str(n): noise.random(5_000 * (n % 7 + 1)) for n in range(40)}
for attempt in range(3):
    try:
        write_arrays(pathlib.Path(sys.argv[1]) / str(attempt), arrays)
    except OSError as error:
        print(error.errno == errno.EFBIG, error)
time.sleep(0.5)  # what still ran would print now
logging.getLogger("absl").error("of somebody else")
"""


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["True [Errno 27] File too large"] * 3
    assert done.stderr == "ERROR:absl:of somebody else\n"


def test_an_error_that_is_not_the_systems_keeps_its_words(tmp_path):
    write_arrays(tmp_path / "x", {"w": np.ones(2)})
    with pytest.raises(OSError, match=r"(?i)already|exist"):
        write_arrays(tmp_path / "x", {"w": np.ones(2)})
    assert read_arrays(tmp_path / "x")["w"].tolist() == [1.0, 1.0]


def test_arrays_in_one_database_as_they_were_once_written_can_be_read(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        checkpointer.save(tmp_path / "old", {"w": np.arange(3.0)})
    assert (tmp_path / "old" / "manifest.ocdbt").exists()
    assert read_arrays(tmp_path / "old")["w"].tolist() == [0.0, 1.0, 2.0]

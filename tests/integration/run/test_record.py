"""What a run leaves behind when it cannot write: the last lines say what is saved, and how on."""

import subprocess
import sys

import pytest
from cases import equal

import funcrl
from funcrl import cli, config, runs
from funcrl.loop.build import empty_state

OPTIONS = [
    "--num-prompts", "3", "--num-generations", "4", "--warm-start.steps", "0", "--steps", "5",
    "--evaluation.every", "0", "--sampling.max-tokens", "3", "--checkpoint.every", "2",
    "--threads", "1",
]  # fmt: skip
# Room for lines, not for a checkpoint: as when another process has filled the disk.
FULL = """
import resource, signal, sys
from funcrl import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
cli.main(sys.argv[1:])
"""


def on_a_full_disk(*args):
    command = [sys.executable, "-c", FULL, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def restored(folder):
    options = config.read_config(config.TrainConfig, folder / "config.yaml")
    return funcrl.restore(folder / "checkpoints", empty_state(funcrl.build(options)))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run of 5 steps that was stopped after 3, and one that was not stopped."""
    folder = tmp_path_factory.mktemp("runs")
    cli.main(["train", "--run-dir", str(folder / "whole"), *OPTIONS])
    plain = config.to_plain(config.read_config(config.TrainConfig, folder / "whole/config.yaml"))
    cut = config.from_plain(config.TrainConfig, {**plain, "run_dir": str(folder / "cut")})
    lines = folder / "cut" / runs.METRICS
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(cut, stop=lambda: len(runs.read_lines(lines)) > 3)
    return folder


@pytest.mark.slow
def test_a_full_disk_ends_in_our_words_and_the_run_goes_on_to_the_same_bits(stopped):
    folder = stopped / "cut"
    ended = on_a_full_disk("train", "--resume", folder)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    first, last = ended.stderr.splitlines()
    assert first.startswith("funcrl: save could not write ")
    assert "File too large" in first
    assert f"Step 3 is saved in {folder / 'checkpoints'}; " in last
    assert last.endswith(f"go on with: funcrl train --resume {folder}")
    cli.main(["train", "--resume", str(folder)])
    assert equal(restored(folder)[0], restored(stopped / "whole")[0])


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start_says_that_nothing_is_saved(tmp_path):
    folder = tmp_path / "run"
    ended = on_a_full_disk("train", "--run-dir", folder, *OPTIONS)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"No step is saved in {folder / 'checkpoints'}; ")
    assert last.endswith(f"funcrl train --resume {folder}")
    cli.main(["train", "--resume", str(folder)])
    assert restored(folder)[1]["step"] == 5


@pytest.mark.slow
def test_a_checkpoint_does_not_grow_with_the_run(tmp_path):
    options = ["--steps", "30", "--checkpoint.keep-last", "40"]
    cli.main(["train", "--run-dir", str(tmp_path / "run"), *OPTIONS, *options])
    sizes = [(tmp_path / "run/checkpoints" / step / "manifest.json").stat().st_size
             for step in ("10", "30")]  # fmt: skip
    assert abs(sizes[0] - sizes[1]) < 100  # digits

"""OpenEnv's real package: a server, its clients as environments, and a policy that is trained."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the package, which needs another mcp than what is installed needs."""
    folder = tmp_path_factory.mktemp("openenv")
    install = ["pip", "install", "-q", "--no-deps", "--target", folder, "-r", "tests/openenv.txt"]
    subprocess.run([sys.executable, "-m", *install], cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
def test_a_policy_is_trained_on_an_environment_behind_its_server(packages, tmp_path):
    code = "import openenv_environment as e; print('rewards', *e.main(steps=4))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{packages}:{ROOT}:{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rewards = re.search(r"^rewards (.*)$", run.stdout, re.MULTILINE)[1].split()
    assert len(rewards) == 4
    assert min(map(float, rewards)) > 0  # some guess found its digit, as the server says

"""A GPU's code on a machine without one: on a CUDA device that the CPU plays.

It has the CPU's kernels and Triton's interpreter, and so says nothing of a GPU's own rounding,
speed or memory; helpers/emulated/emulated_cuda.py says what it is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import interpreting

import funcrl
from funcrl.cli.program import read_train_config
from funcrl.loop.build import empty_state
from funcrl.run import runs

TESTS = Path(__file__).parents[1]
EMULATED = TESTS / "helpers" / "emulated"
MARKED = [
    "generators/test_sampler.py", "graph/test_fuse.py", "graph/test_lowering.py",
    "loop/test_train.py", "ops/test_flash.py", "rl/test_step.py",
]  # fmt: skip


pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a CUDA build of torch has a device of its own"
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A function that runs Python with the device, and returns what it printed."""
    built = tmp_path_factory.mktemp("emulated") / "device.so"
    place = Path(torch.__file__).parent
    headers = [f"-I{place / part}" for part in ("include", "include/torch/csrc/api/include")]
    libraries = [f"-L{place / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{place / 'lib'}"]
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
    source = str(EMULATED / "device.cpp")
    subprocess.run(["g++", *options, *headers, source, "-o", str(built), *libraries], check=True)
    environment = {
        **os.environ, "EMULATED_CUDA": str(built), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (EMULATED, EMULATED.parent, TESTS.parent))),
    }  # fmt: skip

    def run(*words):
        command = [sys.executable, "-W", "ignore", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run


@interpreting
def test_tests_of_a_gpu_pass(emulated):
    files = [TESTS / "integration" / name for name in MARKED]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "emulated_cuda"]
    assert "skipped" not in emulated("-m", "pytest", *options, "-rs", *files)


@interpreting
@pytest.mark.parametrize(
    "options",
    [
        ["--packing", "prefixes", "--optimizer.name", "sgd"],
        ["--microbatch", "3", "--max-staleness", "1", "--optimizer.moments", "8bit"],
    ],
)
def test_a_run_has_the_numbers_of_the_cpu(emulated, options, tmp_path):
    """Decoding, steps, evaluations, checkpoints: the same draws, and numbers up to rounding.

    Triton's kernels add in another order, in float32, and AdamW divides by a gradient's own size: a
    gradient that is rounding alone moves its number by a whole step, so parameters are compared by
    their norm.
    """
    line = [
        "--steps", "3", "--num-prompts", "4", "--num-generations", "4", "--warm-start.steps", "20",
        "--evaluation.every", "2", "--algorithm.kl", "0.1", "--no-choose", *options,
    ]  # fmt: skip
    config = read_train_config([*line, "--run-dir", str(tmp_path / "cpu")])
    host = funcrl.train(config, view=None)
    command = "import emulated_cuda, sys, funcrl.cli; sys.exit(funcrl.cli.main(sys.argv[1:]))"
    folder = tmp_path / "cuda"
    emulated("-c", command, "train", *line, "--device", "cuda", "--run-dir", folder)

    assert completions_of(folder) == completions_of(tmp_path / "cpu")
    for row, wanted in zip(runs.read_history(folder), host.history, strict=True):
        for name in wanted:
            if "time" not in name and "memory" not in name:
                assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5, nan_ok=True)
    state, _ = funcrl.restore(folder / "checkpoints", like=empty_state(funcrl.build(config)))
    for name, leaf in host.state.params.items():
        assert (state.params[name] - leaf).norm() <= 1e-4 * leaf.norm(), name


CAPTURED = """
import emulated_cuda, sys
from funcrl.ops.exact.cuda import linear
linear._candidates = lambda rows: ()  # the ways of a product are compared in 2,000 launches
import funcrl.cli
assert not funcrl.cli.main(sys.argv[1:])
assert emulated_cuda.CUDAGraph.num_replays, "nothing was captured"
"""


@interpreting
@pytest.mark.parametrize(
    ("options", "largest"),
    [
        (["--numerics", "exact"], 0.0),
        (["--numerics", "native"], 2**-5),  # some roundings of 2^-8 of logits around 1
    ],
)
def test_captured_decoding_has_the_trainers_logprobs(emulated, options, largest, tmp_path):
    line = [
        "--steps", "2", "--num-prompts", "2", "--num-generations", "2", "--sampling.max-tokens",
        "3", "--warm-start.steps", "0", "--evaluation.every", "0", "--evaluation.num-prompts", "2",
        "--checkpoint.every", "0", "--no-choose", "--device", "cuda", "--dtype",
        "bfloat16", *options,
    ]  # fmt: skip
    emulated("-c", CAPTURED, "train", *line, "--run-dir", tmp_path / "run")
    _, *steps = runs.read_history(tmp_path / "run")
    assert len(steps) == 2
    for row in steps:
        assert row["num_tokens"] > 0
        assert row["sampling/sampling_logp_difference/max"] <= largest


def completions_of(folder):
    lines = (folder / runs.COMPLETIONS).read_text().splitlines()
    return [json.loads(line)["completion"] for line in lines]

"""Data parallelism, as docs/scaling.md writes it: two processes against one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import equal, tiny_batch, tiny_model

import funcrl

ROOT = Path(__file__).parents[3]
RANK = """
import sys
from datetime import timedelta
from pathlib import Path

import torch
from cases import tiny_batch, tiny_model
from torch import distributed

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
exec(Path(folder, "page.py").read_text())
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                               timeout=timedelta(seconds=200))
model = tiny_model()
step = parallel_step(funcrl.logprob_fn(model))
state = step.init(funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64))
for seed in range(3):
    state, _ = step(state, own_rows(tiny_batch(seed)))
torch.save(dict(state.params), folder / f"{rank}.pt")
distributed.destroy_process_group()
"""


def run_ranks(program, folder, seconds=300.0):
    """Run a program in two processes; none is left, also where one of them fails."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}", "OMP_NUM_THREADS": "1"}
    ranks, end = [], time.monotonic() + seconds
    try:
        for rank in range(2):
            command = [sys.executable, "-c", program, folder, str(rank)]
            ranks.append(subprocess.Popen(command, env=os.environ | environment))
        codes = [None, None]
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
        assert codes == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_rank_that_fails_takes_the_other_along(tmp_path):
    program = (
        "import os, sys, time\n"
        "open(f'{sys.argv[1]}/{os.getpid()}', 'w').close()\n"
        "while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.01)\n"
        "sys.exit(3) if sys.argv[2] == '1' else time.sleep(100)"
    )
    with pytest.raises(AssertionError, match="3"):
        run_ranks(program, tmp_path)
    for process in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path):
    page = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    run_ranks(RANK, tmp_path)
    optim = funcrl.optim
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    model = tiny_model()
    step = funcrl.grpo_step(funcrl.logprob_fn(model), optimizer=optimizer)
    state = step.init(funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64))
    first = state.params
    for seed in range(3):
        state, _ = step(state, tiny_batch(seed))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert equal(*found)
    for name, leaf in state.params.items():
        assert (found[0][name] - leaf).abs().max() <= 1e-12
    assert not equal(first, state.params)

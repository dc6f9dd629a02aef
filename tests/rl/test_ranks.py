"""Data parallelism, as docs/scaling.md writes it: two processes against one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import equal, tiny_batch, tiny_model

import funcrl

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path

import torch
from cases import tiny_batch, tiny_model
from torch import distributed

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
exec(Path(folder, "page.py").read_text())
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = tiny_model()
step = parallel_step(funcrl.logprob_fn(model))
state = step.init(funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64))
for seed in range(3):
    state, _ = step(state, own_rows(tiny_batch(seed)))
torch.save(dict(state.params), folder / f"{rank}.pt")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path):
    page = (ROOT / "docs" / "scaling.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path, str(rank)], env=os.environ | environment
        )
        for rank in range(2)
    ]
    optim = funcrl.optim
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    model = tiny_model()
    step = funcrl.grpo_step(funcrl.logprob_fn(model), optimizer=optimizer)
    state = step.init(funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64))
    first = state.params
    for seed in range(3):
        state, _ = step(state, tiny_batch(seed))
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert equal(*found)
    for name, leaf in state.params.items():
        assert (found[0][name] - leaf).abs().max() <= 1e-12
    assert not equal(first, state.params)

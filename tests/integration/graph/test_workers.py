"""The processes that compile kernels are there before the first kernel."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from funcrl import CompileConfig
from funcrl.graph.lowering import start_workers

start_workers(torch.device({device!r}), CompileConfig(backend={backend!r}))
if "torch._inductor" not in sys.modules:
    print("nothing imported")
else:
    from torch._inductor.async_compile import AsyncCompile
    AsyncCompile.wait_pool_ready(timeout=100)
    print("ready" if AsyncCompile.use_process_pool() else "not ready")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cuda", "inductor", "ready"),
        ("cpu", "inductor", "nothing imported"),
        ("cuda", "eager", "nothing imported"),
    ],
)
def test_a_step_for_a_gpu_alone_starts_them(device, backend, expected):
    program = PROGRAM.format(device=device, backend=backend)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )
    assert done.stdout.split("\n")[-2] == expected, done

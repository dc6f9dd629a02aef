"""Tests of Triton's kernels: on a GPU, or through Triton's interpreter on a machine without one.

The interpreter runs in a process of its own, as Triton reads its switch when it is imported: a file
of such tests calls `run_interpreted` in the one test that is not a `kernel_case`.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


if INTERPRETED:
    import interpreter

    interpreter.correct()


def kernel_case(case):
    """Mark a test for a GPU, unless it runs through the interpreter."""
    return case if INTERPRETED else pytest.mark.gpu(case)


def interpreting(test):
    """Mark the test that runs a file's cases through the interpreter."""
    for mark in (
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
        pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the cases run in this process"),
        pytest.mark.slow,
    ):
        test = mark(test)
    return test


def run_interpreted(*files):
    """Run the cases of some files through the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]

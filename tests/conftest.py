"""Skips what the machine cannot run: tests marked `gpu` without a CUDA device, and nothing else.

And what several files of tests share.
"""

import gc
import os

import pytest
import torch

import funcrl.run.trust

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread each, and for what a test starts
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
# Collections between those of each file, below, took a tenth of the tests' time.
gc.set_threshold(20_000, 10, 100)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not by its name: a folder has it, too
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def freeze_survivors():
    """Millions of objects outlive their file; a full collection would go over them each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def one_thread():
    """With several threads oneDNN's bfloat16 products take scratch for each (28 kB at two here)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def store(tmp_path_factory, monkeypatch):
    """What this account has run is known for one test, and not written to the real account."""
    place = tmp_path_factory.mktemp("store")
    monkeypatch.setattr(funcrl.run.trust, "default_store", lambda: place)
    return place

"""vLLM's engines come and go in the process of the tests."""

import gc
import importlib.util
import warnings
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="session")
def frozen_objects_stay_frozen():
    """An engine freezes what is alive, and ends with several collections of all that there is.

    Here those would be of every test and module, and take most of an engine's time. Engines of a
    class of tests end between tests, so that this holds for as long as the process.
    """
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM and what it imports warn of their own affairs
        from vllm.distributed import parallel_state
        from vllm.v1.engine import core
    gc.collect()
    gc.freeze()
    leaving = SimpleNamespace(**vars(gc) | {"freeze": lambda: None, "unfreeze": lambda: None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "freeze_gc_heap", lambda: None, raising=False)
        for module in (core, parallel_state):
            patch.setattr(module, "gc", leaving)
        yield

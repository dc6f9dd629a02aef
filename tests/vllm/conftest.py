"""vLLM's engines come and go in the process of the tests."""

import gc

import pytest


@pytest.fixture(scope="session")
def vllm_is_imported():
    import vllm.v1.engine.core  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def frozen_objects_stay_frozen(request, monkeypatch):
    """An engine freezes what is alive, and ends with several collections of all that there is.

    Here those would be of every test and module, and take most of an engine's time.
    """
    if request.node.get_closest_marker("vllm") is None:
        return
    request.getfixturevalue("vllm_is_imported")
    monkeypatch.setattr("vllm.v1.engine.core.freeze_gc_heap", lambda: None, raising=False)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)

"""vLLM's engines come and go in the process of the tests."""

import gc

import pytest

from funcrl.generators.vllm.settings import is_installed


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_stay_frozen(freeze_survivors):
    """An engine freezes what is alive, and thaws it and collects several times when it ends.

    Here that is every test and module: seconds each time. An engine of a class ends after the
    class's last test: for the whole of a module, and by whatever module of vLLM.
    """
    if not is_installed():
        yield
        return
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu_worker  # noqa: F401

    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
            patch.setattr(f"{module}.freeze_gc_heap", lambda: None, raising=False)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield

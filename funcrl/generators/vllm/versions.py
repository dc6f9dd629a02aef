"""What differs between the versions of vLLM, in one place."""

import gc
import importlib.util

# The first and the last minor version of 0.x that were run; 0.24 is CUDA's for torch 2.11, 0.32 and
# 0.33 are the CPU's and CUDA's for torch 2.13 and 2.14.
_FIRST, _LAST = 24, 33
# From here on every model runs on the second runner, where there is a GPU.
_RUNNER_FOR_ALL = 27


def check_version() -> int:
    """Return the minor version of the installed vLLM 0.x; raise if there is none that will do."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "VLLM expects vLLM, which is not installed; --generator sampler needs none. On a GPU: "
            "pip install vllm==0.24.0 (torch 2.11); on a CPU see docs/vllm.md."
        )
    import vllm

    minor = supported(vllm.__version__)
    if minor is None:
        raise ImportError(
            f"VLLM expects vLLM 0.{_FIRST} to 0.{_LAST}, got {vllm.__version__}; the embedded "
            f"sampler needs none."
        )
    return minor


def supported(version: str) -> int | None:
    """Return the minor version of a supported 0.x version, None for any other."""
    major, minor = version.split(".")[:2]
    return int(minor) if major == "0" and _FIRST <= int(minor) <= _LAST else None


def architectures(name: str, minor: int) -> list[str]:
    """Return what a config says of a model that funcrl has registered under a name.

    vLLM takes the first that it knows. Before version 0.27 it chose its second, faster runner by
    the names: there one of its own follows.
    """
    return [name] if minor >= _RUNNER_FOR_ALL else [name, "Qwen3ForCausalLM"]


def allow_capture() -> None:
    """Let an engine capture CUDA graphs: the one before it has left that forbidden."""
    from vllm.compilation import monitor

    monitor.set_cudagraph_capturing_enabled(True)


def release_pools() -> None:
    """Give back what held the memory of an engine that could sleep: another one may follow.

    vLLM has its own function for that after 0.24, which keeps the same order: a pool calls its
    allocator when it ends. While something still refers to a tensor there, nothing is done.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    keeper = CuMemAllocator.instance
    if keeper is None or hasattr(keeper, "release_pools"):
        return
    held = keeper.allocator_and_pools
    parts = [part for pool, _ in held.values() for part in pool.snapshot()]
    if not any(part["allocated_size"] for part in parts):
        allocators = [allocator for _, allocator in held.values()]
        held.clear()
        gc.collect()
        del allocators

"""Inductor's processes that compile a GPU's kernels, started before there is one to compile."""

import torch

from funcrl.config.generation import CompileConfig


def start_workers(device: torch.device, config: CompileConfig) -> None:
    """Start the processes that compile kernels for a device, if a step is compiled for a GPU.

    They take seconds to start. Inductor starts them at its first kernel, and compiles one kernel
    after the other until they are there. Started before a step is traced, they wait for it.
    """
    if config.backend == "inductor" and device.type == "cuda":
        # Not at the top: it takes a second, which a step that is not compiled need not wait for.
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()

"""The kernels of a tensor's device; they are plain functions of tensors, without derivatives."""

from types import ModuleType

from torch import Tensor


def kernels_of(tensor: Tensor) -> ModuleType:
    """Return the module of kernels for the device of a tensor: `cpu` or `cuda`."""
    # Imported here, because the kernels for a GPU need triton.
    if tensor.device.type == "cuda":
        from funcrl.ops.exact import cuda

        return cuda
    from funcrl.ops.exact import cpu

    return cpu

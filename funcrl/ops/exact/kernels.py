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


def slow_products(device: str) -> list[str]:
    """Return the shapes of products, of those met so far, for which a GPU's library is not used.

    None of its calls that were tried had the bits of the kernel that defines the product.
    """
    if device != "cuda":
        return []
    from funcrl.ops.exact.cuda.products import describe_products

    return [shape for shape, way in describe_products().items() if way == "definition"]

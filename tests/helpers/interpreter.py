"""Triton's interpreter as a GPU computes: products in order, and in bfloat16, which it lacks.

The interpreter keeps a bfloat16 as the 16 bits of an integer. Kernels read them, compute in float32
and round once, so casts and products are what must know them.
"""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

triton_cast = InterpreterBuilder.cast_impl
triton_methods = interpreter._patch_lang_tensor


def in_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)


def cast(builder, source, dtype):
    """Return the numbers in another dtype, rounded to the nearest."""
    source = in_float32(source)
    if dtype.scalar != tl.bfloat16:
        return triton_cast(builder, source, dtype)
    rounded = source.data.astype(np.float32).astype(ml_dtypes.bfloat16)
    return TensorHandle(rounded.view(np.uint16), tl.bfloat16)


def dot_in_order(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """Return d + a b, with the sum over the inner numbers in their order, by numpy's own loop.

    The interpreter has `np.matmul`, of which a row's bits depend on its place in the tile with some
    of OpenBLAS's kernels, as those for an AMD EPYC.
    """
    factors = (in_float32(each).data.astype(d.data.dtype) for each in (a, b))
    product = np.einsum("...ik,...kj->...ij", *factors, optimize=False)
    return TensorHandle(product + d.data, d.dtype.scalar)


def tensor_methods(tensor, scope):
    """Let a tensor of one number be an index, which Triton 3.6 leaves to numpy before 2.5."""
    triton_methods(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def correct():
    """Make the interpreter of this process compute so."""
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_dot = dot_in_order
    interpreter._patch_lang_tensor = tensor_methods

"""How a library multiplies numbers of float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def float32_products(library: Any, precision: str) -> Iterator[None]:
    """Let a library multiply with this precision inside the block, whatever the process has set.

    Args:
        library: such as `torch.backends.cuda.matmul`, for cuBLAS.
        precision: "ieee", or "tf32": factors of 10 bits.
    """
    before, library.fp32_precision = library.fp32_precision, precision
    try:
        yield
    finally:
        library.fp32_precision = before

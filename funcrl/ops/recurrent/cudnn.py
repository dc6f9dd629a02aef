"""A recurrent layer by cuDNN's kernels, which keep what they need for the backward pass."""
from typing import Any
def run_layer(*a: Any) -> Any: raise NotImplementedError

"""Conversion of tensors to numpy's arrays and back, equal to the bit, for every dtype."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from funcrl.core.arguments import checked

# The dtypes with arrays of their own are a part of the format of checkpoints, so they are listed
# here and not looked up in the installed numpy and torch. That of bfloat16 is from ml_dtypes.
_NUMPY_DTYPES = frozenset({
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64,
    torch.complex128,
})  # fmt: skip


@checked
def to_array(tensor: Tensor) -> Any:
    """Return a dense tensor as an array of its dtype and shape, or else of its bytes in a row.

    A tensor on a CPU shares its memory with the array, unless it is not contiguous.
    """
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if plain.dtype in _NUMPY_DTYPES:
        return plain.numpy()
    return plain.reshape(-1).view(torch.uint8).numpy()


@checked
def to_tensor(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """Return the tensor that `to_array` made the array of, with dtype, shape, device of `like`."""
    plain = array.view(np.int16) if like.dtype == torch.bfloat16 else array
    return torch.from_numpy(plain).view(like.dtype).reshape(like.shape).to(like.device)

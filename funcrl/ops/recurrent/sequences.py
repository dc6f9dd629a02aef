"""The inputs of a recurrent layer: N sequences of T steps, and pieces of some steps of all."""

from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.recurrent.kernels import steps_of_piece
from funcrl.ops.streams import flat


class Sequences(NamedTuple):
    """The inputs of a layer, with N sequences in a row."""

    x: Tensor  # [N, T, D]
    h0: Tensor  # [N, H]
    c0: Tensor  # [N, C], in at least float32
    resets: Tensor | None  # [T, N]
    weight_ih: Tensor  # [G, D]
    weight_hh: Tensor  # [G, H]
    bias: Tensor | None  # [G], all that is added to the product with x
    bias_n: Tensor | None  # [H], of a GRU

    def pieces(self) -> list[slice]:
        """Return the steps of each piece."""
        num_sequences, length = self.x.shape[:2]
        k = steps_of_piece(num_sequences)
        return [slice(at, min(at + k, length)) for at in range(0, length, k)]

    def resets_of(self, piece: slice) -> Tensor | None:
        """Return where new episodes begin in a piece, [k, N]."""
        return None if self.resets is None else self.resets[piece]

    def before(self, outputs: Tensor, piece: slice) -> Tensor:
        """Return the state h before each step of a piece, zero at a reset, [k, N, H]."""
        first = outputs[:, piece.start - 1] if piece.start else self.h0
        before = torch.cat([first[None], of_piece(outputs, slice(piece.start, piece.stop - 1))])
        if self.resets is not None:
            before.masked_fill_(self.resets[piece][..., None], 0.0)
        return before


def sequences_of(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    resets: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> Sequences:
    """Return the inputs of a layer, with any leading axes, as N sequences."""
    bias, bias_n, width = None, None, h.shape[-1]
    if bias_ih is not None and bias_hh is not None:
        bias = bias_ih + bias_hh
        if len(weight_hh) == 3 * width:  # of a GRU
            bias[2 * width :] = bias_ih[2 * width :]
            bias_n = bias_hh[2 * width :]
    return Sequences(
        x=flat(x, 2),
        # Copied, so that it begins where an allocation does, as the states of a replay do.
        h0=flat(h, 1).clone(memory_format=torch.contiguous_format),
        c0=flat(c, 1).to(numerics.at_least_float32(c.dtype)).contiguous(),
        resets=None if resets is None else flat(resets, 1).T.contiguous(),
        weight_ih=weight_ih,
        weight_hh=weight_hh,
        bias=bias,
        bias_n=bias_n,
    )


def of_piece(tensor: Tensor, piece: slice) -> Tensor:
    """Return some steps of [N, T, ...], as [k, N, ...]."""
    return tensor[:, piece].transpose(0, 1)

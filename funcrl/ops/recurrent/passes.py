"""The two passes of a recurrent layer over its sequences, a piece of some steps at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.recurrent.contract import ScanKernels, steps_of_piece
from funcrl.ops.recurrent.gru import of_hidden
from funcrl.ops.sequence_args import flat


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


class Saved(NamedTuple):
    """What the forward pass writes, and the backward pass reads."""

    kept: str  # "gates", "starts" or "nothing"
    outputs: Tensor  # [N, T, H]
    gates: Tensor  # [N, T, 4 H], or empty
    cells: Tensor  # the cell states [N, T, C]; those before each piece, [N, pieces, C]; or empty


def forward_pass(given: Sequences, kernels: ScanKernels, saved: Saved) -> tuple[Tensor, Tensor]:
    """Write the outputs, and what is kept; return the states after the last step."""
    h, c = given.h0, given.c0
    kept, outputs, gates, cells = saved
    every = kept == "gates"
    for index, piece in enumerate(given.pieces()):
        if kept == "starts":
            cells[:, index] = c
        c = kernels.forward(
            _project(given, kernels, piece), given.weight_hh, given.bias_n, h, c,
            given.resets_of(piece), of_piece(outputs, piece),
            of_piece(gates, piece) if every else None, of_piece(cells, piece) if every else None,
        )  # fmt: skip
        # Copied, as a replay's states are: a product's bits may depend on where its factors lie.
        h = outputs[:, piece.stop - 1].clone(memory_format=torch.contiguous_format)
    return h, c


def _project(given: Sequences, kernels: ScanKernels, piece: slice) -> Any:
    """Return what the kernels take for the product of a piece's x with W_ih."""
    return kernels.project(of_piece(given.x, piece), given.weight_ih, given.bias)


def backward_pass(
    given: Sequences,
    kernels: ScanKernels,
    saved: Saved,
    grads: tuple[Tensor, Tensor, Tensor],
    of_x: Tensor | None,
    of_weights: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of x and of the weights; return those of the states at the start.

    Args:
        given: the inputs.
        kernels: of the cell.
        saved: by the forward pass.
        grads: the gradients of the outputs [N, T, H] and of the last states.
        of_x: [N, T, D], written; None if it is not wanted.
        of_weights: zeros, to which the gradients of W_ih, W_hh, b_ih and b_hh of each group of
            sequences are added; None if they are not wanted.
    """
    grad_outputs, of_states = grads[0], grads[1:]
    starts = _starts(given, kernels, saved)
    for piece, start in zip(reversed(given.pieces()), reversed(starts), strict=True):
        before = given.before(saved.outputs, piece)
        of_gates, of_states = _gate_gradients(
            given, kernels, saved, (before, start), of_piece(grad_outputs, piece), of_states, piece
        )
        if of_x is not None:
            of_x[:, piece] = _input_gradients(kernels, of_gates, given.weight_ih).transpose(0, 1)
        if of_weights is not None:
            _add_weight_gradients(given, of_weights, of_gates, before, piece)
        del before, of_gates  # or they are in memory beside the next piece
    return of_states


def _gate_gradients(
    given: Sequences, kernels: ScanKernels, saved: Saved, known: tuple[Tensor, Tensor],
    grad_outputs: Tensor, of_states: tuple[Tensor, Tensor], piece: slice,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the gradients of a piece's gates [k, N, 4 H], and of the states before it.

    Args:
        given: the inputs.
        kernels: of the cell.
        saved: by the forward pass.
        known: the state h before each step of the piece, and c before the first.
        grad_outputs: [k, N, H].
        of_states: the gradients of the states after the piece.
        piece: its steps.
    """
    before, start = known
    if saved.kept == "gates":
        found = of_piece(saved.gates, piece), of_piece(saved.cells, piece)
        of_gates = torch.empty_like(found[0], memory_format=torch.contiguous_format)
    else:
        found = _replayed(given, kernels, before, start, piece)
        of_gates = found[0]  # in the same memory
    of_states = kernels.backward(
        grad_outputs, *found, before, start, given.weight_hh, given.resets_of(piece), *of_states,
        of_gates,
    )  # fmt: skip
    return of_gates, of_states


def _starts(given: Sequences, kernels: ScanKernels, saved: Saved) -> list[Tensor]:
    """Return the cell state before each piece, [N, C]."""
    if saved.kept == "starts":
        return [each.contiguous() for each in saved.cells.unbind(1)]
    starts, pieces = [given.c0], given.pieces()
    if not given.c0.shape[1]:  # a GRU has none
        return starts * len(pieces)
    for piece in pieces[:-1]:
        if saved.kept == "gates":
            start = saved.cells[:, piece.stop - 1].contiguous()
        else:
            start = kernels.replay(
                _project(given, kernels, piece), given.weight_hh, given.bias_n,
                given.before(saved.outputs, piece), starts[-1], given.resets_of(piece), None, None,
            )  # fmt: skip
        starts.append(start)
    return starts


def _replayed(
    given: Sequences, kernels: ScanKernels, before: Tensor, start: Tensor, piece: slice
) -> tuple[Tensor, Tensor]:
    """Return the gates and the cell states of a piece."""
    pre, shape = _project(given, kernels, piece), (*before.shape[:2], 4 * before.shape[2])
    in_place = isinstance(pre, Tensor) and pre.shape == shape
    gates = pre if in_place else before.new_empty(shape)
    cells = start.new_empty(len(before), *start.shape)
    kernels.replay(
        pre, given.weight_hh, given.bias_n, before, start, given.resets_of(piece), gates, cells
    )
    return gates, cells


def _input_gradients(kernels: ScanKernels, of_gates: Tensor, weight_ih: Tensor) -> Tensor:
    """Return the gradient of a piece's x, [k, N, D]."""
    of_pre = of_gates[..., : len(weight_ih)]
    rows = kernels.linear(of_pre.flatten(0, 1), weight_ih.mT, None)
    return rows.unflatten(0, of_gates.shape[:2])


def _add_weight_gradients(
    given: Sequences, totals: Sequence[Tensor], of_gates: Tensor, before: Tensor, piece: slice
) -> None:
    """Add a piece to the gradients of W_ih, W_hh, b_ih and b_hh."""
    is_gru = len(given.weight_hh) < of_gates.shape[-1]
    of_mixed = of_hidden(of_gates) if is_gru else of_gates
    _add_rows(totals[1], totals[3], of_mixed, before)
    of_pre = of_gates[..., : len(given.weight_ih)]
    _add_rows(totals[0], totals[2], of_pre, of_piece(given.x, piece))


def _add_rows(total: Tensor, bias_total: Tensor, grad: Tensor, factor: Tensor) -> None:
    """Add a piece [k, N, ...] to the gradients of a weight and its bias, [groups, ...] each."""
    rows = _by_group(grad, len(total))
    _add_product(total, rows, _by_group(factor, len(total)))
    if bias_total.shape[1]:
        # A bias is a weight on an input of 1. On a GPU torch's sum would take 138 MB of its own.
        ones = rows.new_ones(*rows.shape[:2], 1)
        _add_product(bias_total[..., None], rows, ones)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right of each group, [groups, M, P] and [groups, M, Q], to a total, in place."""
    if total.dtype == left.dtype:
        total.baddbmm_(left.mT, right)
    else:
        total += torch.bmm(left.mT, right)


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    """Return [k, N, ...] as [groups, k N / groups, ...]."""
    return rearrange(tensor, "t (g r) ... -> g (t r) ...", g=groups)

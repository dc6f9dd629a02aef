"""A recurrent layer as one operator forward and one backward, which can compute again what it needs.

It goes over the sequence in pieces of some steps. The product of x with W_ih, [N, T, G], the gates
and the cell states, which autograd would keep for every step, are in memory for one piece at a
time, unless the forward pass keeps them: `recompute` says what the backward pass computes anew.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.recipe import differentiable, each_sample, leading, only_rows, operator
from funcrl.ops.recurrent.gru import of_hidden
from funcrl.ops.recurrent.kernels import Cell, ScanKernels, kernels_of, steps_of_piece

# What the forward pass keeps for the backward pass, by what that one recomputes.
_KEPT = {"none": "gates", "chunk": "starts", "full": "nothing"}
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class _Sequences(NamedTuple):
    """The inputs of a layer, with N sequences in a row."""

    x: Tensor  # [N, T, D]
    h0: Tensor  # [N, H]
    c0: Tensor  # [N, C], in at least float32
    resets: Tensor | None  # [T, N]
    weight_ih: Tensor  # [G, D]
    weight_hh: Tensor  # [G, H]
    bias: Tensor | None  # [G], all that is added to the product with x
    bias_n: Tensor | None  # [H], of a GRU

    def pieces(self) -> Iterator[slice]:
        """Return the steps of each piece."""
        num_sequences, length = self.x.shape[:2]
        k = steps_of_piece(num_sequences)
        return (slice(at, min(at + k, length)) for at in range(0, length, k))

    def inputs(self, piece: slice) -> Tensor:
        """Return x of a piece, [k, N, D]."""
        return self.x[:, piece].transpose(0, 1).contiguous()

    def project(self, x: Tensor) -> Tensor:
        """Return the product of a piece's x with W_ih and the biases, [k, N, G]."""
        return torch.nn.functional.linear(x.flatten(0, 1), self.weight_ih, self.bias).view(
            *x.shape[:2], -1
        )

    def resets_of(self, piece: slice) -> Tensor | None:
        return None if self.resets is None else self.resets[piece]

    def before(self, outputs: Tensor, piece: slice) -> Tensor:
        """Return the state h before each step of a piece, zero at a reset, [k, N, H]."""
        first = outputs[:, piece.start - 1] if piece.start else self.h0
        rest = outputs[:, piece.start : piece.stop - 1].transpose(0, 1)
        before = torch.cat([first[None], rest])
        if self.resets is not None:
            before.masked_fill_(self.resets[piece][..., None], 0.0)
        return before


def _sequences(
    x: Tensor, h: Tensor, c: Tensor, resets: Tensor | None, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, cell: str,
) -> _Sequences:  # fmt: skip
    """Return the inputs with the leading axes as one."""
    bias, bias_n, width = None, None, h.shape[-1]
    if bias_ih is not None and bias_hh is not None:
        bias = bias_ih + bias_hh
        if cell == "gru":
            bias[2 * width :] = bias_ih[2 * width :]
            bias_n = bias_hh[2 * width :]
    return _Sequences(
        x=_flat(x, 2),
        h0=_flat(h, 1).contiguous(),
        c0=_flat(c, 1).to(numerics.at_least_float32(c.dtype)).contiguous(),
        resets=None if resets is None else _flat(resets, 1).T.contiguous(),
        weight_ih=weight_ih,
        weight_hh=weight_hh,
        bias=bias,
        bias_n=bias_n,
    )


def _flat(tensor: Tensor, axes: int) -> Tensor:
    """Return a tensor with all but its last axes as one, of an empty batch as well."""
    lead, rest = tensor.shape[: tensor.ndim - axes], tensor.shape[tensor.ndim - axes :]
    return tensor.reshape(math.prod(lead), *rest)


def _like(x: Tensor, h: Tensor, c: Tensor, *rest: Any) -> Results:
    cell, _, _, kept = rest[-4:]
    lead, length, width = x.shape[:-2], x.shape[-2], h.shape[-1]
    steps = length if kept == "gates" else 0
    states = {"gates": length, "nothing": 0, "starts": _num_pieces(lead, length)}[kept]
    return (
        x.new_empty(*lead, length, width),
        torch.empty_like(h, memory_format=torch.contiguous_format),
        torch.empty_like(c, memory_format=torch.contiguous_format),
        x.new_empty(*lead, steps, 4 * width),
        c.new_empty(*lead, states, c.shape[-1], dtype=numerics.at_least_float32(c.dtype)),
    )


def _num_pieces(lead: Sequence[int], length: int) -> int:
    return -(-length // steps_of_piece(math.prod(lead)))


def _count(x: Sequence[int], *rest: Any) -> int:
    """Return the operations of the products with x and with h."""
    weight_ih, weight_hh = rest[3:5]
    return 2 * math.prod(x[:-1]) * (math.prod(weight_ih) + math.prod(weight_hh))


@operator("recurrent_layer", _like, rows=(0, 1, 2, 3), flops=_count)
def layer_op(
    x: Tensor, h: Tensor, c: Tensor, resets: Tensor | None, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, cell: str, backend: str, precision: str,
    kept: str,
) -> Results:  # fmt: skip
    """Return the outputs, the last states, and the gates and cell states that are kept.

    Kept are "gates": both of every step; "starts": the cell states before each piece; "nothing".
    """
    given = _sequences(x, h, c, resets, weight_ih, weight_hh, bias_ih, bias_hh, cell)
    kernels = kernels_of(cell, backend, precision)
    like = _like(x, h, c, cell, backend, precision, kept)
    outputs, gates, cells = (_flat(like[place], 2) for place in (0, 3, 4))
    last_h, last_c = given.h0, given.c0
    for index, piece in enumerate(given.pieces()):
        if kept == "starts":
            cells[:, index] = last_c
        last_c = kernels.forward(
            given.project(given.inputs(piece)), weight_hh, given.bias_n, last_h, last_c,
            given.resets_of(piece), _of_piece(outputs, piece),
            _of_piece(gates, piece) if kept == "gates" else None,
            _of_piece(cells, piece) if kept == "gates" else None,
        )  # fmt: skip
        last_h = outputs[:, piece.stop - 1].contiguous()
    return like[0], like[1].copy_(last_h.view_as(h)), like[2].copy_(last_c.view_as(c)), *like[3:]


def _of_piece(tensor: Tensor, piece: slice) -> Tensor:
    """Return some steps of [N, T, ...] as [k, N, ...]."""
    return tensor[:, piece].transpose(0, 1)


def _like_gradients(
    x: Tensor, h: Tensor, c: Tensor, resets: Any, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, *rest: Any,
) -> Gradients:  # fmt: skip
    groups, wants_x, wants_weights = rest[-3:]
    wide = numerics.at_least_float32(x.dtype)

    def of_weight(weight: Tensor | None) -> Tensor:
        shape = weight.shape if weight is not None and wants_weights else (0,)
        return x.new_empty(groups, *shape, dtype=wide)

    return (
        x.new_empty(x.shape if wants_x else (*x.shape[:-2], 0)),
        h.new_empty(h.shape),
        c.new_empty(c.shape),
        *(of_weight(each) for each in (weight_ih, weight_hh, bias_ih, bias_hh)),
    )


def _over_batch(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
    """Run a batch as more sequences, and as more groups of them."""
    if not only_rows(in_dims, _ROWS):
        return each_sample(gradients_op, info.batch_size, in_dims, inputs)
    *tensors, groups, wants_x, wants_weights = leading(info.batch_size, in_dims, inputs, _ROWS)
    found = gradients_op(*tensors, groups * info.batch_size, wants_x, wants_weights)
    of_weights = (each.unflatten(0, (info.batch_size, groups)) for each in found[3:])
    return (*found[:3], *of_weights), (0,) * len(found)


def _count_gradients(x: Sequence[int], *rest: Any, **_: Any) -> int:
    """Return the operations of the products, those that are computed anew included."""
    *_, kept, _, wants_x, wants_weights = rest
    weight_ih, weight_hh = (math.prod(each) for each in rest[3:5])
    again = {"gates": 0, "starts": 1, "nothing": 2}[kept]
    products = weight_ih * (again + wants_x + wants_weights) + weight_hh * (
        again + 1 + wants_weights
    )
    return 2 * math.prod(x[:-1]) * products


_ROWS = (*range(4), *range(8, 14))


@operator(
    "recurrent_layer_gradients", _like_gradients, rows=_ROWS, flops=_count_gradients,
    over_batch=_over_batch,
)  # fmt: skip
def gradients_op(
    x: Tensor, h: Tensor, c: Tensor, resets: Tensor | None, weight_ih: Tensor, weight_hh: Tensor,
    bias_ih: Tensor | None, bias_hh: Tensor | None, outputs: Tensor, gates: Tensor, cells: Tensor,
    grad_outputs: Tensor, grad_h: Tensor, grad_c: Tensor, cell: str, backend: str, precision: str,
    kept: str, groups: int, wants_x: bool, wants_weights: bool,
) -> Gradients:  # fmt: skip
    """Return the gradients of the inputs; those of weights for each group of sequences."""
    inputs = x, h, c, resets, weight_ih, weight_hh, bias_ih, bias_hh
    given, kernels = _sequences(*inputs, cell), kernels_of(cell, backend, precision)
    like = _like_gradients(*inputs, groups, wants_x, wants_weights)
    grad_x, totals = _flat(like[0], 2), [each.zero_() for each in like[3:]]
    outputs, gates, cells, grad_outputs = (
        _flat(each, 2) for each in (outputs, gates, cells, grad_outputs)
    )
    of_h, of_c = (_flat(each, 1).to(given.c0.dtype) for each in (grad_h, grad_c))
    pieces = [*given.pieces()]
    starts = _starts(given, kernels, outputs, cells, kept)
    for piece, start in zip(reversed(pieces), reversed(starts), strict=True):
        of_x, before = given.inputs(piece), given.before(outputs, piece)
        if kept == "gates":
            of_gates, of_cells = _of_piece(gates, piece), _of_piece(cells, piece)
            grads = torch.empty_like(of_gates, memory_format=torch.contiguous_format)
        else:
            of_gates, of_cells = _replayed(given, kernels, of_x, before, start, piece)
            grads = of_gates
        of_h, of_c = kernels.backward(
            _of_piece(grad_outputs, piece), of_gates, of_cells, before, start, weight_hh,
            given.resets_of(piece), of_h, of_c, grads,
        )  # fmt: skip
        of_pre = grads[..., : len(weight_ih)]
        if wants_x:
            grad_x[:, piece] = (of_pre @ weight_ih).transpose(0, 1)
        if wants_weights:
            _add_weight_gradients(totals, of_pre, grads if cell == "lstm" else of_hidden(grads),
                                  of_x, before)
    return like[0], like[1].copy_(of_h.view_as(h)), like[2].copy_(of_c.view_as(c)), *totals


def _starts(
    given: _Sequences, kernels: ScanKernels, outputs: Tensor, cells: Tensor, kept: str
) -> list[Tensor]:
    """Return the cell state before each piece, [N, C]."""
    if kept == "starts":
        return [each.contiguous() for each in cells.unbind(1)]
    starts = [given.c0]
    for piece in [*given.pieces()][:-1]:
        if kept == "gates":
            starts.append(cells[:, piece.stop - 1].contiguous())
        else:
            pre, before = given.project(given.inputs(piece)), given.before(outputs, piece)
            starts.append(
                kernels.replay(
                    pre, given.weight_hh, given.bias_n, before, starts[-1], given.resets_of(piece),
                    None, None,
                )
            )  # fmt: skip
    return starts


def _replayed(
    given: _Sequences, kernels: ScanKernels, x: Tensor, before: Tensor, start: Tensor, piece: slice
) -> tuple[Tensor, Tensor]:
    """Return the gates and the cell states of a piece."""
    pre = given.project(x)
    shape = (*before.shape[:2], 4 * before.shape[2])
    gates = pre if pre.shape == shape else pre.new_empty(shape)
    cells = start.new_empty(len(before), *start.shape)
    kernels.replay(
        pre, given.weight_hh, given.bias_n, before, start, given.resets_of(piece), gates, cells
    )
    return gates, cells


def _add_weight_gradients(
    totals: Sequence[Tensor], of_pre: Tensor, of_hidden: Tensor, x: Tensor, before: Tensor
) -> None:
    """Add a piece to the gradients of W_ih, W_hh and the biases, of each group of sequences."""
    groups = len(totals[0])
    for place, grad, factor in ((0, of_pre, x), (1, of_hidden, before)):
        rows, factors = _by_group(grad, groups), _by_group(factor, groups)
        if totals[place].dtype == rows.dtype:
            totals[place].baddbmm_(rows.mT, factors)
        else:
            totals[place] += torch.bmm(rows.mT, factors)
        if totals[2 + place].shape[1]:
            totals[2 + place] += rows.sum(dim=1, dtype=totals[2].dtype)


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    """Return [k, N, ...] as [groups, k N / groups, ...]."""
    return tensor.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)


def _forward(*inputs: Any) -> Results:
    *given, recompute = inputs
    found: Results = layer_op(*given, _KEPT[recompute])
    return found


def _plain(*inputs: Any) -> tuple[Tensor, ...]:
    return layer_op(*inputs[:-1], "nothing")[:3]


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    *given, cell, backend, precision, recompute = inputs
    (outputs, _, _, gates, cells) = results
    grad_x, grad_h, grad_c, *of_weights = gradients_op(
        *given, outputs, gates, cells, *grads, cell, backend, precision, _KEPT[recompute], 1,
        wanted[0], any(wanted[4:8]),
    )  # fmt: skip
    found = [grad_x, grad_h, grad_c, None, *(each[0] for each in of_weights)]
    return [
        each.to(like.dtype)
        for each, like, want in zip(found, given, wanted, strict=False)
        if want and each is not None
    ]


def _layer(function: str) -> Any:
    return differentiable(
        function, _forward, _backward, rows=(0, 1, 2, 3), returned=3, plain=_plain,
        instead='backend="loop" has them all',
    )  # fmt: skip


LAYERS: dict[Cell, Any] = {"lstm": _layer("lstm_scan"), "gru": _layer("gru_scan")}

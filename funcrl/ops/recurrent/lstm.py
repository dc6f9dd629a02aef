"""The kernels of an LSTM in torch's operations, for any device (`contract.py` says what they do).

A step's numbers are always computed from new, contiguous tensors, so that a replay has the bits of
the forward pass wherever the caller keeps what they are computed from.
"""

import torch
from torch import Tensor

from funcrl.ops.recurrent.contract import Arithmetic, kernels_by_backend, unless_reset

aten = torch.ops.aten


def _forward(
    arithmetic: Arithmetic,
    pre: Tensor,
    weight_hh: Tensor,
    _bias_n: Tensor | None,  # of a GRU
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    outputs: Tensor,
    gates: Tensor | None,
    cells: Tensor | None,
) -> Tensor:
    h, c = h0, c0
    for step in range(len(pre)):
        h = unless_reset(h, resets, step)
        step_gates = _gates(arithmetic, pre[step], h, weight_hh)
        c = _advance(arithmetic, step_gates, unless_reset(c, resets, step))
        h = (step_gates[:, 3 * c.shape[1] :] * c.tanh()).to(outputs.dtype)
        outputs[step] = h
        if gates is not None and cells is not None:
            gates[step], cells[step] = step_gates, c
    return c


def _replay(
    arithmetic: Arithmetic,
    pre: Tensor,
    weight_hh: Tensor,
    _bias_n: Tensor | None,  # of a GRU
    before: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    gates: Tensor | None,
    cells: Tensor | None,
) -> Tensor:
    c = c0
    for step in range(len(pre)):
        step_gates = _gates(arithmetic, pre[step], before[step].clone(), weight_hh)
        c = _advance(arithmetic, step_gates, unless_reset(c, resets, step))
        if gates is not None and cells is not None:
            gates[step], cells[step] = step_gates, c
    return c


def _gates(arithmetic: Arithmetic, pre: Tensor, h: Tensor, weight_hh: Tensor) -> Tensor:
    """Return i, f, g and o after their activations, [N, 4 H] in at least float32."""
    width = h.shape[1]
    gates = arithmetic.add_linear(pre, h, weight_hh)
    arithmetic.sigmoid_(gates[:, : 2 * width])
    gates[:, 2 * width : 3 * width].tanh_()
    arithmetic.sigmoid_(gates[:, 3 * width :])
    return gates


def _advance(arithmetic: Arithmetic, gates: Tensor, c: Tensor) -> Tensor:
    i, f, g, _ = gates.chunk(4, dim=1)
    kept = f * c
    return arithmetic.addcmul(kept, i, g, out=kept)


def _backward(
    grad_outputs: Tensor,
    gates: Tensor,
    cells: Tensor,
    _before: Tensor,  # of a GRU
    c0: Tensor,
    weight_hh: Tensor,
    resets: Tensor | None,
    grad_h: Tensor,
    grad_c: Tensor,
    grads: Tensor,
) -> tuple[Tensor, Tensor]:
    for step in reversed(range(len(gates))):
        c_before = unless_reset(cells[step - 1] if step else c0, resets, step)
        found, grad_c = _step_gradients(
            gates[step].contiguous().to(c0.dtype), cells[step].contiguous(),
            c_before.contiguous(), grad_h + grad_outputs[step], grad_c,
        )  # fmt: skip
        found = found.to(grads.dtype)
        grads[step] = found
        grad_h = unless_reset((found @ weight_hh).to(c0.dtype), resets, step)
        grad_c = unless_reset(grad_c, resets, step)
    return grad_h, grad_c


def _step_gradients(
    gates: Tensor, c: Tensor, c_before: Tensor, grad_h: Tensor, grad_c: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a step's gates before their activations, and of `c_before`."""
    i, f, g, o = gates.chunk(4, dim=1)
    tanh_c = c.tanh()
    grad_c = grad_c + aten.tanh_backward(grad_h * o, tanh_c)
    found = torch.empty_like(gates)
    of_i, of_f, of_g, of_o = found.chunk(4, dim=1)
    aten.sigmoid_backward.grad_input(grad_c * g, i, grad_input=of_i)
    aten.sigmoid_backward.grad_input(grad_c * c_before, f, grad_input=of_f)
    aten.tanh_backward.grad_input(grad_c * i, g, grad_input=of_g)
    aten.sigmoid_backward.grad_input(grad_h * tanh_c, o, grad_input=of_o)
    return found, grad_c * f


KERNELS = kernels_by_backend(_forward, _replay, _backward)

"""The kernels of a GRU in torch's operations, for any device (`contract.py` says what they do).

A step's numbers are always computed from new, contiguous tensors, so that a replay has the bits of
the forward pass wherever the caller keeps what they are computed from.
"""

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.recurrent.contract import Arithmetic, kernels_by_backend, unless_reset

aten = torch.ops.aten


def _forward(
    arithmetic: Arithmetic,
    pre: Tensor,
    weight_hh: Tensor,
    bias_n: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor | None,
    outputs: Tensor,
    gates: Tensor | None,
    _cells: Tensor | None,  # of an LSTM
) -> Tensor:
    h = h0
    for step in range(len(pre)):
        h = unless_reset(h, resets, step)
        step_gates = _gates(arithmetic, pre[step], h, weight_hh, bias_n)
        _, z, n, _ = step_gates.chunk(4, dim=1)
        h = arithmetic.addcmul(n, z, h - n).to(outputs.dtype)
        outputs[step] = h
        if gates is not None:
            gates[step] = step_gates
    return c0


def _replay(
    arithmetic: Arithmetic,
    pre: Tensor,
    weight_hh: Tensor,
    bias_n: Tensor | None,
    before: Tensor,
    c0: Tensor,
    _resets: Tensor | None,  # `before` is zero there
    gates: Tensor | None,
    _cells: Tensor | None,  # of an LSTM
) -> Tensor:
    if gates is not None:
        for step in range(len(pre)):
            gates[step] = _gates(arithmetic, pre[step], before[step].clone(), weight_hh, bias_n)
    return c0


def _gates(
    arithmetic: Arithmetic, pre: Tensor, h: Tensor, weight_hh: Tensor, bias_n: Tensor | None
) -> Tensor:
    """Return r, z and n after their activations, then m, [N, 4 H] in at least float32."""
    width, wide = h.shape[1], numerics.at_least_float32(pre.dtype)
    mixed = arithmetic.linear(h, weight_hh, None).to(wide)
    gates = mixed.new_empty(len(h), 4 * width)
    r_and_z, n, m = gates.split([2 * width, width, width], dim=1)
    torch.add(mixed[:, : 2 * width], pre[:, : 2 * width], out=r_and_z)
    arithmetic.sigmoid_(r_and_z)
    m.copy_(mixed[:, 2 * width :])
    if bias_n is not None:
        m.add_(bias_n)
    arithmetic.addcmul(pre[:, 2 * width :].to(wide), r_and_z[:, :width], m, out=n)
    n.tanh_()
    return gates


def _backward(
    grad_outputs: Tensor,
    gates: Tensor,
    _cells: Tensor,  # of an LSTM
    before: Tensor,
    _c0: Tensor,  # of an LSTM
    weight_hh: Tensor,
    resets: Tensor | None,
    grad_h: Tensor,
    grad_c: Tensor,
    grads: Tensor,
) -> tuple[Tensor, Tensor]:
    for step in reversed(range(len(gates))):
        step_gates = gates[step].contiguous().to(grad_h.dtype)
        grad_h = grad_h + grad_outputs[step]
        found = _step_gradients(step_gates, before[step], grad_h).to(grads.dtype)
        direct = grad_h * step_gates.chunk(4, dim=1)[1]
        grads[step] = found  # where the gates may stand
        grad_h = unless_reset(direct.add_(of_hidden(found) @ weight_hh), resets, step)
    return grad_h, grad_c


def _step_gradients(gates: Tensor, before: Tensor, grad_h: Tensor) -> Tensor:
    """Return the gradients of `pre`, then of m."""
    r, z, n, m = gates.chunk(4, dim=1)
    found = torch.empty_like(gates)
    of_r, of_z, of_n, of_m = found.chunk(4, dim=1)
    aten.sigmoid_backward.grad_input(grad_h * (before - n), z, grad_input=of_z)
    aten.tanh_backward.grad_input(grad_h - grad_h * z, n, grad_input=of_n)
    aten.sigmoid_backward.grad_input(of_n * m, r, grad_input=of_r)
    torch.mul(of_n, r, out=of_m)
    return found


def of_hidden(grads: Tensor) -> Tensor:
    """Return the gradients of W_hh h, [..., 3 H]: all but the part of x in n, of `grads`."""
    width = grads.shape[-1] // 4
    return torch.cat([grads[..., : 2 * width], grads[..., 3 * width :]], dim=-1)


KERNELS = kernels_by_backend(_forward, _replay, _backward)

"""SwiGLU and rotary positions by Triton: each number depends on one or two others alone."""

from torch import Tensor

from funcrl.ops.exact.cuda.gate_kernels import (
    norm_rotate_kernel,
    rotation_kernel,
    swiglu_gradient_kernel,
    swiglu_kernel,
)
from funcrl.ops.exact.cuda.layout import STRICT, fresh, power_of_two, row_stride
from funcrl.ops.exact.cuda.norm import rows_of_program

_BLOCK = 1024
_HEADS = 32  # of one token, that a program turns


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, F], rounded once (arXiv:2002.05202)."""
    size, width = gate.shape
    gate, up = _unit(gate), _unit(up)
    out = fresh(gate, size, width)
    if out.numel():
        swiglu_kernel[(size, -(-width // _BLOCK))](
            gate, up, out, row_stride(gate), row_stride(up), width, BLOCK=_BLOCK, **STRICT
        )
    return out


def swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and up [M, F]."""
    size, width = gate.shape
    grad, gate, up = _unit(grad), _unit(gate), _unit(up)
    grad_gate, grad_up = fresh(gate, size, width), fresh(up, size, width)
    if grad_gate.numel():
        swiglu_gradient_kernel[(size, -(-width // _BLOCK))](
            grad, gate, up, grad_gate, grad_up, row_stride(grad), row_stride(gate), row_stride(up),
            width, BLOCK=_BLOCK, **STRICT,
        )  # fmt: skip
    return grad_gate, grad_up


def rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return `x` [B, H, T, C] turned by `rotation` [2, B, T, C], or turned back (arXiv:2104.09864).

    The inverse is the transpose, which the backward pass needs.
    """
    batch, heads, length, width = x.shape
    x, rotation = _unit(x), _unit(rotation)
    out = fresh(x, batch, heads, length, width)
    block = power_of_two(width // 2)
    group = min(_HEADS, power_of_two(heads))
    if out.numel():
        rotation_kernel[(batch * length, -(-heads // group))](
            x, rotation, out, heads, length, *x.stride()[:3], *rotation.stride()[:3],
            HALF=width // 2, BLOCK=block, HEADS=group, INVERSE=inverse, **STRICT,
        )  # fmt: skip
    return out


def norm_rotate(
    q: Tensor, k: Tensor, gains: tuple[Tensor, Tensor] | None, eps: float, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, C] and k [B, T, K, C] as [B, H, T, C]: normed, then rotated, at once.

    Args:
        q: queries of each token.
        k: keys of each token.
        gains: the weights [C] of the two norms, None for no norm.
        eps: of the norms.
        rotation: [2, B, T, C].
    """
    batch, length, heads, width = q.shape
    q, k, rotation = _unit(q), _unit(k), _unit(rotation)
    outs = [fresh(part, batch, part.shape[2], length, width) for part in (q, k)]
    weights = (q, k) if gains is None else [gain.contiguous() for gain in gains]
    block = power_of_two(width)
    rows = rows_of_program(block)
    tiles = sum(-(-part.shape[2] // rows) for part in (q, k))
    if batch * length:
        norm_rotate_kernel[(batch * length, tiles)](
            q, k, *weights, rotation, *outs, eps, heads, k.shape[2], length, *q.stride()[:3],
            *k.stride()[:3], *rotation.stride()[:3], D=width, BLOCK=block, ROWS=rows,
            NORM=gains is not None, num_warps=4, **STRICT,
        )  # fmt: skip
    return outs[0], outs[1]


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()

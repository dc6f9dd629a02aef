"""Recurrent networks over whole sequences: `lstm_scan` and `gru_scan`."""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import checked
from funcrl.ops.recurrent import contract, cudnn
from funcrl.ops.recurrent.contract import Cell, Layer, Precision, check_like, layers_of
from funcrl.ops.recurrent.layer import LAYERS

Backend = Literal["auto", "loop", "op", "exact", "triton", "cudnn"]
Recompute = Literal["none", "full", "chunk"]
# (x, layer, h0, c0, resets) -> outputs, h, c
LayerFn: TypeAlias = Callable[
    [Tensor, Layer, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]
]


@checked
def lstm_scan(
    x: Tensor,
    params: Mapping[str, Tensor],
    state: tuple[Tensor, Tensor] | None = None,
    resets: Tensor | None = None,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    precision: Precision = "ieee",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the outputs [..., T, H] of an LSTM over whole sequences, and its last state.

        i, f, o = sigmoid of W_i x + U_i h + b_i, and so on;  g = tanh(W_g x + U_g h + b_g)
        c' = f c + i g;  h' = o tanh(c')

    At each step h' is the output, and the x of the next layer. A layer is one operator forward and
    one backward, for a whole batch under `vmap` too; with `vmap(grad)` it gives the gradients of
    each sample. Where nobody asks for a gradient, nothing is kept for one.

    Args:
        x: [..., T, D].
        params: under the names and of the shapes of `torch.nn.LSTM`: `weight_ih_l0` [4 H, D],
            `weight_hh_l0` [4 H, H], and either both or none of `bias_ih_l0` and `bias_hh_l0`
            [4 H], with the rows of i, f, g and o one after the other; `..._l1` of the second
            layer, and so on.
        state: h and c before the first step, [..., L, H] each, c in at least float32; zeros if
            None. The last state is one like it.
        resets: [..., T] bool, True where a new episode begins: the state before that step is zero.
        backend: "op", torch's operations inside one operator, on any device; "triton", kernels for
            a GPU; "auto", "triton" where it takes the inputs and else "op"; "cudnn", cuDNN's
            kernels, without resets, and under `vmap` one call a sample; "loop", torch's operations
            step by step, which has all derivatives, where the others have the first one; "exact",
            "op" on a CPU with operations by which a sequence's outputs and states, to the last bit,
            do not depend on the others in the batch, on steps before a reset, or on whether it is
            read in one call or in several.
        recompute: how the backward pass gets the gates [T, 4 H] and cell states [T, H] of a
            sequence. "none": all are kept. "full": nothing is kept beyond the outputs, and both are
            computed anew, for some steps at a time. "chunk": the cell state every so many steps is
            kept, which saves "full" a pass over the sequence. The numbers are the same to the last
            bit. "loop" and "cudnn" take "none" only.
        precision: of the products of float32 numbers in the kernels of "triton": "ieee", three
            products of tf32 each, with the errors of float32, or "tf32", whose factors have 10
            bits. The products of the others, those for the gradients of the weights, and with
            "ieee" those for the gradient of x, are torch's:
            `torch.backends.cuda.matmul.fp32_precision`, and of cuDNN
            `torch.backends.cudnn.rnn.fp32_precision`, say how they are computed.

    Returns:
        The outputs, and (h, c) after the last step.

    Example:
        >>> import torch, funcrl
        >>> params = dict(torch.nn.LSTM(3, 4, num_layers=2).named_parameters())
        >>> outputs, (h, c) = funcrl.ops.lstm_scan(torch.zeros(5, 3), params)
        >>> outputs.shape, h.shape
        (torch.Size([5, 4]), torch.Size([2, 4]))

    An episode that begins at the third step knows nothing of the first two:

        >>> resets = torch.tensor([False, False, True, False, False])
        >>> packed, _ = funcrl.ops.lstm_scan(torch.zeros(5, 3), params, resets=resets)
        >>> torch.equal(packed[2:], outputs[:3])
        True
    """
    return _scan("lstm_scan", "lstm", x, params, state, resets, backend, recompute, precision)


@checked
def gru_scan(
    x: Tensor,
    params: Mapping[str, Tensor],
    state: Tensor | None = None,
    resets: Tensor | None = None,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    precision: Precision = "ieee",
) -> tuple[Tensor, Tensor]:
    """Return the outputs [..., T, H] of a GRU over whole sequences, and its last state [..., L, H].

        r, z = sigmoid of W_r x + U_r h + b_r, and so on;  n = tanh(W_n x + b_n + r (U_n h + b_m))
        h' = n + z (h - n)

    What `lstm_scan` says of operators, gradients and memory holds here, too.

    Args:
        x: [..., T, D].
        params: under the names and of the shapes of `torch.nn.GRU`: as of `lstm_scan`, with 3 H
            rows in place of 4 H, those of r, z and n.
        state: h before the first step, [..., L, H]; zeros if None.
        resets: [..., T] bool, True where a new episode begins: the state before that step is zero.
        backend: as of `lstm_scan`.
        recompute: as of `lstm_scan`. There is no cell state: "chunk" is "full".
        precision: as of `lstm_scan`.

    Example:
        >>> import torch, funcrl
        >>> params = dict(torch.nn.GRU(3, 4).named_parameters())
        >>> outputs, state = funcrl.ops.gru_scan(torch.zeros(2, 5, 3), params, recompute="full")
        >>> torch.equal(outputs[:, -1], state[:, 0])
        True
    """
    states = None if state is None else (state, state[..., :0])
    outputs, (h, _) = _scan(
        "gru_scan", "gru", x, params, states, resets, backend, recompute, precision
    )
    return outputs, h


def _scan(
    function: str,
    cell: Cell,
    x: Tensor,
    params: Mapping[str, Tensor],
    state: tuple[Tensor, Tensor] | None,
    resets: Tensor | None,
    backend: Backend,
    recompute: Recompute,
    precision: Precision,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run the layers one after the other."""
    checks.check_floating(function, "x", x)
    if x.ndim < 2 or not x.shape[-2]:
        raise ValueError(
            f"{function} expects x of shape [..., T, D] with T of at least 1, got {list(x.shape)}."
        )
    layers = layers_of(function, x, params, 4 if cell == "lstm" else 3)
    width = layers[0].weight_hh.shape[-1]
    state = _state(function, cell, x, state, (len(layers), width))
    if resets is not None:
        checks.check_shape(function, "resets", resets, "x without its last axis", x.shape[:-1])
        check_like(function, "resets", resets, x, torch.bool)
    run = _chosen(function, cell, x, width, resets, backend, recompute, precision)
    last = []
    for layer, h0, c0 in zip(layers, *(each.unbind(-2) for each in state), strict=True):
        x, h, c = run(x, layer, h0, c0, resets)
        last.append((h, c))
    hs, cs = (torch.stack(each, dim=-2) for each in zip(*last, strict=True))
    return x, (hs, cs)


def _state(
    function: str,
    cell: Cell,
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return h and c [..., L, H] before the first step; c of a GRU is empty."""
    shape, wide = torch.Size((*x.shape[:-2], *size)), numerics.at_least_float32(x.dtype)
    if state is None:
        c_shape = shape if cell == "lstm" else (*shape[:-1], 0)
        return x.new_zeros(shape), x.new_zeros(c_shape, dtype=wide)
    h, c = state
    named = [("state[0]", h, x.dtype), ("state[1]", c, wide)]
    for name, tensor, dtype in named if cell == "lstm" else [("state", h, x.dtype)]:
        if tensor.shape != shape:
            raise ValueError(
                f"{function} expects {name} of shape {list(shape)}, [..., L, H], "
                f"got {list(tensor.shape)}."
            )
        check_like(function, name, tensor, x, dtype)
    return h, c.to(wide)


def _chosen(
    function: str,
    cell: Cell,
    x: Tensor,
    width: int,
    resets: Tensor | None,
    backend: Backend,
    recompute: Recompute,
    precision: Precision,
) -> LayerFn:
    """Return what runs a layer, or raise for what the backend does not do."""
    if backend == "auto":
        fits = x.device.type == "cuda" and not _why_not_triton(cell, x, width)
        backend = "triton" if fits else "op"
    if backend != "triton" and precision != "ieee":
        _refuse(function, backend, "precision='ieee'", repr(precision))
    if backend in ("loop", "cudnn") and recompute != "none":
        _refuse(function, backend, "recompute='none'", repr(recompute))
    if backend == "loop":
        return contract.LAYERS[cell]
    if backend == "cudnn":
        if resets is not None:
            _refuse(function, backend, "resets=None", "a tensor")
        if not torch.backends.cudnn.is_acceptable(x):
            got = f"{x.dtype} on {x.device}"
            _refuse(function, backend, "float64, 32 or 16 on a GPU that has cuDNN", got)
        return functools.partial(cudnn.run_layer, cell)
    if backend == "exact" and x.device.type != "cpu":
        _refuse(function, backend, "x on a CPU", f"{x.device}")
    if backend == "triton" and (reason := _why_not_triton(cell, x, width)):
        raise ValueError(f"{function} with backend='triton' expects {reason}.")
    return functools.partial(_run_operator, cell, backend, precision, recompute)


def _run_operator(
    cell: Cell,
    backend: str,
    precision: str,
    recompute: str,
    x: Tensor,
    layer: Layer,
    h: Tensor,
    c: Tensor,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = LAYERS[cell](
        x, h, c, resets, *layer, cell, backend, precision, recompute
    )
    return found


def _why_not_triton(cell: Cell, x: Tensor, width: int) -> str:
    checks.import_extra(f"{cell}_scan", "triton", "for backend='triton'", "triton")
    # Imported here, because it needs triton.
    from funcrl.ops.recurrent.cuda import scan as on_gpu

    return on_gpu.why_not(cell, x, width)


def _refuse(function: str, backend: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{function} with backend={backend!r} expects {expected}, got {got}.")

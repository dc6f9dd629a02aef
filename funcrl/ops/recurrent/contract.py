"""What a recurrent layer computes with: its parameters, and a cell's kernels for some steps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from funcrl.core import checks
from funcrl.core.numerics import at_least_float32
from funcrl.ops.contract import LinearFn
from funcrl.ops.exact import linear

Cell = Literal["lstm", "gru"]
Precision = Literal["ieee", "tf32"]


class ProjectFn(Protocol):
    """The product of a piece's x with W_ih."""

    def __call__(
        self,
        x: Tensor,  # [k, N, D]
        weight_ih: Tensor,  # [G, D]
        bias: Tensor | None,  # [G], all that is added
        /,
    ) -> Any:
        """Return what the kernels take as `pre`: the product, or what they compute it from."""
        ...


class ForwardFn(Protocol):
    """The forward pass of k steps."""

    def __call__(
        self,
        pre: Any,  # what `project` returned
        weight_hh: Tensor,  # [G, H]
        bias_n: Tensor | None,  # [H], of a GRU
        h0: Tensor,  # [N, H], the state before the first step
        c0: Tensor,  # [N, C]
        resets: Tensor | None,  # [k, N] bool, True where a new episode begins
        outputs: Tensor,  # [k, N, H], written: the state h after each step
        gates: Tensor | None,  # [k, N, 4 H], written, or None: nobody wants them
        cells: Tensor | None,  # [k, N, C], written: the cell state after each step; None with gates
        /,
    ) -> Tensor:
        """Run k steps; return the cell state after the last one, [N, C]."""
        ...


class ReplayFn(Protocol):
    """The gates and cell states of k steps once more.

    The state h of every step is known, so that the product with W_hh need not wait for the step
    before. The results have the bits that the forward pass gives.
    """

    def __call__(
        self,
        pre: Any,  # what `project` returned
        weight_hh: Tensor,
        bias_n: Tensor | None,
        before: Tensor,  # [k, N, H], contiguous: the state h before each step, zero at a reset
        c0: Tensor,  # [N, C]
        resets: Tensor | None,  # [k, N]
        gates: Tensor | None,  # [k, N, 4 H], written, or None; it may be `pre` itself
        cells: Tensor | None,  # [k, N, C], written; None with gates
        /,
    ) -> Tensor:
        """Find gates and cell states; return the cell state after the last step, [N, C]."""
        ...


class BackwardFn(Protocol):
    """The backward pass of k steps."""

    def __call__(
        self,
        grad_outputs: Tensor,  # [k, N, H], without what comes from later steps; any strides
        gates: Tensor,  # [k, N, 4 H]
        cells: Tensor,  # [k, N, C]
        before: Tensor,  # [k, N, H], contiguous: the state h before each step, zero at a reset
        c0: Tensor,  # [N, C]
        weight_hh: Tensor,
        resets: Tensor | None,  # [k, N]
        grad_h: Tensor,  # [N, H], at least float32: of the state after the last step
        grad_c: Tensor,  # [N, C]
        grads: Tensor,  # [k, N, 4 H], written; it may be `gates` itself
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states before the piece, [N, H] and [N, C]."""
        ...


class ScanKernels(NamedTuple):
    """The kernels of one cell on one kind of device; plain functions of tensors."""

    project: ProjectFn
    forward: ForwardFn
    replay: ReplayFn
    backward: BackwardFn
    # Of all rows [M, D] of a piece, for the gradient of x; the weight may be a transposed view.
    linear: LinearFn = torch.nn.functional.linear


def unless_reset(state: Tensor, resets: Tensor | None, step: int) -> Tensor:
    """Return a state [N, ...] before a step, zero where a new episode begins."""
    return state if resets is None else state.masked_fill(resets[step][:, None], 0.0)


def steps_of_piece(num_sequences: int) -> int:
    """Return k, how many steps a piece has: the same whatever is recomputed."""
    return min(max(16384 // max(num_sequences, 1), 4), 64)


class Arithmetic(NamedTuple):
    """The operations of a step that torch may compute in more than one way."""

    linear: LinearFn
    # (y, x, W) -> y + x W^T, in at least float32
    add_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    sigmoid_: Callable[[Tensor], Tensor]  # in place
    addcmul: Callable[..., Tensor]  # (x, y, z, out=None) -> x + y z


def _add_linear(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(y, x, weight.mT).to(at_least_float32(y.dtype))


def _exact_add_linear(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return linear.linear_impl(x, weight, None).to(at_least_float32(y.dtype)).add_(y)


def _exact_sigmoid_(x: Tensor) -> Tensor:
    return x.neg_().exp_().add_(1).reciprocal_()


def _exact_addcmul(x: Tensor, y: Tensor, z: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.add(x, y * z, out=out)


NATIVE = Arithmetic(
    linear=torch.nn.functional.linear,
    add_linear=_add_linear,
    sigmoid_=torch.Tensor.sigmoid_,
    addcmul=torch.addcmul,
)
EXACT = Arithmetic(
    linear=linear.linear_impl,
    add_linear=_exact_add_linear,
    sigmoid_=_exact_sigmoid_,
    addcmul=_exact_addcmul,
)


def kernels_by_backend(
    forward: Callable[..., Tensor], replay: Callable[..., Tensor], backward: BackwardFn
) -> dict[str, ScanKernels]:
    """Return a cell's kernels for the backends "op" and "exact".

    Args:
        forward: a `ForwardFn` with an `Arithmetic` before its other arguments.
        replay: a `ReplayFn` with one.
        backward: of both, in torch's order of summation.
    """
    return {
        name: ScanKernels(
            partial(_project, arithmetic),
            partial(forward, arithmetic),
            partial(replay, arithmetic),
            backward,
        )
        for name, arithmetic in (("op", NATIVE), ("exact", EXACT))
    }


def _project(arithmetic: Arithmetic, x: Tensor, weight_ih: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W_ih^T and the bias, [k, N, G]."""
    return arithmetic.linear(x.flatten(0, 1), weight_ih, bias).unflatten(0, x.shape[:2])


_WEIGHTS, _BIASES = ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh")


class Layer(NamedTuple):
    """The parameters of one layer; G is 4 H (LSTM: i f g o) or 3 H (GRU: r z n)."""

    weight_ih: Tensor  # [G, D]
    weight_hh: Tensor  # [G, H]
    bias_ih: Tensor | None  # [G]
    bias_hh: Tensor | None  # [G]


def layers_of(
    function: str, x: Tensor, params: Mapping[str, Tensor], num_gates: int
) -> list[Layer]:
    """Return the layers that a dict has, after checking names, shapes and dtypes.

    Args:
        function: the public function, for errors.
        x: [..., T, D].
        params: under torch's names, such as `weight_ih_l0`.
        num_gates: 4 of an LSTM, 3 of a GRU.
    """
    count = sum(name.startswith("weight_hh_l") for name in params)
    names = {f"{kind}_l{n}" for n in range(count) for kind in (*_WEIGHTS, *_BIASES)}
    unknown = sorted(params.keys() - names)
    if unknown or not count:
        found = unknown[0] if unknown else "none"
        raise ValueError(
            f"{function} expects params named weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, "
            f"and so on for each layer, got {found!r}."
        )
    layers = [_layer(function, params, n) for n in range(count)]
    width_in, width = x.shape[-1], layers[0].weight_hh.shape[-1]
    for n, layer in enumerate(layers):
        rows = num_gates * width
        expected = ((rows, width_in), (rows, width), (rows,), (rows,))
        for kind, tensor, shape in zip((*_WEIGHTS, *_BIASES), layer, expected, strict=True):
            if tensor is None:
                continue
            name = f"params['{kind}_l{n}']"
            if tensor.shape != torch.Size(shape):
                raise ValueError(
                    f"{function} expects {name} of shape {list(shape)}, got {list(tensor.shape)}."
                )
            check_like(function, name, tensor, x)
        width_in = width
    return layers


def check_like(
    function: str, name: str, tensor: Tensor, x: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise unless a tensor is on the device of x and has its dtype, or the given one."""
    if tensor.device != x.device:
        raise ValueError(
            f"{function} expects {name} on the device of x, {x.device}, got {tensor.device}."
        )
    checks.check_dtype(function, name, tensor, dtype or x.dtype)


def _layer(function: str, params: Mapping[str, Tensor], n: int) -> Layer:
    names = [f"{kind}_l{n}" for kind in (*_WEIGHTS, *_BIASES)]
    biased = [name in params for name in names[2:]]
    for name in names if any(biased) else names[:2]:
        if name not in params:
            raise ValueError(f"{function} expects params[{name!r}], got {sorted(params)}.")
    weight_ih, weight_hh, bias_ih, bias_hh = names
    return Layer(params[weight_ih], params[weight_hh], params.get(bias_ih), params.get(bias_hh))


def lstm_layer(
    x: Tensor, layer: Layer, h: Tensor, c: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [..., T, H], and the states after the last step."""
    outputs = []
    for step in range(x.shape[-2]):
        h, c = _unless_reset(h, resets, step), _unless_reset(c, resets, step)
        mixed = functional.linear(h, layer.weight_hh, layer.bias_hh)
        pre = functional.linear(x[..., step, :], layer.weight_ih, layer.bias_ih) + mixed
        i, f, g, o = pre.to(c.dtype).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(x.dtype)
        outputs.append(h)
    return torch.stack(outputs, dim=-2), h, c


def gru_layer(
    x: Tensor, layer: Layer, h: Tensor, c: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [..., T, H], the state after the last step, and `c` as it is."""
    outputs = []
    for step in range(x.shape[-2]):
        h = _unless_reset(h, resets, step)
        of_x = functional.linear(x[..., step, :], layer.weight_ih, layer.bias_ih).chunk(3, dim=-1)
        of_h = functional.linear(h, layer.weight_hh, layer.bias_hh).chunk(3, dim=-1)
        r, z = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
        n = torch.tanh(of_x[2] + r * of_h[2])
        h = n + z * (h - n)
        outputs.append(h)
    return torch.stack(outputs, dim=-2), h, c


LAYERS = {"lstm": lstm_layer, "gru": gru_layer}


def _unless_reset(state: Tensor, resets: Tensor | None, step: int) -> Tensor:
    if resets is None:
        return state
    return torch.where(resets[..., step, None], torch.zeros_like(state), state)

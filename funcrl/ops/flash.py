"""Causal attention by kernels that never hold [T, T] scores (arXiv:2205.14135).

On a CPU and on most GPUs they are torch's own; on a GPU from Hopper on they are cuDNN's, which took
two thirds of the time on an H200 (docs/benchmarks.md).
"""

from typing import Any

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Count, checked
from funcrl.core.types import Absent
from funcrl.ops.contract import AttendFn
from funcrl.ops.exact import attention

aten = torch.ops.aten

_FIRST = (
    "attend_flash has a first derivative only, got a second one to compute; "
    "attend_causal has them all."
)
_HALF = (torch.bfloat16, torch.float16)
# The dtypes that the kernels of each device take.
_DTYPES = {"cpu": (torch.float64, torch.float32, *_HALF), "cuda": _HALF}


@checked
def attend_flash(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
    """Return what `attend_causal` returns, up to rounding, in memory that grows with T, not T^2.

    One kernel forward and one backward, for a whole batch under `vmap` too. It has a first
    derivative only. A GPU may add up the gradient of `q` in no fixed order, so that its last bits
    differ from run to run, unless `torch.use_deterministic_algorithms(True)`.

    Args:
        q: [..., H, T, C]; on a GPU bfloat16 or float16, and C a multiple of 8, at most 256.
        k: [..., K, T, C].
        v: [..., K, T, C].
        window: the number of tokens that each one sees, itself included; all when left out. With
            one, the kernels are those of `attend_flash_segments`, as torch's know of none; their
            backward pass holds all scores of a sample on a CPU.

    Example:
        >>> import torch, funcrl
        >>> q, k, v = torch.zeros(2, 2, 1), torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]])
        >>> funcrl.ops.attend_flash(q, k, v).squeeze(-1)
        tensor([[1., 2.],
                [1., 2.]])
    """
    _check(q, k, v)
    if window is not None and window < q.shape[-2]:
        return attention.attend_causal(q, k, v, window)
    out: Tensor = _apply(_Attend, q, k, v)[0]
    return out


class _Attend(torch.autograd.Function):
    """The forward pass; its other results are kept for the backward pass.

    They are the log-normalisers [..., H, T], and on a GPU the two states of the kernel's dropout,
    which is off.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if not q.numel():  # the kernels divide by the number of tokens
            return torch.zeros_like(q), q.new_zeros(q.shape[:-1])
        flat = [_flat(part) for part in (q, k, v)]
        states: tuple[Tensor, ...] = ()
        if q.device.type == "cpu":
            out, normaliser = aten._scaled_dot_product_flash_attention_for_cpu(*flat, 0.0, True)
        elif _takes_cudnn(q):
            results = aten._scaled_dot_product_cudnn_attention(*flat, None, True, 0.0, True, False)
            out, normaliser, states = results[0], results[1], results[6:8]
        else:
            results = aten._scaled_dot_product_flash_attention(*flat, 0.0, True)
            out, normaliser, states = results[0], results[1], results[6:8]
        return _shaped(out, q.shape), _shaped(normaliser, q.shape[:-1]), *states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> Any:
        if grad_out is None:
            return None, None, None
        return _apply(_Gradients, grad_out, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        """Return the results with the batch as a leading axis of all but the states of dropout."""
        results = _apply(_Attend, *_lead(info.batch_size, in_dims, inputs))
        return results, (0, 0, *[None] * (len(results) - 2))


class _Gradients(torch.autograd.Function):
    """The backward pass as an op of its own, so that its derivative is an error."""

    @staticmethod
    def forward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if not q.numel():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        flat = [_flat(part) for part in (grad_out, q, k, v, out)]
        normaliser = _merged(normaliser, 3)
        # The starts of samples of different lengths (there are none), and the largest lengths.
        lengths = (None, None, q.shape[-2], q.shape[-2])
        if q.device.type == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *flat, normaliser, 0.0, True
            )
        elif _takes_cudnn(q):
            normaliser = normaliser.contiguous().unsqueeze(-1)
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                *flat, normaliser, *states, None, *lengths, 0.0, True
            )
        else:  # this kernel, too, takes the normaliser as contiguous
            grads = aten._scaled_dot_product_flash_attention_backward(
                *flat, normaliser.contiguous(), *lengths, 0.0, True, *states
            )
        return tuple(_shaped(g, part.shape) for g, part in zip(grads, (q, k, v), strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no backward pass."""

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(_FIRST)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        tensors = _lead(info.batch_size, in_dims[:6], inputs[:6])
        return _apply(_Gradients, *tensors, *inputs[6:]), (0, 0, 0)


def _takes_cudnn(q: Tensor) -> bool:
    """Return whether cuDNN's kernel is available, takes this shape, and may be used."""
    return (
        torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and q.shape[-2] >= 2
        and q.shape[-1] <= 128
        and not torch.are_deterministic_algorithms_enabled()
    )


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


def _lead(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the tensors with the batch as their first axis."""
    lead = []
    for part, at in zip(tensors, in_dims, strict=True):
        if at is None:
            part = part.expand(size, *part.shape)
        lead.append(part.movedim(at, 0) if at else part)
    return lead


def _flat(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [B, H, T, C] with a contiguous last axis, as a view if possible."""
    x = _merged(x, 4)
    return x if x.stride(-1) == 1 else x.contiguous()


def _merged(x: Tensor, ndim: int) -> Tensor:
    if x.ndim < ndim:
        return x[None]
    return x if x.ndim == ndim else x.flatten(0, -ndim)


def _shaped(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x.view(shape)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise, in the name of `attend_flash`, for inputs that the kernels refuse or misread."""
    for name, part in (("q", q), ("k", k), ("v", v)):
        checks.check_tensor("attend_flash", name, part)
    heads = [part.shape[-3] if part.ndim > 2 else 0 for part in (q, k)]
    if 0 in heads or heads[0] % heads[1]:
        raise ValueError(
            f"attend_flash expects q [..., H, T, C] and k [..., K, T, C], where K divides H, got "
            f"{list(q.shape)} and {list(k.shape)}."
        )
    expected = torch.Size((*q.shape[:-3], heads[1], *q.shape[-2:]))
    for name, part in (("k", k), ("v", v)):
        checks.check_shape("attend_flash", name, part, "q (with the heads of k)", expected)
        checks.check_dtype("attend_flash", name, part, q.dtype)
    device = q.device.type
    if q.dtype not in _DTYPES.get(device, ()):
        raise TypeError(
            f"attend_flash expects bfloat16 or float16 on cuda, or any float on cpu, got {q.dtype} "
            f"on {device}; attend_causal takes them all."
        )
    if device == "cuda" and (q.shape[-1] % 8 or q.shape[-1] > 256):
        raise ValueError(
            f"attend_flash expects on cuda a head width that is a multiple of 8 and at most 256, "
            f"got {q.shape[-1]}; attend_causal takes all."
        )


@checked
def attend_flash_segments(segment_ids: Tensor, prefix_ids: Tensor | Absent = ()) -> AttendFn:
    """Return what `attend_segments` returns, up to rounding, in time and memory of what is seen.

    One kernel forward and a few backward, for a whole batch under `vmap` too, in a fixed order of
    sums. The function has a first derivative only.

    Args:
        segment_ids: [T], equal for the tokens of one sample, -1 on padding; tokens of one number
            are neighbours, as `pack` and `pack_groups` lay them, and numbers are below T.
        prefix_ids: [T], the segment of which each token sees all tokens too, -1 for none; none has
            one when left out.

    Example:
        >>> import torch, funcrl
        >>> ids = torch.tensor([0, 1, 1]), torch.tensor([-1, 0, 0])
        >>> zero, v = torch.zeros(1, 3, 1), torch.tensor([[[1.0], [3.0], [8.0]]])
        >>> funcrl.ops.attend_flash_segments(*ids)(zero, zero, v).squeeze(-1)
        tensor([[1., 2., 4.]])
    """
    checks.check_rank("attend_flash_segments", "segment_ids", segment_ids, "T")
    checks.check_dtype("attend_flash_segments", "segment_ids", segment_ids, torch.int64)
    if not isinstance(prefix_ids, tuple):
        name, shape = "prefix_ids", segment_ids.shape
        checks.check_shape("attend_flash_segments", name, prefix_ids, "segment_ids", shape)
        checks.check_dtype("attend_flash_segments", name, prefix_ids, torch.int64)
    attend_rows = attention.attend_segments(segment_ids, prefix_ids)

    @checked
    def attend(q: Tensor, k: Tensor, v: Tensor, window: Count | None = None) -> Tensor:
        for name, part in (("q", q), ("k", k), ("v", v)):
            if part.ndim < 3 or part.shape[-2] != segment_ids.shape[0]:
                raise ValueError(
                    f"attend_flash_segments expects {name} [..., heads, T, C] of T = "
                    f"{segment_ids.shape[0]}, got {list(part.shape)}."
                )
        return attend_rows(q, k, v, window)

    return attend

"""Exact numerics: operations whose result for a row is a function of that row alone.

Not of the number of rows, nor of their place, of a prompt's pieces, of the layout of a cache or of
a micro-batch: so trainer, sampler and vLLM agree to the last bit. See docs/numerics.md.
"""

from functools import partial
from typing import Any

from funcrl.ops import arithmetic
from funcrl.ops.contract import Ops
from funcrl.ops.exact import attention, conv, delta, embedding, gate, linear, norm, rotary, scores

EXACT = Ops(
    embed=embedding.embed,
    linear=linear.linear,
    project=linear.project,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    swiglu=gate.swiglu,
    geglu=gate.geglu,
    sigmoid_gate=gate.sigmoid_gate,
    rotation=rotary.rotation,
    rotate=rotary.rotate,
    norm_rotate=rotary.norm_rotate,
    short_conv=conv.short_conv,
    delta_gates=delta.delta_gates,
    gated_delta=delta.gated_delta,
    attend_causal=attention.attend_causal,
    attend_segments=attention.attend_segments,
    scores=scores.linear_scores,
    log_softmax=scores.log_softmax,
    attend_prompts=attention.attend_causal_forward,
    attend_last=attention.attend_last,
    exact=True,
)
"""The exact operations, with derivatives."""

EXACT_FORWARD = EXACT._replace(
    embed=arithmetic.embed,
    linear=linear.linear_forward,
    project=linear.project_forward,
    rms_norm=norm.rms_norm_forward,
    add_rms_norm=norm.add_rms_norm_forward,
    swiglu=gate.swiglu_forward,
    geglu=gate.geglu_forward,
    sigmoid_gate=gate.sigmoid_gate_forward,
    rotation=rotary.rotation_forward,
    rotate=rotary.rotate_forward,
    norm_rotate=rotary.norm_rotate_forward,
    short_conv=conv.short_conv_forward,
    delta_gates=delta.delta_gates_forward,
    gated_delta=delta.gated_delta_forward,
    attend_causal=attention.attend_causal_forward,
)
"""The same kernels, called without what a derivative needs: for generators."""

_SUMMED = (  # over rows
    "embed", "linear", "project", "rms_norm", "add_rms_norm", "norm_rotate", "scores",
    "short_conv", "delta_gates",
)  # fmt: skip


def sum_in_blocks(ops: Ops, blocks: int) -> Ops | None:
    """Return operations whose gradients of weights sum each of some blocks of rows for itself.

    The blocks, one, two or four of as many rows, are then added in pairs. There are none for other
    operations on weights than the exact ones.

    Args:
        ops: `EXACT`, some of its fields perhaps replaced.
        blocks: their number.

    Example:
        >>> import torch
        >>> from funcrl.ops import EXACT
        >>> from funcrl.ops.exact import sum_in_blocks
        >>> linear = sum_in_blocks(EXACT, 2).linear
        >>> weight = torch.ones(1, 3, requires_grad=True)
        >>> linear(torch.ones(4, 3), weight, None).sum().backward()
        >>> weight.grad
        tensor([[4., 4., 4.]])
    """
    given = [name for name in _SUMMED if getattr(ops, name) is not None]
    if any(getattr(ops, name) is not getattr(EXACT, name) for name in given):
        return None
    summing: dict[str, Any] = {name: partial(getattr(EXACT, name), blocks=blocks) for name in given}
    return ops._replace(**summing)

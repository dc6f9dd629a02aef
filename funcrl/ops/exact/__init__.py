"""Exact numerics: operations whose result for a row is a function of that row alone.

Not of the number of rows, nor of their place, of a prompt's pieces, of the layout of a cache or of
a micro-batch: so trainer, sampler and vLLM agree to the last bit. See docs/numerics.md.
"""

from funcrl.ops import arithmetic
from funcrl.ops.contract import Ops
from funcrl.ops.exact import attention, embedding, gate, linear, norm, rotary, scores

EXACT = Ops(
    embed=embedding.embed,
    linear=linear.linear,
    project=linear.project,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    swiglu=gate.swiglu,
    rotation=rotary.rotation,
    rotate=rotary.rotate,
    attend_causal=attention.attend_causal,
    attend_segments=attention.attend_segments,
    scores=scores.linear_scores,
    log_softmax=scores.log_softmax,
    attend_prompts=attention.plain_attend_causal,
    attend_last=attention.attend_last,
    exact=True,
)
"""The exact operations, with derivatives."""

EXACT_FORWARD = EXACT._replace(
    embed=arithmetic.embed,
    linear=linear.plain_linear,
    project=linear.plain_project,
    rms_norm=norm.plain_rms_norm,
    add_rms_norm=norm.plain_add_rms_norm,
    swiglu=gate.plain_swiglu,
    rotation=rotary.plain_rotation,
    rotate=rotary.plain_rotate,
    attend_causal=attention.plain_attend_causal,
)
"""The same kernels, called without what a derivative needs: for generators."""

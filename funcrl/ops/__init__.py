"""Operations with more than one implementation, or a backward pass of their own."""

from funcrl.ops.arithmetic import (
    NATIVE,
    LinearFn,
    Ops,
    Weights,
    choose_ops,
    project,
    rms_norm,
    swiglu,
)
from funcrl.ops.attention import AttendFn, attend_causal, attend_hidden, attend_segments
from funcrl.ops.chunked import linear_scores
from funcrl.ops.flash import attend_flash
from funcrl.ops.scores import entropy

__all__ = [
    "NATIVE",
    "AttendFn",
    "LinearFn",
    "Ops",
    "Weights",
    "attend_causal",
    "attend_flash",
    "attend_hidden",
    "attend_segments",
    "choose_ops",
    "entropy",
    "linear_scores",
    "project",
    "rms_norm",
    "swiglu",
]

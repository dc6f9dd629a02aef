"""Operations with more than one implementation, or a backward pass of their own."""

from funcrl.ops.attention import AttendFn, attend_causal, attend_segments
from funcrl.ops.scores import entropy

__all__ = ["AttendFn", "attend_causal", "attend_segments", "entropy"]

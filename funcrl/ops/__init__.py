"""Operations with more than one implementation, or a backward pass of their own."""

from funcrl.ops.arithmetic import geglu, project, rms_norm, sigmoid_gate, swiglu
from funcrl.ops.attention import attend_causal, attend_hidden, attend_segments
from funcrl.ops.choice import NATIVE, choose_ops, ops_of
from funcrl.ops.chunked import linear_scores
from funcrl.ops.contract import AttendFn, AttendSegmentsFn, GatedDeltaFn, LinearFn, Ops, Weights
from funcrl.ops.delta import delta_gates, gated_delta_scan, short_conv
from funcrl.ops.divergences import divergence, linear_divergence
from funcrl.ops.exact import EXACT
from funcrl.ops.flash import attend_flash, attend_flash_segments
from funcrl.ops.logits import entropy
from funcrl.ops.quantized import Quantized, adapted, adapted_linear, dequantize, quantize
from funcrl.ops.recurrent import gru_scan, lstm_scan
from funcrl.ops.truncation import Truncation, truncated_logits

__all__ = [
    "EXACT",
    "NATIVE",
    "AttendFn",
    "AttendSegmentsFn",
    "GatedDeltaFn",
    "LinearFn",
    "Ops",
    "Quantized",
    "Truncation",
    "Weights",
    "adapted",
    "adapted_linear",
    "attend_causal",
    "attend_flash",
    "attend_flash_segments",
    "attend_hidden",
    "attend_segments",
    "choose_ops",
    "delta_gates",
    "dequantize",
    "divergence",
    "entropy",
    "gated_delta_scan",
    "geglu",
    "gru_scan",
    "linear_divergence",
    "linear_scores",
    "lstm_scan",
    "ops_of",
    "project",
    "quantize",
    "rms_norm",
    "short_conv",
    "sigmoid_gate",
    "swiglu",
    "truncated_logits",
]

"""Kernels for a CPU: a row of a result is a function of that row and of the number of threads."""

from funcrl.ops.exact.cpu.attention import attend
from funcrl.ops.exact.cpu.attention_gradients import attend_gradients
from funcrl.ops.exact.cpu.conv import short_conv, short_conv_gradients
from funcrl.ops.exact.cpu.delta import gated_delta, gated_delta_gradients
from funcrl.ops.exact.cpu.elements import (
    geglu,
    geglu_gradients,
    rotate,
    sigmoid_gate,
    sigmoid_gate_gradients,
    swiglu,
    swiglu_gradients,
)
from funcrl.ops.exact.cpu.norm import add_rms_norm, rms_norm, rms_norm_gradients
from funcrl.ops.exact.cpu.norm_rotate import norm_rotate, norm_rotate_gradients
from funcrl.ops.exact.cpu.paged import attend_new, attend_paged
from funcrl.ops.exact.cpu.products import (
    add_weight_gradient,
    bias_gradient,
    embedding_gradient,
    linear,
    weight_gradient,
)
from funcrl.ops.exact.cpu.scores import log_softmax, logsumexp, scores, scores_gradients

__all__ = [
    "add_rms_norm",
    "add_weight_gradient",
    "attend",
    "attend_gradients",
    "attend_new",
    "attend_paged",
    "bias_gradient",
    "embedding_gradient",
    "gated_delta",
    "gated_delta_gradients",
    "geglu",
    "geglu_gradients",
    "linear",
    "log_softmax",
    "logsumexp",
    "norm_rotate",
    "norm_rotate_gradients",
    "rms_norm",
    "rms_norm_gradients",
    "rotate",
    "scores",
    "scores_gradients",
    "short_conv",
    "short_conv_gradients",
    "sigmoid_gate",
    "sigmoid_gate_gradients",
    "swiglu",
    "swiglu_gradients",
    "weight_gradient",
]

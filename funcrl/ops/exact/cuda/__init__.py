"""Exact kernels on a GPU, by Triton and cuBLAS: each row of a result is a function of itself alone.

Plain functions of tensors, without autograd and without checks. A GPU older than Hopper may not
hold that tiles of different sizes have equal bits: `tests/ops/exact` compares them.
"""

from funcrl.ops.exact.cuda.attention import attend, attend_paged
from funcrl.ops.exact.cuda.attention_gradients import attend_gradients
from funcrl.ops.exact.cuda.conv import short_conv, short_conv_gradients
from funcrl.ops.exact.cuda.decode import attend_new
from funcrl.ops.exact.cuda.delta import gated_delta, gated_delta_gradients
from funcrl.ops.exact.cuda.embedding import embedding_gradient
from funcrl.ops.exact.cuda.gate import (
    geglu,
    geglu_gradients,
    rotate,
    sigmoid_gate,
    sigmoid_gate_gradients,
    swiglu,
    swiglu_gradients,
)
from funcrl.ops.exact.cuda.gradients import add_weight_gradient, bias_gradient, weight_gradient
from funcrl.ops.exact.cuda.norm import add_rms_norm, rms_norm, rms_norm_gradients
from funcrl.ops.exact.cuda.norm_rotate import norm_rotate, norm_rotate_gradients
from funcrl.ops.exact.cuda.products import linear
from funcrl.ops.exact.cuda.scores import draw, log_softmax, logsumexp, scores, scores_gradients

__all__ = [
    "add_rms_norm",
    "add_weight_gradient",
    "attend",
    "attend_gradients",
    "attend_new",
    "attend_paged",
    "bias_gradient",
    "draw",
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

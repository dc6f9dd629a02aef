"""Optimizers as pairs of pure functions on trees (optax's contract).

tx = funcrl.optim.adamw(1e-6)
opt_state = tx.init(params)
updates, opt_state = tx.update(grads, opt_state, params)
params = funcrl.optim.apply_updates(params, updates)
"""

from funcrl.optim.base import (
    EmptyState,
    MaskedState,
    SkipNonfiniteState,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    freeze,
    masked,
    skip_nonfinite,
    stateless,
    zero_count,
)
from funcrl.optim.eight_bits import (
    EightBits,
    ScaleByAdam8bitState,
    scale_by_adam_8bit,
)
from funcrl.optim.of_torch import FromTorchState, from_torch
from funcrl.optim.optimizers import (
    ScaleByAdamState,
    ScaleByMuonState,
    TraceState,
    adamw,
    muon,
    newton_schulz,
    scale_by_adam,
    scale_by_muon,
    sgd,
    trace,
)
from funcrl.optim.schedules import (
    ScaleByLearningRateState,
    ScaleByScheduleState,
    constant,
    cosine,
    current_learning_rate,
    linear,
    scale_by_learning_rate,
    warmup,
    with_learning_rate,
)

__all__ = [
    "EightBits",
    "EmptyState",
    "FromTorchState",
    "MaskedState",
    "ScaleByAdam8bitState",
    "ScaleByAdamState",
    "ScaleByLearningRateState",
    "ScaleByMuonState",
    "ScaleByScheduleState",
    "SkipNonfiniteState",
    "TraceState",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "current_learning_rate",
    "freeze",
    "from_torch",
    "linear",
    "masked",
    "muon",
    "newton_schulz",
    "scale_by_adam",
    "scale_by_adam_8bit",
    "scale_by_learning_rate",
    "scale_by_muon",
    "sgd",
    "skip_nonfinite",
    "stateless",
    "trace",
    "warmup",
    "with_learning_rate",
    "zero_count",
]

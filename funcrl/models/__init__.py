"""The network definition, and parameters for it."""

from funcrl.models.config import LARGEST, TransformerConfig
from funcrl.models.initial import (
    RECURRENT_SHAPES,
    SHAPES,
    init_params,
    shape,
    with_critic,
    without_critic,
)
from funcrl.models.layers import (
    MLP,
    Attention,
    GatedDelta,
    Linear,
    Memory,
    Past,
    RecurFn,
    recur_causal,
    recur_segments,
)
from funcrl.models.lora import AdaptedWeight, qlora
from funcrl.models.networks import LogitsFn, logits_fn
from funcrl.models.recurrent import Recurrent, RecurrentConfig, RecurrentState
from funcrl.models.transformer import HeadFn, LayerFn, Transformer
from funcrl.ops.arithmetic import rotary_angles, rotary_factors, rotate

__all__ = [
    "LARGEST",
    "MLP",
    "RECURRENT_SHAPES",
    "SHAPES",
    "AdaptedWeight",
    "Attention",
    "GatedDelta",
    "HeadFn",
    "LayerFn",
    "Linear",
    "LogitsFn",
    "Memory",
    "Past",
    "RecurFn",
    "Recurrent",
    "RecurrentConfig",
    "RecurrentState",
    "Transformer",
    "TransformerConfig",
    "init_params",
    "logits_fn",
    "qlora",
    "recur_causal",
    "recur_segments",
    "rotary_angles",
    "rotary_factors",
    "rotate",
    "shape",
    "with_critic",
    "without_critic",
]

"""The network definition, and parameters for it."""

from funcrl.models.logits import LogitsFn, logits_fn
from funcrl.models.recurrent import Recurrent, RecurrentConfig, RecurrentState
from funcrl.models.shapes import RECURRENT_SHAPES, SHAPES, shape
from funcrl.models.transformer import (
    LARGEST,
    MLP,
    Attention,
    HeadFn,
    Linear,
    Transformer,
    TransformerConfig,
    init_params,
)
from funcrl.ops.rotary import rotary_angles, rotary_factors, rotate

__all__ = [
    "LARGEST",
    "MLP",
    "RECURRENT_SHAPES",
    "SHAPES",
    "Attention",
    "HeadFn",
    "Linear",
    "LogitsFn",
    "Recurrent",
    "RecurrentConfig",
    "RecurrentState",
    "Transformer",
    "TransformerConfig",
    "init_params",
    "logits_fn",
    "rotary_angles",
    "rotary_factors",
    "rotate",
    "shape",
]

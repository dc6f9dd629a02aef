"""The network definition, and parameters for it."""

from funcrl.models.transformer import (
    AttendFn,
    Transformer,
    TransformerConfig,
    attend_causal,
    init_params,
    rotary_angles,
    rotate,
)

__all__ = [
    "AttendFn",
    "Transformer",
    "TransformerConfig",
    "attend_causal",
    "init_params",
    "rotary_angles",
    "rotate",
]

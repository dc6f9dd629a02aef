"""The network definition, and parameters for it."""

from funcrl.models.transformer import (
    Transformer,
    TransformerConfig,
    init_params,
    rotary_angles,
    rotate,
)

__all__ = [
    "Transformer",
    "TransformerConfig",
    "init_params",
    "rotary_angles",
    "rotate",
]

"""Configuration: frozen dataclasses that refuse bad values, and YAML to and from them."""

from funcrl.config.generation import (
    CompileConfig,
    EvalConfig,
    Sampling,
    ServerConfig,
    VLLMCompileConfig,
    VLLMConfig,
)
from funcrl.config.plain import (
    MAY_CHANGE,
    Change,
    changed_options,
    from_plain,
    read_config,
    to_plain,
)
from funcrl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    RanksConfig,
    WarmStartConfig,
)
from funcrl.config.serving import ChatConfig, GenerateConfig, ServeConfig
from funcrl.config.training import PRETRAINED, TrainConfig

__all__ = [
    "MAY_CHANGE",
    "PRETRAINED",
    "AlgorithmConfig",
    "Change",
    "ChatConfig",
    "CheckpointConfig",
    "CompileConfig",
    "EvalConfig",
    "EvaluationConfig",
    "GenerateConfig",
    "LogConfig",
    "LoraConfig",
    "OptimizerConfig",
    "RanksConfig",
    "Sampling",
    "ServeConfig",
    "ServerConfig",
    "TrainConfig",
    "VLLMCompileConfig",
    "VLLMConfig",
    "WarmStartConfig",
    "changed_options",
    "from_plain",
    "read_config",
    "to_plain",
]

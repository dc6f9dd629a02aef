"""funcrl's classes made known to vLLM, in any of its processes: an entry point `general_plugins`.

Every process of a server on this machine loads it, so it imports little and changes nothing for
models that do not ask for funcrl.
"""

from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.transformers_utils.config import register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from funcrl.generators.vllm.settings import architectures, check_version

NAME = "FuncrlForCausalLM"


def register() -> None:
    """Make known how funcrl describes its network, and how parameters get into a server."""
    register_config_parser("funcrl")(Parser)
    register_model_loader("funcrl")(Loader)
    if NAME not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(NAME, f"funcrl.generators.vllm.plugin.unified:{NAME}")
    with suppress(ValueError):  # known already: vLLM may load a plugin several times
        WeightTransferEngineFactory.register_engine(
            "funcrl", "funcrl.generators.vllm.plugin.receiver", "Receiver"
        )


class Parser(ConfigParserBase):
    """The description of a model that is all in the engine's arguments."""

    def parse(self, model: Any, trust_remote_code: bool, *_: Any, **__: Any) -> Any:
        """Return what vLLM takes for the content of a config.json."""
        del model, trust_remote_code
        names = architectures(NAME, check_version())
        basic = {"architectures": names, "model_type": "funcrl"}
        return basic, PretrainedConfig.from_dict(basic)


class Loader(BaseModelLoader):
    """Loads nothing: parameters are pushed."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Do nothing."""

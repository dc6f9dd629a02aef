"""Weights in files: Hugging Face folders and GGUF."""

from funcrl.weights.hub import push_to_hub
from funcrl.weights.hugging_face import from_hugging_face, to_hugging_face
from funcrl.weights.load import find_model, load_config, load_network, load_params
from funcrl.weights.names import Name, translate
from funcrl.weights.save import save_params
from funcrl.weights.sources import find

__all__ = [
    "Name",
    "find",
    "find_model",
    "from_hugging_face",
    "load_config",
    "load_network",
    "load_params",
    "push_to_hub",
    "save_params",
    "to_hugging_face",
    "translate",
]

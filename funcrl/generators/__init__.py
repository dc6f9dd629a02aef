"""Generators: from prompts to samples. One interface, `push`, `generate`, `close`."""

from funcrl.config import Sampling
from funcrl.generators.embedded.draw import draw, draw_tokens, sampling_logprobs
from funcrl.generators.embedded.sampler import Sampler, sample
from funcrl.generators.stops import DecodeFn
from funcrl.generators.vllm.generator import VLLM
from funcrl.generators.vllm.owner import EngineError

__all__ = [
    "VLLM",
    "DecodeFn",
    "EngineError",
    "Sampler",
    "Sampling",
    "draw",
    "draw_tokens",
    "sample",
    "sampling_logprobs",
]

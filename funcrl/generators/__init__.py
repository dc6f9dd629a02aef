"""Generators: from prompts to samples. One interface, `push`, `generate`, `close`."""

from funcrl.config import Sampling
from funcrl.generators.draw import draw, draw_tokens, sampling_logprobs
from funcrl.generators.sampler import Sampler, sample
from funcrl.generators.vllm import VLLM
from funcrl.generators.vllm_owner import EngineError
from funcrl.stops import DecodeFn

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

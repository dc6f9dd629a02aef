"""Generators: from prompts to samples, by one interface: push, generate, score, close."""

from funcrl.config import Sampling
from funcrl.generators.contract import Generator, Scorer, State
from funcrl.generators.draw import draw, draw_tokens, sampling_logprobs
from funcrl.generators.embedded.hugging_face import HuggingFace
from funcrl.generators.embedded.recompute import Recompute
from funcrl.generators.embedded.sampler import Sampler, sample
from funcrl.generators.served_teacher import ServedTeacher
from funcrl.generators.stops import DecodeFn
from funcrl.generators.vllm.failures import EngineError
from funcrl.generators.vllm.generator import VLLM

__all__ = [
    "VLLM",
    "DecodeFn",
    "EngineError",
    "Generator",
    "HuggingFace",
    "Recompute",
    "Sampler",
    "Sampling",
    "Scorer",
    "ServedTeacher",
    "State",
    "draw",
    "draw_tokens",
    "sample",
    "sampling_logprobs",
]

"""Generators: from prompts to samples. One interface, `push`, `generate`, `close`."""

from funcrl.config import Sampling
from funcrl.generators.draw import draw, draw_tokens, sampling_logprobs
from funcrl.generators.sampler import Sampler, sample

__all__ = ["Sampler", "Sampling", "draw", "draw_tokens", "sample", "sampling_logprobs"]

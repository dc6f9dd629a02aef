"""Generators: from prompts to samples. One interface, `push`, `generate`, `close`."""

from funcrl.config import Sampling
from funcrl.generators.draw import draw, sampling_logprobs
from funcrl.generators.sampler import Sampler, sample

__all__ = ["Sampler", "Sampling", "draw", "sample", "sampling_logprobs"]

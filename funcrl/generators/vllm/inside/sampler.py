"""Exact numerics in vLLM's second runner, which gives no log-probabilities but its own kernel's."""

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class ExactState(DefaultModelState):
    """What that runner asks a model for a sampler."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        """Return vLLM's sampler, which then reports what it was given."""
        return GivenLogprobs(sampler, self.model_config.get_vocab_size()), None


class GivenLogprobs:
    """A sampler whose log-probabilities are the numbers that it draws from, to the last bit.

    Args:
        sampler: vLLM's, which draws.
        vocab_size: V; more columns than that are of no token.
    """

    def __init__(self, sampler: Any, vocab_size: int) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logprobs: Tensor, *args: Any, **kw: Any) -> Any:
        """Return vLLM's output of the log-probabilities [n, V], and these of the tokens."""
        logprobs = logprobs[:, : self._vocab_size]
        output = self._sampler(logprobs, *args, **kw)
        found = output.logprobs_tensors
        if found is not None:
            given = logprobs.gather(-1, found.logprob_token_ids.long())
            output.logprobs_tensors = found._replace(logprobs=given)
        return output

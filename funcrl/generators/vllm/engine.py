"""vLLM's engine in this process, asked for what funcrl asks of a generator."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from funcrl.config import Sampling
from funcrl.generators.embedded.slots import sample_seeds
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.generators.vllm.core import Core
from funcrl.generators.vllm.finished import Spoken, finite, spoken
from funcrl.generators.vllm.settings import sample_fields


class Engine(Core):
    """vLLM's engine, asked for samples of prompts and for their log-probabilities."""

    def speak(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int,
        decode: DecodeFn | None,
    ) -> list[Spoken]:  # fmt: skip
        """Return every sample, group-major.

        A sample enters only when the cache has room for the longest that it can become: nothing is
        evicted and computed again, which with seeds would crash on a CPU, and cost time elsewhere.
        """
        seeds = sample_seeds(prompts, sampling.num_samples, seed)
        waiting, finished = deque(range(len(seeds))), dict[int, Spoken]()
        held = dict[int, int]()  # blocks of the samples under way
        with self._nothing_left(held):
            self._draw(prompts, sampling, seeds, waiting, held, finished, decode)
        return [finished[row] for row in range(len(seeds))]

    def _draw(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: list[int],
        waiting: deque[int], held: dict[int, int], finished: dict[int, Spoken],
        decode: DecodeFn | None,
    ) -> None:  # fmt: skip
        while waiting or held:
            while waiting:
                row, prompt = waiting[0], prompts[waiting[0] // sampling.num_samples]
                longest = min(len(prompt) + sampling.max_tokens, self._context)
                needed = -(-longest // self._block)
                if sum(held.values()) + needed > self._blocks:
                    break
                asked = _request(sampling, seeds[row], longest - len(prompt))
                held[waiting.popleft()] = needed  # first: what is held is taken out after an error
                self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, asked)
            for output in self._step():
                row, said = int(output.request_id), _spoken(output.outputs[0])
                stopped = has_stop_string(said.tokens, sampling, decode)
                if stopped and not output.finished:
                    self._llm.abort_request([output.request_id])
                if stopped or output.finished:
                    finished[row] = said._replace(finish_reason="stop") if stopped else said
                    del held[row]

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens from the second on."""
        asked = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        scores: dict[int, list[float]] = {}
        with self._nothing_left(range(len(prompts))):
            for row, prompt in enumerate(prompts):
                self._llm.add_request(str(row), {"prompt_token_ids": list(prompt)}, asked)
            while len(scores) < len(prompts):
                for output in self._step():
                    row = int(output.request_id)
                    pairs = zip(output.prompt_logprobs[1:], prompts[row][1:], strict=True)
                    scores[row] = finite([each[token].logprob for each, token in pairs])
        return [scores[row] for row in range(len(prompts))]


def _request(sampling: Sampling, seed: int, most: int) -> Any:
    """Return vLLM's description of one sample of at most so many tokens."""
    # Stop strings are looked for here, after each token: the engine has no tokenizer.
    kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
    fields = sample_fields(sampling, seed, most)
    return SamplingParams(**fields, detokenize=False, output_kind=kind)


def _spoken(output: Any) -> Spoken:
    tokens = list(output.token_ids)
    pairs = zip(output.logprobs, tokens, strict=True)
    return spoken(tokens, [each[token].logprob for each, token in pairs], output.finish_reason)

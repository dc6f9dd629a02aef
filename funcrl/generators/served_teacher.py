"""A teacher behind an address: a server on another GPU, or on another machine."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from funcrl.core.arguments import Count, checked
from funcrl.core.files import brief
from funcrl.core.http import ask
from funcrl.generators.contract import Prompts


class ServedTeacher:
    """A model that `vllm serve` or `funcrl serve` has, as a teacher of `funcrl.train`.

    It scores the tokens that the policy has drawn: `--algorithm.divergence sampled`.

    Args:
        address: of the server, such as http://localhost:8000.
        model: its name there.
        key: that the server asks for.
        at_once: samples that it scores at a time.
        attempts: how often a request is sent, with longer waits between, before it is an error.

    Example:
        >>> import funcrl
        >>> teacher = funcrl.ServedTeacher("http://localhost:8000", "Qwen/Qwen3-8B")
        >>> config = funcrl.config.AlgorithmConfig(name="distill", divergence="sampled")
        >>> parts = funcrl.build(funcrl.config.TrainConfig(algorithm=config), teacher=teacher)
        >>> parts.teacher
        ServedTeacher('http://localhost:8000', 'Qwen/Qwen3-8B')
    """

    @checked
    def __init__(
        self, address: str, model: str, *, key: str = "", at_once: Count = 32, attempts: Count = 4
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(
                f"ServedTeacher expects an address that begins with http:// or https://, got "
                f"{address!r}."
            )
        self.address, self.model = address.rstrip("/").removesuffix("/v1"), model
        self._key, self._at_once, self._attempts = key, at_once, attempts

    def __repr__(self) -> str:
        return f"ServedTeacher({self.address!r}, {self.model!r})"

    @checked
    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens, from the second on."""
        with ThreadPoolExecutor(self._at_once) as pool:
            answers = [pool.submit(self._score, prompt) for prompt in prompts]
            try:
                return [answer.result() for answer in answers]
            finally:
                for answer in answers:
                    answer.cancel()  # after an error: ask for no more

    @checked
    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without any before or after it."""
        answer = self._ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token) for token in answer["tokens"]]

    def _score(self, prompt: Sequence[int]) -> list[float]:
        fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._ask("/v1/completions", {"prompt": [*prompt], **fields})
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, prompt[1:], strict=True)
            found = [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (LookupError, TypeError, ValueError) as error:
            raise ConnectionError(
                f"ServedTeacher expects prompt_logprobs of {len(prompt)} tokens from "
                f"{self.address}, as vllm serve and funcrl serve return them, got "
                f"{brief(json.dumps(answer))}."
            ) from error
        if not all(map(math.isfinite, found)):
            raise FloatingPointError(
                f"ServedTeacher expects finite log-probabilities from {self.address}, got "
                f"{next(each for each in found if not math.isfinite(each))}."
            )
        return found

    def _ask(self, path: str, fields: dict[str, Any]) -> Any:
        content = json.dumps({"model": self.model, **fields}).encode()
        return ask("ServedTeacher", self.address + path, content, self._key, self._attempts)

"""Rewards that a model gives: one of transformers in this process, or a judge behind an address."""

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from funcrl.core import checks
from funcrl.core.arguments import Count, FinitePositive, checked
from funcrl.core.files import brief
from funcrl.core.http import ask
from funcrl.tasks.contracts import Prompt
from funcrl.weights.hub import no_progress_bar
from funcrl.weights.sources import find

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@checked
def reward_model(
    name: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    batch_size: Count = 16,
) -> Callable[..., list[float]]:
    """Return a reward function: the score of a sequence classifier of transformers, as in TRL.

    It reads the prompt and the completion as one text, or as a conversation in its own chat
    template, if it has one.

    Args:
        name: a folder, pypi:PACKAGE or a hub's ORG/NAME, of a model with one label.
        device: to run on.
        dtype: to compute in.
        batch_size: texts scored at a time.

    Example:
        >>> from funcrl.tasks import reward_model
        >>> reward_model("no/such/model/here")
        Traceback (most recent call last):
        FileNotFoundError: find expects a path, pypi:PACKAGE or a hub id ORG/NAME, got \
'no/such/model/here'.
    """
    transformers = checks.import_extra(
        "reward_model", "transformers", f"for {name}", "'funcrl[models]'"
    )
    place = find(str(name))
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with no_progress_bar():
            model, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
                place, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place, padding_side="right", **options
            )
    except Exception as error:
        raise ValueError(
            f"reward_model expects a sequence classifier of transformers in {place}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if model.config.num_labels != 1 or loaded["missing_keys"]:
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        got = f"no weights for {missing}" if missing else f"{model.config.num_labels} labels"
        raise ValueError(f"reward_model expects a trained head of one label in {place}, got {got}.")
    model = model.eval().to(device)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id  # by which it finds each text's last token

    def scores(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        texts = [_as_text(tokenizer, *pair) for pair in zip(prompts, completions, strict=True)]
        # A template writes the special tokens itself.
        plain = tokenizer.chat_template is None
        found: list[float] = []
        for start in range(0, len(texts), batch_size):
            rows = tokenizer(
                texts[start : start + batch_size], return_tensors="pt", padding=True,
                add_special_tokens=plain,
            ).to(device)  # fmt: skip
            with torch.inference_mode():
                found += model(**rows).logits[:, 0].float().tolist()
        return found

    return scores


def _as_text(tokenizer: Any, prompt: Any, completion: Any) -> str:
    """Return what a reward model reads of a prompt and a completion, texts or messages."""
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return prompt + str(completion)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    is_text = isinstance(completion, str)
    after = [{"role": "assistant", "content": completion}] if is_text else list(completion)
    if tokenizer.chat_template is None:
        return "".join(each["content"] for each in [*before, *after])
    return str(tokenizer.apply_chat_template([*before, *after], tokenize=False))


@checked
def ask_judge(
    address: str,
    model: str,
    question: str,
    *,
    key: str = "",
    best: FinitePositive = 10.0,
    attempts: Count = 4,
    cache: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Prompt, str], Awaitable[float]]:
    """Return a reward function that asks a model behind an OpenAI-compatible address for a number.

    The reward is the last number in its answer divided by `best`, between 0 and 1. How many are
    asked at a time, and how long one may take, say `--reward-concurrency` and `--reward-timeout`.

    Args:
        address: of the service, such as http://localhost:8000/v1.
        model: its name there.
        question: the user's message, with {prompt}, {completion} and {answer} in place of these;
            it should ask for a number at the end.
        key: of the service.
        best: the number of the best completion.
        attempts: how often a request is sent, with longer waits between, before it is an error.
        cache: a file that keeps answers, so that a run that is resumed does not ask again.
        options: further fields of each request; the temperature is 0 unless they have it.

    Example:
        >>> from funcrl.tasks import ask_judge
        >>> polite = ask_judge(
        ...     "http://localhost:8000/v1", "judge",
        ...     "How polite is this, from 0 to 10? {completion}", cache="answers.jsonl")
        >>> polite.__name__
        'judge'
    """
    url = f"{address.rstrip('/')}/chat/completions"
    kept = _Cache(None if cache is None else Path(cache))

    async def judge(prompt: Prompt, completion: str) -> float:
        texts = {"prompt": prompt.text, "completion": str(completion), "answer": prompt.answer}
        # In one pass: what a completion says is no place for another text.
        content = re.sub(r"\{(prompt|completion|answer)\}", lambda found: texts[found[1]], question)
        message = {"role": "user", "content": content}
        body = {"model": model, "messages": [message], "temperature": 0.0, **(options or {})}
        sent = json.dumps(body, sort_keys=True).encode()
        name = hashlib.sha256(url.encode() + sent).hexdigest()
        if name not in kept.answers:
            answer = await asyncio.to_thread(ask, "ask_judge", url, sent, key, attempts)
            kept.add(name, _text(answer))
        return _score(kept.answers[name], best)

    return judge


def _score(answer: str, best: float) -> float:
    found = _NUMBER.findall(re.sub(rf"/\s*{best:g}\b", "", answer))  # of 7/10 the 7
    if not found:
        raise ValueError(f"ask_judge expects an answer with a number, got {brief(answer)}.")
    return min(max(float(found[-1]) / best, 0.0), 1.0)


def _text(answer: Any) -> str:
    """Return what the first choice of an answer says."""
    try:
        return str(answer["choices"][0]["message"]["content"])
    except (LookupError, TypeError) as error:
        raise ConnectionError(
            f"ask_judge expects an answer with choices, got {type(error).__name__}: {error} in "
            f"{brief(str(answer))}."
        ) from error


class _Cache:
    """Answers by the requests that they are to, in a file too if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.answers: dict[str, str] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):  # one that was cut off is asked again
                    kept = json.loads(line)
                    self.answers[kept["request"]] = kept["answer"]

    def add(self, request: str, answer: str) -> None:
        """Keep an answer."""
        self.answers[request] = answer
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"request": request, "answer": answer}) + "\n")

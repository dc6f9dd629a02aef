"""Prompts as every generator takes them: checked, and with a seed for each sample."""

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import checks, rng
from funcrl.generators.stops import DecodeFn

Prompts: TypeAlias = Sequence[Sequence[int]]  # the tokens of each
Hash: TypeAlias = hashlib.blake2b


def check_prompts(
    prompts: Prompts,
    sampling: Sampling,
    vocab_size: int | None,
    decode: DecodeFn | None,
    context_length: int,
) -> None:
    """Raise if a generator cannot complete these prompts.

    Args:
        prompts: N lists of tokens.
        sampling: how to draw.
        vocab_size: tokens are below it, where it is known.
        decode: from tokens to text.
        context_length: tokens of a prompt and its completion, at most.
    """
    if len(prompts) == 0:
        raise ValueError("generate expects at least one prompt, got none.")
    if sampling.stop and decode is None:
        raise ValueError(
            f"generate expects a decode function for stop strings, got stop={sampling.stop} and no "
            f"decode; make the generator with decode=tokenizer.decode."
        )
    above = math.inf if vocab_size is None else vocab_size
    if len(set(sampling.stop_tokens)) >= above:
        raise ValueError("generate expects a token that is not a stop token, got none.")
    for token in sampling.stop_tokens:
        checks.check_range("generate", "stop_tokens", token, 0, above - 1)
    for index, prompt in enumerate(prompts):
        _check_tokens(index, prompt)
        if not 0 < len(prompt) < context_length:
            raise ValueError(
                f"generate expects prompts of 1 to {context_length - 1} tokens, fewer than "
                f"the generator's context_length, got {len(prompt)} in prompt {index}."
            )
        # Of the different tokens first: the contexts of long episodes repeat few, each turn anew.
        if any(not 0 <= token < above for token in {*prompt}):
            wrong = next(token for token in prompt if not 0 <= token < above)
            raise ValueError(
                f"generate expects tokens from 0 on, below vocab_size={vocab_size}, got "
                f"{wrong} in prompt {index}."
            )


def _check_tokens(index: int, prompt: Any) -> None:
    """Raise unless a prompt is a sequence of integers."""
    if isinstance(prompt, str | bytes) or not hasattr(prompt, "__len__"):
        got = "a text, which tokenizer.encode turns into tokens"
        got = got if isinstance(prompt, str | bytes) else type(prompt).__name__
        raise TypeError(f"generate expects lists of tokens, got {got}, as prompt {index}.")
    # Of the different ones: the contexts of long episodes repeat few, each turn anew.
    for token in {*prompt}:
        if type(token) is not int and not _is_integer(token):
            raise TypeError(
                f"generate expects tokens that are integers, got {token!r} in prompt {index}."
            )


def _is_integer(token: Any) -> bool:
    try:
        operator.index(token)
    except TypeError:
        return False
    return True


def sample_seeds(prompts: Prompts, num_samples: int, seed: int) -> list[int]:
    """Return the seed of each sample, group-major: of the prompt's tokens, not of its place.

    The k-th copy of a prompt goes on where the one before ended, so that copies differ.
    """
    return seeds_of([hashed(prompt) for prompt in prompts], num_samples, seed)


def hashed(tokens: Sequence[int], before: Hash | None = None) -> Hash:
    """Return the hash of a sequence's tokens, of which some may have been hashed before."""
    content = ",".join(str(operator.index(token)) for token in tokens).encode()
    if before is None:
        return hashlib.blake2b(content, digest_size=8)
    found = before.copy()
    if content:
        found.update(b"," + content)
    return found


def seeds_of(hashes: Sequence[Hash], num_samples: int, seed: int) -> list[int]:
    """Return what `sample_seeds` does, of the hashes of the prompts."""
    seen: Counter[bytes] = Counter()
    seeds = []
    for each in hashes:
        content = each.digest()
        first = seen[content] * num_samples
        seen[content] += 1
        digest = int.from_bytes(content)
        seeds += [rng.fold_in(seed, digest, first + number) for number in range(num_samples)]
    return seeds


def pad_prompts(prompts: Prompts, width: int) -> list[list[int]]:
    """Return the prompts padded on the right with a token of their own.

    Another token's keys must not touch a prompt, not even hidden: 0 times infinity is not 0.

    Args:
        prompts: lists of tokens.
        width: the length of each row.
    """
    return [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]


def padded_prompts(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [n, P], padded as `pad_prompts` does, and the length of each [n]."""
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor(pad_prompts(prompts, max(lengths)), device=device)
    return padded, torch.tensor(lengths, device=device)

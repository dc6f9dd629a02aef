"""The files by which transformers reads a tokenizer; made without transformers."""

import json
from collections.abc import Mapping
from typing import Any

from funcrl.tasks.contracts import Tokenizer, end_tokens

_GENERATION = "generation_config.json"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, and the one that says what ends a completion.

    A tokenizer that has no files of its own (`Tokenizer.files`) has that one alone.

    Args:
        tokenizer: of a task.
    """
    ends = list(dict.fromkeys([*end_tokens(tokenizer), *tokenizer.ends]))
    ids = {
        "bos_token_id": None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ends[0] if ends else None,
    }
    return {_GENERATION: _encoded(ids), **tokenizer.files()}


def character_files(tokens: Mapping[str, int], end: int) -> dict[str, bytes]:
    """Return the files of a tokenizer with a token for each character; others are an error there.

    Args:
        tokens: character -> token.
        end: the token that ends a completion.
    """
    if any("\ud800" <= char <= "\udfff" for char in tokens):
        return {}  # lone surrogates, which are no text
    text = _end_text(tokens)
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    # What is in no vocabulary cannot stand for an unknown character, which is an error so.
    model = {"type": "WordLevel", "vocab": {text: end, **tokens}, "unk_token": f"{text}?"}
    return _files(text, end, {**split, "invert": False}, {"type": "Fuse"}, model)


def byte_files(end: int) -> dict[str, bytes]:
    """Return the files of a tokenizer with a token for each byte of UTF-8, its number.

    Args:
        end: the token that ends a completion, 256 or above.
    """
    text = _end_text({})
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    plain |= {"trim_offsets": False}
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {**vocab, text: end}, "merges": [],
    }  # fmt: skip
    return _files(text, end, plain, plain, model)


def _end_text(tokens: Mapping[str, int]) -> str:
    """Return what stands for the end, with a character that no text of the alphabet has."""
    marks = (char for char in "|#~\N{SYMBOL FOR END OF TEXT}" if char not in tokens)
    mark = next(marks, "|")
    return f"<{mark}end{mark}>"


def _files(
    text: str, end: int, split: Mapping[str, Any], decoder: Mapping[str, Any], model: Any
) -> dict[str, bytes]:
    token = {"id": end, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
    # The end token has no text, as in `Tokenizer.decode`.
    silent = {"type": "Replace", "pattern": {"String": text}, "content": ""}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [silent, decoder]},
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text,
        "pad_token": text,
        "clean_up_tokenization_spaces": False,
        # A prompt that spells the end token out does not hold it.
        "split_special_tokens": True,
    }
    return {"tokenizer.json": _encoded(whole), "tokenizer_config.json": _encoded(settings)}


def _byte_characters() -> list[str]:
    """Return the character by which a byte-level tokenizer of transformers writes each byte.

    A byte that Latin-1 prints is itself; the others follow from U+0100 on, in their order.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _encoded(values: Any) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()

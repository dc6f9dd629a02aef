"""Tokenizers: of characters, of texts with special tokens, and of files for transformers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from funcrl.core import checks
from funcrl.tasks.contracts import Tokenizer, all_ends


class CharTokenizer(Tokenizer):
    """A tokenizer with one token for each character of an alphabet; token 0 ends a completion.

    Args:
        alphabet: every character that may occur, each once.

    Example:
        >>> import funcrl
        >>> tokenizer = funcrl.tasks.CharTokenizer("ab ")
        >>> tokenizer.encode("ba"), tokenizer.decode([2, 1, 0]), tokenizer.vocab_size
        ([2, 1], 'ba', 4)
    """

    end: int = 0

    def __init__(self, alphabet: str) -> None:
        checks.check_count("CharTokenizer", "the alphabet's length", len(alphabet))
        twice = [char for char in alphabet if alphabet.count(char) > 1]
        if twice:
            raise ValueError(f"CharTokenizer expects each character once, got {twice[0]!r} twice.")
        self.vocab_size = len(alphabet) + 1
        self._tokens = {char: index for index, char in enumerate(alphabet, start=1)}
        self._chars = ["", *alphabet]

    def encode(self, text: str) -> list[int]:
        """Return one token for each character."""
        unknown = [char for char in text if char not in self._tokens]
        if unknown:
            raise ValueError(
                f"CharTokenizer.encode expects characters of {''.join(self._chars)!r}, "
                f"got {unknown[0]!r} in {text!r}."
            )
        return [self._tokens[char] for char in text]

    def decode(self, tokens: list[int]) -> str:
        """Return the characters; the end token has none."""
        return "".join(self._chars[token] for token in tokens)

    def files(self) -> dict[str, bytes]:
        """Return the files by which transformers reads this tokenizer; see `Tokenizer.files`."""
        return character_files(self._tokens, self.end)


class WordTokenizer(Tokenizer):
    """A tokenizer with one token for each word of a list; token 0 ends a completion.

    A text is words, each followed by a space.

    Args:
        words: every word that may occur, each once, none with a space.

    Example:
        >>> import funcrl
        >>> tokenizer = funcrl.tasks.WordTokenizer(["left", "right"])
        >>> tokenizer.encode("right left "), tokenizer.decode([2, 1, 0]), tokenizer.vocab_size
        ([2, 1], 'right left ', 3)
    """

    end: int = 0

    def __init__(self, words: Sequence[str]) -> None:
        checks.check_count("WordTokenizer", "the number of words", len(words))
        wrong = [word for word in words if words.count(word) > 1 or word.split() != [word]]
        if wrong:
            raise ValueError(
                f"WordTokenizer expects words without spaces, each once, got {wrong[0]!r}."
            )
        self.vocab_size = len(words) + 1
        self._tokens = {word: index for index, word in enumerate(words, start=1)}
        self._texts = ["", *(f"{word} " for word in words)]

    def encode(self, text: str) -> list[int]:
        """Return one token for each word."""
        words = text.split()
        unknown = [word for word in words if word not in self._tokens]
        if unknown:
            raise ValueError(
                f"WordTokenizer.encode expects its {len(self._tokens)} words, got {unknown[0]!r} "
                f"in {text!r}."
            )
        return [self._tokens[word] for word in words]

    def decode(self, tokens: list[int]) -> str:
        """Return the words; the end token has none."""
        return "".join(self._texts[token] for token in tokens)


class ByteTokenizer(Tokenizer):
    """A tokenizer with one token for each byte of UTF-8; token 256 ends a completion.

    It encodes any text. What is drawn need not be UTF-8: a wrong byte is decoded as U+FFFD.

    Example:
        >>> import funcrl
        >>> tokenizer = funcrl.tasks.ByteTokenizer()
        >>> tokenizer.encode("aé"), tokenizer.decode([97, 195, 169, 256, 255])
        ([97, 195, 169], 'aé\ufffd')
        >>> tokenizer.vocab_size, tokenizer.end
        (257, 256)
    """

    vocab_size = 257
    end: int = 256

    def encode(self, text: str) -> list[int]:
        """Return one token for each byte."""
        # A lone surrogate is no UTF-8, but may be in a file of JSON.
        return list(text.encode("utf-8", "replace"))

    def decode(self, tokens: list[int]) -> str:
        """Return the text of the bytes; the end token has none."""
        return bytes(token for token in tokens if token != self.end).decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        """Return the files by which transformers reads this tokenizer; see `Tokenizer.files`."""
        return byte_files(self.end)


_GENERATION = "generation_config.json"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, and the one that says what ends a completion.

    A tokenizer that has no files of its own (`Tokenizer.files`) has that one alone.
    """
    ends = all_ends(tokenizer)
    ids = {
        "bos_token_id": None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ends[0] if ends else None,
    }
    return {_GENERATION: _encoded(ids), **tokenizer.files()}


def character_files(tokens: Mapping[str, int], end: int) -> dict[str, bytes]:
    """Return the files of a tokenizer with a token for each character; it refuses others."""
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

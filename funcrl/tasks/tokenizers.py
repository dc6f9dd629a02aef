"""Tokenizers that need no file."""

from collections.abc import Sequence

from funcrl.core import checks
from funcrl.tasks.contracts import Tokenizer
from funcrl.tasks.tokenizer_files import byte_files, character_files


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

"""The tokenizer that is saved beside weights."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrl.core import checks
from funcrl.core.files import brief, read_json
from funcrl.weights.gguf import read_gguf, read_metadata
from funcrl.weights.load import base_of, find_model

GENERATION = "generation_config.json"
_LONGEST_JSON = 1 << 20  # of a model's description, in bytes
FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", GENERATION,
)  # fmt: skip
_VOCABULARIES = FILES[:3]  # one of these is in every folder with a tokenizer
NO_TOKENIZER = (
    "{} expects the tokenizer of a model in {}, got none; `funcrl train --tokenizer` names another "
    "folder or file."
)

# How text is split before merging, by the name that a GGUF file gives: as llama.cpp does it.
# Transformers reads some of these names, and splits like gpt-2 where it knows none.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "smollm": (r"\p{N}", _GPT2),
}


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer by name, made by transformers from a GGUF file."""
    if has_tokenizer(source):
        return {name: (source / name).read_bytes() for name in FILES if (source / name).exists()}
    model = find_model(source)
    if has_tokenizer(model):
        return tokenizer_files(model)
    if model.suffix != ".gguf" or not model.is_file():
        raise FileNotFoundError(
            f"save_params expects a tokenizer in {source}, one of {', '.join(_VOCABULARIES)} or a "
            f".gguf file, got none."
        )
    made = gguf_tokenizer("save_params", model)
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        return tokenizer_files(Path(folder))


def gguf_tokenizer(caller: str, path: Path) -> Any:
    """Return the tokenizer of a GGUF file, as transformers' that splits text as the file says."""
    metadata = read_metadata(path)
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):  # as llama.cpp says it
        raise ValueError(NO_TOKENIZER.format(caller, path))
    why, install = f"for the tokenizer in {path}", "transformers gguf"
    transformers = checks.import_extra(caller, "transformers", why, install)
    # The file says everything; `AutoTokenizer` takes seconds to find a class of the same tokens.
    load = transformers.PreTrainedTokenizerFast.from_pretrained
    tokenizer = load(path.parent, gguf_file=path.name)
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return tokenizer  # sentencepiece splits nothing
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in tuple(_SPLITS):  # a list is none, and has no hash
        raise ValueError(
            f"{caller} expects tokenizer.ggml.pre to be one of {', '.join(_SPLITS)}, got "
            f"{brief(name)} in {path}; the model's Hugging Face folder has its tokenizer whole."
        )
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in _SPLITS[name]]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def special_tokens(source: Path | None, ends: Sequence[int]) -> dict[str, Any]:
    """Return what a config.json says of the tokens that begin, end and fill a text; null for none.

    Without it, transformers ends a text at token 2, whatever that is.

    Args:
        source: a folder with a tokenizer, whose model's files say it; None if there is none.
        ends: what ends a text, besides what the folder says.
    """
    pad = ends[0] if ends else None
    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": [], "pad_token_id": pad}
    for name in ("config.json", GENERATION):
        if source is not None and (source / name).is_file():
            found_there = read_json("save_params", source / name, _LONGEST_JSON)
            found |= {key: found_there[key] for key in found if _is_tokens(found_there.get(key))}
    of_folder = found["eos_token_id"]
    of_folder = of_folder if isinstance(of_folder, list) else [of_folder]
    all_ends = list(dict.fromkeys([*ends, *of_folder]))
    return found | {"eos_token_id": all_ends[0] if len(all_ends) == 1 else all_ends or None}


def _is_tokens(value: Any) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return bool(tokens) and all(type(token) is int for token in tokens)


def tokenizer_metadata(source: Path, vocab_size: int) -> list[bytes]:
    """Return a GGUF file's metadata of its tokenizer, as they are in the file.

    `source` is the file or a folder with one, and `vocab_size` that of the model to be written.
    """
    found = list(source.rglob("*.gguf")) if source.is_dir() else [source]
    if len(found) != 1 or found[0].suffix != ".gguf":
        raise ValueError(
            f"save_params expects the tokenizer of a .gguf file for a .gguf file, got {source}; "
            f"llama.cpp's convert_hf_to_gguf.py converts a folder with its tokenizer."
        )
    model, gguf = found[0], read_gguf(found[0])
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) != vocab_size:
        there = len(tokens) if isinstance(tokens, list) else brief(tokens)
        raise ValueError(
            f"save_params expects a tokenizer of {vocab_size} tokens, got {there} in {model}."
        )
    with model.open("rb") as file:
        raw = file.read(max(end for _, end in gguf.spans.values()))
    return [raw[slice(*span)] for name, span in gguf.spans.items() if name.startswith("tokenizer.")]


def tokenizer_home(model: Path) -> Path:
    """Return where the tokenizer of a model is: of adapters without one, beside their base."""
    return model if has_tokenizer(model) else base_of(model)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).exists() for name in _VOCABULARIES)

"""Models of a hub: downloads them, saying how much and where to, and uploads them."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.printing import print_safely

# Of a model; weights in other formats, or a second time in the maker's own layout, are left.
_WANTED = ("*.json", "*.safetensors", "*.jsonl", "*.parquet", "*.txt", "*.model", "*.jinja")
_SECOND = ("consolidated*", "original/*")


def download(name: str, file: str = "") -> Path:
    """Return the folder of a model, or one file of it: some have dozens of GGUF files.

    A line on standard error says what is fetched; bars show how far it is.
    """
    hub = _hub("find", f"for {name!r}, which is no local path")
    chosen: dict[str, Any] = {
        "allow_patterns": [file] if file else list(_WANTED),
        "ignore_patterns": None if file else list(_SECOND),
    }
    silent = {"tqdm_class": _silent()}
    options: dict[str, Any] = silent
    try:
        planned = hub.snapshot_download(name, dry_run=True, **chosen, **silent)
        missing = [each.file_size for each in planned if each.will_download]
        # A bar is of use where something is fetched; elsewhere the hub need not be asked again.
        options = {} if missing else {"local_files_only": True, **silent}
    except Exception:  # where the hub cannot be reached, what was fetched before will do
        missing = []
    if missing:
        place = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
        print_safely(
            f"Downloading {name}: {_size(missing)} in {len(missing)} files, to {place}.", sys.stderr
        )
    try:
        return Path(hub.snapshot_download(name, **chosen, **options)) / file
    except Exception as error:  # of many kinds: of the network, the hub, the disk
        reason = " ".join(str(error).split())[:300]
        raise OSError(
            f"find expects a path, pypi:PACKAGE or a hub id that can be reached, got {name!r}: "
            f"{reason} Without a network, the model's folder is a --model too."
        ) from error


def _silent() -> type[Any]:
    """Return a progress bar that is not drawn."""
    bar: Any = importlib.import_module("tqdm.auto").tqdm

    def start(self: Any, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # of a group of bars, which is the hub's own
        bar.__init__(self, *args, **{**options, "disable": True})

    return type("Silent", (bar,), {"__init__": start})


def _size(sizes: Sequence[int]) -> str:
    total = sum(sizes)
    unit, name = next(
        each
        for each in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
        if total >= each[0] or each[0] == 1e3
    )
    return f"{total / unit:.1f} {name}"


@checked
def push_to_hub(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Upload the files of a folder as a model of the hub, and return its address.

    The account is that of `hf auth login`, or of the token in the environment's HF_TOKEN.

    Args:
        folder: such as one that `funcrl.save_params` or `funcrl.export` has written.
        name: ORG/NAME; it is made if there is none.
        private: make it one that nobody else sees.

    Example:
        >>> from funcrl.weights import push_to_hub
        >>> push_to_hub("no/such/folder", "me/model")
        Traceback (most recent call last):
        FileNotFoundError: push_to_hub expects the folder of a model, got no/such/folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"push_to_hub expects the folder of a model, got {folder}.")
    check_name(name)
    hub = _hub("push_to_hub", f"for {name!r}")
    try:
        address = str(hub.HfApi().create_repo(name, private=private, exist_ok=True))
        hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload of funcrl"
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise OSError(
            f"push_to_hub expects a hub that can be reached and an account that may write "
            f"{name!r} (hf auth login), got: {reason}"
        ) from error
    return address


def check_name(name: str) -> None:
    """Raise unless a name is one of the hub's."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"push_to_hub expects the name of a model, ORG/NAME, got {name!r}.")


def _hub(function: str, why: str) -> Any:
    return checks.import_extra(function, "huggingface_hub", why, "huggingface_hub")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Silence transformers' bars over a load from a local disk, or a save to it."""
    logging = importlib.import_module("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

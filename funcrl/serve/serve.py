"""`funcrl serve`: a model behind an address of this machine, until it is interrupted."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from funcrl.config import ServeConfig
from funcrl.loop.from_config import embedded
from funcrl.serve.http import listening
from funcrl.serve.jobs import SharedGenerator
from funcrl.serve.openai import OpenAI, error_fields
from funcrl.serve.served import load_served

Note = Callable[[str], None]


@contextmanager
def serving(config: ServeConfig, note: Note, trust: bool = False) -> Iterator[str]:
    """Serve a model until the block ends; the value is the server's address.

    Args:
        config: which model, and where.
        note: is called with lines about what is served, and about the code that is run.
        trust: run the code that a run's folder names, even if this account has not run it before.
    """
    if config.model is None:
        raise ValueError("serve expects --model, the folder of a run or weights, got none.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    served = load_served("serve", config.model, config.device, trust, note)
    key = config.key or f"tml-{secrets.token_hex(16)}"
    dtype = getattr(torch, config.dtype)
    generator = embedded(served.model)(
        served.model, decode=served.tokenizer.decode, slots=config.slots, dtype=dtype
    )
    shared = SharedGenerator(generator)
    routes, without = dict(OpenAI(served, shared).routes()), ""
    try:
        from funcrl.serve.tinker import Tinker  # needs the package of that name

        tinker = Tinker(served, shared, config.folder, config.microbatch, dtype)
        routes |= tinker.routes()
    except ImportError:
        without = "; for Tinker's routes, pip install 'funcrl[tinker]'"
    listens = listening(routes, _error_fields, config.host, config.port, key)
    with closing(shared), listens as server:
        address = f"http://{config.host}:{server.server_address[1]}"
        note(f"{config.model} at {address}, key {key}{without}")
        yield address


def _error_fields(path: str, message: str) -> dict[str, Any]:
    """Return an error as the clients of a path read it: Tinker's, or OpenAI's."""
    if path.startswith("/api/"):
        return {"error": message, "detail": message}
    return error_fields(message)


def serve(config: ServeConfig, note: Note, trust: bool = False) -> None:
    """Serve a model until the process is interrupted."""
    with serving(config, note, trust):
        threading.Event().wait()

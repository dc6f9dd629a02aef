"""`funcrl serve`: a model behind an address of this machine, until it is interrupted."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from funcrl.config import ServeConfig
from funcrl.loop.from_config import embedded
from funcrl.serve.http import listening
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
    try:
        from funcrl.serve.tinker import Tinker, error_fields  # needs the package of that name
    except ImportError as error:
        raise ImportError(
            f"serve expects the package tinker, whose messages it reads: pip install "
            f"'funcrl[tinker]' ({error})."
        ) from error
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    served = load_served("serve", config.model, config.device, trust, note)
    key = config.key or f"tml-{secrets.token_hex(16)}"
    dtype = getattr(torch, config.dtype)
    generator = embedded(served.model)(
        served.model, decode=served.tokenizer.decode, slots=config.slots, dtype=dtype
    )
    service = Tinker(served, generator, config.folder, config.microbatch, dtype)
    listens = listening(service.routes(), error_fields, config.host, config.port, key)
    with closing(generator), closing(service), listens as server:
        address = f"http://{config.host}:{server.server_address[1]}"
        note(f"{config.model} at {address}, key {key}")
        yield address


def serve(config: ServeConfig, note: Note, trust: bool = False) -> None:
    """Serve a model until the process is interrupted."""
    with serving(config, note, trust):
        threading.Event().wait()

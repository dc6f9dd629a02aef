"""The implementations of exact operations, of a CPU or of a GPU, by the names of the operations."""

import importlib
import pkgutil
from types import SimpleNamespace


def implementations(package: str) -> SimpleNamespace:
    """What `funcrl.ops.exact` or `funcrl.ops.exact.cuda` computes `NAME_impl` with, as `NAME`."""
    found = {}
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not file.ispkg:
            found |= vars(importlib.import_module(f"{package}.{file.name}"))
    whole = {name: value for name, value in found.items() if callable(value)}
    return SimpleNamespace(
        **{name.removesuffix("_impl"): value for name, value in whole.items() if "_impl" in name},
        **{name: whole[name] for name in ("attend_new", "attend_paged", "draw") if name in whole},
    )

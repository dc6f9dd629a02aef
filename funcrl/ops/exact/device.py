"""An implementation for each device: a function for a CPU, and its twin for a GPU."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def per_device(on_cpu: Implementation) -> Implementation:
    """Return the implementation on the device of the first argument: this function on a CPU.

    On a GPU it is the function of the same name and signature in the file of the same name in
    `cuda/`, which is imported when it is first called, as it needs triton.
    """
    package, _, file = on_cpu.__module__.rpartition(".")

    @functools.cache
    def on_gpu() -> Callable[..., Any]:
        twin: Callable[..., Any] = getattr(
            importlib.import_module(f"{package}.cuda.{file}"), on_cpu.__name__
        )
        return twin

    @functools.wraps(on_cpu)
    def call(first: Tensor, *others: Any, **options: Any) -> Any:
        implementation = on_gpu() if first.device.type == "cuda" else on_cpu
        return implementation(first, *others, **options)

    return cast(Implementation, call)

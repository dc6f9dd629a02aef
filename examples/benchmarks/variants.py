"""Ways to run one and the same loop: each is a change of the configuration, and they combine."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch

from funcrl.config import CompileConfig, TrainConfig, VLLMCompileConfig
from funcrl.config.generation import Form

# The fastest landed: bfloat16 activations of one micro-batch fit where products are kept alone.
_COMPILED = CompileConfig(backend="inductor", remat="selective")


def _trainer(compiled: CompileConfig | None) -> Callable[[TrainConfig], TrainConfig]:
    """Return the change to a step that is compiled so."""
    return lambda config: replace(config, compile=compiled)


def _engine(form: Form) -> Callable[[TrainConfig], TrainConfig]:
    """Return the change to vLLM, compiled and replayed from CUDA graphs where there is a GPU."""

    def change(config: TrainConfig) -> TrainConfig:
        fast = VLLMCompileConfig(backend="inductor", cudagraph="full")
        modes = fast if config.device == "cuda" else VLLMCompileConfig()
        return replace(
            config, generator="vllm", vllm=replace(config.vllm, form=form, compile=modes)
        )

    return change


# A new way to run the loop is a line here: `prefixes`, `stale` ...
CHANGES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "given": lambda config: config,
    "eager": _trainer(None),
    "traced": _trainer(CompileConfig()),
    "compiled": _trainer(_COMPILED),
    "graphs": _trainer(replace(_COMPILED, cudagraph="full")),
    "sampler": lambda config: replace(config, generator="sampler"),
    "native": _engine("native"),
    "unified": _engine("unified"),
}
_NEED_A_GPU = {"graphs"}
_NEED_VLLM = {"native", "unified"}


def check_names(variant: str) -> None:
    """Raise unless a variant is names of changes, joined by +."""
    for name in variant.split("+"):
        if name not in CHANGES:
            raise ValueError(
                f"benchmarks loop expects --variants of {', '.join(CHANGES)}, or several of them "
                f"joined by +, got {variant!r}."
            )


def check_runs_here(variant: str, config: TrainConfig) -> None:
    """Raise if this machine, with the configured device, cannot run a variant."""
    names = set(variant.split("+"))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"benchmarks loop expects a GPU for --train.device cuda, got none for {variant!r}."
        )
    if names & _NEED_A_GPU and config.device != "cuda":
        raise ValueError(
            f"benchmarks loop expects --train.device cuda for the variant {variant!r}, which "
            f"replays a CUDA graph, got {config.device}."
        )
    if names & _NEED_VLLM and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"benchmarks loop expects vLLM to be installed for the variant {variant!r}, got none; "
            f"docs/vllm.md says how."
        )


def changed(variant: str, config: TrainConfig) -> TrainConfig:
    """Return a configuration with the changes of a variant, from left to right."""
    for name in variant.split("+"):
        config = CHANGES[name](config)
    return config

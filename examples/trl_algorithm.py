"""From TRL's options to the algorithm with the same loss, or an error that names what has none.

    python examples/trl_algorithm.py --loss_type grpo --beta 0.04    # needs trl; prints it

Options that are not of the algorithm (temperature, vLLM's correction ...): docs/migrating.md.
"""

from functools import partial

from trl import GRPOConfig, TrlParser

import funcrl
from funcrl import advantages, aggregation, surrogates

SCALES = {
    "group": advantages.by_group(partial(advantages.standardize, eps=1e-4)),
    "batch": partial(advantages.standardize_by_batch, eps=1e-4),
    "none": "none",
}
WEIGHTS = {
    **dict.fromkeys(("dapo", "cispo", "bnpo"), aggregation.token_mean),
    **dict.fromkeys(("grpo", "sapo"), aggregation.sequence_mean),
    "dr_grpo": aggregation.constant,
    "luspo": partial(aggregation.constant, length=1),
}
EXPRESSIBLE = {
    "loss_type": [*WEIGHTS],
    "scale_rewards": [*SCALES],
    "importance_sampling_level": ["token", "sequence"],
    "multi_objective_aggregation": ["sum_then_normalize"],
    "off_policy_mask_threshold": [None],
    "top_entropy_quantile": [1],
    "use_adaptive_entropy": [False],
}


def algorithm_of(args: GRPOConfig) -> funcrl.Algorithm:
    """Return the algorithm that has the loss of TRL's options; ValueError where there is none."""
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    check(args, high)
    weight = WEIGHTS[args.loss_type]
    if args.loss_type == "dr_grpo":
        weight = partial(weight, length=args.max_completion_length)
    if args.loss_type == "cispo":
        surrogate = surrogates.clipped_weight(1, high - 1)
    elif args.loss_type == "sapo":
        surrogate = surrogates.soft_gate(args.sapo_temperature_pos, args.sapo_temperature_neg)
    else:
        surrogate = surrogates.clipped(low, high, dual_clip=args.delta)
    return funcrl.grpo(
        level=args.importance_sampling_level, scale_rewards=SCALES[args.scale_rewards],
        kl=args.beta, kl_estimator="k3+" if args.use_bias_correction_kl else "k3",
        entropy=args.entropy_coef, weight=weight,
    )._replace(surrogate=surrogate)  # fmt: skip


def check(args: GRPOConfig, high: float) -> None:
    """Raise ValueError for a value that changes the loss and that no algorithm expresses."""
    kind, values = args.loss_type, {name: (known, "") for name, known in EXPRESSIBLE.items()}
    if args.beta and args.importance_sampling_level == "sequence":
        values["use_bias_correction_kl"] = [False], " with beta and ratios of sequences"
    if WEIGHTS.get(kind) is not aggregation.token_mean:
        values["entropy_coef"] = [0], f" with {kind}, whose loss is not the mean of all tokens"
    if kind == "bnpo" or args.entropy_coef:  # these are means of each micro-batch
        values["gradient_accumulation_steps"] = [1], " with bnpo or entropy_coef"
    for name, (known, where) in values.items():
        if (value := getattr(args, name)) not in known:
            known = " or ".join(map(str, known))
            raise ValueError(f"algorithm_of expects {name} {known}{where}, got {value!r}.")
    if kind == "cispo" and high < 1:  # the bound itself, and not its distance from 1
        raise ValueError(f"algorithm_of expects epsilon_high of at least 1 with cispo, got {high}.")
    if kind not in ("cispo", "sapo") and args.delta is not None and args.delta <= 1 + high:
        raise ValueError(f"algorithm_of expects delta above 1 + epsilon_high, got {args.delta}.")


if __name__ == "__main__":
    parser = TrlParser(GRPOConfig)
    parser.set_defaults(use_cpu=True, bf16=False)
    print(algorithm_of(*parser.parse_args_into_dataclasses()))

"""From TRL to funcrl: the same rows and reward function, TRL's loss to 1e-6, and then a run.

    pip install trl && python examples/from_trl.py      # half a minute on two CPU cores, offline
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import funcrl
from funcrl import advantages, aggregation, surrogates
from funcrl.config import AlgorithmConfig, OptimizerConfig, Sampling, TrainConfig

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def right(prompts, completions, answer, **columns):  # TRL's form of a reward function
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def algorithm_of(args: GRPOConfig) -> funcrl.Algorithm:
    """Return the algorithm with TRL's loss, also where TRL differs: docs/migrating.md."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        surrogate = surrogates.clipped_weight(1.0, high - 1)
    elif args.loss_type == "sapo":
        surrogate = surrogates.soft_gate(args.sapo_temperature_pos, args.sapo_temperature_neg)
    else:
        surrogate = surrogates.clipped(args.epsilon, high, dual_clip=args.delta)
    per_row = lambda mask, lengths: mask / (lengths * len(mask))  # counts rows without a token
    scales = {"group": advantages.by_group(partial(advantages.standardize, eps=1e-4)),
              "batch": partial(advantages.standardize_by_batch, eps=1e-4), "none": "none"}  # fmt: skip
    mean = lambda mask, dtype: per_row(mask.to(dtype), mask.sum(1, keepdim=True).clamp(min=1))
    weights = {
        "grpo": mean,
        "sapo": mean,
        "dr_grpo": lambda mask, dtype: per_row(mask.to(dtype), args.max_completion_length),
        "luspo": lambda mask, dtype: per_row(mask.to(dtype), 1),
    }
    return funcrl.grpo(
        level=args.importance_sampling_level,
        scale_rewards=scales[args.scale_rewards],
        kl=args.beta,
        kl_estimator="k3+" if args.use_bias_correction_kl else "k3",
        entropy=args.entropy_coef,
        weight=weights.get(args.loss_type, aggregation.token_mean),
    )._replace(surrogate=surrogate)

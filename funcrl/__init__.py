"""RL post-training of language models as pure functions.

step = funcrl.grpo_step(model_fn)
state = step.init(params, seed=0)
state, metrics = step(state, batch)
"""

from funcrl import (
    advantages,
    aggregation,
    checks,
    config,
    generators,
    grads,
    graph,
    losses,
    memory,
    metrics,
    models,
    numerics,
    ops,
    optim,
    prepare,
    ratios,
    rewards,
    rng,
    rollouts,
    runs,
    surrogates,
    tasks,
    tree,
    types,
    weights,
)
from funcrl.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce, rloo, sapo
from funcrl.batching import collate, drop_zero_variance, mask_truncated, minibatches, pack
from funcrl.checkpoint import restore, save
from funcrl.config_generation import CompileConfig
from funcrl.evaluate import evaluate
from funcrl.export import export
from funcrl.functional import functional
from funcrl.grads import (
    GradientMoments,
    NoiseScale,
    clip_per_sample,
    gradient_moments,
    noise_scale,
    per_sample_grad,
    per_sample_norms,
)
from funcrl.graph import compile_step, donate, fuse_per_sample, remat, trace
from funcrl.logprobs import logprob_fn, score, token_scores
from funcrl.lora import Lora, lora
from funcrl.losses import policy_loss
from funcrl.models import init_params
from funcrl.parity import parity
from funcrl.parts import build
from funcrl.prepare import recenter, top_entropy
from funcrl.step import grpo_step
from funcrl.supervised import warm_start
from funcrl.train import train
from funcrl.types import (
    Algorithm,
    Batch,
    GradientTransformation,
    Metrics,
    PackedBatch,
    Rollout,
    Sample,
    Step,
    TokenScores,
    TrainState,
)
from funcrl.weights import load_params, save_params

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "CompileConfig",
    "GradientMoments",
    "GradientTransformation",
    "Lora",
    "Metrics",
    "NoiseScale",
    "PackedBatch",
    "Rollout",
    "Sample",
    "Step",
    "TokenScores",
    "TrainState",
    "advantages",
    "aggregation",
    "build",
    "checks",
    "cispo",
    "clip_per_sample",
    "collate",
    "compile_step",
    "config",
    "dapo",
    "donate",
    "dr_grpo",
    "drop_zero_variance",
    "evaluate",
    "export",
    "functional",
    "fuse_per_sample",
    "generators",
    "gradient_moments",
    "grads",
    "graph",
    "grpo",
    "grpo_step",
    "gspo",
    "init_params",
    "load_params",
    "logprob_fn",
    "lora",
    "losses",
    "mask_truncated",
    "memory",
    "metrics",
    "minibatches",
    "models",
    "noise_scale",
    "numerics",
    "ops",
    "optim",
    "pack",
    "parity",
    "per_sample_grad",
    "per_sample_norms",
    "policy_loss",
    "prepare",
    "ratios",
    "recenter",
    "reinforce",
    "remat",
    "restore",
    "rewards",
    "rloo",
    "rng",
    "rollouts",
    "runs",
    "sapo",
    "save",
    "save_params",
    "score",
    "surrogates",
    "tasks",
    "token_scores",
    "top_entropy",
    "trace",
    "train",
    "tree",
    "types",
    "warm_start",
    "weights",
]

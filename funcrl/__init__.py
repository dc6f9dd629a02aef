"""RL post-training of language models as pure functions.

step = funcrl.grpo_step(model_fn)
state = step.init(params, seed=0)
state, metrics = step(state, batch)
"""

from funcrl import config, generators, graph, models, ops, optim, parallel, tasks, weights
from funcrl.config.generation import CompileConfig
from funcrl.core import checks, numerics, rng, tree, types
from funcrl.core.process import VERSION
from funcrl.core.types import (
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
from funcrl.generators.served_teacher import ServedTeacher
from funcrl.graph import compile_step, donate, fuse_per_sample, remat, trace
from funcrl.loop import memory, rollouts
from funcrl.loop.build import build
from funcrl.loop.choose import choose_options
from funcrl.loop.evaluate import evaluate
from funcrl.loop.export import LoadedRun, export, load_run
from funcrl.loop.parity import parity
from funcrl.loop.train import train
from funcrl.loop.warm_start import warm_start
from funcrl.models import init_params
from funcrl.models.functional import functional
from funcrl.models.logprobs import Teacher, logprob_fn, score, token_scores
from funcrl.models.lora import Lora, lora
from funcrl.rl import (
    advantages,
    aggregation,
    batching,
    grads,
    losses,
    metrics,
    packing,
    prepare,
    ratios,
    rewards,
    surrogates,
)
from funcrl.rl.algorithms import (
    cispo,
    dapo,
    distill,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    rloo,
    sapo,
    sft,
)
from funcrl.rl.batching import collate, drop_zero_variance, mask_truncated, minibatches
from funcrl.rl.critic import gae
from funcrl.rl.grads import (
    GradientMoments,
    NoiseScale,
    clip_per_sample,
    gradient_moments,
    noise_scale,
    per_sample_grad,
    per_sample_norms,
)
from funcrl.rl.losses import policy_loss
from funcrl.rl.packing import pack, pack_groups
from funcrl.rl.prepare import off_policy_mask, recenter, top_entropy
from funcrl.rl.primitives import forward_backward, optim_step
from funcrl.rl.step import grpo_step
from funcrl.run import runs
from funcrl.run.checkpoint import restore, save
from funcrl.run.memory import (
    MemoryBlock,
    MemoryProfile,
    MemoryStats,
    memory_profile,
    memory_stats,
    reset_peak,
)
from funcrl.weights import load_params, save_params

__version__ = VERSION

__all__ = [
    "Algorithm",
    "Batch",
    "CompileConfig",
    "GradientMoments",
    "GradientTransformation",
    "LoadedRun",
    "Lora",
    "MemoryBlock",
    "MemoryProfile",
    "MemoryStats",
    "Metrics",
    "NoiseScale",
    "PackedBatch",
    "Rollout",
    "Sample",
    "ServedTeacher",
    "Step",
    "Teacher",
    "TokenScores",
    "TrainState",
    "advantages",
    "aggregation",
    "batching",
    "build",
    "checks",
    "choose_options",
    "cispo",
    "clip_per_sample",
    "collate",
    "compile_step",
    "config",
    "dapo",
    "distill",
    "donate",
    "dr_grpo",
    "drop_zero_variance",
    "evaluate",
    "export",
    "forward_backward",
    "functional",
    "fuse_per_sample",
    "gae",
    "generators",
    "gradient_moments",
    "grads",
    "graph",
    "grpo",
    "grpo_step",
    "gspo",
    "init_params",
    "load_params",
    "load_run",
    "logprob_fn",
    "lora",
    "losses",
    "mask_truncated",
    "memory",
    "memory_profile",
    "memory_stats",
    "metrics",
    "minibatches",
    "models",
    "noise_scale",
    "numerics",
    "off_policy_mask",
    "ops",
    "optim",
    "optim_step",
    "pack",
    "pack_groups",
    "packing",
    "parallel",
    "parity",
    "per_sample_grad",
    "per_sample_norms",
    "policy_loss",
    "ppo",
    "prepare",
    "ratios",
    "recenter",
    "reinforce",
    "remat",
    "reset_peak",
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
    "sft",
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

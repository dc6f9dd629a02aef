"""One table over every public function: inputs untouched, equal bits again, no global generator."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import verifiers_guess
from cases import random_case, table_model, tiny_batch, tiny_model, tiny_tokenizer
from graphs import flatten
from recurrent_cases import case as scan_case
from surface import functions_of, public_functions

import funcrl
import trl_environment
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
    parallel,
    ratios,
    rewards,
    rng,
    rollouts,
    runs,
    surrogates,
    tasks,
    tree,
    weights,
)
from funcrl.config import TrainConfig
from funcrl.core import arrays, rows
from funcrl.generators import stops
from funcrl.loop.parity import ParityConfig
from funcrl.models.functional import bind

# Modules that are not public, but as pure.
INNER = {"arrays": arrays, "rows": rows, "stops": stops}

torch.manual_seed(0)  # the inputs below
CASE = random_case(1)
ROLLOUT, TABLE, REF = CASE
BATCH = tiny_batch()
MODEL = tiny_model()
MODEL_FN = funcrl.logprob_fn(MODEL)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
# A policy of few operations for what is done to graphs: each takes a millisecond to trace.
NET = torch.nn.Sequential(
    torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 11)
)
NET_PARAMS = {name: leaf.detach().double() for name, leaf in NET.named_parameters()}
MATRICES = {"a": torch.randn(3, 4), "b": torch.randn(4, 2)}
GRADS = tree.map(torch.randn_like, MATRICES)
ROWS = tree.map(lambda leaf: torch.randn(5, *leaf.shape), MATRICES)
T = [torch.randn(6).double() for _ in range(3)]
MASK = torch.tensor([False, True, True, False, True, True])
SCORES = funcrl.TokenScores(TABLE["logprobs"], TABLE["entropy"])
COLLATED = funcrl.collate(ROLLOUT, funcrl.grpo(), REF)
SAMPLE = tree.map(lambda leaf: leaf[0], COLLATED)
ROW_SCORES = funcrl.TokenScores(TABLE["logprobs"][0], TABLE["entropy"][0])
METRICS = funcrl.Metrics(
    sums={"a": torch.tensor(3.0)}, means={"b": torch.tensor(2.0)}, maxes={"c": torch.tensor(1.0)},
    last={"d": torch.tensor(0.0)},
)  # fmt: skip
LOGITS, TOKENS = torch.randn(4, 5), torch.tensor([1, 2, 3, 4])
COUNT = torch.tensor(2)
SAMPLING = generators.Sampling(num_samples=2, max_tokens=3, top_p=0.9)
NARROW = generators.Sampling(max_tokens=3, top_k=4, min_p=0.1)
STOPPING = generators.Sampling(stop=("B",))
TASK = tasks.SumDigits()
PROMPT = tasks.Prompt("1+2=", "3")
MICRO = models.Transformer(models.shape("micro", TASK.tokenizer.vocab_size))
MICRO_FN, MICRO_PARAMS = funcrl.logprob_fn(MICRO), funcrl.init_params(MICRO, seed=0)
QLORA = partial(funcrl.models.qlora, MICRO, rank=2)
TRAIN = TrainConfig(
    steps=1, num_prompts=2, num_generations=2, drop_zero_variance=False,
    warm_start=funcrl.config.WarmStartConfig(steps=1), sampling=SAMPLING,
    evaluation=funcrl.config.EvaluationConfig(num_prompts=2),
)  # fmt: skip
FLAT = flatten(torch.func.grad(lambda x: x.exp().sin().cos().sum()), T[0])
AGAIN = funcrl.remat(FLAT.gm, lambda node: node.name == "sin")
MOMENTS = funcrl.GradientMoments(GRADS, torch.tensor(90.0), 4)


def loss_fn(params, sample):
    return aux_loss_fn(params, sample)[0]


def spell(tokens):
    return "".join(map(chr, tokens))


def net_fn(params, sample):
    logits = funcrl.functional(NET)(params, sample.tokens)
    return funcrl.token_scores(logits, sample.tokens)


def aux_loss_fn(params, sample):
    return funcrl.policy_loss(funcrl.grpo(), MODEL_FN(params, sample), sample)


def algorithm(factory):
    """All five functions of an algorithm at once, through a step."""

    def run(params, rollout, ref):
        made = factory(correction=ratios.truncated(2.0), kl=0.1, entropy=0.1)
        step = funcrl.grpo_step(table_model, algorithm=made)
        return step(step.init(params), funcrl.collate(rollout, made, ref))

    return run, (TABLE, ROLLOUT, REF)


def without_rewards(factory):
    def run(params, rollout, teacher):
        made = factory(weight=aggregation.sequence_mean)
        step = funcrl.grpo_step(table_model, algorithm=made)
        return step(step.init(params), funcrl.collate(rollout, made, teacher_logprobs=teacher))

    return run, (TABLE, ROLLOUT, REF)


def optimizer(transformation):
    """Two updates, so that the state is used too."""

    def run(grads, params):
        state = transformation.init(params)
        _, state = transformation.update(grads, state, params)
        return transformation.update(grads, state, params)

    return run, (GRADS, MATRICES)


def step_of(**options):
    def run(params, batch):
        step = funcrl.grpo_step(MODEL_FN, **options)
        return step(step.init(params, seed=1), batch)

    return run, (PARAMS, BATCH)


def stepped(rewrite):
    """From parameters, which `init` copies: `donate` consumes its state, and says so."""

    def run(params, batch):
        step = funcrl.grpo_step(net_fn, optimizer=optim.sgd(0.1))
        state = step.init(params)
        return rewrite(step, state, batch)(state, batch)

    return run, (NET_PARAMS, BATCH)


def traced(rewrite, model_fn=net_fn, params=NET_PARAMS):
    def run(params, batch):
        options = {"optimizer": optim.sgd(0.1), "per_sample": funcrl.clip_per_sample(0.1)}
        step = funcrl.grpo_step(model_fn, **options)
        state = step.init(params)
        return rewrite(funcrl.trace(step.update, state, batch))(state, batch)

    return run, (params, BATCH)


def written_config():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text("steps: 3")
        return config.read_config(TrainConfig, path)


EVALUATION = config.EvalConfig(num_prompts=3, max_tokens=2)


def save_and_restore(value):
    with tempfile.TemporaryDirectory() as folder:
        funcrl.save(Path(folder) / "one", value, {"step": 1})
        return funcrl.restore(Path(folder) / "one", value)


def no_reward_model():
    with suppress(FileNotFoundError):
        tasks.reward_model("no/such/model/here")
    return ()


def failed_upload(folder):
    with suppress(FileNotFoundError):
        weights.push_to_hub(folder, "me/model")
    return ()


def save_and_load(params):
    with tempfile.TemporaryDirectory() as folder:
        funcrl.save_params(Path(folder) / "model", MICRO, params)
        config = weights.load_config(Path(folder) / "model")
        assert weights.load_network(Path(folder) / "model").config == config
        return config.width, funcrl.load_params(Path(folder) / "model")[1]


def train_and_load():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        funcrl.train(replace(TRAIN, run_dir=run, steps=1))
        return funcrl.load_run(run).params


def train_and_export():
    with tempfile.TemporaryDirectory() as folder:
        funcrl.train(replace(TRAIN, run_dir=Path(folder) / "run", steps=1))
        out = funcrl.export(Path(folder) / "run", Path(folder) / "model")
        return funcrl.load_params(out)[1]


def with_more_rewards():
    return tasks.with_rewards(TASK, {"format": tasks.matches("[0-9]")})


def tokenizer_from_a_folder():
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer()._tokenizer.save_pretrained(folder)
        return tasks.load_tokenizer(Path(folder)).encode("4 + 7")


def train_twice():
    with tempfile.TemporaryDirectory() as folder:
        return funcrl.train(replace(TRAIN, run_dir=Path(folder) / "run")).state


def roll():
    sampler = generators.Sampler(MICRO)
    sampler.push(MICRO_PARAMS)
    completed = rollouts.complete(TASK, sampler, TASK.prompts(0, 0, 2), SAMPLING, 0)
    return completed, rollouts.grade(TASK, completed.prompts, completed.outcomes)


def roll_with_rewards():
    completed, _ = roll()
    return completed, torch.arange(4, dtype=torch.float32, device="cpu")


def vector(fn):
    return fn, (T[0],)


def added_at_peak(params):
    with funcrl.memory_profile("sum", "cpu", stacks=False) as memory:
        total = tree.add(params, params)
    found = memory.result
    return total, found.peak_allocated - found.start_allocated


def remat_twice(x):
    again = funcrl.remat(FLAT.gm, lambda node: node.name in ("exp", "sin"))
    return again(x), FLAT.gm(x), graph.live_bytes(FLAT.gm)


TABLE_OF_CALLS = {
    **{name: algorithm(getattr(funcrl, name)) for name in (
        "cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce", "rloo", "sapo")},
    "ppo": (lambda r: funcrl.collate(r, funcrl.ppo()), (ROLLOUT,)),
    "gae": (
        lambda s, b: funcrl.gae(0.9, 0.8)(s._replace(values=s.logprobs), b), (SCORES, COLLATED)),
    **{name: without_rewards(getattr(funcrl, name)) for name in ("distill", "sft")},
    "grpo_step": step_of(microbatch=4),
    "forward_backward": (
        funcrl.forward_backward(table_model, microbatch=2), (TABLE, COLLATED)),
    "optim_step": (
        lambda p, g: (lambda step: step(step.init(p), g))(funcrl.optim_step()),
        (MATRICES, GRADS)),
    "grpo_step, per sample": step_of(per_sample=funcrl.clip_per_sample(0.1)),
    "grpo_step, prepared": step_of(prepare=funcrl.top_entropy(0.5)),
    "collate": (lambda r, ref: funcrl.collate(r, funcrl.dapo(), ref), (ROLLOUT, REF)),
    "pack": (lambda r, ref: funcrl.pack(r, funcrl.dapo(), 20, ref), (ROLLOUT, REF)),
    "pack_groups": (lambda r, ref: funcrl.pack_groups(r, funcrl.dapo(), 20, ref), (ROLLOUT, REF)),
    "packing.pack_batch": (lambda b: funcrl.packing.pack_batch(b, 20, 3), (COLLATED,)),
    "packing.pack_batch_groups": (
        lambda b: funcrl.packing.pack_batch_groups(b, 20, 3), (COLLATED,)),
    "metrics.padding_frac": (funcrl.metrics.padding_frac, (COLLATED,)),
    "batching.counted_tokens": (
        funcrl.batching.counted_tokens, (ROLLOUT.mask, ROLLOUT.behavior_logprobs)),
    "batching.join": (
        lambda r: funcrl.batching.join([funcrl.collate(r, funcrl.grpo()),
                                        funcrl.collate(r, funcrl.sft())]), (ROLLOUT,)),
    "batching.pad_length": (lambda r: funcrl.batching.pad_length(r, 16), (ROLLOUT,)),
    "batching.pad_rows": (lambda: funcrl.batching.pad_rows([[1, 2], [3]], torch.int64), ()),
    "drop_zero_variance": (funcrl.drop_zero_variance, (ROLLOUT,)),
    "mask_truncated": (funcrl.mask_truncated, (ROLLOUT, torch.arange(12) % 2 == 0)),
    "functional": (lambda p, t: funcrl.functional(MODEL)(p, t, t), (PARAMS, TOKENS)),
    "logprob_fn": (MODEL_FN, (PARAMS, funcrl.Sample(TOKENS, TOKENS))),
    "score": (lambda p, b: funcrl.score(MODEL_FN, p, b, 4), (PARAMS, BATCH)),
    "token_scores": (funcrl.token_scores, (LOGITS, TOKENS)),
    "policy_loss": (lambda *a: funcrl.policy_loss(funcrl.gspo(), *a), (ROW_SCORES, SAMPLE)),
    "per_sample_grad": (funcrl.per_sample_grad(loss_fn, chunk=4), (PARAMS, BATCH)),
    "clip_per_sample": (funcrl.clip_per_sample(1.0), (ROWS,)),
    "per_sample_norms": (funcrl.per_sample_norms, (ROWS,)),
    "gradient_moments": (funcrl.gradient_moments(loss_fn, chunk=4), (PARAMS, BATCH)),
    "noise_scale": (funcrl.noise_scale, (MOMENTS,)),
    "remat": (remat_twice, (T[0],)),
    "graph.add_fences": (lambda x: (graph.add_fences(AGAIN)(x), AGAIN(x)), (T[0],)),
    "graph.live_bytes": (lambda: graph.live_bytes(FLAT.gm), ()),
    "graph.predict_peak": (lambda: graph.predict_peak(FLAT.gm), ()),
    "graph.recomputed_cost": (lambda: graph.recomputed_cost(AGAIN), ()),
    "grads.summed_gradient": (grads.summed_gradient(aux_loss_fn, None, 4), (PARAMS, BATCH)),
    "rows.num_rows": (lambda b: rows.num_rows("f", b), (BATCH,)),
    "rows.over_groups": (
        lambda r, g: rows.over_groups(torch.sum, r, g, True), (ROLLOUT.rewards, ROLLOUT.group)),
    "rows.row_ends": (rows.row_ends, (BATCH.mask,)),
    "rows.split_rows": (lambda b: list(rows.split_rows("f", b, 4)), (BATCH,)),
    "rows.over_rows": (lambda p, b: rows.over_rows("f", MODEL_FN)(p, b), (PARAMS, BATCH)),
    "off_policy_mask": (funcrl.off_policy_mask(0.05), (SCORES, COLLATED)),
    "recenter": (funcrl.recenter(ratios.truncated(2.0)), (SCORES, COLLATED)),
    "top_entropy": (funcrl.top_entropy(0.5), (SCORES, COLLATED)),
    "init_params": (lambda: funcrl.init_params(MODEL, seed=3), ()),
    "ops.attend_causal": (ops.attend_causal, (torch.randn(2, 3, 4),) * 3),
    "ops.attend_flash": (ops.attend_flash, (torch.randn(2, 3, 4),) * 3),
    "ops.attend_flash_segments": (
        lambda ids, x: ops.attend_flash_segments(ids)(x, x, x),
        (TOKENS // 3, torch.randn(2, 4, 5))),
    "ops.attend_segments": (
        lambda ids, x: ops.attend_segments(ids)(x, x, x), (TOKENS // 3, torch.randn(2, 4, 5))),
    "ops.entropy": (ops.entropy, (LOGITS.log_softmax(-1),)),
    **{f"ops.{cell}_scan": (getattr(ops, f"{cell}_scan"), scan_case(cell, (2,))[:4])
       for cell in ("gru", "lstm")},
    "numerics.at_least_float32": (lambda: numerics.at_least_float32(torch.float16), ()),
    "numerics.exp_ratio": (numerics.exp_ratio, (T[0],)),
    "numerics.power_of_two": (numerics.power_of_two, (T[0],)),
    "models.rotary_angles": (lambda p: models.rotary_angles(p, 8, 1e4), (TOKENS,)),
    "models.recur_causal": (lambda x: models.recur_causal(lambda past: (x, past)), (T[0],)),
    "models.recur_segments": (
        lambda ids: models.recur_segments(ids)(lambda past: (past.resets, past)), (TOKENS // 3,)),
    "models.rotate": (models.rotate, (torch.randn(4, 6), torch.randn(2, 4, 6))),
    **{f"advantages.{name}": vector(getattr(advantages, name)) for name in (
        "raw", "center", "standardize", "leave_one_out")},
    "advantages.by_group": (
        advantages.by_group(advantages.center), (ROLLOUT.rewards, ROLLOUT.group)),
    "advantages.standardize_by_batch": (
        advantages.standardize_by_batch, (ROLLOUT.rewards, ROLLOUT.group)),
    "ratios.sequence_mean": (
        ratios.sequence_mean, (T[0], T[0] > 0, torch.tensor([0, 0, 0, 1, 1, 1]))),
    "ratios.sequence_sum": (
        ratios.sequence_sum, (T[0], T[0] > 0, torch.tensor([0, 0, 0, 1, 1, 1]))),
    "aggregation.scaled": (
        lambda mask: aggregation.scaled(aggregation.token_mean, 0.5)(mask), (ROLLOUT.mask,)),
    "aggregation.token_mean": (aggregation.token_mean, (ROLLOUT.mask,)),
    "aggregation.sequence_mean": (aggregation.sequence_mean, (ROLLOUT.mask,)),
    "aggregation.constant": (lambda m: aggregation.constant(m, 7), (ROLLOUT.mask,)),
    "rewards.weighted_sum": (
        lambda r: rewards.weighted_sum({"x": r, "y": r}, {"x": 1.0, "y": 2.0}), (T[0],)),
    "rewards.soft_overlong": (lambda n: rewards.soft_overlong(n, 9, 3), (TOKENS,)),
    "ratios.token": (ratios.token, (T[0], T[1], MASK)),
    "ratios.sequence": (ratios.sequence, (T[0], T[1], MASK)),
    "ratios.corrected": (
        ratios.corrected(ratios.token, ratios.truncated(2.0)), (T[0], T[1], MASK, ())),
    "ratios.truncated": (ratios.truncated(2.0, "sequence"), (T[0], MASK, ())),
    "ratios.masked": (ratios.masked(2.0), (T[0], MASK, ())),
    "surrogates.clipped": (surrogates.clipped(0.1, 0.2, 3.0), tuple(T)),
    "surrogates.clipped_weight": (surrogates.clipped_weight(), tuple(T)),
    "surrogates.soft_gate": (surrogates.soft_gate(), tuple(T)),
    "surrogates.score_function": (surrogates.score_function, tuple(T)),
    **{f"losses.{name}": (getattr(losses, name), (T[0], T[1])) for name in ("k1", "k2", "k3")},
    "losses.clipped_value": (losses.clipped_value(), tuple(T)),
    "losses.as_loss": (losses.as_loss(losses.k1), tuple(T)),
    "losses.with_kl_gradient": (losses.with_kl_gradient(losses.k3), tuple(T)),
    "losses.penalty": (losses.penalty(0.1, "k3+", 0.1), (funcrl.TokenScores(*T[:2]), T[2], T[0])),
    "metrics.token_means": (metrics.token_means, (METRICS, torch.tensor(3))),
    "metrics.merge": (metrics.merge, ([METRICS, METRICS], [1, torch.tensor(3)])),
    "metrics.merge_ranks": (metrics.merge_ranks, (METRICS, COUNT, parallel.Mesh().data)),
    "metrics.num_samples": (metrics.num_samples, (COLLATED,)),
    "metrics.to_floats": (metrics.to_floats, (METRICS,)),
    "metrics.describe_rollout": (metrics.describe_rollout, (ROLLOUT, {"x": ROLLOUT.rewards})),
    **{  # of one rank; tests/integration/rl/test_ranks.py has several
        f"parallel.{function.__name__}": (function, (value, parallel.Mesh().data))
        for function, value in [
            *((each, T[0]) for each in (
                parallel.psum, parallel.pmax, parallel.all_gather, parallel.psum_scatter,
                parallel.broadcast, parallel.gather_objects,
            )),
            *((each, GRADS) for each in (
                parallel.psum_tree, parallel.pairwise_psum_tree, parallel.broadcast_tree,
            )),
        ]
    },
    "parallel.make_mesh": (parallel.make_mesh, ()),
    "parallel.layout_of": (parallel.layout_of, (MATRICES,)),
    "parallel.shard": (parallel.shard, (MATRICES, parallel.Axis(3, 1))),
    "parallel.unshard": (
        parallel.unshard, (MATRICES, parallel.layout_of(MATRICES), parallel.Mesh().shard)
    ),
    "parallel.whole_leaf": (parallel.whole_leaf, (T[0], (6,), parallel.Mesh().shard)),
    "parallel.global_norm": (parallel.global_norm, (GRADS, parallel.Mesh().shard)),
    "parallel.psum_scatter_tree": (parallel.psum_scatter_tree, (GRADS, parallel.Axis())),
    "parallel.own_rows": (parallel.own_rows, (COLLATED, parallel.Mesh(all=parallel.Axis(3, 1)))),
    "optim.adamw": optimizer(optim.adamw(optim.warmup(2, then=optim.cosine(1.0, 0.1, 9)))),
    "optim.sgd": optimizer(optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "optim.from_torch": optimizer(
        optim.from_torch(lambda params: torch.optim.NAdam(params, lr=0.1))),
    "optim.muon": optimizer(optim.muon(0.1)),
    "optim.chain": optimizer(optim.chain(optim.sgd(0.1), optim.sgd(0.2))),
    "optim.masked": optimizer(optim.masked(optim.adamw(0.1), {"a": True, "b": False})),
    "optim.skip_nonfinite": optimizer(optim.skip_nonfinite(optim.adamw(0.1))),
    "optim.freeze": optimizer(optim.freeze(lambda path, leaf: path == "a")),
    "optim.stateless": optimizer(optim.stateless(lambda g, p: tree.add(g, p))),
    "optim.clip_by_global_norm": optimizer(optim.clip_by_global_norm(0.1)),
    "optim.add_decayed_weights": optimizer(optim.add_decayed_weights(0.1)),
    "optim.scale_by_adam": optimizer(optim.scale_by_adam()),
    "optim.scale_by_adam_8bit": optimizer(optim.scale_by_adam_8bit()),
    "optim.scale_by_muon": optimizer(optim.scale_by_muon(nesterov=False)),
    "optim.scale_by_learning_rate": optimizer(optim.scale_by_learning_rate(0.1)),
    "optim.trace": optimizer(optim.trace(0.9)),
    "optim.newton_schulz": (optim.newton_schulz, (torch.randn(3, 5),)),
    "optim.apply_updates": (optim.apply_updates, (MATRICES, GRADS)),
    "optim.current_learning_rate": (
        optim.current_learning_rate, (optim.sgd(0.1).init(MATRICES),)),
    "optim.with_learning_rate": (
        optim.with_learning_rate, (optim.sgd(0.1).init(MATRICES), COUNT)),
    "optim.zero_count": (optim.zero_count, (MATRICES,)),
    "optim.constant": (optim.constant(0.1), (COUNT,)),
    "optim.linear": (optim.linear(1.0, 0.0, 5), (COUNT,)),
    "optim.cosine": (optim.cosine(1.0, 0.0, 5), (COUNT,)),
    "optim.warmup": (optim.warmup(5, then=optim.constant(1.0)), (COUNT,)),
    "stops.cut_at_stop": (lambda: stops.cut_at_stop([65, 66], STOPPING, spell), ()),
    "stops.find_stop": (lambda: stops.find_stop("AB", 1, ("B",)), ()),
    "stops.has_stop_string": (lambda: stops.has_stop_string([65, 66], STOPPING, spell), ()),
    "rng.fold_in": (rng.fold_in, (COUNT, 3)),
    "rng.generator": (
        lambda seed: torch.rand(
            3, generator=rng.generator(seed, 1), dtype=torch.float32, device="cpu"),
        (COUNT,)),
    "tree.map": (lambda a, b: tree.map(torch.add, a, b), (MATRICES, GRADS)),
    "tree.map_with_path": (lambda a: tree.map_with_path(lambda p, x: x * len(p), a), (MATRICES,)),
    "tree.leaves": (tree.leaves, (MATRICES,)),
    "tree.paths": (tree.paths, (MATRICES,)),
    "tree.flatten": (lambda a: tree.flatten(a)[0], (MATRICES,)),
    "tree.structure": (lambda a: str(tree.structure(a)), (MATRICES,)),
    "tree.contiguous": (
        lambda a: tree.contiguous(tree.map(torch.t, a), ["a"]), (MATRICES,)),
    "tree.zeros_like": (tree.zeros_like, (MATRICES,)),
    "tree.add": (tree.add, (MATRICES, GRADS)),
    "tree.scale": (lambda a: tree.scale(a, 0.5), (MATRICES,)),
    "tree.cast": (lambda a: tree.cast(a, torch.bfloat16), (MATRICES,)),
    "tree.global_norm": (tree.global_norm, (MATRICES,)),
    "tree.leaf_norm": (tree.leaf_norm, (T[0],)),
    "tree.check_same_shapes": (
        lambda a, b: tree.check_same_shapes("f", "a", a, "b", b), (MATRICES, GRADS)),
    "tree.check_same_structure": (
        lambda a, b: tree.check_same_structure("f", a, b), (MATRICES, GRADS)),
    "tree.check_tensors": (lambda a: tree.check_tensors("f", "a", a), (MATRICES,)),
    "bind": (lambda p, t: bind(MODEL, p)(t, t), (PARAMS, TOKENS)),
    "build": (lambda: funcrl.build(TRAIN).model.config, ()),
    "minibatches": (lambda b: funcrl.minibatches(b, funcrl.dapo(), 2, 1), (BATCH,)),
    "batching.in_order": (
        lambda b, n: funcrl.batching.in_order(b, n),
        (BATCH, torch.arange(BATCH.tokens.shape[0]).flip(0)),
    ),
    "minibatches, packed": (
        lambda b: funcrl.minibatches(b, funcrl.grpo(), 2, 1),
        (funcrl.pack(ROLLOUT, funcrl.grpo(), 20),)),
    "evaluate": (lambda: funcrl.evaluate(EVALUATION), ()),
    "export": (train_and_export, ()),
    "load_run": (train_and_load, ()),
    "models.logits_fn": (
        lambda p, t: funcrl.models.logits_fn(MODEL)(p, funcrl.Sample(t, t)), (PARAMS, TOKENS)),
    "parity": (
        lambda: funcrl.parity(ParityConfig(num_prompts=1, max_tokens=2)), ()),
    "save": (save_and_restore, (PARAMS,)),
    "restore": (save_and_restore, (BATCH,)),
    "train": (train_twice, ()),
    "warm_start": (
        lambda p: funcrl.warm_start(
            MICRO_FN, p, TASK, funcrl.config.WarmStartConfig(steps=2), 0, lambda _: 0.0)[0],
        (MICRO_PARAMS,)),
    "config.changed_options": (
        lambda: config.changed_options(TRAIN, replace(TRAIN, seed=1)), ()),
    "config.to_plain": (lambda: config.to_plain(TRAIN), ()),
    "config.from_plain": (
        lambda: config.to_plain(config.from_plain(TrainConfig, {"steps": 3})), ()),
    "generators.sample": (
        lambda p: generators.sample(MODEL, p, [[1, 2], [3]], SAMPLING, 0)[:4], (PARAMS,)),
    "generators.sample, min-p": (
        lambda p: generators.sample(MODEL, p, [[1, 2], [3]], NARROW, 0)[:4], (PARAMS,)),
    "generators.draw": (
        lambda x, u: generators.draw(x, u), (LOGITS.log_softmax(-1), torch.rand(4).double())),
    "generators.draw_tokens": (
        lambda x, u: generators.draw_tokens(x, TOKENS, u, SAMPLING),
        (LOGITS, torch.rand(4).double())),
    "generators.sampling_logprobs": (
        lambda x: generators.sampling_logprobs(x, SAMPLING), (LOGITS,)),
    "models.rotary_factors": (models.rotary_factors, (torch.randn(3, 4),)),
    "models.with_critic": (lambda p: models.with_critic(p, 3), (PARAMS,)),
    "models.without_critic": (models.without_critic, (PARAMS,)),
    "models.shape": (lambda: models.shape("micro", 13).width, ()),
    "memory.num_params": (lambda: memory.num_params(MICRO.config), ()),
    "memory.estimate_memory": (
        lambda: tuple(memory.estimate_memory(TRAIN, MICRO.config, 6)), ()),
    "memory_stats": (lambda: funcrl.memory_stats("cpu").device, ()),
    "reset_peak": (lambda: funcrl.reset_peak("cpu").device, ()),
    "memory_profile": (added_at_peak, (MATRICES,)),
    "ops.attend_hidden": (
        lambda x, h: ops.attend_hidden(x, x, x, h), (torch.randn(2, 4, 3), torch.eye(4) > 0)),
    "ops.ops_of": (lambda: ops.ops_of(torch.nn.Identity()) is ops.NATIVE, ()),
    "ops.choose_ops": (lambda: ops.choose_ops("f", "native") is ops.NATIVE, ()),
    "ops.divergence": (
        lambda a, b: ops.divergence(a, b, "forward", 0.7), (torch.randn(4, 3), torch.randn(4, 3))),
    "ops.linear_divergence": (
        lambda h, w: ops.linear_divergence(h, w, h.flip(0), w.flip(0), "reverse", 0.7, 3),
        (torch.randn(4, 3), torch.randn(6, 3))),
    "ops.linear_scores": (
        lambda h, w, t: ops.linear_scores(h, w, t, 0.7, 3),
        (torch.randn(4, 3), torch.randn(6, 3), TOKENS)),
    "ops.quantize": (lambda w: ops.quantize(w, "int8"), (torch.randn(3, 4),)),
    "ops.dequantize": (lambda w: ops.dequantize(ops.quantize(w)), (torch.randn(3, 4),)),
    "ops.adapted": (
        lambda w, a, b: ops.adapted(ops.quantize(w), a, b, 0.5),
        (torch.randn(3, 4), torch.randn(1, 4), torch.randn(3, 1))),
    "ops.adapted_linear": (
        lambda x, w, a, b: ops.adapted_linear(x, ops.quantize(w), a, b, 0.5),
        (torch.randn(2, 4), torch.randn(3, 4), torch.randn(1, 4), torch.randn(3, 1))),
    "ops.truncated_logits": (
        lambda x: ops.truncated_logits(x, x.argmin(-1), ops.Truncation(2, 0.8, 0.1), 0.7),
        (torch.randn(4, 6),)),
    "ops.project": (
        lambda x, w: ops.project(x, [(w, None)]), (torch.randn(4, 3), torch.randn(2, 3))),
    "ops.rms_norm": (lambda x: ops.rms_norm(x, x[0], 1e-6), (torch.randn(4, 3),)),
    "ops.swiglu": (ops.swiglu, (torch.randn(4, 3), torch.randn(4, 3))),
    "ops.geglu": (ops.geglu, (torch.randn(4, 3), torch.randn(4, 3))),
    "ops.sigmoid_gate": (ops.sigmoid_gate, (torch.randn(4, 3), torch.randn(4, 3))),
    "ops.delta_gates": (ops.delta_gates, (*torch.randn(2, 4, 3), *torch.randn(2, 3))),
    "ops.short_conv": (
        ops.short_conv, (torch.randn(4, 3), torch.randn(3, 2), torch.randn(1, 3), MASK[:4])),
    "ops.gated_delta_scan": (
        lambda *given: ops.gated_delta_scan(*given, backend="recurrent"),
        (*torch.randn(3, 2, 4, 3), -torch.rand(2, 4), torch.rand(2, 4), torch.randn(2, 3, 3),
         MASK[:4])),
    "rng.permutation": (lambda: rng.permutation(5, 3), ()),
    "rng.restored_global_state": (lambda: type(rng.restored_global_state()).__name__, ()),
    "rng.splitmix64": (rng.splitmix64, (TOKENS,)),
    "batching.sampled_tokens": (funcrl.batching.sampled_tokens, (COLLATED,)),
    "rng.uniform": (lambda s: rng.uniform(s, 3), (TOKENS,)),
    "rollouts.complete": (lambda: roll()[0].texts, ()),
    "rollouts.grade": (lambda: roll()[1].total, ()),
    "rollouts.comparable": (lambda x: rollouts.comparable(x, 2), (torch.ones(4),)),
    "rollouts.to_rollout": (lambda: rollouts.to_rollout(*roll_with_rewards()), ()),
    "runs.read_lines": (lambda: runs.read_lines(Path("no/such")), ()),
    "tasks.boxed_answer": (lambda: tasks.boxed_answer("\\boxed{5}"), ()),
    "tasks.check_task": (lambda: tasks.check_task("f", TASK), ()),
    "tasks.matches": (lambda: tasks.matches("5")(PROMPT, "5"), ()),
    "tasks.ask_judge": (
        lambda: tasks.ask_judge("http://localhost:1/v1", "m", "{completion}").__name__, (),
    ),
    "tasks.reward_model": (lambda: no_reward_model(), ()),
    "tasks.with_rewards": (lambda: with_more_rewards().reward(PROMPT, "5"), ()),
    "rollouts.punish_overlong": (
        lambda x: rollouts.punish_overlong(roll()[1], x, 4, 2).total, (torch.arange(4),)),
    "memory.num_trained": (lambda: memory.num_trained(TRAIN, MICRO.config), ()),
    "tasks.is_built_in": (lambda: tasks.is_built_in("sum_digits"), ()),
    "tasks.source_file": (lambda: tasks.source_file("sum_digits") is None, ()),
    "tasks.data_file": (lambda: tasks.data_file("data.csv").name, ()),
    "tasks.from_rows": (
        lambda: tasks.from_rows([{"prompt": "a", "answer": "b"}] * 3).prompts(0, 0, 2), ()),
    "tasks.from_environment": (
        lambda: tasks.from_environment(trl_environment.Guess, [{"secret": 3}]).prompts(0, 0, 2),
        ()),
    "tasks.from_verifiers": (
        lambda: [
            prompt.text for prompt in tasks.from_verifiers(
                verifiers_guess.environment(), tasks.CharTokenizer("ab")).prompts(0, 0, 2)],
        ()),
    "tasks.json_calls": (lambda: tasks.json_calls('<tool_call>{"name": "f"}</tool_call>'), ()),
    "tasks.renderer_calls": (
        lambda: tasks.renderer_calls(
            verifiers_guess.qwen_tokenizer(), verifiers_guess.RENDERER)("<tool_call>{</tool_call>"),
        ()),
    "tasks.python_calls": (lambda: tasks.python_calls("f(a=1)"), ()),
    "tasks.load_rewards": (lambda: list(tasks.load_rewards(["math:sqrt"])), ()),
    "tasks.load": (lambda: tasks.load("sum_digits").prompts(0, 0, 2), ()),
    "lora": (
        lambda p: funcrl.lora(MICRO_FN, p, rank=2).merge(funcrl.lora(MICRO_FN, p, rank=2).init(0)),
        (MICRO_PARAMS,)),
    "choose_options": (
        lambda: funcrl.choose_options(
            replace(TRAIN, device="cuda"), [], MICRO.config, 6, 10**10).line, ()),
    "models.qlora": (
        lambda p: QLORA(p).merge(QLORA(p).init(0)), (MICRO_PARAMS,)),
    "load_params": (save_and_load, (MICRO_PARAMS,)),
    "save_params": (save_and_load, (MICRO_PARAMS,)),
    "tasks.load_tokenizer": (tokenizer_from_a_folder, ()),
    "tasks.last_number": (lambda: tasks.last_number("4 and 5"), ()),
    "tasks.marked_answer": (lambda: tasks.marked_answer("#### 5"), ()),
    "tasks.number_of": (lambda: float(tasks.number_of("5")), ()),
    "tasks.same_number": (lambda: tasks.same_number("5", "5.0"), ()),
    "tasks.tagged_answer": (lambda: tasks.tagged_answer("<answer>5</answer>"), ()),
    "weights.find": (lambda: weights.find("."), ()),
    "weights.find_model": (lambda: weights.find_model(Path("a.gguf")), ()),
    "weights.from_hugging_face": (
        lambda: weights.from_hugging_face(weights.to_hugging_face(MICRO.config, "x"), ""), ()),
    "weights.load_config": (save_and_load, (MICRO_PARAMS,)),
    "weights.push_to_hub": (failed_upload, ("no/such/folder",)),
    "weights.load_network": (save_and_load, (MICRO_PARAMS,)),
    "weights.to_hugging_face": (lambda: weights.to_hugging_face(MICRO.config, "float32"), ()),
    "weights.translate": (lambda: weights.translate("norm.weight"), ()),
    "trace": traced(lambda graph: graph, MODEL_FN, PARAMS),
    "fuse_per_sample": traced(funcrl.fuse_per_sample),
    "compile_step": stepped(lambda *args: funcrl.compile_step(*args)),
    "graph.compile_at_first": stepped(
        lambda step, *_: graph.compile_at_first(step, funcrl.CompileConfig())),
    "graph.split_repeated": traced(graph.split_repeated),
    "graph.step_graph": stepped(
        lambda *args: graph.step_graph(*args, funcrl.CompileConfig(remat="full"))),
    "donate": stepped(lambda step, *_: funcrl.donate(step)),
    "arrays.to_array": (lambda x: arrays.to_array(x).tolist(), (T[0],)),
    "arrays.to_tensor": (lambda x: arrays.to_tensor(arrays.to_array(x), x), (T[0],)),
    "checks.check_tensor": (lambda x: checks.check_tensor("f", "x", x), (T[0],)),
    "checks.check_rank": (lambda x: checks.check_rank("f", "x", x, "T"), (T[0],)),
    "checks.check_shape": (lambda x: checks.check_shape("f", "x", x, "y", x.shape), (T[0],)),
    "checks.check_dtype": (lambda x: checks.check_dtype("f", "x", x, torch.float64), (T[0],)),
    "checks.check_floating": (lambda x: checks.check_floating("f", "x", x), (T[0],)),
    "checks.check_count": (lambda: checks.check_count("f", "x", 1), ()),
    "checks.import_extra": (lambda: checks.import_extra("f", "math", "", "").pi, ()),
    "config.read_config": (lambda: config.to_plain(written_config()), ()),
    "rollouts.accuracies": (lambda: rollouts.accuracies(TASK, roll()[1]), ()),
    "rollouts.judging_reward": (lambda: rollouts.judging_reward(TASK, roll()[1]), ()),
    "rollouts.is_accuracy": (lambda x: rollouts.is_accuracy(TASK, "correct", x), (T[0],)),
    "rollouts.named_rewards": (lambda: rollouts.named_rewards(TASK, PROMPT, "3"), ()),
    "rollouts.to_completions": (lambda: rollouts.to_completions(*roll(), 1, 1)[0][:5], ()),
    "checks.check_callable": (lambda: checks.check_callable("f", "x", abs, "a function"), ()),
    "checks.check_range": (lambda: checks.check_range("f", "x", 1.0, 0.0, 2.0), ()),
    "checks.check_choice": (lambda: checks.check_choice("f", "x", 1, (1, 2)), ()),
}  # fmt: skip


def pure_functions() -> dict[str, Callable[..., Any]]:
    """Every function that is public or inner, but those of `runs`, which read and write files."""
    public = {name: fn for name, fn in public_functions().items() if not name.startswith("runs.")}
    inner = {prefix: functions_of(module).items() for prefix, module in INNER.items()}
    return public | {f"{prefix}.{name}": fn for prefix in inner for name, fn in inner[prefix]}


def test_the_table_is_complete():
    assert pure_functions().keys() - TABLE_OF_CALLS.keys() == set()


def snapshot(values):
    return [
        (leaf._version, leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree.leaves(values)
    ]


def unchanged(before, values) -> bool:
    return all(
        (old[0] == leaf._version and torch.equal(old[1], leaf))
        if isinstance(leaf, torch.Tensor)
        else old == leaf
        for old, leaf in zip(before, tree.leaves(values), strict=True)
    )


def same_bits(first, second) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(tree.leaves(first), tree.leaves(second), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE_OF_CALLS)
def test_is_pure(name):
    fn, args = TABLE_OF_CALLS[name]
    before = snapshot(args)
    torch.manual_seed(1)
    global_state = torch.get_rng_state()
    first = fn(*args)
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.manual_seed(2)
    second = fn(*args)
    assert same_bits(first, second)
    assert unchanged(before, args)

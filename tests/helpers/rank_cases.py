"""Training over ranks: cases that one process and several take the same steps of.

    python rank_cases.py FOLDER

forks 1, 2, 3 and 4 ranks, one size after the other, from one process that has imported everything;
each rank saves what it comes to as FOLDER/SIZE/RANK.pt.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._inductor.compile_fx  # (what a rank would import, once for all)
from cases import small_network, tiny_model
from children import child_of
from torch import distributed

import funcrl
from funcrl.parallel import layout_of, make_mesh, own_rows, unshard

FEW, MANY = 6, 20  # steps in a row


def rollout_of(seed, prompts=4, samples=2, length=9):
    """A ragged rollout without a row that is masked whole."""
    draw = torch.Generator().manual_seed(seed)
    rows = prompts * samples
    ends = torch.randint(4, length + 1, (rows, 1), generator=draw)
    place = torch.arange(length)
    tokens = torch.randint(0, 11, (rows, length), generator=draw)
    tokens[:, :2] = tokens[::samples, :2].repeat_interleave(samples, 0)  # prompts
    return funcrl.Rollout(
        tokens=tokens,
        mask=(place >= 2) & (place < ends),
        behavior_logprobs=-3 * torch.rand(rows, length, generator=draw, dtype=torch.float64),
        rewards=torch.rand(rows, generator=draw, dtype=torch.float64),
        group=torch.arange(prompts).repeat_interleave(samples),
        policy_version=torch.zeros(rows, dtype=torch.int64),
    )


def steps(
    mesh, algorithm, pack=None, drop=0, reference=False, lora=False, compiled=None, exact=False,
    schedule=True, model=None, shard="none", taught=False, critic=False, count=FEW, optimizer=None,
    cut=0,
    **options,
):  # fmt: skip
    """The parameters after some steps in a row with a schedule, and the metrics of each."""
    model = model or tiny_model()
    size = mesh.all.size
    if shard != "none":  # all ranks hold a state together, or two of four do
        mesh = make_mesh(timeout=200.0, shard=2 if size == 4 and shard == "pairs" else size)
    params = funcrl.tree.cast(funcrl.init_params(model, seed=0), torch.float64)
    model_fn = funcrl.logprob_fn(model)
    if taught:
        other = tiny_model(width=8, num_layers=1)
        theirs = funcrl.init_params(other, seed=1, dtype=torch.float64)
        model_fn = funcrl.logprob_fn(model, chunk=4, teacher=funcrl.Teacher(other, theirs))
    if critic:
        model_fn = funcrl.logprob_fn(model, chunk=4, critic=True)
        params = funcrl.models.with_critic(params, width=16)
    if exact:
        params = funcrl.init_params(model, seed=0)
    if lora:
        adapters = funcrl.lora(funcrl.logprob_fn(model), params, rank=2, alpha=4.0)
        model_fn, trained = adapters.model_fn, funcrl.tree.cast(adapters.init(0), torch.float64)
        trained = funcrl.tree.map(lambda leaf: leaf + 0.01, trained)
    else:
        trained = params
    rate = funcrl.optim.warmup(3, funcrl.optim.constant(1e-3)) if schedule else 1e-3
    optimizer = optimizer or funcrl.optim.chain(
        funcrl.optim.clip_by_global_norm(1.0, mesh.shard), funcrl.optim.adamw(rate)
    )
    layout = layout_of(trained) if shard in ("state", "pairs") else ()
    step = funcrl.grpo_step(
        model_fn, algorithm=algorithm, optimizer=optimizer, mesh=mesh, layout=layout, **options
    )
    state, reports = step.init(trained), []
    for seed in range(count):
        rollout = rollout_of(seed)
        rollout = type(rollout)(*(leaf[drop:] for leaf in rollout))
        whole = torch.arange(len(rollout.mask)) >= cut  # the others teach nothing, as if cut off
        rollout = rollout._replace(mask=rollout.mask & whole[:, None])
        ref = ()
        if reference:
            ref = rollout.behavior_logprobs - 0.1
        teacher = () if algorithm.teacher_weight == () else rollout.behavior_logprobs - 0.2
        batch = funcrl.collate(rollout, algorithm, ref, teacher)
        if exact:
            batch = batch._replace(behavior_logprobs=batch.behavior_logprobs.float())
            batch = funcrl.tree.map(lambda x: x.float() if x.is_floating_point() else x, batch)
        if pack:
            batch = pack(rollout, algorithm, ref_logprobs=ref)
        batch = own_rows(batch, mesh, in_order=exact)
        if compiled is not None and seed == 0:
            step = funcrl.compile_step(funcrl.donate(step), state, batch, compiled)
        state, metrics = step(state, batch)
        reports.append(funcrl.metrics.to_floats(metrics))
    params = unshard(state.params, layout, mesh.shard) if layout else state.params
    held = sum(
        leaf.numel() for leaf in funcrl.tree.leaves(state)
    )  # numbers of the state, on a rank
    return {"params": dict(params), "reports": reports, "held": held}


KL = {"algorithm": funcrl.grpo(kl=0.1), "reference": True}
TAUGHT = {"algorithm": funcrl.grpo(kl=0.1, teacher=0.5), "reference": True, "taught": True}
STREAMS = funcrl.grpo(teacher=0.5)._replace(ce_weight=funcrl.aggregation.token_mean)
CLIP = {"per_sample": funcrl.clip_per_sample(0.05)}
EXACT = {"algorithm": funcrl.grpo(kl=0.0), "exact": True, "count": MANY}
EXACT |= {"model": tiny_model(numerics="exact")}
ONE_LAYER = {"model": tiny_model(num_layers=1)}
# What keeps Inductor's numbers near torch's: no float32 rotation, and none of AdamW's divisions.
SMALL = {"model": small_network(num_layers=1), "optimizer": funcrl.optim.sgd(1e-2)}
traced = funcrl.CompileConfig(backend="eager", remat="selective")
aot = funcrl.CompileConfig(backend="aot_eager", remat="selective")  # what is sent is not
inductor = funcrl.CompileConfig(backend="inductor")
CASES = {
    "grpo": partial(steps, algorithm=funcrl.grpo(), count=MANY),
    "gspo": partial(steps, algorithm=funcrl.gspo()),
    "dapo": partial(steps, algorithm=funcrl.dapo(), microbatch=1),
    "seven rows": partial(steps, algorithm=funcrl.grpo(), drop=1),
    "one row": partial(steps, algorithm=funcrl.reinforce(), drop=7),
    "kl": partial(steps, **KL),
    "one layer": partial(steps, **KL, **ONE_LAYER),
    "small": partial(steps, algorithm=funcrl.reinforce(), **SMALL),
    "correction": partial(steps, algorithm=funcrl.grpo(correction=funcrl.ratios.truncated(2.0))),
    "packed": partial(steps, algorithm=funcrl.dapo(), pack=partial(funcrl.pack, length=16)),
    "prefixes": partial(steps, **KL, pack=partial(funcrl.pack_groups, length=14)),
    "lora": partial(steps, algorithm=funcrl.grpo(), lora=True),
    "three streams, seven rows": partial(steps, algorithm=STREAMS, drop=1),
    "taught": partial(steps, **TAUGHT),
    "critic": partial(
        steps, algorithm=funcrl.ppo(), critic=True, prepare=funcrl.gae(), drop=1, shard="state"
    ),
    "clipped, seven rows": partial(
        steps, algorithm=funcrl.grpo(), drop=1, cut=2, **CLIP, microbatch=2
    ),
    "entropy": partial(steps, algorithm=funcrl.grpo(), prepare=funcrl.top_entropy(0.3), drop=1),
    "optimizer": partial(steps, **KL, **CLIP, shard="optimizer"),
    "state": partial(steps, **KL, shard="state", microbatch=1),
    "state, packed": partial(
        steps, algorithm=funcrl.dapo(), pack=partial(funcrl.pack, length=16), shard="state"
    ),
    "state, lora": partial(steps, algorithm=funcrl.gspo(), lora=True, shard="state"),
    "state, entropy": partial(
        steps, algorithm=funcrl.grpo(), prepare=funcrl.top_entropy(0.3), drop=1, shard="state"
    ),
    "state in pairs": partial(steps, algorithm=funcrl.grpo(), shard="pairs"),
    "exact": partial(steps, **EXACT),
    "exact, six rows": partial(steps, **EXACT | {"count": FEW}, drop=2),
}  # fmt: skip
# Those that are compiled, which takes the most of their time, and the case whose numbers each has.
COMPILED = {
    "traced, clipped": (
        partial(CASES["clipped, seven rows"], compiled=traced, microbatch=None),
        "clipped, seven rows",
    ),
    "traced state": (partial(steps, **TAUGHT, shard="state", compiled=traced), "taught"),
    "aot state": (partial(steps, **KL, **ONE_LAYER, shard="state", compiled=aot), "one layer"),
    "exact, traced": (partial(CASES["exact"], compiled=traced), "exact"),
    "inductor": (partial(CASES["small"], compiled=inductor), "small"),
}  # fmt: skip
# Those of more ranks than two: rows that they do not divide, and halves of halves.
THREE = ("grpo", "clipped, seven rows", "entropy", "packed", "state", "optimizer")
FOUR = ("dapo", "prefixes", "one row", "state in pairs", "exact", "exact, six rows")


def cases_of(size):
    """The cases that so many ranks run."""
    if size > 2:
        return {name: CASES[name] for name in (THREE if size == 3 else FOUR)}
    if size == 1:
        return CASES
    padded = {"one row", "state in pairs"}  # a rank of padding, and halves of a whole
    two = {name: case for name, case in CASES.items() if name not in padded}
    return two | {name: case for name, (case, _) in COMPILED.items()}


def run(folder, rank, size):
    """Be one of several ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size,
        timeout=timedelta(seconds=200),
    )  # fmt: skip
    mesh = make_mesh(timeout=200.0)
    found = {name: case(mesh) for name, case in cases_of(size).items()}
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def main(folder):
    for size in (1, 2, 3, 4):
        place = folder / str(size)
        place.mkdir()
        ranks = [child_of(partial(run, place, rank, size)) for rank in range(size)]
        # One that fails leaves the others waiting, for as long as their time-out is.
        failed = [rank for rank in ranks if os.waitpid(rank, 0)[1]]
        if failed:
            raise SystemExit(f"of {size} ranks {len(failed)} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

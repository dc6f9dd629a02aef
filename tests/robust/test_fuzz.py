"""Random programs and policies through trace, fuse, remat, donate and compilers, beside eager.

Each case is made from a number, so a failure names it: `program(17)`, `policy(17, mixed=True)`.
"""

import zlib
from functools import lru_cache
from random import Random

import pytest
import torch
from cases import equal, random_case
from programs import LENGTH, VOCABULARY, policy, program

import funcrl
from funcrl import optim
from funcrl.graph import remat, step_graph
from funcrl.graph.aliases import writes

_BLOCK = 25


def alike(results, expected):
    """Whether two lists of tensors have the same dtypes, shapes and numbers, NaN included."""
    return all(
        (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(results, expected, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_a_traced_program_is_the_program(block):
    """Also what it does to its arguments; and nothing is left in place but copies into those."""
    generator = torch.Generator().manual_seed(block)
    x, y = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    refused = 0
    for seed in range(block * _BLOCK, (block + 1) * _BLOCK):
        fn = program(seed)
        mine, theirs = [x.clone(), y.clone()], [x.clone(), y.clone()]
        expected = fn(*theirs)
        try:
            graph = funcrl.trace(fn, x, y)
        except ValueError:  # as_strided of a view, which torch cannot write out of place
            refused += 1
            continue
        results = graph(*mine)
        assert alike([*results, *mine], [*expected, *theirs]), f"program({seed})"
        inputs = graph.graph.find_nodes(op="placeholder")
        assert all(n.args[0] in inputs for n in graph.graph.nodes if writes(n)), f"program({seed})"
    assert refused <= 1


def batch(seed):
    case = random_case(seed, prompts=2, samples=2, length=LENGTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, case.rollout.tokens.shape, generator=generator)
    return funcrl.collate(case.rollout._replace(tokens=tokens), funcrl.grpo())


def schedule(draw):
    falling = draw.choice([optim.linear, optim.cosine])(1e-2, 0.0, 4)
    return draw.choice([falling, optim.warmup(2, falling), 1e-2])


def per_sample(draw):
    return draw.choice([None, lambda grads: grads, funcrl.clip_per_sample(0.1)])


def tag(node):
    """Tag half of the nodes, by their names."""
    return zlib.crc32(node.name.encode()) % 2 == 0


def run(step, state, batches):
    states = []
    for each in batches:
        state, metrics = step(state, each)
        states.append((funcrl.tree.map(torch.clone, state), metrics))
    return states


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_policy_has_the_bits_of_the_policy(seed):
    """Three steps in a row with a schedule, donated or computed again, in mixed dtypes."""
    draw = Random(seed)
    model_fn, params = policy(seed, mixed=True)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule(draw)))
    options = {"per_sample": per_sample(draw), "microbatch": draw.choice([None, 2])}
    step = funcrl.grpo_step(model_fn, optimizer=tx, **options)
    config = funcrl.CompileConfig(backend=("eager", "aot_eager")[seed % 2], fuse="none")
    batches = [batch(seed + index) for index in range(3)]
    state, graph, source = step.init(params), None, step
    if draw.random() < 0.6:
        source = funcrl.donate(step)
    else:
        graph = remat(step_graph(step, state, batches[0], config), tag)
    compiled = funcrl.compile_step(source, state, batches[0], config, graph)
    mine = run(compiled, source.init(params), batches)
    for (got, metrics), (wanted, reported) in zip(mine, run(step, state, batches), strict=True):
        assert equal(got, wanted)
        metrics.maxes.pop("num_recompilations")
        assert equal(metrics, reported)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("seed", range(100, 103))
def test_a_fused_policy_has_the_numbers_of_the_policy(seed, backend):
    check_numbers(seed, backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("seed", [203])
def test_inductor_has_the_numbers_of_the_policy(seed):
    check_numbers(seed, "inductor")


@lru_cache
def traced_policy(seed):
    """A step without Adam, which makes a step of any gradient, however small; its parameters, its
    batches, its graph and what it returns."""
    draw = Random(seed)
    model_fn, params = policy(seed, mixed=False)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(schedule(draw), momentum=0.9))
    options = {"per_sample": per_sample(draw), "microbatch": draw.choice([None, 2])}
    step = funcrl.grpo_step(model_fn, optimizer=tx, **options)
    source = draw.choice([step, funcrl.donate(step)])
    batches = [batch(seed + index) for index in range(3)]
    state = step.init(params)
    graph = step_graph(source, state, batches[0], funcrl.CompileConfig())
    return source, params, batches, graph, run(step, state, batches)


def check_numbers(seed, backend):
    """Sums in another order: 1e-12 of the largest number of each leaf, in float64, in 3 steps."""
    source, params, batches, graph, expected = traced_policy(seed)
    config = funcrl.CompileConfig(backend=backend)
    compiled = funcrl.compile_step(source, source.init(params), batches[0], config, graph)
    mine = run(compiled, source.init(params), batches)
    for (got, _), (wanted, _) in zip(mine, expected, strict=True):
        paths = funcrl.tree.paths(wanted)
        for path, x, y in zip(paths, *map(funcrl.tree.leaves, (got, wanted)), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), path
            bound = 1e-12 * max(1.0, y.abs().max().item())
            assert (x - y).abs().max() <= bound, path

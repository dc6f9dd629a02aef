"""The compiled step: its bits, its buckets, its donated memory, its refusals."""

import copy
import itertools
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from cases import equal, relative, tiny_batch, tiny_model, twice

import funcrl
from funcrl import CompileConfig, optim, tree
from funcrl.graph import compilation, predict_peak
from funcrl.graph.capture import capture

MODEL = tiny_model(num_layers=1)
MODEL_FN = funcrl.logprob_fn(MODEL)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
BATCH = tiny_batch()
# AdamW's first step divides each entry of a gradient by its own size, which turns rounding of
# entries near 0 into anything; SGD leaves it as it is.
SGD = {"optimizer": optim.sgd(1.0, momentum=0.9), "per_sample": funcrl.clip_per_sample(0.01)}
OPTIONS = {"plain": {}, "clipped": SGD}


def without_count(metrics):
    maxes = dict(metrics.maxes)
    return metrics._replace(maxes=maxes), int(maxes.pop("num_recompilations"))


@lru_cache
def traced(name, donated, num_layers=1):
    """A step, its parameters, and its graph, which is traced once for all tests."""
    model = tiny_model(num_layers=num_layers)
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    step = funcrl.grpo_step(funcrl.logprob_fn(model), **OPTIONS[name])
    step = funcrl.donate(step) if donated else step
    return step, params, funcrl.trace(step.update, step.init(params), BATCH)


def compiled(name, donated, config, num_layers=1):
    """The step of that graph, after the passes of a configuration."""
    step, params, graph = traced(name, donated, num_layers)
    graph = funcrl.fuse_per_sample(graph) if config.fuse == "per_sample" else graph
    graph = funcrl.remat(graph, config.remat, config.remat_budget or None)
    return funcrl.compile_step(step, step.init(params), BATCH, config, graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "donated"),  # every pair of choices
    [
        ("plain", "eager", False),
        ("plain", "aot_eager", True),
        ("clipped", "eager", True),
        ("clipped", "aot_eager", False),
    ],
)
def test_every_bit_is_kept_without_fusion(name, backend, donated):
    step = funcrl.grpo_step(MODEL_FN, **OPTIONS[name])
    fast = compiled(name, donated, CompileConfig(backend=backend, fuse="none"))
    assert equal(twice(fast, fast.init(PARAMS), BATCH), twice(step, step.init(PARAMS), BATCH))


def gated_scores(params, sample):
    """A policy with a parameter of no dimension."""
    hidden = torch.tanh(params["embed"][sample.tokens] * params["gate"])
    return funcrl.token_scores(hidden @ params["out"], sample.tokens)


GATED = {"embed": (11, 4), "gate": (), "out": (4, 11)}
RATES = {
    "constant": (1e-2, [1e-2] * 4),
    "linear": (optim.linear(1e-2, 0.0, 4), [1e-2, 7.5e-3, 5e-3, 2.5e-3]),
    "warmup": (optim.warmup(3, optim.constant(1e-2)), [2.5e-3, 5e-3, 7.5e-3, 1e-2]),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *itertools.product(["eager", "aot_eager"], RATES),
        # With Inductor test_inductor.py has constant rates, test_fuzz.py those of `linear`.
        pytest.param("inductor", "warmup", marks=pytest.mark.slow),
    ],
)
def test_a_donated_step_follows_its_schedule(backend, name):
    """Also a parameter without dimensions moves: torch.compile drops writes into such leaves."""
    rate, expected = RATES[name]
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(rate))
    step = funcrl.grpo_step(gated_scores, optimizer=tx)
    generator = torch.Generator().manual_seed(0)
    params = {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in GATED.items()
    }
    donated = funcrl.donate(step)
    state, other, rates = donated.init(params), step.init(params), []
    fast = funcrl.compile_step(donated, state, BATCH, CompileConfig(backend=backend))
    for _ in expected:
        state, metrics = fast(state, BATCH)
        other, _ = step(other, BATCH)
        rates.append(optim.current_learning_rate(state.opt_state).item())
        assert metrics.last["learning_rate"] == rates[-1]
        assert relative(state.params, other.params) <= 1e-12
        assert equal(state.step, other.step)
    assert rates == pytest.approx(expected, rel=1e-15)
    assert state.params["gate"] != params["gate"]


@pytest.mark.slow
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fusion_changes_rounding_alone(backend, donated):
    step = funcrl.grpo_step(MODEL_FN, **SGD)
    fast = compiled("clipped", donated, CompileConfig(backend=backend))
    assert (
        relative(twice(fast, fast.init(PARAMS), BATCH), twice(step, step.init(PARAMS), BATCH))
        <= 1e-12
    )


@lru_cache
def without_remat(fuse, donated):
    """A state of a step of two layers, its results, and its predicted peak."""
    step, params, graph = traced("clipped", donated, 2)
    fast = compiled("clipped", donated, CompileConfig(fuse=fuse), 2)
    graph = funcrl.fuse_per_sample(graph) if fuse == "per_sample" else graph
    state = step.init(params)
    return state, copy.deepcopy(fast(copy.deepcopy(state), BATCH)), predict_peak(graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "fuse", "donated"),  # every pair of choices
    [
        ("full", "none", False),
        ("full", "per_sample", True),
        ("selective", "none", True),
        ("selective", "per_sample", False),
        ("budget", "none", False),
        ("budget", "per_sample", True),
    ],
)
def test_remat_keeps_every_bit_with_all_the_rest(remat, fuse, donated):
    """Beside the same program without it."""
    state, expected, peak = without_remat(fuse, donated)
    budget = int(0.95 * peak) if remat == "budget" else 0
    config = CompileConfig(fuse=fuse, remat=remat, remat_budget=budget)
    fast = compiled("clipped", donated, config, 2)
    assert equal(fast(copy.deepcopy(state), BATCH), expected)


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_a_donated_step_computes_the_same_again(remat):
    """Its writes come when nothing is computed any more: no product of a parameter is kept."""
    graphs = [funcrl.remat(traced("plain", donated, 2)[2], remat) for donated in (False, True)]
    plain, donated = (
        [node.name for node in graph.graph.nodes if node.meta.get("recomputed")] for graph in graphs
    )
    assert plain == donated
    assert any(name.startswith("mm") for name in plain) == (remat == "full")


@pytest.mark.slow
def test_another_shape_is_compiled_with_a_warning_and_counted():
    step = funcrl.grpo_step(MODEL_FN)
    state = step.init(PARAMS)
    fast = funcrl.compile_step(step, state, BATCH, CompileConfig(max_shapes=2))
    assert without_count(fast(state, BATCH)[1])[1] == 0
    longer = tiny_batch(length=8)
    with pytest.warns(UserWarning, match=r"compile_step.*batch\.tokens.*\(6, 8\).*\(6, 7\)"):
        new, metrics = fast(state, longer)
    metrics, count = without_count(metrics)
    assert count == 1
    assert equal((new, metrics), step(state, longer))
    assert without_count(fast(state, BATCH)[1])[1] == 1  # both are known now: no warning
    assert without_count(fast(state, longer)[1])[1] == 1
    longest = tiny_batch(length=9)
    with pytest.warns(UserWarning, match="compile_step.*2.*max_shapes"):
        new, metrics = fast(state, longest)
    assert equal((new, without_count(metrics)[0]), step(state, longest))


@pytest.mark.slow
def test_values_are_read_from_the_arguments():
    """A learning rate, a step and a seed are inputs: another state needs no other program."""
    schedule = optim.warmup(3, then=optim.constant(0.1))
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.adamw(schedule))
    fast = funcrl.compile_step(step, step.init(PARAMS), BATCH, CompileConfig(fuse="none"))
    state = step.init(PARAMS, seed=7)
    for _ in range(4):
        expected, got = step(state, BATCH), fast(state, BATCH)
        assert equal((got[0], without_count(got[1])[0]), expected)
        state = got[0]
    assert (state.seed, state.step) == (7, 4)
    # Strides are put right, so a batch may be a slice of another.
    wide = tree.map(lambda leaf: torch.cat([leaf, leaf], dim=1), BATCH)
    assert equal(fast(state, tree.map(lambda leaf: leaf[:, :7], wide))[0], step(state, BATCH)[0])


@pytest.mark.slow
def test_a_program_reads_its_arguments_by_name():
    """Names in another order are the same state, other names another one."""
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0))
    state = step.init(PARAMS)
    fast = funcrl.compile_step(step, state, BATCH, CompileConfig(fuse="none"))
    turned = state._replace(params=dict(reversed(state.params.items())))
    assert equal(fast(turned, BATCH)[0], step(state, BATCH)[0])
    named = state._replace(params={**state.params, "extra": torch.ones(1)})
    with (
        pytest.warns(UserWarning, match=r"compile_step.*state\.params\.extra"),
        pytest.raises(ValueError, match="extra"),
    ):
        fast(named, BATCH)


@pytest.mark.slow
def test_a_tensor_that_was_in_two_places_need_not_be_again():
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0))
    state = step.init(PARAMS)
    twice = BATCH._replace(advantages=BATCH.token_weights)
    fast = funcrl.compile_step(step, state, twice, CompileConfig(fuse="none"))
    assert equal(fast(state, BATCH)[0], step(state, BATCH)[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_constant_is_read_where_it_is(backend):
    """The base of adapters, which the graph holds by reference."""
    base = tree.map(torch.clone, PARAMS)
    lora = funcrl.lora(MODEL_FN, base, rank=2)
    step = funcrl.grpo_step(lora.model_fn, optimizer=optim.sgd(1.0))
    state = step.init(tree.cast(lora.init(0), torch.float64))
    fast = funcrl.compile_step(step, state, BATCH, CompileConfig(backend=backend, fuse="none"))
    assert equal(fast(state, BATCH)[0], step(state, BATCH)[0])
    for leaf in base.values():
        leaf.mul_(1.5)
    assert equal(fast(state, BATCH)[0], step(state, BATCH)[0])


@pytest.mark.slow
def test_strides_of_one_row_are_no_other_shape():
    step = funcrl.grpo_step(MODEL_FN)
    state = step.init(PARAMS)
    row = tree.map(lambda leaf: leaf[:1].clone(), BATCH)
    fast = funcrl.compile_step(step, state, row)
    wide = tree.map(lambda leaf: torch.cat([leaf, leaf], dim=1)[:, :7], row)
    assert wide.tokens.stride() != row.tokens.stride()
    assert without_count(fast(state, wide)[1])[1] == 0


@pytest.mark.slow
def test_a_graph_of_another_shape_is_refused():
    step = funcrl.grpo_step(MODEL_FN)
    state, config = step.init(PARAMS), CompileConfig()
    graph = funcrl.graph.step_graph(step, state, tiny_batch(length=8), config)
    with pytest.raises(ValueError, match=r"compile_step.*graph.*batch\.tokens.*7\).*8\)"):
        funcrl.compile_step(step, state, BATCH, config, graph)


def test_a_cache_may_be_damaged_and_shared(tmp_path, monkeypatch):
    """Two processes may end their first call at one time; here the second in the first's place."""
    path = tmp_path / "program.bin"
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    replace = Path.replace

    def replaced_by_another_first(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        assert compilation._cached(lambda: 2, path)() == 2
        return self.replace(target)

    monkeypatch.setattr(Path, "replace", replaced_by_another_first)
    assert compilation._cached(lambda: 1, path)() == 1
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"damaged")
    assert compilation._cached(lambda: 3, path)() == 3
    assert path.read_bytes() == b"artifacts"


# -- donation -------------------------------------------------------------------------------------


def test_a_donated_step_has_the_same_bits_in_the_old_memory():
    schedule = optim.warmup(3, then=optim.constant(0.1))
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.adamw(schedule))
    donated = funcrl.donate(step)
    assert equal(twice(donated, donated.init(PARAMS), BATCH), twice(step, step.init(PARAMS), BATCH))
    state = donated.init(PARAMS)
    places = [leaf.data_ptr() for leaf in tree.leaves(state)]
    new, metrics = donated(state, BATCH)
    assert [leaf.data_ptr() for leaf in tree.leaves(new)] == places
    # What is reported is not in that memory: the next step does not change it.
    reported = copy.deepcopy(metrics)
    donated(new, BATCH)
    assert equal(metrics, reported)
    assert not torch.equal(state.params["norm.weight"], PARAMS["norm.weight"])  # used up


def copies_alive(step):
    """Copies of the state in memory as a step returns, when the old one cannot be gone yet."""
    state = step.init(PARAMS)
    new, _ = step(state, BATCH)
    leaves = [*tree.leaves(state), *tree.leaves(new)]
    storages = {leaf.untyped_storage().data_ptr(): leaf.nbytes for leaf in leaves}
    return sum(storages.values()) / sum(leaf.nbytes for leaf in tree.leaves(new))


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_copy_of_the_state_is_alive_instead_of_two(is_compiled):
    step = funcrl.grpo_step(MODEL_FN)
    for made, copies in ((step, 2), (funcrl.donate(step), 1)):
        if is_compiled:
            made = compiled("plain", copies == 1, CompileConfig())
        assert copies_alive(made) == pytest.approx(copies, abs=0.01)


def test_leaves_may_change_places():
    """A state that swaps two leaves: each is read before it is written."""

    def update(state, batch):
        a, b = state.params["a"], state.params["b"]
        new = state._replace(params={"a": b, "b": a.view(-1)}, step=state.step + 1)
        return new, funcrl.Metrics({"a": a}, {}, {"b": b.sum()}, {})

    step = funcrl.Step(funcrl.grpo_step(MODEL_FN).init, update)
    state = funcrl.TrainState(
        {"a": torch.zeros(2), "b": torch.ones(2)}, (), torch.tensor(0), torch.tensor(0)
    )
    new, metrics = funcrl.donate(step)(state, BATCH)
    assert (new.params["a"].tolist(), new.params["b"].tolist()) == ([1, 1], [0, 0])
    assert metrics.sums["a"].tolist() == [0, 0]
    assert new.params["a"] is state.params["a"]


@pytest.mark.slow
def test_states_that_cannot_be_written_are_refused():
    step = funcrl.donate(funcrl.grpo_step(MODEL_FN))
    state = step.init(PARAMS)
    shared = state._replace(seed=state.step)
    fast = compiled("plain", True, CompileConfig())
    for made in (step, fast):
        with pytest.raises(ValueError, match="donate.*'step'.*'seed'"):
            made(shared, BATCH)

    def narrower(state, batch):
        return tree.cast(state, torch.float32), funcrl.Metrics({}, {}, {}, {})

    with pytest.raises(ValueError, match="donate.*dtypes"):
        funcrl.donate(funcrl.Step(step.init, narrower))(state, BATCH)
    with pytest.raises(TypeError, match="donate.*step"):
        funcrl.donate(step.update)


# -- refusals -------------------------------------------------------------------------------------


def test_combinations_that_cannot_work_are_refused(tmp_path):
    for options, message in [
        ({"remat": "budget"}, "CompileConfig.*remat_budget 0"),
        ({"remat_budget": 5}, "CompileConfig.*remat_budget 5"),
        ({"cache_dir": tmp_path}, "CompileConfig.*cache_dir"),
        ({"max_shapes": 0}, "CompileConfig.*max_shapes"),
    ]:
        with pytest.raises(ValueError, match=message):
            CompileConfig(**options)


def test_what_a_step_cannot_do_is_refused():
    step = funcrl.grpo_step(MODEL_FN)
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match="CompileConfig.*cudagraph"):
        CompileConfig(cudagraph="piecewise")
    with pytest.raises(ValueError, match="compile_step.*cudagraph.*cpu"):
        funcrl.compile_step(step, state, BATCH, CompileConfig(cudagraph="full"))
    with pytest.raises(TypeError, match="compile_step expects step"):
        funcrl.compile_step(step.update, state, BATCH)


@pytest.mark.gpu
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # Inductor's own choice
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_cuda_graph_replays_the_step(backend, donated):
    step = funcrl.grpo_step(MODEL_FN, **SGD)
    cuda = lambda value: tree.map(lambda leaf: leaf.cuda(), value)  # noqa: E731 (short)
    params, batch = cuda(PARAMS), cuda(BATCH)
    made = funcrl.donate(step) if donated else step
    config = CompileConfig(backend=backend, cudagraph="full")
    fast = funcrl.compile_step(made, step.init(params), batch, config)
    state, other = step.init(params), step.init(params)
    kept = []
    for sign in (1, -1, 1):
        rows = batch._replace(advantages=sign * batch.advantages)
        state, metrics = fast(state, rows)
        other, expected = step(other, rows)
        assert relative(state, other) <= 1e-12
        assert relative(without_count(metrics)[0], expected) <= 1e-12
        kept.append((metrics, copy.deepcopy(metrics)))
    assert all(equal(now, then) for now, then in kept)  # no replay writes into what was returned


@pytest.mark.gpu
def test_leaves_of_a_graph_s_memory_may_change_places():
    """Two leaves that are written into, passed in again the other way round."""

    def program(a, b):
        new = a + 1, 2 * b
        return [a.copy_(new[0]), b.copy_(new[1])]

    a, b = torch.tensor([1.0], device="cuda"), torch.tensor([10.0], device="cuda")
    replay = capture(program, [a, b], [0, 1])
    counts = a._version, b._version
    a, b = replay(a, b)
    assert (a.item(), b.item()) == (2, 20)
    assert a._version > counts[0]  # a generator sees by it that they were written to
    assert b._version > counts[1]
    a, b = replay(b, a)
    assert (a.item(), b.item()) == (21, 4)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_its_inputs_as_they_were():
    def program(a):
        a += 1
        if a.item() > 1:  # the second warm-up
            raise RuntimeError("out of memory")
        return [a]

    a = torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="out of memory"):
        capture(program, [a], [0])
    assert a.item() == 0

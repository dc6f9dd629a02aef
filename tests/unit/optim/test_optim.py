"""Optimizers against torch.optim in float64 over 20 steps; masks, schedules, skipped updates."""

import math
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import optim, tree


def start(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (4, 3), "tall": (7, 2), "wide": (2, 5)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def gradients(step: int, params):
    """A gradient that depends on the parameters and on the step."""
    return {name: torch.sin(leaf * 3 + step) * (step + 1) for name, leaf in params.items()}


def run(tx, params, steps=20):
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(gradients(step, params), state, params)
        params = optim.apply_updates(params, updates)
    return params


def run_torch(optimizer_class, params, steps=20, **options):
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = optimizer_class(list(leaves.values()), **options)
    for step in range(steps):
        with torch.no_grad():
            for name, grad in gradients(step, leaves).items():
                leaves[name].grad = grad
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def check_close(got, expected, tolerance):
    for name, leaf in expected.items():
        assert (got[name] - leaf).abs().max().item() <= tolerance, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"betas": (0.8, 0.95), "eps": 1e-4},
        {"betas": (0.0, 0.9)},
    ],
)
def test_adamw_equals_torch(options):
    got = run(optim.adamw(0.05, **options), start())
    check_close(got, run_torch(torch.optim.AdamW, start(), lr=0.05, **options), 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1},
    ],
)
def test_sgd_equals_torch(options):
    got = run(optim.sgd(1e-3, **options), start())
    check_close(got, run_torch(torch.optim.SGD, start(), lr=1e-3, **options), 1e-12)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch(adjust, nesterov):
    # torch iterates in bfloat16 as well: the same operations on the same bits. Both start each
    # step from the same parameters, because a last bit before a rounding to bfloat16 can grow;
    # the running means are each one's own over all 20 steps.
    params = start()
    tx = optim.muon(0.02, adjust=adjust, nesterov=nesterov)
    state = tx.init(params)
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    reference = torch.optim.Muon(
        list(leaves.values()), lr=0.02, adjust_lr_fn=adjust, nesterov=nesterov
    )
    for step in range(20):
        grads = gradients(step, params)
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        reference.step()
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        check_close(params, {name: leaf.detach() for name, leaf in leaves.items()}, 1e-12)
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(params[name])


def test_newton_schulz_orthogonalizes():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    singular = torch.linalg.svdvals(optim.newton_schulz(matrix))
    assert singular.min() > 0.65
    assert singular.max() < 1.25
    # The singular vectors stay: U^T X V is diagonal.
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ optim.newton_schulz(matrix) @ vh.T
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-12


def test_muon_with_adamw_for_the_rest():
    params = {"w": torch.eye(2), "b": torch.ones(2)}
    matrices, others = (lambda p, x: x.ndim == 2), (lambda p, x: x.ndim != 2)
    tx = optim.chain(
        optim.masked(optim.muon(0.1), matrices), optim.masked(optim.adamw(0.2), others)
    )
    grads = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    updates, state = tx.update(grads, tx.init(params), params)
    alone, _ = optim.adamw(0.2).update(
        {"b": grads["b"]}, optim.adamw(0.2).init({"b": params["b"]}), {"b": params["b"]}
    )
    assert torch.equal(updates["b"], alone["b"])
    muon_alone, _ = optim.muon(0.1).update(
        {"w": grads["w"]}, optim.muon(0.1).init({"w": params["w"]}), {"w": params["w"]}
    )
    assert torch.equal(updates["w"], muon_alone["w"])
    # No state is kept for what a mask leaves out.
    assert sum(leaf.numel() for leaf in tree.leaves(state)) == 4 + 2 * 2 + 5


def test_weight_decay_mask():
    params = {"w": torch.ones(1), "b": torch.ones(1)}
    zero = tree.zeros_like(params)
    for mask in ({"w": True, "b": False}, lambda path, leaf: path == "w"):
        tx = optim.adamw(0.5, weight_decay=0.1, mask=mask)
        updates, _ = tx.update(zero, tx.init(params), params)
        assert updates["w"].item() == pytest.approx(-0.05)
        assert updates["b"].item() == 0.0
        tx = optim.sgd(0.5, weight_decay=0.1, mask=mask)
        updates, _ = tx.update(zero, tx.init(params), params)
        assert (updates["w"].item(), updates["b"].item()) == (pytest.approx(-0.05), 0.0)
    with pytest.raises(ValueError, match="masked .*structure.* 'b'"):
        optim.masked(optim.sgd(0.1), {"w": True}).init(params)


def test_fp32_moments_for_bf16_parameters():
    params = tree.cast(start(), torch.bfloat16)
    narrow = optim.adamw(1e-3).init(params)
    wide = optim.adamw(1e-3, moment_dtype=torch.float32).init(params)
    assert narrow[0].mean["wide"].dtype == torch.bfloat16
    assert wide[0].square["wide"].dtype == torch.float32
    got = run(optim.adamw(0.05, moment_dtype=torch.float32), params)
    assert got["wide"].dtype == torch.bfloat16
    expected = run(optim.adamw(0.05), start())
    # 20 roundings of parameters of size up to 4 to 8 bits: 20 * 4 * 2^-9.
    check_close(tree.cast(got, torch.float64), expected, 0.16)


def test_clip_by_global_norm():
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clip = optim.clip_by_global_norm(10.0)
    assert torch.equal(clip.update(grads, clip.init(grads), grads)[0]["a"], torch.tensor([3.0]))
    zero = tree.zeros_like(grads)
    assert torch.equal(clip.update(zero, clip.init(zero), zero)[0]["a"], torch.tensor([0.0]))
    with pytest.raises(ValueError, match="clip_by_global_norm .*max_norm"):
        optim.clip_by_global_norm(0)


def test_schedules_by_hand():
    at = torch.tensor
    # Half a cosine from 1 to 0.2 in 4: at 1, 0.2 + 0.8 (1 + cos(pi/4)) / 2.
    cosine = optim.cosine(1.0, 0.2, steps=4)
    assert cosine(at(1)).item() == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)), abs=1e-15)
    assert cosine(at(9)).item() == pytest.approx(0.2, abs=1e-15)
    assert optim.linear(1.0, 0.0, steps=4)(at(3)).item() == 0.25
    warm = optim.warmup(1, then=optim.linear(1.0, 0.0, steps=2))
    assert [warm(at(n)).item() for n in range(5)] == [0.5, 1.0, 0.5, 0.0, 0.0]


def test_a_schedule_is_followed():
    tx = optim.sgd(optim.linear(1.0, 0.0, steps=4))
    params = {"w": torch.zeros(1)}
    state, rates = tx.init(params), []
    for _ in range(6):
        updates, state = tx.update({"w": torch.ones(1)}, state, params)
        rates.append(-updates["w"].item())
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("before", [0.5, optim.cosine(0.5, 0.1, 9)], ids=["number", "schedule"])
def test_a_restored_state_follows_the_schedule_that_it_is_given_to(before, tmp_path):
    """Three updates before it is saved: the next is number 3 of the new schedule, 0.4."""
    params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    tx = optim.sgd(before, momentum=0.9)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(grads, state, params)
    funcrl.save(tmp_path / "state", state)
    tx = optim.sgd(optim.linear(1.0, 0.0, steps=5), momentum=0.9)
    state, _ = funcrl.restore(tmp_path / "state", like=tx.init(params))
    trace = 1 + 0.9 + 0.81 + 0.729
    updates, state = tx.update(grads, state, params)
    assert updates["w"].item() == pytest.approx(-0.4 * trace, rel=1e-6)
    assert optim.current_learning_rate(state) == optim.linear(1.0, 0.0, steps=5)(torch.tensor(3))


def test_a_number_is_replaced_in_the_state_and_a_schedule_is_not():
    params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    tx = optim.skip_nonfinite(optim.chain(optim.clip_by_global_norm(9.0), optim.adamw(0.5)))
    _, state = tx.update(grads, tx.init(params), params)
    for rate in (0.25, torch.tensor(0.125)):
        changed = optim.with_learning_rate(state, rate)
        assert tree.structure(changed) == tree.structure(state)
        updates, after = tx.update(grads, changed, params)
        expected, _ = tx.update(grads, state, params)
        assert torch.equal(updates["w"] * 0.5, expected["w"] * rate)
        assert optim.current_learning_rate(after) == rate
    assert optim.current_learning_rate(state) == 0.5
    halves = [optim.masked(optim.sgd(0.1), lambda path, leaf: True)] * 2
    for other in (optim.adamw(optim.constant(0.1)), optim.chain(*halves), optim.scale_by_adam()):
        with pytest.raises(ValueError, match="with_learning_rate .*optimizer"):
            optim.with_learning_rate(other.init(params), 0.1)
    with pytest.raises(ValueError, match="with_learning_rate .*learning_rate"):
        optim.with_learning_rate(state, -1.0)


@pytest.mark.slow
def test_a_new_learning_rate_does_not_recompile():
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    params = start(torch.float32)
    grads, state = gradients(0, params), tx.init(params)
    graph = make_fx(tx.update)(grads, state, params)
    compilations = []

    def backend(module, inputs):
        compilations.append(module)
        return module.forward

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about its imports
        compiled = torch.compile(graph, backend=backend)
        for rate in (1e-3, 2e-3, 0.5):
            changed = optim.with_learning_rate(state, rate)
            updates, _ = compiled(grads, changed, params)
            expected, _ = tx.update(grads, changed, params)
            assert all(torch.equal(updates[name], expected[name]) for name in params)
    assert len(compilations) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_change_nothing(bad):
    tx = optim.skip_nonfinite(optim.adamw(0.1))
    params = start()
    state = tx.init(params)
    _, state = tx.update(gradients(0, params), state, params)
    poisoned = gradients(1, params)
    poisoned["wide"] = poisoned["wide"].clone()
    poisoned["wide"][0, 0] = bad
    updates, after = tx.update(poisoned, state, params)
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in tree.leaves(updates))
    same = zip(tree.leaves(after.inner), tree.leaves(state.inner), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert after.num_skipped == 1
    # The next finite update is what it would have been.
    recovered, _ = tx.update(gradients(2, params), after, params)
    expected, _ = tx.update(gradients(2, params), state, params)
    assert all(torch.equal(recovered[name], expected[name]) for name in params)


def test_a_moment_that_would_overflow_is_not_poisoned():
    # 1e22 is finite in float32, its square is not: the second moment would be infinite for good.
    tx = optim.skip_nonfinite(optim.adamw(0.1))
    params = {"w": torch.zeros(2)}
    state = tx.init(params)
    updates, after = tx.update({"w": torch.tensor([1e22, 1.0])}, state, params)
    assert after.num_skipped == 1
    assert torch.equal(updates["w"], torch.zeros(2))
    assert torch.equal(after.inner[0].square["w"], torch.zeros(2))


def test_frozen_leaves_stay():
    params = start()
    tx = optim.chain(optim.adamw(0.1), optim.freeze(lambda path, leaf: path == "tall"))
    got = run(tx, params, steps=3)
    assert torch.equal(got["tall"], params["tall"])
    assert not torch.equal(got["wide"], params["wide"])


@pytest.mark.parametrize("make", [optim.adamw, optim.muon])
def test_scalars_and_low_precision_keep_their_dtypes(make):
    params = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    tx = make(0.1, moment_dtype=torch.float32)
    state = tx.init(params)
    _, after = tx.update(params, state, params)
    dtypes = [leaf.dtype for leaf in tree.leaves(state)]
    assert dtypes == [leaf.dtype for leaf in tree.leaves(after)]
    scalar = {"t": torch.ones((), dtype=torch.bfloat16)}
    tx = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, momentum=0.9))
    state = tx.init(scalar)
    updates, after = tx.update(scalar, state, scalar)
    assert updates["t"].dtype == after[1][0].trace["t"].dtype == torch.bfloat16


def test_a_schedule_may_return_a_python_number():
    tx = optim.sgd(lambda num_updates: 0.5)
    state = tx.init({"w": torch.ones(1)})
    assert torch.equal(optim.current_learning_rate(state), torch.tensor(0.5, dtype=torch.float64))


def test_large_finite_gradients_are_not_skipped():
    # Their squares overflow float32, they do not.
    tx = optim.skip_nonfinite(optim.sgd(1.0))
    params = {"w": torch.zeros(2)}
    updates, state = tx.update({"w": torch.full((2,), 1e30)}, tx.init(params), params)
    assert state.num_skipped == 0
    assert torch.equal(updates["w"], torch.full((2,), -1e30))


def test_refusals():
    with pytest.raises(ValueError, match=r"adamw .*betas\[1\]"):
        optim.adamw(1e-3, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="sgd .*learning_rate"):
        optim.sgd(-1)
    with pytest.raises(ValueError, match="sgd.*nesterov.* momentum"):
        optim.sgd(0.1, nesterov=True)
    with pytest.raises(ValueError, match="init .*parameter.* mask"):
        optim.masked(optim.adamw(1e-3), lambda path, leaf: False).init(start())
    with pytest.raises(ValueError, match="apply_updates .*structure.* 'v'"):
        optim.apply_updates({"w": torch.ones(1)}, {"w": torch.ones(1), "v": torch.ones(1)})
    with pytest.raises(ValueError, match="muon .*adjust"):
        optim.muon(0.1, adjust="best")
    with pytest.raises(ValueError, match="sgd .*momentum"):
        optim.sgd(0.1, momentum=2.0)
    with pytest.raises(ValueError, match="cosine .*initial"):
        optim.cosine(-1, 0.0, 5)
    with pytest.raises(ValueError, match="warmup .*steps"):
        optim.warmup(0, then=optim.constant(1.0))


SQUARE = {"a": torch.ones(3), "w": torch.ones(2, 2)}
SUMMED = optim.stateless(lambda grads, params: tree.map(torch.sum, grads))
ROWS = optim.stateless(lambda grads, params: tree.map(lambda leaf: leaf[:1], grads))


@pytest.mark.parametrize(
    ("function", "tx"),
    [
        ("chain", optim.chain(SUMMED, optim.add_decayed_weights(0.1))),
        ("chain", optim.chain(ROWS, optim.sgd(0.1))),
        ("masked", optim.masked(ROWS, lambda path, leaf: path == "w")),
        ("skip_nonfinite", optim.skip_nonfinite(SUMMED)),
        ("apply_updates", SUMMED),
        ("apply_updates", ROWS),
    ],
)
def test_updates_of_another_shape_are_refused_by_name(function, tx):
    with pytest.raises(ValueError, match=f"^{function} .* '[aw]'"):
        optim.apply_updates(SQUARE, tx.update(SQUARE, tx.init(SQUARE), SQUARE)[0])


@pytest.mark.parametrize(
    ("function", "tx"),
    [
        ("scale_by_adam", optim.adamw(0.1)),
        ("trace", optim.sgd(0.1, momentum=0.9)),
        ("add_decayed_weights", optim.sgd(0.1, weight_decay=0.1)),
        ("scale_by_muon", optim.masked(optim.muon(0.1), lambda path, leaf: path == "w")),
    ],
)
def test_gradients_of_another_shape_are_refused_by_name(function, tx):
    """A column would be added to every column of the moments, whose shape it then has."""
    column = {**SQUARE, "w": torch.ones(2, 1)}
    with pytest.raises(ValueError, match=rf"^{function} .* 'w'.* \[2, 1\]"):
        tx.update(column, tx.init(SQUARE), SQUARE)


def test_a_state_of_another_shape_is_refused_by_name():
    def update(grads, state, params):
        return grads, {"seen": state["seen"] + grads["a"]}

    tx = optim.skip_nonfinite(
        funcrl.GradientTransformation(lambda params: {"seen": torch.zeros(())}, update)
    )
    with pytest.raises(ValueError, match=r"^skip_nonfinite .* state .* 'seen'.* \[3\]"):
        tx.update(SQUARE, tx.init(SQUARE), SQUARE)


def test_a_schedule_returns_one_number():
    with pytest.raises(ValueError, match=r"scale_by_learning_rate .*learning_rate.* \[3\]"):
        optim.sgd(lambda count: torch.ones(3)).init(SQUARE)


def test_the_module_is_reachable_from_the_root():
    assert funcrl.optim is optim

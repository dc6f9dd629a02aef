"""Per-sample gradients that nobody makes: against literal loops, and by counting."""

import pytest
import torch
from cases import relative, tiny_batch, tiny_model
from torch import Tensor

import funcrl
from funcrl import optim, tree

BATCH = tiny_batch()
SHAPES = {
    "tied": {}, "untied": {"tied": False, "num_layers": 1},
    "biases": {"qkv_bias": True, "qk_norm": False, "num_layers": 1},
}  # fmt: skip


def count(graph, *targets):
    return sum(
        str(node.target) in {f"aten.{name}" for name in targets} for node in graph.graph.nodes
    )


def products(graph):
    return count(graph, "mm.default", "bmm.default", "addmm.default")


def largest(graph):
    """Entries of the largest tensor that is made: expanding makes none."""
    nodes = [node for node in graph.graph.nodes if "expand" not in str(node.target)]
    values = [node.meta.get("val") for node in nodes]
    return max(value.numel() for value in values if isinstance(value, Tensor))


def stepped(model, chunk=None, dtype=torch.float64, compute=None, **options):
    """SGD: AdamW divides a gradient by its own size and blows rounding up."""
    model_fn = funcrl.logprob_fn(model, chunk=chunk, dtype=compute)
    step = funcrl.grpo_step(model_fn, optimizer=optim.sgd(1.0), **options)
    return step, step.init(funcrl.init_params(model, seed=0, dtype=dtype))


def traced_step(batch, model, chunk=None, **options):
    step, state = stepped(model, chunk, **options)
    return step, state, funcrl.trace(step.update, state, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "chunk"), [*((shape, None) for shape in SHAPES), ("tied", 12)])
def test_summed_gradients_cost_what_the_batch_costs(shape, chunk):
    model = tiny_model(**SHAPES[shape])
    _, _, batched = traced_step(BATCH, model, chunk)
    step, state, graph = traced_step(BATCH, model, chunk, per_sample=lambda grads: grads)
    fused = funcrl.fuse_per_sample(graph)
    assert relative(fused(state, BATCH), step(state, BATCH)) <= 1e-12
    assert largest(fused) == largest(batched)
    assert products(fused) == products(graph)
    if chunk is None:  # chunks of a sample are rounded down to whole tokens of it
        assert products(fused) == products(batched)
        assert len(fused.graph.nodes) <= len(batched.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "chunk"), [*((shape, None) for shape in SHAPES), ("tied", 3)])
def test_clipping_makes_no_per_sample_gradient(shape, chunk):
    """A vocabulary and widths much larger than T, so that nothing else is as large as [B, P, Q]."""
    model = tiny_model(vocab_size=211, width=40, mlp_width=104, num_heads=5, **SHAPES[shape])
    batch = tiny_batch(rows=4, length=5)
    step, state, graph = traced_step(batch, model, chunk, per_sample=funcrl.clip_per_sample(1e-3))
    fused = funcrl.fuse_per_sample(graph)
    expected, got = step(state, batch), fused(state, batch)
    # Noise and signal are differences of nearly equal numbers, of four squares of 1e-3 each.
    for name in ("per_sample/noise", "per_sample/signal"):
        difference = got[1].means.pop(name) - expected[1].means.pop(name)
        assert abs(difference) <= 1e-12 * 4 * 1e-3**2
    del got[1].last["per_sample/noise_scale"], expected[1].last["per_sample/noise_scale"]
    assert relative(got, expected) <= 1e-12
    # Clipping took place, or the test would test the sum again.
    free, _ = stepped(model, per_sample=lambda grads: grads)
    assert expected[1].maxes["grad_norm"] < free(state, batch)[1].maxes["grad_norm"] / 2
    wide = [
        leaf.numel() for leaf in state.params.values() if leaf.ndim == 2 and min(leaf.shape) >= 40
    ]
    assert largest(graph) >= 4 * max(wide)
    assert largest(fused) == max(wide)  # a parameter
    # One product for the sum of each weight, as before, and two Gram products for its norm. An
    # embedding has one; tied, it also has one of its rows with those of the output's gradient.
    matrices = sum(leaf.ndim == 2 for leaf in state.params.values())
    others = 2 if model.config.tied else -1
    assert products(fused) - products(graph) == 2 * matrices + others


@pytest.mark.slow
def test_the_number_of_nodes_does_not_depend_on_the_number_of_rows():
    clip = funcrl.clip_per_sample(0.01)
    graphs = [
        funcrl.fuse_per_sample(
            traced_step(tiny_batch(rows=rows), tiny_model(num_layers=1), per_sample=clip)[2]
        )
        for rows in (2, 6)
    ]
    assert len({len(graph.graph.nodes) for graph in graphs}) == 1


# -- the algebra, against loops over samples ------------------------------------------------------

WIDE = {"embed": (53, 20), "up": (30, 20), "down": (20, 30), "norm": (20,), "bias": (30,)}


def random_params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 4
        for name, shape in WIDE.items()
    }


def network(params, tokens):
    """Every kind of gradient: an embedding tied with the output, two weights, a bias, a norm."""
    x = torch.nn.functional.embedding(tokens, params["embed"]) * params["norm"]
    hidden = torch.tanh(x @ params["up"].T + params["bias"])
    x = x + hidden @ params["down"].T
    return (x @ params["embed"].T).logsumexp(-1).square().sum() / tokens.shape[0]


def loop_gradients(params, tokens):
    rows = [torch.func.grad(network)(params, row) for row in tokens]
    return {name: torch.stack([row[name] for row in rows]) for name in params}


def per_row(values, leaf):
    return values.reshape(-1, *[1] * (leaf.ndim - 1))


FACTORS = torch.tensor([0.5, -2.0, 0.0, 3.0], dtype=torch.float64)
CONSUMERS = {
    "sum": lambda g: g.sum(0),
    "norm": lambda g: torch.linalg.vector_norm(g, dim=tuple(range(1, g.ndim))),
    "squares": lambda g: g.square().sum(dim=tuple(range(1, g.ndim))),
    "product with itself": lambda g: (g * g).flatten(1).sum(1),
    "flattened norm": lambda g: g.flatten(1).norm(dim=1),
    "scaled": lambda g: (2.0 * g / 3.0).sum(0),
    "negated": lambda g: (-g).sum(0),
    "a factor a sample": lambda g: (g * per_row(FACTORS, g)).sum(0),
    "a divisor a sample": lambda g: (g / per_row(FACTORS + 5, g)).sum(0),
    "norm of the scaled": lambda g: (g * per_row(FACTORS, g)).flatten(1).norm(dim=1),
    "flattened sum": lambda g: g.flatten(1).sum(0),
    "double transpose": lambda g: g.mT.sum(0) if g.ndim == 3 else g.sum(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("name", CONSUMERS)
def test_every_use_against_a_loop_over_samples(name, length):
    """At T = 6 norms are by Gram products; at T = 40 a [B, P, Q] is smaller than its operands."""
    params = random_params()
    tokens = torch.randint(0, 53, (4, length), generator=torch.Generator().manual_seed(1))

    def use(params, tokens):
        return tree.map(CONSUMERS[name], funcrl.per_sample_grad(network)(params, tokens))

    fused = funcrl.fuse_per_sample(funcrl.trace(use, params, tokens))
    expected = tree.map(CONSUMERS[name], loop_gradients(params, tokens))
    assert relative(fused(params, tokens), expected) <= 1e-12
    if length == 6:
        assert largest(fused) < 4 * 20 * 30
    elif "norm" in name or "squares" in name or "itself" in name:
        grams = [n for n in fused.graph.nodes if n.target is torch.ops.aten.bmm.default]
        shapes = {tuple(node.meta["val"].shape[1:]) for node in grams}
        assert shapes & {(20, 30), (30, 20)}


def test_norms_with_repeated_tokens():
    """The Gram matrix of an embedding's one-hot rows: which tokens are equal."""
    params = random_params()
    tokens = torch.tensor([[3, 3, 3], [3, 4, 3], [1, 2, 0], [0, 0, 1]])

    def norms(params, tokens):
        return funcrl.per_sample_norms(funcrl.per_sample_grad(network)(params, tokens))

    fused = funcrl.fuse_per_sample(funcrl.trace(norms, params, tokens))
    expected = funcrl.per_sample_norms(loop_gradients(params, tokens))
    assert relative(fused(params, tokens), expected) <= 1e-12


def test_the_noise_scale_makes_no_per_sample_gradient():
    params, tokens = random_params(), torch.arange(24).reshape(4, 6)

    def moments(params, tokens):
        return funcrl.gradient_moments(network)(params, tokens)[:2]

    fused = funcrl.fuse_per_sample(funcrl.trace(moments, params, tokens))
    assert relative(fused(params, tokens), moments(params, tokens)) <= 1e-12
    assert largest(fused) < 4 * 20 * 30


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.01])
def test_adapters_never_make_a_gradient_of_the_base(clip):
    model = tiny_model(width=40, mlp_width=104, num_heads=5, num_layers=1)
    base = funcrl.init_params(model, seed=0, dtype=torch.float64)
    lora = funcrl.lora(funcrl.logprob_fn(model), base, rank=2)
    adapters = tree.map(lambda leaf: torch.full_like(leaf, 0.01) + leaf, lora.init(0))
    transform = funcrl.clip_per_sample(clip) if clip else lambda grads: grads
    step = funcrl.grpo_step(lora.model_fn, optimizer=optim.sgd(1.0), per_sample=transform)
    state, batch = step.init(adapters), tiny_batch(rows=4, length=5)
    graph = funcrl.trace(step.update, state, batch)
    fused = funcrl.fuse_per_sample(graph)
    assert relative(fused(state, batch), step(state, batch)) <= 1e-12
    assert largest(graph) >= 4 * 40 * 104
    assert largest(fused) <= 40 * 104  # the base itself


# How a sample of 6 tokens looks rows up in a table of 9; a negative index counts from the end.
INDICES = {
    "negative": lambda tokens: torch.arange(6) * 0 + tokens % 5 - 9,
    "the token before": lambda tokens: torch.cat([torch.full((1,), -1), tokens[:-1] % 9]),
    "the same for all": lambda tokens: torch.arange(6),
    "the same, negative": lambda tokens: torch.tensor([0, -1, 2, 0, -9, -1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", INDICES)
def test_an_index_may_be_negative_or_the_same_for_all(name, clip):
    def loss_fn(params, tokens):
        hidden = params["table"][INDICES[name](tokens)] * tokens[:, None].sin()
        return (hidden @ params["out"]).sin().square().sum()

    def total(params, tokens):
        grads = funcrl.per_sample_grad(loss_fn)(params, tokens)
        grads = funcrl.clip_per_sample(clip)(grads)[0] if clip else grads
        return tree.map(lambda leaf: leaf.sum(0), grads)

    generator = torch.Generator().manual_seed(0)
    table, out = (torch.randn(shape, generator=generator, dtype=torch.float64)
                  for shape in ((9, 20), (20, 20)))  # fmt: skip
    params, tokens = {"table": table, "out": out}, torch.arange(24).reshape(4, 6)
    graph = funcrl.trace(total, params, tokens)
    fused = funcrl.fuse_per_sample(graph)
    assert relative(fused(params, tokens), total(params, tokens)) <= 1e-12
    assert largest(graph) == 4 * 20 * 20  # a gradient for each sample
    assert largest(fused) < 4 * 20 * 20


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (1, 5), (3, 5), (1, 1)], ids=str)
def test_a_leaf_keeps_its_shape(shape, clip):
    """Factors that are broadcast over the tokens, the width or both: [3, 5] a sample."""

    def loss_fn(params, row):
        factor = params["factor"]
        return ((row.T * factor).T if factor.shape == (3,) else row * factor).sin().sum()

    def total(params, rows):
        grads = funcrl.per_sample_grad(loss_fn)(params, rows)
        grads = funcrl.clip_per_sample(clip)(grads)[0] if clip else grads
        return tree.map(lambda leaf: leaf.sum(0), grads)

    generator = torch.Generator().manual_seed(0)
    params = {"factor": torch.randn(shape, generator=generator, dtype=torch.float64)}
    rows = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    got = funcrl.fuse_per_sample(funcrl.trace(total, params, rows))(params, rows)
    assert got["factor"].shape == shape
    assert relative(got, total(params, rows)) <= 1e-12


def test_norms_of_complex_products_are_left_as_they_are():
    def norms(x, y):
        return torch.linalg.vector_norm(torch.bmm(x, y), 2, dim=(1, 2))

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 20, 20, generator=generator, dtype=torch.complex128)
    x, y = x[:, :, :2], y[:, :2]
    fused = funcrl.fuse_per_sample(funcrl.trace(norms, x, y))
    assert torch.equal(fused(x, y), norms(x, y))


@pytest.mark.slow
def test_what_is_not_understood_is_left_as_it_is():
    params, tokens = random_params(), torch.arange(24).reshape(4, 6)
    uses = {
        "returned": lambda g: (g, g.sum(0)),
        "sorted": lambda g: g.sort(0).values.sum(0),
        "clipped by entry": lambda g: g.clamp(-0.1, 0.1).sum(0),
        "another norm": lambda g: torch.linalg.vector_norm(g.flatten(1), 1, dim=1),
        "a factor an entry": lambda g: (g * g.sum(0)).sum(0),
        "means of rows": lambda g: g.sum(1),
    }
    for name, use in uses.items():

        def run(params, tokens, use=use):
            return tree.map(use, funcrl.per_sample_grad(network)(params, tokens))

        graph = funcrl.trace(run, params, tokens)
        fused = funcrl.fuse_per_sample(graph)
        assert relative(fused(params, tokens), run(params, tokens)) <= 1e-12, name
        assert products(fused) == products(graph), name


@pytest.mark.slow
def test_the_graph_that_was_given_is_unchanged():
    _, state, graph = traced_step(BATCH, tiny_model(num_layers=1), per_sample=lambda grads: grads)
    before = graph.code
    funcrl.fuse_per_sample(graph)
    assert graph.code == before
    funcrl.trace(lambda *a: graph(*a), state, BATCH)  # and still a function of tensors


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.01])
def test_bfloat16_compute_is_within_its_own_rounding(clip):
    """A gradient's entries are rounded to bfloat16, 2^-9 relative, in either way; so is a factor's
    product with a row. Both are compared with the same step in float32."""
    transform = funcrl.clip_per_sample(clip) if clip else lambda grads: grads
    options = {"dtype": torch.float32, "per_sample": transform}
    model, batch = tiny_model(num_layers=1), tiny_batch(dtype=torch.float32)
    step, state, graph = traced_step(batch, model, compute=torch.bfloat16, **options)
    fused = funcrl.fuse_per_sample(graph)
    exact = stepped(model, **options)[0](state, batch)[0].params

    def error(params):
        changes = [tree.map(torch.sub, new, state.params) for new in (params, exact)]
        return tree.global_norm(tree.map(torch.sub, *changes)) / tree.global_norm(changes[1])

    assert error(fused(state, batch)[0].params) <= 1.25 * error(step(state, batch)[0].params)


@pytest.mark.gpu
def test_gram_products_of_bfloat16_on_a_gpu_are_summed_in_float32():
    params = tree.map(lambda leaf: leaf.cuda().bfloat16(), random_params())
    tokens = torch.arange(24, device="cuda").reshape(4, 6)

    def norms(params, tokens):
        return funcrl.per_sample_norms(funcrl.per_sample_grad(network)(params, tokens))

    fused = funcrl.fuse_per_sample(funcrl.trace(norms, params, tokens))
    assert count(fused, "bmm.dtype") > 0
    # Entries of a gradient that is made are rounded, 2^-9 of each; those of a Gram matrix are not.
    assert relative(fused(params, tokens), norms(params, tokens)) <= 2**-7


def normal(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


A, B, ONE_A, ONE_B = normal(3, 4, 5), normal(3, 5, 6), normal(1, 4, 5), normal(1, 5, 6)
LOOK_ALIKE = {
    "a sum that is broadcast": (lambda a, b, c, d: (a @ b + c @ d).sum(0), (A, B, ONE_A, ONE_B)),
    "a sum that is broadcast first": (
        lambda a, b, c, d: (c @ d + a @ b).sum(0), (A, B, ONE_A, ONE_B),
    ),
    "a norm of such a sum": (
        lambda a, b, c, d: torch.linalg.vector_norm(a @ b + c @ d, dim=(1, 2)),
        (A, B, ONE_A, ONE_B),
    ),
    "a product of one sample scaled by many factors": (
        lambda c, d, f: (torch.bmm(c, d) * f).sum(0), (ONE_A, ONE_B, normal(3, 1, 1)),
    ),
    "a broadcast matrix": (
        lambda a, b, v: torch.bmm(torch.bmm(a, b), v.expand(3, 6, 2)).sum(0),
        (A, B, normal(1, 2)),
    ),
    "integers that are scaled": (
        lambda a, b: (torch.bmm(a, b) * 0.5).sum(0), ((9 * A).long(), (9 * B).long()),
    ),
    "a norm of a narrower dtype": (
        lambda a, b: torch.linalg.vector_norm(torch.bmm(a, b).bfloat16(), dim=(1, 2)),
        (normal(3, 9, 2), normal(3, 2, 9)),
    ),
    "a norm of a narrower dtype, dense": (
        lambda a, b: torch.linalg.vector_norm(torch.bmm(a, b).bfloat16(), dim=(1, 2)),
        (normal(3, 2, 9), normal(3, 9, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKE)
def test_what_looks_like_a_per_sample_gradient_keeps_its_value(name):
    fn, args = LOOK_ALIKE[name]
    graph = funcrl.trace(fn, *args)
    got, expected = funcrl.fuse_per_sample(graph)(*args), fn(*args)
    assert got.dtype == expected.dtype
    bound = 2**-7 if expected.dtype is torch.bfloat16 else 1e-12
    assert (got - expected).abs().max() <= bound * expected.abs().max()

"""Scores from logits that are kept, chunk "all": equal to recomputed ones, by fewer products."""

import pytest
import torch
from cases import equal, random_case, tiny_batch, tiny_model
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import CompileConfig, ops, optim
from funcrl.ops.exact import sum_in_blocks
from funcrl.ops.logits import logits_gradient, plain_score_logits

B, T, D, V = 3, 7, 5, 11
ON_GPU = pytest.mark.gpu
NUMERICS = {"native": ops.NATIVE, "exact": ops.EXACT}


def drawn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(dtype=torch.float64):
    targets = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))
    return drawn(V, D, dtype=dtype), drawn(B, T, D, dtype=dtype), targets


def loss_of(scores, chunk, temperature=0.7):
    """The loss with its log-probabilities and entropies, each token of which has its own factor."""

    def loss(weight, hidden, targets):
        logprobs, entropy = scores(hidden, weight, targets, temperature, chunk)
        factors = torch.arange(1, T + 1, dtype=logprobs.dtype, device=logprobs.device)
        return (factors * logprobs + factors.sin() * entropy).sum(), (logprobs, entropy)

    return loss


def transforms(loss):
    """A sample's gradient, each sample's, and that of their sum."""

    def summed(weight, hidden, targets):
        losses, scores = vmap(loss, (None, 0, 0))(weight, hidden, targets)
        return losses.sum(), scores

    return {
        "one": (grad(loss, (0, 1), has_aux=True), lambda w, h, t: (w, h[0], t[0])),
        "each": (vmap(grad(loss, (0, 1), has_aux=True), (None, 0, 0)), lambda *given: given),
        "sum": (grad(summed, (0, 1), has_aux=True), lambda *given: given),
    }


@pytest.mark.parametrize("name", ["one", "each", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_kept_logits_have_the_bits_of_those_computed_anew(numerics, dtype, name):
    """Values and gradients, eager and traced, where a chunk holds all tokens: one product."""
    for temperature in (1.0, 0.7):
        kept, anew = (
            transforms(loss_of(NUMERICS[numerics].scores, chunk, temperature))[name]
            for chunk in ("all", B * T)
        )
        args = kept[1](*inputs(dtype))
        wanted = anew[0](*args)
        assert equal(kept[0](*args), wanted)
        assert equal(make_fx(kept[0])(*args)(*args), wanted)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_exact_sums_in_blocks_have_the_same_bits(blocks):
    weight, hidden, targets = drawn(V, D).float(), drawn(8, D).float(), torch.arange(8)
    scores = sum_in_blocks(ops.EXACT, blocks).scores

    def gradients(chunk):
        loss = lambda w, h: sum(part.sum() for part in scores(h, w, targets, 0.7, chunk))  # noqa: E731
        return grad(loss, (0, 1))(weight, hidden)

    assert equal(gradients("all"), gradients(8))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_gradcheck(numerics):
    weight, hidden, targets = inputs()
    leaves = hidden[0].requires_grad_(), weight.requires_grad_()
    scores = NUMERICS[numerics].scores
    assert torch.autograd.gradcheck(lambda h, w: scores(h, w, targets[0], 0.7, "all"), leaves)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_token_of_probability_zero_does_no_harm(numerics):
    """By hand: of logits 0, 0 and -inf the entropy is log 2; the token of -inf has no gradient."""
    weight = torch.tensor([[0.0], [0.0], [-1e300]], dtype=torch.float64)
    hidden = torch.tensor([[1e10]], dtype=torch.float64)
    scores = NUMERICS[numerics].scores

    def loss(weight):
        logprobs, entropy = scores(hidden, weight, torch.tensor([0]), 1.0, "all")
        return (logprobs + 2 * entropy).sum(), (logprobs, entropy)

    found, (logprobs, entropy) = grad(loss, has_aux=True)(weight)
    log2 = torch.tensor([2.0], dtype=torch.float64).log()
    torch.testing.assert_close((logprobs, entropy), (-log2, log2), rtol=1e-15, atol=0)
    wanted = torch.tensor([[0.5e10], [-0.5e10], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-15, atol=0)


def test_logits_are_computed_once():
    """Three products in the graph of a gradient, and four where they are computed anew."""
    weight, hidden, targets = inputs()
    counts = []
    for chunk in ("all", T):
        gradient = grad(loss_of(ops.linear_scores, chunk), (0, 1), has_aux=True)
        graph = make_fx(gradient)(weight, hidden[0], targets[0])
        products = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        counts.append(len(list(products)))
    assert counts == [3, 4]


def test_a_second_derivative_is_refused():
    weight, hidden, targets = inputs()

    def penalty(h):
        loss = lambda v: ops.linear_scores(v, weight, targets[0], chunk="all")[0].sum()  # noqa: E731
        return grad(loss)(h).square().sum()

    for ask in (lambda: grad(penalty)(hidden[0]), lambda: vmap(grad(penalty))(hidden)):
        with pytest.raises(RuntimeError, match="linear_scores .*derivative.*chunk=None"):
            ask()


def test_an_unknown_chunk_is_refused():
    weight, hidden, targets = inputs()
    for call in (
        lambda chunk: ops.linear_scores(hidden[0], weight, targets[0], chunk=chunk),
        lambda chunk: funcrl.logprob_fn(tiny_model(), chunk=chunk),
        lambda chunk: funcrl.config.TrainConfig(logprob_chunk=chunk),
    ):
        with pytest.raises(ValueError, match="chunk .*above 0 or 'all'.*'half'"):
            call("half")


# Per-sample gradients are clipped where the optimizer's step is.
STEPS = {
    "summed": {},
    "micro-batches": {"microbatch": 3},
    "clipped": {"per_sample": funcrl.clip_per_sample(0.1)},
}


def three_steps(step, state, batch):
    metrics = []
    for _ in range(3):
        state, each = step(state, batch)
        metrics.append(each._replace(maxes={}))  # a compiled step counts its compilations there
    return state.params, metrics


def step_of(model, chunk, **options):
    model_fn = funcrl.logprob_fn(model, 0.8, chunk=chunk)
    return funcrl.grpo_step(model_fn, optimizer=optim.sgd(0.5, momentum=0.9), **options)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_steps_in_a_row_have_the_bits_of_those_that_compute_logits_anew(name, numerics):
    model, batch = tiny_model(num_layers=1, numerics=numerics), tiny_batch()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    found = []
    for chunk in ("all", batch.tokens.numel()):
        step = step_of(model, chunk, **STEPS[name])
        found.append(three_steps(step, step.init(params), batch))
    assert equal(found[0], found[1])


@pytest.mark.parametrize("numerics", NUMERICS)
def test_packed_rows_have_the_bits_of_those_that_compute_logits_anew(numerics):
    rollout = random_case(prompts=2, completion=3).rollout
    rollout = rollout._replace(tokens=rollout.tokens % V)
    batch = funcrl.pack(rollout, funcrl.grpo(), length=20)
    model = tiny_model(num_layers=1, numerics=numerics)
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    steps = [step_of(model, chunk) for chunk in ("all", batch.tokens.numel())]
    found = [three_steps(step, step.init(params), batch) for step in steps]
    assert equal(found[0], found[1])


@pytest.mark.slow
def test_compiled_and_donated_steps_have_the_bits_of_the_eager_one():
    model, batch = tiny_model(num_layers=2), tiny_batch()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    step = step_of(model, "all", **STEPS["clipped"])
    wanted = three_steps(step, step.init(params), batch)
    config = CompileConfig(backend="aot_eager", fuse="none", remat="full")
    fast = funcrl.compile_step(funcrl.donate(step), step.init(params), batch, config)
    assert equal(three_steps(fast, step.init(params), batch), wanted)


@pytest.mark.slow
def test_the_pass_makes_no_per_sample_gradient_of_the_output_layer():
    """In float64 the fused step is the eager one to rounding, and has no [B, V, D]."""
    model, batch = tiny_model(num_layers=1), tiny_batch()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    step = step_of(model, "all", **STEPS["clipped"])
    graph = funcrl.fuse_per_sample(funcrl.trace(step.update, step.init(params), batch))
    width = model.config.width
    shapes = {tuple(n.meta["val"].shape) for n in graph.graph.nodes if n.op == "call_function"
              and isinstance(n.meta.get("val"), torch.Tensor)}  # fmt: skip
    assert (len(batch.tokens), model.config.vocab_size, width) not in shapes
    found, wanted = graph(step.init(params), batch)[0], step(step.init(params), batch)[0]
    for name, leaf in wanted.params.items():
        torch.testing.assert_close(found.params[name], leaf, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_never_makes_logits_again(policy):
    model, batch = tiny_model(num_layers=2), tiny_batch()
    step = step_of(model, "all")
    state = step.init(funcrl.init_params(model, seed=0, dtype=torch.float64))
    graph = funcrl.remat(funcrl.trace(step.update, state, batch), policy)
    vocab_size = model.config.vocab_size
    again = [
        node
        for node in graph.graph.nodes
        if node.meta.get("recomputed") and isinstance(node.meta["val"], torch.Tensor)
    ]
    assert again
    assert not [n for n in again if n.meta["val"].ndim and n.meta["val"].shape[-1] == vocab_size]


# -- on a GPU: half precision by kernels ---------------------------------------------------------


def on_gpu(rows, vocab_size, dtype=torch.bfloat16):
    logits = (drawn(rows, vocab_size) * 3).to("cuda", dtype)
    targets = torch.randint(0, vocab_size, (rows,), generator=torch.Generator().manual_seed(1))
    grads = (drawn(rows, seed=seed).float().cuda() for seed in (1, 2))
    return logits, targets.cuda(), *grads


@ON_GPU
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [13, 9000, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_are_the_formula_in_float64(dtype, vocab_size, temperature):
    """Given the same logits, the scores are off by float32's rounding, the gradient by its own.

    A sum of V terms of one sign, by pieces of at most 2^13 in a tree, is off by less than 64
    roundings of 2^-24; a logarithm and two differences add as many of the largest term.
    """
    logits, targets, *grads = on_gpu(33, vocab_size, dtype)
    logits[:, 3], targets[0] = -torch.inf, 2
    ours = plain_score_logits(logits, targets, temperature)
    wanted = plain_score_logits(logits.double(), targets, temperature)
    largest = logits.double().nan_to_num(neginf=0).abs().max() / temperature
    bound = 2.0**-24 * 64 * (largest + wanted[2].abs().max())
    for mine, oracle in zip(ours, wanted, strict=True):
        assert mine.dtype == torch.float32
        same = mine.double() == oracle  # -inf, of a target of probability 0
        assert (same | ((mine.double() - oracle).abs() <= bound)).all()
    found = logits_gradient(logits, temperature, targets, *ours[1:], *grads)
    oracle = logits_gradient(
        logits.double(), temperature, targets, *wanted[1:], *(each.double() for each in grads)
    )
    # The factors p, log p and H are off by `bound`, relative of p; the three terms are summed in
    # float32, and the sum is rounded once, below the least normal number to a multiple of its unit.
    p = (logits.double() / temperature - wanted[2][:, None]).exp()
    g, h = (each.double().abs()[:, None] for each in grads)
    surprise = (p.log().nan_to_num(neginf=0) + wanted[1][:, None]).abs()
    terms = p * (g + (surprise + 2) * h) + torch.nn.functional.one_hot(targets, vocab_size) * g
    kind, single = torch.finfo(dtype), torch.finfo(torch.float32)
    slack = 2 * bound * terms / temperature + kind.tiny * kind.eps + 8 * single.tiny
    assert found.dtype == dtype
    assert ((found.double() - oracle).abs() <= oracle.abs() * kind.eps / 2 + 1.01 * slack).all()


@ON_GPU
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_on_a_gpu_is_near_the_oracle(temperature):
    """Logits are rounded once to 8 bits: a log-probability is off by twice the largest error.

    Their product sums D terms of bfloat16 in float32, whose rounding is 2^-16 of the logits' own.
    """
    rows, width, vocab_size = 96, 64, 5000
    hidden = drawn(rows, width).to("cuda", torch.bfloat16)
    weight = (drawn(vocab_size, width) * 0.2).to("cuda", torch.bfloat16)
    targets = torch.arange(rows, device="cuda")
    logits = hidden.double() @ weight.double().mT / temperature
    error = logits.abs().max() * 2.0**-8 * 1.01
    wanted = ops.linear_scores(hidden.double(), weight.double(), targets, temperature, rows)
    for chunk in (32, "all"):
        logprobs, entropy = ops.linear_scores(hidden, weight, targets, temperature, chunk)
        assert (logprobs - wanted[0]).abs().max() <= 2 * error
        # |dH| <= sum p |log p + H| |dz|, and the mean of |log p + H| is at most 2 H.
        assert (entropy - wanted[1]).abs().max() <= 2 * wanted[1].max() * error * 1.1


@ON_GPU
@pytest.mark.parametrize("name", ["one", "each", "sum"])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_on_a_gpu_kept_logits_have_the_bits_of_those_computed_anew(numerics, name):
    kept, anew = (
        transforms(loss_of(NUMERICS[numerics].scores, chunk))[name] for chunk in ("all", B * T)
    )
    args = kept[1](*(each.cuda() for each in inputs(torch.bfloat16)))
    found = kept[0](*args)
    assert equal(found, anew[0](*args))
    assert equal(make_fx(kept[0])(*args)(*args), found)


@ON_GPU
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # a choice of Inductor
@pytest.mark.parametrize("chunk", [8, "all"])
def test_on_a_gpu_compiled_steps_are_as_near_the_oracle_as_eager_ones(chunk):
    """By Inductor in a CUDA graph, three in a row, with clipped gradients of samples.

    No ratio comes near the bounds at which it is clipped: there a rounding would decide.
    """
    model, batch = tiny_model(num_layers=2), tiny_batch()
    wide = funcrl.init_params(model, seed=0, dtype=torch.float64)
    options = {**STEPS["clipped"], "algorithm": funcrl.grpo(clip=(0.99, 99.0))}
    oracle, _ = three_steps(step := step_of(model, None, **options), step.init(wide), batch)

    def on_gpu(leaf):
        return leaf.to("cuda", torch.float32 if leaf.is_floating_point() else leaf.dtype)

    params, batch = funcrl.tree.map(on_gpu, wide), funcrl.tree.map(on_gpu, batch)
    model_fn = funcrl.logprob_fn(model, 0.8, chunk=chunk, dtype=torch.bfloat16)
    optimizer = optim.sgd(0.5, momentum=0.9)
    step = funcrl.grpo_step(model_fn, optimizer=optimizer, **options)
    config = CompileConfig(backend="inductor", cudagraph="full", remat="selective")
    fast = funcrl.compile_step(funcrl.donate(step), step.init(params), batch, config)
    errors = []
    for each in (step, fast):
        found, _ = three_steps(each, step.init(params), batch)
        apart = [
            (found[name].double().cpu() - leaf).square().sum() for name, leaf in oracle.items()
        ]
        errors.append(sum(apart).sqrt())
    assert 0 < errors[1] <= 2 * errors[0]

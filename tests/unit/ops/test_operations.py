"""Exact operations under grad, vmap, tracing and compilation, against the native ones."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import grad, vmap

import funcrl
from funcrl import ops
from funcrl.ops import EXACT, NATIVE
from funcrl.ops.exact import EXACT_FORWARD

D, V, T = 8, 11, 5


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def add_rms_norm(chosen, x, delta, weight):
    """Native operations have none of both at once."""
    if chosen.add_rms_norm is not None:
        return chosen.add_rms_norm(x, delta, weight, 1e-5)
    return x + delta, chosen.rms_norm(x + delta, weight, 1e-5)


def norm_rotate(chosen, q, k, *gains):
    """Native operations have none of these at once."""
    rotation = chosen.rotation(torch.arange(T), 4, 10.0)
    if chosen.norm_rotate is not None:
        return chosen.norm_rotate(q, k, gains or None, 1e-5, rotation)
    if gains:
        q, k = (chosen.rms_norm(part, gain, 1e-5) for part, gain in zip((q, k), gains, strict=True))
    return chosen.rotate([part.transpose(-2, -3) for part in (q, k)], rotation)


SEGMENTS = torch.tensor([0, 0, 1, 1, -1])
PREFIXES = torch.tensor([-1, -1, 0, 0, -1])
RESETS = torch.tensor([False, False, False, True, False])
TARGETS = torch.tensor([1, 10, 0, 4, 4])
# Each operation as a function of floating-point tensors, and such tensors.
CASES = {
    "linear": (lambda o, *given: o.linear(*given), (draw(T, D), draw(3, D), draw(3))),
    "project": (
        lambda o, x, a, b: torch.cat(list(o.project(x, [(a, None), (b, None)])), -1),
        (draw(T, D), draw(3, D), draw(4, D, seed=1)),
    ),
    "rms_norm": (lambda o, x, w: o.rms_norm(x, w, 1e-5), (draw(T, D), draw(D))),
    "add_rms_norm": (
        lambda o, *given: torch.cat(add_rms_norm(o, *given), -1),
        (draw(T, D), draw(T, D, seed=1), draw(D)),
    ),
    "swiglu": (lambda o, *given: o.swiglu(*given), (draw(T, D), draw(T, D, seed=1))),
    "geglu": (lambda o, *given: o.geglu(*given), (draw(T, D), draw(T, D, seed=1))),
    "sigmoid_gate": (lambda o, *given: o.sigmoid_gate(*given), (draw(T, D), draw(T, D, seed=1))),
    "short_conv": (
        lambda o, x, w: torch.cat(o.short_conv(x, w, None, RESETS), -2), (draw(T, D), draw(D, 4)),
    ),
    "delta_gates": (
        lambda o, a, *given: torch.cat([x.to(a.dtype) for x in o.delta_gates(a, *given)], -1),
        (draw(T, 3), draw(T, 3, seed=1), draw(3), draw(3, seed=1)),
    ),
    "gated_delta": (
        lambda o, q, k, v, g, b: o.gated_delta(q, k, v, -g.abs(), b.sigmoid(), None, RESETS)[0],
        (draw(2, T, 4), draw(2, T, 4, seed=1), draw(2, T, 3), draw(2, T), draw(2, T, seed=1)),
    ),
    "rotate": (
        lambda o, *parts: torch.cat(list(o.rotate(parts, o.rotation(torch.arange(T), 4, 10.0))), 0),
        (draw(2, T, 4), draw(1, T, 4)),
    ),
    "norm_rotate": (
        lambda o, *given: torch.cat(list(norm_rotate(o, *given)), 0),
        (draw(T, 2, 4), draw(T, 1, 4), draw(4), draw(4, seed=1)),
    ),
    "norm_rotate without norms": (
        lambda o, *given: torch.cat(list(norm_rotate(o, *given)), 0),
        (draw(T, 2, 4), draw(T, 1, 4)),
    ),
    "embed": (lambda o, w: o.embed(TARGETS, w, None), (draw(V, D),)),
    "attend_causal": (
        lambda o, *given: o.attend_causal(*given),
        (draw(4, T, 4), draw(2, T, 4), draw(2, T, 4, seed=1)),
    ),
    "attend_causal with a window": (
        lambda o, *given: o.attend_causal(*given, window=2),
        (draw(4, T, 4), draw(2, T, 4), draw(2, T, 4, seed=1)),
    ),
    "attend_segments with a window and a prefix": (
        lambda o, *given: o.attend_segments(SEGMENTS, PREFIXES)(*given, window=3),
        (draw(4, T, 4), draw(2, T, 4), draw(2, T, 4, seed=1)),
    ),
    "rms_norm with an offset": (lambda o, x, w: o.rms_norm(x, w, 1e-5, 1.0), (draw(T, D), draw(D))),
    "scores with a cap": (
        lambda o, h, w: torch.stack(o.scores(h, w, TARGETS, 0.7, 2, cap=1.5)),
        (draw(T, D), draw(V, D)),
    ),
    "scores with a cap, of kept logits": (
        lambda o, h, w: torch.stack(o.scores(h, w, TARGETS, 0.7, "all", cap=1.5)),
        (draw(T, D), draw(V, D)),
    ),
    "attend_segments": (
        lambda o, *given: o.attend_segments(SEGMENTS)(*given),
        (draw(4, T, 4), draw(2, T, 4), draw(2, T, 4, seed=1)),
    ),
    "scores": (
        lambda o, h, w: torch.stack(o.scores(h, w, TARGETS, 0.7, 2)),
        (draw(T, D), draw(V, D)),
    ),
}  # fmt: skip
FORWARD_ONLY = {name for name in CASES if name.startswith("scores")}  # a generator has log_softmax


@pytest.mark.parametrize("name", CASES)
def test_the_derivative_is_that_of_the_function(name):
    fn, inputs = CASES[name]
    assert gradcheck(lambda *given: fn(EXACT, *given), [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_native_ones(name):
    """In float64, where both are right to 1e-12; rotation's factors are the same float32."""
    fn, inputs = CASES[name]
    inputs = [x.detach() for x in inputs]

    def weighted(chosen):
        def loss(given):
            out = fn(chosen, *given)
            return (out * torch.arange(1, out.numel() + 1).view(out.shape)).sum()

        return loss

    torch.testing.assert_close(fn(EXACT, *inputs), fn(NATIVE, *inputs), rtol=1e-12, atol=1e-12)
    exact, native = (grad(weighted(chosen))(inputs) for chosen in (EXACT, NATIVE))
    torch.testing.assert_close(exact, native, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_a_batch_is_as_alone(name, dtype):
    """Values, and per-sample gradients, under vmap, bit for bit; rows are every input's."""
    fn, inputs = CASES[name]
    # The weights, which are not batched, are those that have no axis of T tokens.
    batched = [T in x.shape for x in inputs]
    batch = [
        torch.stack([x.detach() + n for n in range(3)]).to(dtype) if b else x.detach().to(dtype)
        for x, b in zip(inputs, batched, strict=True)
    ]
    in_dims = tuple(0 if b else None for b in batched)

    def value_and_gradient(*given):
        def loss(given):
            out = fn(EXACT, *given)
            return out.float().square().sum(), out

        grads, out = grad(loss, has_aux=True)(given)
        return out, grads

    together = vmap(value_and_gradient, in_dims=in_dims)(*batch) if any(batched) else None
    for n in range(3 if any(batched) else 0):
        alone = value_and_gradient(*(x[n] if b else x for x, b in zip(batch, batched, strict=True)))
        for a, b in zip(funcrl.tree.leaves(together), funcrl.tree.leaves(alone), strict=True):
            assert torch.equal(a[n], b)
    if name not in FORWARD_ONLY and any(batched):
        out = vmap(lambda *given: fn(EXACT, *given), in_dims=in_dims)(*batch)
        plain = torch.stack([
            fn(EXACT_FORWARD, *(x[n] if b else x for x, b in zip(batch, batched, strict=True)))
            for n in range(3)
        ])  # fmt: skip
        assert torch.equal(out, plain)


@pytest.mark.parametrize("name", CASES)
def test_a_tracer_sees_one_operator_each_way(name):
    """Not one a sample: the graph of a vmapped gradient has as many as that of one sample."""
    fn, inputs = CASES[name]
    inputs = [x.detach().float() for x in inputs]

    def loss(given):
        return fn(EXACT, *given).square().sum()

    batch = [torch.stack([x, x + 1]) for x in inputs[:1]]

    def counted(function, *given):
        graph = funcrl.trace(function, *given).graph
        return [n.target for n in graph.nodes if "funcrl" in str(n.target)]

    alone = counted(lambda x: grad(loss)([x, *inputs[1:]])[0], inputs[0])
    if T not in inputs[0].shape:
        assert alone == [torch.ops.funcrl.embedding_gradient.default]
        return
    summed = counted(
        lambda xs: grad(lambda xs: vmap(lambda x: loss([x, *inputs[1:]]))(xs).sum())(xs), batch[0]
    )
    assert alone
    assert len(summed) == len(alone)


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_an_error(name):
    fn, inputs = CASES[name]
    inputs = [x.detach() for x in inputs]

    def loss(x):
        return fn(EXACT, x, *inputs[1:]).square().sum()

    with pytest.raises(RuntimeError, match="has a first derivative only, .* them all"):
        grad(lambda x: grad(loss)(x).square().sum())(inputs[0])


def test_batched_weights_are_a_loop_over_samples():
    weights = draw(3, 4, D, dtype=torch.float32)
    x = draw(T, D, dtype=torch.float32)
    found = vmap(lambda w: EXACT.linear(x, w, None))(weights)
    assert torch.equal(found, torch.stack([EXACT.linear(x, w, None) for w in weights]))


def test_weights_wider_than_the_rows_have_a_wide_gradient():
    """Of bfloat16 rows: the sum is rounded once, to the weight's float32."""
    x, weight = draw(40, D, dtype=torch.bfloat16), draw(3, D, dtype=torch.float32)
    found = grad(lambda w: EXACT.linear(x, w, None).float().sum())(weight)
    expected = x.double().sum(dim=0).expand(3, D)
    # 40 float32 additions of numbers below 4: each rounds by at most 2^-24 of a sum below 160.
    assert (found.double() - expected).abs().max() <= 40 * 160 * 2**-24
    assert not torch.equal(found, found.bfloat16().float())


def test_a_network_of_exact_numerics_can_be_copied_and_pickled():
    config = funcrl.models.TransformerConfig(vocab_size=7, width=8, numerics="exact")
    model = funcrl.models.Transformer(config)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.ops == EXACT


def test_a_network_of_exact_operations_takes_what_they_need():
    network = torch.nn.Linear(2, 2)
    network.ops = EXACT
    with pytest.raises(ValueError, match="logprob_fn expects a network of exact operations to tak"):
        funcrl.logprob_fn(network)
    native = funcrl.models.Transformer(funcrl.models.TransformerConfig(vocab_size=7, width=8))
    with pytest.raises(ValueError, match="Transformer expects no dtype= with native operations"):
        native(torch.tensor([1]), torch.tensor([0]), dtype=torch.bfloat16)


def test_recomputed_samples_have_the_bits_of_the_trainer():
    config = funcrl.models.TransformerConfig(vocab_size=37, width=16, numerics="exact")
    model = funcrl.models.Transformer(config)
    params = {name: 4 * leaf for name, leaf in funcrl.init_params(model, seed=0).items()}
    generator = funcrl.generators.Recompute(model)
    generator.push(params)
    prompts = [[1, 2, 3], [4]]
    samples = generator.generate(prompts, funcrl.generators.Sampling(2, max_tokens=9), seed=0)
    for row, tokens in enumerate(samples.tokens):
        prompt = prompts[row // 2]
        whole = torch.tensor([*prompt, *tokens.tolist()])[None]
        sample = funcrl.types.Sample(whole, torch.arange(whole.shape[1])[None])
        scored = funcrl.score(funcrl.logprob_fn(model), params, sample).logprobs[0, len(prompt) :]
        assert torch.equal(scored, samples.policy_logprobs[row])
        assert generator.score(whole.tolist())[0][len(prompt) - 1 :] == scored.tolist()


def test_choose_ops_knows_both():
    assert ops.choose_ops("f", "exact") is EXACT
    with pytest.raises(ValueError, match="'fast'"):
        ops.choose_ops("f", "fast")

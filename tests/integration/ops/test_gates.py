"""The gates of a gated delta layer, at their ends, and a layer's exact operations compiled."""

import math

import pytest
import torch
from torch.func import grad

import funcrl
from funcrl.ops import EXACT, NATIVE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", [NATIVE, EXACT], ids=["native", "exact"])
def test_gates_are_their_formulas(ops, dtype):
    a = torch.tensor([-80.0, -17.0, -1.0, 0.0, 3.0, 19.0, 90.0], dtype=dtype)[:, None]
    rate, bias = torch.tensor([0.5], dtype=dtype), torch.tensor([0.25], dtype=dtype)
    decay, beta = ops.delta_gates(a, a, rate, bias)
    wide = torch.promote_types(dtype, torch.float32)
    assert (decay.dtype, beta.dtype) == (wide, dtype)
    # Of log1p, exp and the rate's exponential: each errs by at most a few units of its last place.
    close = 16 * torch.finfo(wide).eps
    for number, ours, share in zip(a[:, 0].tolist(), decay[:, 0], beta[:, 0], strict=True):
        x = number + 0.25
        softplus = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
        # Torch's softplus is x from 20 on, where it differs by e^-20.
        assert math.isclose(-math.exp(0.5) * softplus, ours, rel_tol=close, abs_tol=1e-37)
        sigmoid = 1 / (1 + math.exp(-number))
        assert math.isclose(sigmoid, share, rel_tol=16 * torch.finfo(dtype).eps)


def test_gates_near_the_ends_are_finite():
    x = torch.tensor([-3e4, -200.0, 200.0, 3e4])
    for name in ("geglu", "sigmoid_gate"):
        fn = getattr(EXACT, name)
        native = getattr(NATIVE, name)(x, torch.ones(4))
        torch.testing.assert_close(fn(x, torch.ones(4)), native, rtol=0, atol=0)
        assert grad(lambda x, fn=fn: fn(x, torch.ones(4)).sum())(x).isfinite().all()
    zero = torch.zeros(1)
    decay, _ = EXACT.delta_gates(x[:, None], x[:, None], zero, zero)
    torch.testing.assert_close(decay[:, 0], torch.tensor([0.0, 0.0, -200.0, -3e4]))


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_bits_are_those_of_the_operators(compiler):
    """Of everything that a gated delta layer computes with, and of its gradients."""
    length, heads, width = 6, 2, 4
    resets = torch.tensor([False, False, True, False, False, False])
    given = {
        "x": draw(length, 3 * heads * width), "conv": draw(3 * heads * width, 4),
        "a": draw(length, heads), "b": draw(length, heads, seed=1), "rate": draw(heads),
        "bias": draw(heads, seed=2), "gate": draw(length, heads * width),
    }  # fmt: skip

    def layer(given):
        mixed, history = EXACT.short_conv(given["x"], given["conv"], None, resets)
        q, k, v = (part.transpose(0, 1) for part in mixed.unflatten(-1, (3, heads, -1)).unbind(1))
        decay, beta = EXACT.delta_gates(given["a"], given["b"], given["rate"], given["bias"])
        out, state = EXACT.gated_delta(q, k, v, decay.mT, beta.mT, None, resets)
        out = out.transpose(0, 1).flatten(-2)
        out = EXACT.geglu(given["gate"], EXACT.sigmoid_gate(given["gate"], out))
        # The gradients of a sum are ones, whatever a compiler makes of it.
        return out.sum() + state.sum(), (out, state, history)

    def step(given):
        return grad(layer, has_aux=True)(given)

    traced = funcrl.trace(step, given)
    with torch.no_grad():
        found = torch.compile(traced, backend=compiler)(given)
    pairs = zip(funcrl.tree.leaves(found), funcrl.tree.leaves(step(given)), strict=True)
    assert all(torch.equal(ours, eager) for ours, eager in pairs)

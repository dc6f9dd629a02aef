"""The gated delta scan: its loop against matrices, and each backend against the loop."""

import importlib
import itertools
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

import funcrl
from funcrl.graph.nodes import count_flops
from funcrl.ops import gated_delta_scan

B, H, T, CK, CV = 2, 3, 21, 6, 4
OPERATORS = ["recurrent", "chunked"]
NAMES = ["q", "k", "v", "decay", "beta", "state"]


def draw(*leading, length=T, dtype=torch.float64, seed=0):
    """q, k, v, decay, beta, state and resets; keys of length 1, so that no state grows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*leading, H, *shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(length, CK), dim=-1) for _ in "qk")
    gates = -normal(length).abs(), torch.sigmoid(normal(length))
    resets = torch.rand(*leading, length, generator=generator) < 0.15
    given = [q, k, normal(length, CV), *gates, normal(CK, CV)]
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype) for x in given[:5]] + [given[5].to(wide), resets]


def loss_of(backend, given, **options):
    """A scalar of the outputs and the last state in which each number has a factor of its own."""
    total = 0.0
    for part in gated_delta_scan(*given, backend=backend, **options):
        factors = torch.linspace(-1, 2, part.numel(), dtype=part.dtype).view(part.shape)
        total = total + (part * factors).sum() + part.square().sum()
    return total


def gradients(backend, given, **options):
    given, resets = [x.detach().requires_grad_() for x in given[:6]], given[6]
    loss = loss_of(backend, [*given, resets], **options)
    return torch.autograd.grad(loss, given)


def test_the_loop_is_a_product_of_matrices():
    """S_t = exp(g) (1 - beta k k^T) S + beta k v^T, written out in the order of the products."""
    q, k, v, decay, beta, state, resets = draw()
    outputs, last = gated_delta_scan(q, k, v, decay, beta, state, resets, backend="loop")
    for head in range(H):
        memory = state[head]
        for t in range(T):
            key, share = k[head, t, :, None], beta[head, t]
            turn = torch.eye(CK, dtype=torch.float64) - share * key @ key.T
            memory = torch.zeros_like(memory) if resets[t] else decay[head, t].exp() * memory
            memory = turn @ memory + share * key @ v[head, t, None]
            torch.testing.assert_close(
                outputs[head, t], memory.T @ q[head, t], rtol=1e-12, atol=1e-12
            )
        torch.testing.assert_close(last[head], memory, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 8, 21, 64])
@pytest.mark.parametrize("leading", [(), (B,), (2, 1)])
def test_chunked_is_the_loop(leading, chunk):
    given = draw(*leading)
    expected = gated_delta_scan(*given, backend="loop")
    found = gated_delta_scan(*given, backend="chunked", chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pair = gradients("chunked", given, chunk=chunk), gradients("loop", given)
    for name, ours, oracle in zip(NAMES, *pair, strict=True):
        torch.testing.assert_close(
            ours, oracle, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("leading", [(), (B,), (2, 1)])
def test_recurrent_is_the_loop(leading):
    given = draw(*leading, length=37)  # more than two of the pieces that are replayed
    expected = gated_delta_scan(*given, backend="loop")
    found = gated_delta_scan(*given, backend="recurrent")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pair = gradients("recurrent", given), gradients("loop", given)
    for name, ours, oracle in zip(NAMES, *pair, strict=True):
        torch.testing.assert_close(
            ours, oracle, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def bound(given, chunk):
    """The error of a float32 state's norm and of an output.

    Keys and queries have length 1, and a decay and a share of at most 1, so that no step makes an
    error of the state larger: those of T steps add up. A step rounds a decayed state, a sum of Ck
    products, a value and what is written: Ck + 8 roundings of numbers of at most the largest norm
    of a state or a value. A chunk solves a system by C sums of C products instead, whose inverse's
    entries are at most 1, as they are products of such steps, and its exponents round C times.
    """
    given = [x.double() if x.is_floating_point() else x for x in given]
    norms = [given[5].norm(dim=(-2, -1)).max(), given[2].norm(dim=-1).max()]
    for length in range(1, given[0].shape[-2] + 1):
        part = [x[..., :length, :] for x in given[:3]] + [x[..., :length] for x in given[3:5]]
        _, state = gated_delta_scan(*part, given[5], given[6][..., :length], backend="loop")
        norms.append(state.norm(dim=(-2, -1)).max())
    largest = 1 + given[3].abs().amax() if chunk > 1 else 1.0
    steps = given[0].shape[-2] * (CK + 8 + chunk**2 * largest)
    return (steps * 2.0**-24 * torch.stack(norms).max()).item()


@pytest.mark.parametrize(("backend", "chunk"), [("recurrent", 1), ("chunked", 8)])
def test_float32_is_within_its_roundings(backend, chunk):
    given = draw(dtype=torch.float32)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    found = gated_delta_scan(*given, backend=backend, chunk=chunk)
    expected = gated_delta_scan(*wide, backend="loop")
    for ours, oracle in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - oracle).abs().max() <= bound(given, chunk)


@pytest.mark.parametrize("backend", OPERATORS)
def test_half_precision_has_a_float32_state(backend):
    given = draw(dtype=torch.bfloat16)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    outputs, state = gated_delta_scan(*given, backend=backend)
    expected = gated_delta_scan(*wide, backend="loop")
    assert (outputs.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (state.double() - expected[1]).abs().max() <= bound(given, 64)
    # The outputs are rounded once more, to 8 bits.
    error = (outputs.double() - expected[0]).abs()
    assert (error <= 2.0**-8 * expected[0].abs() + bound(given, 64)).all()
    for ours, part in zip(gradients(backend, given), given, strict=False):
        assert ours.dtype == part.dtype


@pytest.mark.parametrize("backend", ["loop", *OPERATORS])
def test_the_derivative_is_that_of_the_function(backend):
    *given, resets = draw(length=4)
    given = [x[:1].requires_grad_() for x in given]
    resets[2] = True

    def scan(*parts):
        return gated_delta_scan(*parts, resets, backend=backend, chunk=3)

    assert gradcheck(scan, given)
    if backend == "loop":
        assert gradgradcheck(scan, given)


@pytest.mark.parametrize("backend", OPERATORS)
def test_gradients_of_functions_are_those_of_autograd(backend):
    *given, resets = draw()
    found = grad(lambda given: loss_of(backend, [*given, resets]))(given)
    assert all(map(torch.equal, found, gradients(backend, [*given, resets])))


def test_a_sample_of_a_batch_is_as_alone():
    """Values and per-sample gradients by the recurrent form, bit for bit, of any number of rows."""
    whole = draw(4, dtype=torch.float32)

    def value_and_gradients(*given):
        def loss(parts):
            outputs, last = gated_delta_scan(*parts, given[6], backend="recurrent")
            return outputs.square().sum() + last.sum(), (outputs, last)

        return grad(loss, has_aux=True)(given[:6])

    together = funcrl.tree.leaves(vmap(value_and_gradients)(*whole))
    pair = funcrl.tree.leaves(vmap(value_and_gradients)(*(x[1:3] for x in whole)))
    for n in range(4):
        alone = funcrl.tree.leaves(value_and_gradients(*(x[n] for x in whole)))
        assert all(torch.equal(a[n], b) for a, b in zip(together, alone, strict=True))
        if n in (1, 2):
            assert all(torch.equal(a[n - 1], b) for a, b in zip(pair, alone, strict=True))


@pytest.mark.parametrize("backend", OPERATORS)
def test_per_sample_gradients_are_those_of_each_sample(backend):
    whole = draw(3)
    one = grad(lambda given, resets: loss_of(backend, [*given, resets]))
    found = vmap(one)(whole[:6], whole[6])
    for n in range(3):
        alone = gradients("loop", [x[n] for x in whole])
        for ours, oracle in zip(found, alone, strict=True):
            torch.testing.assert_close(ours[n], oracle, rtol=1e-11, atol=1e-11)
    # Of what all samples share, a gradient is that of each sample, too.
    one = grad(lambda state, given, resets: loss_of(backend, [*given, state, resets]))
    found = vmap(one, in_dims=(None, 0, 0))(whole[5][0], whole[:5], whole[6])
    alone = gradients("loop", [*(x[2] for x in whole[:5]), whole[5][0], whole[6][2]])[5]
    torch.testing.assert_close(found[2], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", OPERATORS)
def test_a_tracer_sees_one_operator_each_way(backend):
    whole = draw(3, dtype=torch.float32)

    def counted(function, given):
        nodes = [n for n in funcrl.trace(function, *given).graph.nodes if "funcrl" in str(n.target)]
        return [str(n.target) for n in nodes], nodes

    one = grad(lambda *given: loss_of(backend, given), argnums=(0, 3, 5))
    alone, nodes = counted(one, [x[0] for x in whole])
    assert len(alone) == 2
    assert counted(vmap(one), whole)[0] == alone
    # Products with a state [Ck, Cv] for each token: three forward, and nine backward.
    least = 6 * H * T * CK * CV
    forward, backward = (count_flops(node) for node in nodes)
    assert forward == (least if backend == "recurrent" else least + 4 * H * T * T * (CK + CV))
    assert backward == 3 * forward


@pytest.mark.parametrize("backend", OPERATORS)
def test_a_second_derivative_is_refused(backend):
    *given, resets = draw(length=4)

    def twice(backend):
        first = grad(lambda q: loss_of(backend, [q, *given[1:], resets]))
        return grad(lambda q: first(q).square().sum())(given[0])

    with pytest.raises(RuntimeError, match='gated_delta_scan has a first .* backend="loop" has'):
        twice(backend)
    assert twice("loop").abs().max() > 0


def split(given, places):
    """The pieces of a row, cut before each of the places."""
    edges = [0, *places, given[0].shape[-2]]
    for start, stop in itertools.pairwise(edges):
        at = slice(start, stop)
        yield [x[..., at, :] for x in given[:3]] + [x[..., at] for x in given[3:5]]


@pytest.mark.parametrize("backend", ["loop", *OPERATORS])
@pytest.mark.parametrize("places", [[5], [1, 2, 9], list(range(1, T))])
def test_resets_are_a_split_by_hand(backend, places):
    given = draw(dtype=torch.float64)
    resets = torch.zeros(T, dtype=torch.bool)
    resets[places] = True
    found = gated_delta_scan(*given[:6], resets, backend=backend, chunk=8)
    parts = [
        gated_delta_scan(*part, None if n else given[5], backend=backend, chunk=8)
        for n, part in enumerate(split(given, places))
    ]
    expected = torch.cat([out for out, _ in parts], dim=-2), parts[-1][1]
    same = backend != "chunked"
    for ours, oracle in zip(found, expected, strict=True):
        assert torch.equal(ours, oracle) if same else torch.allclose(ours, oracle, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[13], [3, 4, 16], list(range(1, T))])
def test_a_state_that_is_handed_on_has_the_bits_of_the_whole(cuts, dtype):
    """The recurrent form in pieces, and one token at a time, as a generator does."""
    given = draw(2, dtype=dtype)
    whole = gated_delta_scan(*given, backend="recurrent")
    state, outputs = given[5], []
    for part, resets in zip(split(given, cuts), given[6].tensor_split(cuts, dim=-1), strict=True):
        out, state = gated_delta_scan(*part, state, resets, backend="recurrent")
        outputs.append(out)
    assert torch.equal(torch.cat(outputs, dim=-2), whole[0])
    assert torch.equal(state, whole[1])
    chunked, last = gated_delta_scan(*given, backend="chunked", chunk=8)
    if dtype == torch.float32:
        assert (chunked - whole[0]).abs().max() <= 2 * bound(given, 8)
        assert (last - state).abs().max() <= 2 * bound(given, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_sample_has_the_bits_that_it_has_alone(dtype):
    given = draw(dtype=dtype)
    resets = torch.zeros(T, dtype=torch.bool)
    resets[[0, 7, 15]] = True
    packed, _ = gated_delta_scan(*given[:6], resets, backend="recurrent")
    for start, stop in ((0, 7), (7, 15), (15, T)):
        at = slice(start, stop)
        part = [x[:, at] for x in given[:5]]
        assert torch.equal(packed[:, at], gated_delta_scan(*part, backend="recurrent")[0])


@pytest.mark.parametrize("backend", ["loop", *OPERATORS])
def test_nothing_of_a_sample_reaches_the_next(backend):
    """Neither its numbers, nor a NaN, nor a gradient."""
    given = draw()
    given[5].zero_()
    resets = torch.zeros(T, dtype=torch.bool)
    resets[[7, 15]] = True
    before = gated_delta_scan(*given[:6], resets, backend=backend, chunk=4)[0]
    changed = [x.clone() for x in given]
    changed[1][:, 7:15], changed[2][:, 7:15] = 0.0, 9.0
    after = gated_delta_scan(*changed[:6], resets, backend=backend, chunk=4)[0]
    outside = [*range(7), *range(15, T)]
    assert torch.equal(before[:, outside], after[:, outside])
    assert not torch.equal(before, after)

    def last_sample(v):
        return gated_delta_scan(*given[:2], v, *given[3:6], resets, backend=backend, chunk=4)[0][
            :, 15:
        ].sum()

    assert grad(last_sample)(given[2])[:, :15].eq(0).all()


def test_a_nan_stays_in_its_sample():
    given = draw()
    resets = torch.zeros(T, dtype=torch.bool)
    resets[7] = True
    before = gated_delta_scan(*given[:6], resets, backend="recurrent")
    given[2][:, 3] = torch.nan
    after = gated_delta_scan(*given[:6], resets, backend="recurrent")
    assert torch.equal(before[0][:, 7:], after[0][:, 7:])
    assert torch.equal(before[1], after[1])
    assert after[0][:, 3:7].isnan().all()


def test_transformers_has_the_same_rule():
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    q, k, v, decay, beta, state, _ = draw(2, dtype=torch.float32)
    turned = [x.transpose(1, 2) for x in (q, k, v, decay, beta)]
    options = {"initial_state": state, "output_final_state": True}
    with warnings.catch_warnings(action="ignore"):
        chunked = module.torch_chunk_gated_delta_rule(*turned, chunk_size=8, **options)
        recurrent = module.torch_recurrent_gated_delta_rule(*turned, **options)
    for theirs in (chunked, recurrent):
        # They scale the queries.
        oracle = gated_delta_scan(q * CK**-0.5, k, v, decay, beta, state, backend="loop")
        assert (theirs[0].transpose(1, 2) - oracle[0]).abs().max() <= bound(
            draw(2, dtype=torch.float32), 8
        )
        assert (theirs[1] - oracle[1]).abs().max() <= bound(draw(2, dtype=torch.float32), 8)


def test_auto_takes_a_backend_that_can():
    given = draw()
    assert all(
        map(torch.equal, gated_delta_scan(*given), gated_delta_scan(*given, backend="chunked"))
    )
    one = [*next(split(given, [1])), given[5]]
    assert all(
        map(torch.equal, gated_delta_scan(*one), gated_delta_scan(*one, backend="recurrent"))
    )


def test_left_out_arguments_are_zeros():
    given = draw()
    zeros = torch.zeros(H, CK, CV, dtype=torch.float64), torch.zeros(T, dtype=torch.bool)
    for backend in ("loop", *OPERATORS):
        found = gated_delta_scan(*given[:5], backend=backend)
        assert all(map(torch.equal, found, gated_delta_scan(*given[:5], *zeros, backend=backend)))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, torch.zeros(3), r"expects q \[..., H, T, Ck\] and v \[..., H, T, Cv\] with T > 0"),
        (1, torch.zeros(H, T, 1), r"expects k of the shape of q"),
        (2, torch.zeros(H, 1, CV), r"expects v of the shape of q \(with Cv numbers\)"),
        (3, torch.zeros(T, H), r"expects decay of the shape of q \(without Ck\)"),
        (4, torch.zeros(H), r"expects beta of the shape of q"),
        (5, torch.zeros(H, CK, CV, dtype=torch.bfloat16), r"expects state of torch.float64"),
        (5, torch.zeros(H, CV), r"expects state of the shape of q and v"),
        (6, torch.zeros(T), r"expects resets of torch.bool"),
        (6, torch.zeros(H, T) > 0, r"expects resets of the shape of q"),
    ],
)
def test_wrong_arguments_are_named(place, value, words):
    given = draw()
    given[place] = value
    with pytest.raises((ValueError, TypeError), match=f"gated_delta_scan {words}"):
        gated_delta_scan(*given)


def test_kernels_are_refused_by_name_where_there_is_no_gpu():
    with pytest.raises(
        ValueError, match='for backend="triton" .*float64 on cpu, .*"chunked" takes all'
    ):
        gated_delta_scan(*draw(), backend="triton")
    with pytest.raises(ValueError, match="in chunks of 64 tokens, got .* and chunks of 5"):
        gated_delta_scan(*draw(), backend="triton", chunk=5)
    with pytest.raises(ValueError, match="backend"):
        gated_delta_scan(*draw(), backend="fast")

"""The short convolution: native against torch's, exact against native, and both in pieces."""

import itertools

import pytest
import torch
from torch.func import grad, vmap

from funcrl.ops import EXACT, short_conv

E, K, T = 5, 4, 11
FORMS = {"native": short_conv, "exact": EXACT.short_conv}


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def resets_at(*places):
    return torch.zeros(T, dtype=torch.bool).index_fill(0, torch.tensor(places), True)


@pytest.fixture(params=FORMS)
def conv(request):
    return FORMS[request.param]


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_it_is_a_convolution_of_each_channel(conv, taps):
    x, weight, history = draw(2, T, E), draw(E, taps), draw(2, taps - 1, E)
    stream = torch.cat((history, x), dim=-2).mT
    expected = torch.nn.functional.conv1d(stream, weight[:, None], groups=E).mT
    out, after = conv(x, weight, history, None)
    torch.testing.assert_close(out, torch.nn.functional.silu(expected), rtol=1e-12, atol=1e-12)
    assert torch.equal(after, stream.mT[:, T:])


@pytest.mark.parametrize("places", [[0], [3], [4, 5, 9], [10]])
def test_resets_are_a_split_by_hand(conv, places):
    x, weight, history = draw(T, E), draw(E, K), draw(K - 1, E)
    out, after = conv(x, weight, history, resets_at(*places))
    edges = [0, *places, T]
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        before = history if start == 0 and 0 not in places else None
        part, last = conv(x[start:stop], weight, before, None)
        torch.testing.assert_close(out[start:stop], part, rtol=1e-15, atol=1e-15)
    # What a later call reads is of the last sequence alone.
    assert torch.equal(after, last)


@pytest.mark.parametrize("cuts", [[1], [2, 3, 7], list(range(1, T))])
def test_a_history_that_is_handed_on_has_the_bits_of_the_whole(cuts):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, resets = draw(T, E, dtype=dtype), draw(E, K, dtype=dtype), resets_at(4, 5)
        history, outs = draw(K - 1, E, dtype=dtype), []
        whole = EXACT.short_conv(x, weight, history, resets)
        for part, fresh in zip(x.tensor_split(cuts), resets.tensor_split(cuts), strict=True):
            out, history = EXACT.short_conv(part, weight, history, fresh)
            outs.append(out)
        assert torch.equal(torch.cat(outs), whole[0])
        assert torch.equal(history, whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_sample_has_the_bits_that_it_has_alone(dtype):
    x, weight = draw(3, T, E, dtype=dtype), draw(E, K)
    packed, _ = EXACT.short_conv(x, weight, None, resets_at(0, 4).expand(3, T))
    for row in range(3):
        for at in (slice(0, 4), slice(4, T)):
            assert torch.equal(packed[row, at], EXACT.short_conv(x[row, at], weight, None, None)[0])


def test_nothing_of_a_sample_reaches_the_next(conv):
    x, weight, resets = draw(T, E), draw(E, K), resets_at(0, 6)
    before, _ = conv(x, weight, None, resets)
    x[3:6] = torch.nan
    after, history = conv(x, weight, None, resets)
    assert torch.equal(before[[0, 1, 2, *range(6, T)]], after[[0, 1, 2, *range(6, T)]])
    assert history.isfinite().all()
    given = grad(lambda x: conv(x, weight, None, resets)[0][6:].sum())(draw(T, E))
    assert given[:6].eq(0).all()


def test_exact_gradients_are_the_native_ones():
    given = draw(3, T, E), draw(E, K), draw(3, K - 1, E)
    resets = resets_at(2, 7).expand(3, T)

    def loss(conv, x, weight, history, resets):
        out, after = conv(x, weight, history, resets)
        return (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum() + after.sum()

    for argument in range(3):
        ours, native = (
            grad(loss, argnums=argument + 1)(conv, *given, resets) for conv in FORMS.values()
        )
        torch.testing.assert_close(ours, native, rtol=1e-11, atol=1e-11)
    # Of the weight that samples share, one gradient a sample.
    one = grad(loss, argnums=2)
    dims = (0, None, 0, 0)
    ours, native = (
        vmap(lambda *each, form=form: one(form, *each), dims)(*given, resets)
        for form in FORMS.values()
    )
    torch.testing.assert_close(ours, native, rtol=1e-11, atol=1e-11)
    assert ours.shape == (3, E, K)


def test_a_batched_weight_is_a_loop_over_samples():
    x, weights = draw(T, E), draw(3, E, K)
    found = vmap(lambda weight: EXACT.short_conv(x, weight, None, None)[0])(weights)
    assert torch.equal(found, torch.stack([EXACT.short_conv(x, w, None, None)[0] for w in weights]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.zeros(T, E + 1), draw(E, K)), r"x of shape \[..., T, E\] .* weight's 5 rows"),
        ((draw(T, E), draw(E)), r"weight of shape \[E, K\]"),
        ((draw(T, E), draw(E, K), draw(K, E)), r"history of the shape of x \(with K - 1 tokens\)"),
        ((draw(T, E), draw(E, K), None, torch.zeros(T)), r"resets of torch.bool"),
        ((draw(T, E), draw(E, K), None, resets_at(1)[1:]), r"resets of the shape of x"),
        ((torch.zeros(T, E).long(), draw(E, K)), r"x of a floating-point dtype"),
    ],
)
def test_wrong_arguments_are_named(given, words):
    with pytest.raises((ValueError, TypeError), match=f"short_conv expects {words}"):
        short_conv(*given)

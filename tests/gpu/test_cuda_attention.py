"""The exact attention of a GPU, against float64 and against itself in other arrangements."""

import pytest
import torch
from exact_implementations import implementations
from kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU
from sharing import samples_under_way, with_new

# Through the interpreter a case needs no GPU; else `-m gpu` runs it.
pytestmark = [] if INTERPRETED else pytest.mark.gpu
LENGTHS = (200, 513) if ON_GPU else (38,)
WINDOWS = (None, 100) if ON_GPU else (None, 7)

if ON_GPU or INTERPRETED:
    from funcrl.ops.exact.cuda import attention_gradients

    exact = implementations("funcrl.ops.exact.cuda")


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def oracle(q, k, v, first, last, window=None):
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    places = torch.arange(k.shape[2], device=k.device)
    seen = (places >= first[..., None]) & (places <= last[..., None])
    if window is not None:
        seen = seen & (places > last[..., None] - window)
    score = (q @ k.mT) * q.shape[-1] ** -0.5
    score = score.masked_fill(~seen[:, None], -1e30)
    weights = torch.softmax(score, -1) * seen[:, None]
    normaliser = torch.where(seen.any(-1)[:, None], score.logsumexp(-1), 0)
    return weights @ v, normaliser


def assert_near(ours, expected, dtype, factor=1):
    assert torch.isfinite(ours).all()
    error = (ours.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error < (8e-3 if dtype == torch.bfloat16 else 3e-6) * factor, error


def rows(*segments, length):
    """The first and last keys [T] of a row that packs segments, with dead padding after them."""
    first, last = torch.zeros(length, dtype=torch.int64), torch.full((length,), -1)
    start = 0
    for size in segments:
        first[start : start + size] = start
        last[start : start + size] = torch.arange(start, start + size)
        start += size
    return first.to(DEVICE), last.to(DEVICE)


def batch_of(length):
    """A causal row, a packed row with padding, a row with padding alone at its end."""
    third = length // 3
    pairs = [
        rows(length, length=length),
        rows(third, 1, third - 5, length=length),
        rows(length - 3, length=length),
    ]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


def inputs(length, heads, key_heads, width, dtype):
    q = randn(3, heads, length, width, dtype=dtype) * 2
    k, v = (randn(3, key_heads, length, width, dtype=dtype, seed=seed) for seed in (1, 2))
    return q, k, v, *batch_of(length)


# The interpreter takes seconds for what a GPU does at once.
CASES = [(3, 1, 24)]
if ON_GPU:
    CASES += [(4, 2, 16), (3, 1, 40), (2, 2, 64), (16, 8, 128), (8, 1, 96), (2, 1, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_and_its_gradients(heads, key_heads, width, length, dtype, window):
    q, k, v, first, last = inputs(length, heads, key_heads, width, dtype)
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    expected, log_total = oracle(*leaves, first, last, window)
    out, normaliser = exact.attend(q, k, v, first, last, window=window)
    assert_near(out, expected, dtype)
    assert_near(normaliser, log_total, torch.float32)
    grad = randn(*out.shape, dtype=dtype, seed=7)
    ours = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, window=window)
    for part, wide in zip(ours, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert_near(part, wide, dtype, factor=2)
    again = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, window=window)
    assert all(torch.equal(part, other) for part, other in zip(ours, again, strict=True))
    # A segment of the packed row has the bits of a row of its own.
    third = length // 3
    cut = slice(third + 1, third + 1 + third - 5)
    alone = [part[1:2, :, cut] for part in (q, k, v)]
    ranges = [part[None] for part in rows(third - 5, length=third - 5)]
    own, own_normaliser = exact.attend(*alone, *ranges, window=window)
    assert torch.equal(own, out[1:2, :, cut])
    assert torch.equal(own_normaliser, normaliser[1:2, :, cut])
    given = grad[1:2, :, cut], *alone, *ranges, own, own_normaliser
    own_grads = exact.attend_gradients(*given, window=window)
    for part, whole in zip(own_grads, ours, strict=True):
        assert torch.equal(part, whole[1:2, :, cut])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_and_decoding_have_the_bits_of_the_whole(
    heads, key_heads, width, length, dtype, window
):
    q, k, v, _, _ = inputs(length, heads, key_heads, width, dtype)
    first, last = (part.expand(3, length) for part in rows(length, length=length))
    out, normaliser = exact.attend(q, k, v, first, last, window=window)
    # A cache of another layout, with NaN past what is written.
    cache = torch.full(
        (3, length + 90, key_heads, 2 * width), float("nan"), dtype=dtype, device=DEVICE
    )
    cache[:, :length] = torch.cat([k, v], -1).transpose(1, 2)
    keys, values = cache.transpose(1, 2).split(width, -1)
    for start, size in (
        (0, 1),
        (0, 9),
        (5, 32),
        (length - 1, 1),
        (length - 8, 8),
        (20, length - 20),
    ):
        cut = slice(start, start + size)
        written = cache.clone()
        written[:, start + size :] = float("nan")
        keys, values = written.transpose(1, 2).split(width, -1)
        given = q[:, :, cut], keys, values, first[:, cut], last[:, cut]
        ours, own = exact.attend(*given, window=window)
        assert torch.equal(ours, out[:, :, cut]), (start, size)
        assert torch.equal(own, normaliser[:, :, cut])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
@pytest.mark.parametrize("size", [16, 24] if ON_GPU else [12])
def test_pages_have_the_bits_of_rows(heads, key_heads, width, size, dtype):
    length = LENGTHS[0]
    q, k, v, _, _ = inputs(length, heads, key_heads, width, dtype)
    first, last = (part.expand(3, length) for part in rows(length, length=length))
    out, _ = exact.attend(q, k, v, first, last)
    pages = -(-length // size)
    order = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tables = order.view(3, pages)
    cache = torch.full(
        (3 * pages, size, key_heads, 2 * width), float("nan"), dtype=dtype, device=DEVICE
    )
    padded = torch.full(
        (3, pages * size, key_heads, 2 * width), float("nan"), dtype=dtype, device=DEVICE
    )
    padded[:, :length] = torch.cat([k, v], -1).transpose(1, 2)
    cache[order] = padded.view(3 * pages, size, key_heads, 2 * width)
    cache = cache.transpose(1, 2)
    flat = q.transpose(1, 2).flatten(0, 1)
    expected = out.transpose(1, 2).flatten(0, 1)
    requests = torch.arange(3, device=DEVICE).repeat_interleave(length)
    ends = torch.arange(length, device=DEVICE).repeat(3)
    for places in (
        torch.arange(3 * length),
        torch.tensor([length - 1, 3 * length - 1]),
        torch.tensor([7]),
    ):
        picked = places.to(DEVICE)
        ours = exact.attend_paged(flat[picked], cache, tables, requests[picked], ends[picked])
        assert torch.equal(ours, expected[picked])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
@pytest.mark.parametrize(("group", "groups"), [(1, 3), (3, 2), (40, 2)] if ON_GPU else [(3, 2)])
def test_shared_pages_have_the_bits_of_pages(heads, key_heads, width, group, groups, dtype):
    size = 64 if ON_GPU or dtype == torch.bfloat16 else 16  # a tile's keys lie in one page
    case = samples_under_way(dtype, heads, key_heads, width, group, groups, size, 0, DEVICE)
    written = with_new(case)
    every = torch.arange(len(case.q), device=DEVICE)
    expected = exact.attend_paged(case.q, written, case.tables, every, case.last)
    assert torch.equal(exact.attend_new(*case), expected)
    assert torch.equal(case.cache.nan_to_num(9), written.nan_to_num(9))


def test_a_place_of_minus_one_writes_nothing():
    case = samples_under_way(DTYPES[-1], 4, 2, 16, 2, 2, 16, 1, DEVICE)
    before = case.cache.clone()
    case.last[1] = -1
    out = exact.attend_new(*case)
    assert not out[1].any()
    page = case.tables[1, -1]
    assert torch.equal(case.cache[page].nan_to_num(9), before[page].nan_to_num(9))
    assert torch.equal(case.cache[0], before[0])
    whole = samples_under_way(DTYPES[-1], 4, 2, 16, 2, 2, 16, 1, DEVICE)
    others = [0, 2, 3]
    assert torch.equal(out[others], exact.attend_new(*whole)[others])


def shared_row(prefix, *samples, length):
    """`rows` of samples behind a prefix that they share, and the spans [T, 2] that they see too."""
    first, last = rows(prefix, *samples, length=length)
    shared = torch.zeros(length, 2, dtype=torch.int64, device=DEVICE)
    shared[prefix : prefix + sum(samples), 1] = prefix
    return first, last, shared


def shared_oracle(q, k, v, first, last, shared, window=None):
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    places = torch.arange(k.shape[2], device=k.device)
    seen = (places >= first[..., None]) & (places <= last[..., None])
    start, count = shared[..., :1], shared[..., 1:]
    of_prefix = (places >= start) & (places < start + count) & (last >= first)[..., None]
    if window is not None:  # of the prefix's and the sample's own keys as if they were neighbours
        seen = seen & (places > last[..., None] - window)
        number = (first[..., None] - count) + places - start
        of_prefix = of_prefix & (number > last[..., None] - window)
    seen = seen | of_prefix
    score = ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], -1e30)
    return (torch.softmax(score, -1) * seen[:, None]) @ v


SAMPLES = [(70, 64, 1, 200, 130), (64, 30, 31, 32)] if ON_GPU else [(13, 9, 1, 20), (40, 3, 6)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
@pytest.mark.parametrize("sizes", SAMPLES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_shared_prefix(heads, key_heads, width, sizes, dtype, window):
    """Results against float64; a sample's bits are those that it has with the prefix alone."""
    length, (prefix, *samples) = sum(sizes) + 5, sizes
    q, k, v, _, _ = inputs(length, heads, key_heads, width, dtype)
    row = shared_row(prefix, *samples, length=length)
    spans = [torch.stack([part] * 3) for part in row]
    spans[2][1] = 0  # a row without: its samples stand for themselves
    first, last, shared = spans
    out, normaliser = exact.attend(q, k, v, first, last, shared, window)
    plain = exact.attend(q[1:2], k[1:2], v[1:2], first[1:2], last[1:2], window=window)
    assert torch.equal(out[1:2], plain[0])
    assert torch.equal(normaliser[1:2], plain[1])
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    expected = shared_oracle(*leaves, *spans, window)
    assert_near(out, expected, dtype)
    grad = randn(*out.shape, dtype=dtype, seed=7)
    ours = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, shared, window)
    for part, wide in zip(ours, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert_near(part, wide, dtype, factor=2)
    again = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, shared, window)
    assert all(torch.equal(part, other) for part, other in zip(ours, again, strict=True))
    start = prefix
    for size in samples:
        own = torch.arange(start, start + size, device=DEVICE)
        places = torch.cat([torch.arange(prefix, device=DEVICE), own])
        alone = [part[:1, :, places] for part in (q, k, v)]
        ranges = [part[None] for part in rows(len(places), length=len(places))]
        result, own_normaliser = exact.attend(*alone, *ranges, window=window)
        assert torch.equal(result[:, :, prefix:], out[:1, :, own])
        assert torch.equal(own_normaliser[:, :, prefix:], normaliser[:1, :, own])
        start += size


GROUPS = [(70, 64, 1, 200), (30, 31, 1, 130)] if ON_GPU else [(40, 3, 6), (13, 9, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width"), CASES)
def test_groups_of_a_row_have_the_bits_of_their_own_rows(
    heads, key_heads, width, dtype, monkeypatch
):
    """Also the gradients of prefixes, whichever programs start first and however rows are read."""
    length = sum(map(sum, GROUPS)) + 5
    q, k, v, _, _ = inputs(length, heads, key_heads, width, dtype)
    (q, k, v), grad = (part[:1] for part in (q, k, v)), randn(1, *q.shape[1:], dtype=dtype, seed=7)
    spans = [torch.full((length,), fill, device=DEVICE) for fill in (0, -1)]
    spans.append(torch.zeros(length, 2, dtype=torch.int64, device=DEVICE))
    places = []
    for sizes in GROUPS:
        start = places[-1].stop if places else 0
        places.append(slice(start, start + sum(sizes)))
        first, last, shared = shared_row(*sizes, length=sum(sizes))
        shared[:, 0] = torch.where(shared[:, 1] > 0, start, 0)
        for whole, part in zip(spans, (first + start, last + start, shared), strict=True):
            whole[places[-1]] = part
    first, last, shared = (part[None] for part in spans)
    out, normaliser = exact.attend(q, k, v, first, last, shared)
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    expected = shared_oracle(*leaves, first, last, shared)
    assert_near(out, expected, dtype)
    ours = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, shared)
    for part, wide in zip(ours, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert_near(part, wide, dtype, factor=2)
    # Of a shorter piece of a row that is read at a time, programs start in another order.
    monkeypatch.setattr(attention_gradients, "_SCAN", 16)
    again = exact.attend_gradients(grad, q, k, v, first, last, out, normaliser, shared)
    assert all(torch.equal(part, other) for part, other in zip(ours, again, strict=True))
    for cut, sizes in zip(places, GROUPS, strict=True):
        alone = [part[:, :, cut] for part in (q, k, v)]
        ranges = [part[None] for part in shared_row(*sizes, length=sum(sizes))]
        own, own_normaliser = exact.attend(*alone, *ranges)
        assert torch.equal(own, out[:, :, cut])
        own_grads = exact.attend_gradients(
            grad[:, :, cut], *alone, *ranges[:2], own, own_normaliser, ranges[2]
        )
        for part, whole in zip(own_grads, ours, strict=True):
            assert torch.equal(part, whole[:, :, cut])

"""Rows whose samples share a prefix: attention native, flash and exact against float64 by hand."""

import pytest
import torch
from cases import equal
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import ops
from funcrl.ops import EXACT, NATIVE

WAYS = {
    "native": NATIVE.attend_segments,
    "flash": ops.attend_flash_segments,
    "exact": EXACT.attend_segments,
}


def row_of(groups, padding=3):
    """segment_ids and prefix_ids of a row; a group is (length of the prefix, of each sample)."""
    segments, prefixes, segment = [], [], 0
    for prefix, *samples in groups:
        shared = -1
        if prefix:
            segments += [segment] * prefix
            prefixes += [-1] * prefix
            shared, segment = segment, segment + 1
        for size in samples:
            segments += [segment] * size
            prefixes += [shared] * size
            segment += 1
    both = (segments + [-1] * padding, prefixes + [-1] * padding)
    return tuple(torch.tensor(ids) for ids in both)


def by_hand(q, k, v, segment_ids, prefix_ids):
    """One query after another, each over the list of keys that it sees."""
    group = q.shape[0] // k.shape[0]
    out = torch.zeros_like(q)
    for t, (segment, prefix) in enumerate(zip(segment_ids, prefix_ids, strict=True)):
        seen = [
            s
            for s, other in enumerate(segment_ids)
            if (other == segment and s <= t) or (prefix >= 0 and other == prefix)
        ]
        for head in range(q.shape[0]):
            keys, values = k[head // group, seen], v[head // group, seen]
            weights = torch.softmax(keys @ q[head, t] * q.shape[-1] ** -0.5, 0)
            out[head, t] = weights @ values
    return out


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def heads_of(length, seed=0, dtype=torch.float64, heads=4, kv_heads=2, width=4):
    counts = (heads, kv_heads, kv_heads)
    return [draw(n, length, width, seed=seed + at, dtype=dtype) for at, n in enumerate(counts)]


def random_groups(seed):
    draws = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draws))

    return [
        (number(0, 12), *(number(1, 9) for _ in range(number(1, 5)))) for _ in range(number(1, 4))
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_by_hand(way, seed):
    ids = row_of(random_groups(seed))
    inputs = heads_of(len(ids[0]), seed)
    weights = draw(4, len(ids[0]), 4, seed=9)
    weights[:, ids[0] < 0] = 0  # what padding gets is nobody's business

    def loss(attend):
        return lambda *given: (attend(*given) * weights).sum()

    def slow(q, k, v):
        return by_hand(q, k, v, *ids)

    fast = WAYS[way](*ids)
    real = ids[0] >= 0
    leaves = [part.clone().requires_grad_() for part in inputs]
    expected = torch.autograd.grad(loss(slow)(*leaves), leaves)
    assert (fast(*inputs) - slow(*inputs))[:, real].abs().max() <= 1e-13
    for mine, theirs in zip(grad(loss(fast), (0, 1, 2))(*inputs), expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_rows_is_its_rows_eager_and_traced(way):
    rows = [row_of([(4, 3, 2), (1, 2)], 2), row_of([(0, 5), (3, 1, 1, 1)], 3)]
    ids = [torch.stack(both) for both in zip(*rows, strict=True)]
    length = ids[0].shape[1]
    inputs = [torch.stack(both) for both in zip(heads_of(length), heads_of(length, 7), strict=True)]

    def loss(q, k, v, *ids):
        return WAYS[way](*ids)(q, k, v).square().sum()

    batched = vmap(grad(loss, (0, 1, 2)))
    found = batched(*inputs, *ids)
    graph = make_fx(batched)(*inputs, *ids)
    assert equal(graph(*inputs, *ids), found)
    for row in range(2):
        alone = grad(loss, (0, 1, 2))(*(part[row] for part in (*inputs, *ids)))
        for mine, theirs in zip(found, alone, strict=True):
            assert (mine[row] - theirs).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [[(70, 3, 90, 1)], [(0, 7), (5, 60, 2), (129, 1, 64, 65)]])
def test_a_sample_behind_a_shared_prefix_has_the_bits_that_it_has_alone(groups, dtype):
    """Blocks of 64 keys are counted over prefix and sample together."""
    ids = row_of(groups)
    q, k, v = heads_of(len(ids[0]), dtype=dtype, width=16)
    out = EXACT.attend_segments(*ids)(q, k, v)
    for segment in range(int(ids[0].max()) + 1):
        own = (ids[0] == segment).nonzero().squeeze(1)
        shared = (ids[0] == ids[1][own[0]]).nonzero().squeeze(1) if ids[1][own[0]] >= 0 else own[:0]
        places = torch.cat([shared, own])
        alone = EXACT.attend_causal(*(part[:, places] for part in (q, k, v)))
        assert torch.equal(out[:, own], alone[:, len(shared) :])


def test_exact_attention_takes_all_rows_at_once():
    rows = [row_of([(4, 3, 2), (1, 2)], 2), row_of([(0, 5), (3, 1, 1, 1)], 3)]
    ids = [torch.stack(both) for both in zip(*rows, strict=True)]
    length = ids[0].shape[1]
    pairs = [heads_of(length), heads_of(length, 7)]
    found = EXACT.attend_segments(*ids)(*(torch.stack(both) for both in zip(*pairs, strict=True)))
    for row, inputs in enumerate(pairs):
        assert torch.equal(found[row], EXACT.attend_segments(*rows[row])(*inputs))


def test_flash_segments_skip_what_is_not_seen():
    """No tensor of a trace has T x T numbers, as the scores of native attention."""
    ids = row_of([(20, 10, 10), (20, 10, 10)], 5)
    length = len(ids[0])

    def largest(way):
        def loss(*given):
            return WAYS[way](*ids)(*given).sum()

        graph = make_fx(grad(loss, (0, 1, 2)))(*heads_of(length))
        sizes = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
        return max(part.numel() for part in sizes if isinstance(part, torch.Tensor))

    assert largest("native") >= 4 * length * length
    assert largest("flash") == 4 * length * 4


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((torch.zeros(2, 3).long(),), "segment_ids of shape"),
        ((torch.zeros(3),), "segment_ids of torch.int64"),
        ((torch.zeros(3).long(), torch.zeros(2).long()), "prefix_ids of the shape of segment_ids"),
        ((torch.zeros(4).long(),), "q .* of T = 4"),
    ],
)
def test_wrong_arguments_are_named(ids, words):
    with pytest.raises((TypeError, ValueError), match=f"attend_flash_segments expects {words}"):
        ops.attend_flash_segments(*ids)(*heads_of(3))
    with pytest.raises(ValueError, match="attend_segments expects prefix_ids of the shape"):
        funcrl.ops.attend_segments(torch.zeros(3).long(), torch.zeros(2).long())

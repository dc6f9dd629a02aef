"""The backward pass of attention by Triton, without atomic additions: equal bits at each run.

Blocks of queries, like blocks of keys, are counted from `first`: a segment of a packed row has the
gradients that it has in a row of its own. With PREFIX a query also sees the keys of a prefix, whose
first place and number are in `shared`; they are counted as if they lay before `first`.

Which queries see a tile of keys is found from the data, so that one program fits all rows: the
queries of a segment are neighbours, and segments stand in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.attention import log2_scale, prefix_arguments, prefix_span, row_products
from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh, power_of_two

NEVER = tl.constexpr(2147483647)


@triton.jit
def _seers(
    first, last, shared, first_t, last_t, shared_t, place, times, end_time,
    BN: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Return the segments of the queries at `times`, and which of these see a key of the tile."""
    known = times < end_time
    owner = tl.load(first + times * first_t, mask=known, other=0).to(tl.int32)
    end = tl.load(last + times * last_t, mask=known, other=-1).to(tl.int32)
    sees = (end >= place) & (owner < place + BN)
    if PREFIX:
        span = shared + times * shared_t
        prefix = tl.load(span, mask=known, other=0).to(tl.int32)
        count = tl.load(span + 1, mask=known, other=0).to(tl.int32)
        sees = sees | ((count > 0) & (prefix < place + BN) & (prefix + count > place))
    return owner, sees & (end >= owner)


@triton.jit
def seeing_range(
    first, last, shared, first_t, last_t, shared_t, place, segment, begin, final,
    BN: tl.constexpr, BT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Return the end of the segment's queries that see the tile, and the first of a later one's.

    Of those queries `begin` is the segment's first, and none is at `final` or later.
    """
    stop = tl.full((), 0, tl.int32)
    following = tl.full((), NEVER, tl.int32)
    start = begin
    while (start < final) & (following == NEVER):  # segments stand in their order
        times = start + tl.arange(0, BT)
        owner, sees = _seers(
            first, last, shared, first_t, last_t, shared_t, place, times, final, BN, PREFIX
        )
        own = sees & (owner == segment)
        stop = tl.maximum(stop, tl.max(tl.where(own, times + 1, 0), 0))
        following = tl.min(tl.where(sees & (owner > segment), times, NEVER), 0)
        start += BT
    return stop, following


@triton.jit
def range_kernel(
    first, last, shared, ranges, lengths, T, first_b, first_t, last_b, last_t, shared_b, shared_t,
    BN: tl.constexpr, BT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Write, for a tile of keys, the first segment that sees it: begin, number, `seeing_range`.

    Also the end of all queries that see the tile, and how many times BT of them there are.
    """
    place = tl.program_id(0) * BN
    batch = tl.program_id(1).to(tl.int64)
    first += batch * first_b
    last += batch * last_b
    shared += batch * shared_b
    begin = tl.full((), NEVER, tl.int32)
    final = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    for start in range(0, T, BT):
        times = start + tl.arange(0, BT)
        _, sees = _seers(
            first, last, shared, first_t, last_t, shared_t, place, times, T, BN, PREFIX
        )
        begin = tl.minimum(begin, tl.min(tl.where(sees, times, NEVER), 0))
        final = tl.maximum(final, tl.max(tl.where(sees, times + 1, 0), 0))
        count += tl.sum(sees.to(tl.int32), 0)
    segment = tl.load(first + tl.minimum(begin, T - 1) * first_t).to(tl.int32)
    stop, following = seeing_range(
        first, last, shared, first_t, last_t, shared_t, place, segment, begin, final, BN, BT, PREFIX
    )
    tile = batch * tl.num_programs(0) + tl.program_id(0)
    ranges += tile * 5
    tl.store(ranges, begin)
    tl.store(ranges + 1, segment)
    tl.store(ranges + 2, stop)
    tl.store(ranges + 3, following)
    tl.store(ranges + 4, final)
    tl.store(lengths + tile, count // BT)


_SCAN = 512  # queries of which a program reads the ranges at a time


def attend_gradients_impl(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    normaliser: Tensor,
    shared: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [B, H, T, C], k and v [B, K, S, C].

    p = exp(score - normaliser),  d score = p (grad v^T - sum(grad * out))

    Those of the keys of a prefix, which `shared` says as in `attend`, are summed over the segments
    that see it, in their order.
    """
    batch, heads, length, width = q.shape
    key_heads, places = k.shape[1:3]
    grad, q, k, v, out = (aligned_heads(part) for part in (grad, q, k, v, out))
    grads = fresh(q, *q.shape), fresh(k, *k.shape), fresh(v, *v.shape)
    if not grads[0].numel():
        return grads[0], grads[1].zero_(), grads[2].zero_()
    if not places:
        return grads[0].zero_(), grads[1], grads[2]
    columns = max(16, power_of_two(width))
    delta, power = (fresh(q, batch, heads, length, dtype=torch.float32) for _ in range(2))
    inputs = grad, q, k, v, delta, power, first, last
    strides = [stride for part in (grad, q, k, v) for stride in part.stride()[:3]]
    strides += [*first.stride(), *last.stride()]
    factors = log2_scale(width), width**-0.5
    spans, span_strides = prefix_arguments(shared, first)
    prefix = shared is not None
    tile = _query_tile(q.dtype, columns)
    query_kernel[(-(-length // tile["BM"]), heads, batch)](
        *inputs, out, normaliser, grads[0], heads, heads // key_heads, length, width, *factors,
        *strides, *out.stride()[:3], *normaliser.stride(), spans, *span_strides,
        BC=columns, PREFIX=prefix, WINDOW=window or 0, **tile, **STRICT,
    )  # fmt: skip
    tile = _key_tile(q.dtype, columns)
    tiles = -(-places // tile["BN"])
    ranges = fresh(q, batch, tiles, 5, dtype=torch.int32)
    lengths = fresh(q, batch * tiles, dtype=torch.int32)
    range_kernel[(tiles, batch)](
        first, last, spans, ranges, lengths, length, *strides[-4:], *span_strides,
        BN=tile["BN"], BT=_SCAN, PREFIX=prefix, **STRICT,
    )  # fmt: skip
    # A prefix is seen by all its samples: the programs of its keys run longest, and start first.
    # Others keep their order, as neighbours read the same queries.
    order = lengths.argsort(descending=True, stable=True) if prefix else lengths
    key_kernel[(batch * tiles * key_heads,)](
        *inputs, ranges, order, *grads[1:], heads, heads // key_heads, length, places, width, tiles,
        *factors, *strides, spans, *span_strides, BC=columns, BT=_SCAN, PREFIX=prefix,
        WINDOW=window or 0, **tile, **STRICT,
    )  # fmt: skip
    return grads


def _query_tile(dtype: torch.dtype, columns: int) -> dict[str, int | bool]:
    if dtype == torch.float32:
        return {"BM": 32, "BN": 16, "IEEE": True, "num_warps": 8, "num_stages": 1}
    if columns > 128:
        return {"BM": 64, "BN": 64, "IEEE": False, "num_warps": 4, "num_stages": 2}
    return {"BM": 64, "BN": 32, "IEEE": False, "num_warps": 4, "num_stages": 3}


def _key_tile(dtype: torch.dtype, columns: int) -> dict[str, int | bool]:
    if dtype == torch.float32:
        return {"BM": 16, "BN": 32, "IEEE": True, "num_warps": 8, "num_stages": 1}
    if columns > 128:
        return {"BM": 64, "BN": 64, "IEEE": False, "num_warps": 8, "num_stages": 1}
    return {"BM": 32, "BN": 64, "IEEE": False, "num_warps": 4, "num_stages": 3}


@triton.jit
def query_kernel(
    grad, q, k, v, delta, power, first, last, out, normaliser, grad_q, H, G, T, C, scale, factor,
    g_b, g_h, g_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, first_b, first_t, last_b, last_t,
    o_b, o_h, o_t, n_b, n_h, n_t, shared, shared_b, shared_t,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PREFIX: tl.constexpr,
    WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of queries, by the loop of the forward pass.

    Also sum(grad * out) of each row, and its normaliser in powers of 2, inf for a dead row.
    """
    head_time = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    tail_time = tl.minimum(head_time + BM, T) - 1
    times = head_time + tl.arange(0, BM)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BC)
    known = times < T
    seen = known[:, None] & (columns < C)[None, :]
    owner = tl.load(first + batch * first_b + times * first_t, mask=known, other=0).to(tl.int32)
    end = tl.load(last + batch * last_b + times * last_t, mask=known, other=-1).to(tl.int32)
    alive = known & (end >= owner)
    at = (batch * H + head) * T + times
    q_at = q + batch * q_b + head * q_h + times * q_t
    g_at = grad + batch * g_b + head * g_h + times * g_t
    queries = tl.load(q_at[:, None] + columns[None, :], mask=seen, other=0.0)
    given = tl.load(g_at[:, None] + columns[None, :], mask=seen, other=0.0)
    o_at = out + batch * o_b + head * o_h + times[:, None] * o_t + columns[None, :]
    result = tl.load(o_at, mask=seen, other=0.0)
    row_delta = tl.sum(given.to(tl.float32) * result.to(tl.float32), 1)
    value = tl.load(normaliser + batch * n_b + head * n_h + times * n_t, mask=known, other=0.0)
    row_power = tl.where(alive, value * 1.4426950408889634, float("inf"))
    tl.store(delta + at, row_delta, mask=known)
    tl.store(power + at, row_power, mask=known)
    k += batch * k_b + head // G * k_h
    v += batch * v_b + head // G * v_h
    summed = tl.zeros((BM, BC), tl.float32)
    head_group = tl.load(first + batch * first_b + head_time * first_t).to(tl.int32)
    tail_group = tl.load(first + batch * first_b + tail_time * first_t).to(tl.int32)
    head_end = tl.load(last + batch * last_b + head_time * last_t).to(tl.int32)
    tail_end = tl.load(last + batch * last_b + tail_time * last_t).to(tl.int32)
    simple = (head_group == tail_group) & (head_end >= head_group) & (tail_end >= head_end)
    current = head_group
    if not simple:
        current = tl.min(tl.where(alive, owner, NEVER), 0)
    while current < NEVER:
        own = alive & (owner == current)
        stop = tail_end + 1
        if not simple:
            stop = tl.max(tl.where(own, end, -1), 0) + 1
        limit = tl.where(own, end, -1)
        begin = current
        if PREFIX:
            one = head_time  # a query of the segment
            if not simple:
                one = tl.min(tl.where(own, times, NEVER), 0)
            begin, shift = prefix_span(shared + batch * shared_b + one * shared_t, current)
        if WINDOW > 0:  # as in the forward pass
            least = tl.min(tl.where(own, end, NEVER), 0) - WINDOW + 1
            begin += tl.maximum(least - begin, 0) // BN * BN
        for start in range(begin, stop, BN):
            places = start + tl.arange(0, BN)
            inside = (columns < C)[None, :] & (places < stop)[:, None]
            real = places
            if PREFIX:
                real = tl.where(places < current, places + shift, places)
            k_at, v_at = k + real * k_s, v + real * v_s
            keys = tl.load(k_at[:, None] + columns[None, :], mask=inside, other=0.0)
            if IEEE:
                score = row_products(q_at, known, k_at, places < stop, C, BM, BN)
                towards = row_products(g_at, known, v_at, places < stop, C, BM, BN)
            else:
                values = tl.load(v_at[:, None] + columns[None, :], mask=inside, other=0.0)
                score = tl.dot(queries, tl.trans(keys))
                towards = tl.dot(given, tl.trans(values))
            p = tl.exp2(tl.fma(score, scale, -row_power[:, None]))
            p = tl.where(places[None, :] <= limit[:, None], p, 0.0)
            if WINDOW > 0:
                p = tl.where(places[None, :] > limit[:, None] - WINDOW, p, 0.0)
            slope = (p * (towards - row_delta[:, None])).to(keys.dtype)
            summed = tl.dot(slope, keys, summed, input_precision="ieee" if IEEE else "tf32")
        following = tl.full((), NEVER, tl.int32)
        if not simple:
            following = tl.min(tl.where(alive & (owner > current), owner, NEVER), 0)
        current = following
    summed = tl.where(alive[:, None], summed * factor, 0.0)
    tl.store(grad_q + at[:, None] * C + columns[None, :], summed, mask=seen)


@triton.jit
def key_kernel(
    grad, q, k, v, delta, power, first, last, ranges, order, grad_k, grad_v,
    H, G, T, S, C, TILES, scale, factor,
    g_b, g_h, g_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, first_b, first_t, last_b, last_t,
    shared, shared_b, shared_t,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, PREFIX: tl.constexpr,
    WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and values: over segments, heads, blocks of queries.

    Programs start in the order of their ids. With PREFIX `order` [B * TILES] lists the tiles.
    """
    tile = tl.program_id(0) // (H // G)
    if PREFIX:
        tile = tl.load(order + tile).to(tl.int32)
    ranges += tile.to(tl.int64) * 5
    place = tile % TILES * BN
    batch = (tile // TILES).to(tl.int64)
    key_head = (tl.program_id(0) % (H // G)).to(tl.int64)
    places = place + tl.arange(0, BN)
    columns = tl.arange(0, BC)
    seen = (places < S)[:, None] & (columns < C)[None, :]
    k_at = k + batch * k_b + key_head * k_h + places * k_s
    v_at = v + batch * v_b + key_head * v_h + places * v_s
    if not IEEE:
        keys = tl.load(k_at[:, None] + columns[None, :], mask=seen, other=0.0)
        values = tl.load(v_at[:, None] + columns[None, :], mask=seen, other=0.0)
    first += batch * first_b
    last += batch * last_b
    shared += batch * shared_b
    q += batch * q_b
    grad += batch * g_b
    power += batch * H * T
    delta += batch * H * T
    sum_k = tl.zeros((BN, BC), tl.float32)
    sum_v = tl.zeros((BN, BC), tl.float32)
    # The queries of one segment that see the tile: begin..stop.
    begin, segment = tl.load(ranges), tl.load(ranges + 1)
    stop, following, final = tl.load(ranges + 2), tl.load(ranges + 3), tl.load(ranges + 4)
    while begin < NEVER:
        limit = tl.where(places >= segment, places, NEVER)  # keys of an earlier segment: none
        number = places  # a key's place, as queries count it
        if PREFIX:  # but of the prefix all
            span = shared + begin * shared_t
            prefix, count = tl.load(span).to(tl.int32), tl.load(span + 1).to(tl.int32)
            inside_prefix = (places >= prefix) & (places < prefix + count)
            limit = tl.where(inside_prefix, -1, limit)
            number = tl.where(inside_prefix, segment - count + places - prefix, number)
        start = begin - ((begin - segment) % BM + BM) % BM
        blocks = (stop - start + BM - 1) // BM
        for step in range(G * blocks):
            head = key_head * G + step // blocks
            times = start + step % blocks * BM + tl.arange(0, BM)
            known = (times >= begin) & (times < stop)
            inside = known[:, None] & (columns < C)[None, :]
            q_at = q + head * q_h + times * q_t
            g_at = grad + head * g_h + times * g_t
            row = head * T + times
            queries = tl.load(q_at[:, None] + columns[None, :], mask=inside, other=0.0)
            given = tl.load(g_at[:, None] + columns[None, :], mask=inside, other=0.0)
            row_power = tl.load(power + row, mask=known, other=float("inf"))
            row_delta = tl.load(delta + row, mask=known, other=0.0)
            end = tl.load(last + times * last_t, mask=known, other=-1).to(tl.int32)
            if IEEE:
                score = row_products(k_at, places < S, q_at, known, C, BN, BM)
            else:
                score = tl.dot(keys, tl.trans(queries))
            p = tl.exp2(tl.fma(score, scale, -row_power[None, :]))
            p = tl.where(limit[:, None] <= end[None, :], p, 0.0)
            if WINDOW > 0:
                p = tl.where(number[:, None] > end[None, :] - WINDOW, p, 0.0)
            precision: tl.constexpr = "ieee" if IEEE else "tf32"
            sum_v = tl.dot(p.to(given.dtype), given, sum_v, input_precision=precision)
            if IEEE:
                towards = row_products(v_at, places < S, g_at, known, C, BN, BM)
            else:
                towards = tl.dot(values, tl.trans(given))
            slope = (p * (towards - row_delta[None, :])).to(queries.dtype)
            sum_k = tl.dot(slope, queries, sum_k, input_precision=precision)
        begin = following
        if begin < NEVER:
            segment = tl.load(first + begin * first_t).to(tl.int32)
            stop, following = seeing_range(
                first, last, shared, first_t, last_t, shared_t,
                place, segment, begin, final, BN, BT, PREFIX,
            )  # fmt: skip
    at = ((batch * (H // G) + key_head) * S + places)[:, None] * C + columns[None, :]
    tl.store(grad_k + at, sum_k * factor, mask=seen)
    tl.store(grad_v + at, sum_v, mask=seen)

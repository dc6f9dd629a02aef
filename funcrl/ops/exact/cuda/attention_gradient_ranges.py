"""Which queries see a tile of keys: found from the data, so that one program fits all rows.

The queries of a segment are neighbours, and segments stand in their order.
"""

import triton
import triton.language as tl

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

"""The kernels of attention's backward pass: each sum has one owner and one order.

Blocks of queries, like blocks of keys, are counted from `first`: a segment of a packed row has the
gradients that it has in a row of its own.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

NEVER = tl.constexpr(2147483647)


@triton.jit
def row_kernel(
    grad, out, normaliser, first, last, delta, power, H, T, C,
    g_b, g_h, g_t, o_b, o_h, o_t, n_b, n_h, n_t, first_b, first_t, last_b, last_t,
    ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write sum(grad * out) of each row, and its normaliser in powers of 2, inf for a dead row."""
    times = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BC)
    known = times < T
    seen = known[:, None] & (columns < C)[None, :]
    g_at = grad + batch * g_b + head * g_h + times[:, None] * g_t + columns[None, :]
    o_at = out + batch * o_b + head * o_h + times[:, None] * o_t + columns[None, :]
    given = tl.load(g_at, mask=seen, other=0.0).to(tl.float32)
    own = tl.load(o_at, mask=seen, other=0.0).to(tl.float32)
    begin = tl.load(first + batch * first_b + times * first_t, mask=known, other=0)
    end = tl.load(last + batch * last_b + times * last_t, mask=known, other=-1)
    value = tl.load(normaliser + batch * n_b + head * n_h + times * n_t, mask=known, other=0.0)
    at = (batch * H + head) * T + times
    tl.store(delta + at, tl.sum(given * own, 1), mask=known)
    value = tl.where(end >= begin, value * 1.4426950408889634, float("inf"))
    tl.store(power + at, value, mask=known)


@triton.jit
def query_kernel(
    grad, q, k, v, delta, power, first, last, grad_q, H, G, T, C, scale, factor,
    g_b, g_h, g_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, first_b, first_t, last_b, last_t,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of queries, by the loop of the forward pass."""
    times = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BC)
    known = times < T
    seen = known[:, None] & (columns < C)[None, :]
    owner = tl.load(first + batch * first_b + times * first_t, mask=known, other=0).to(tl.int32)
    end = tl.load(last + batch * last_b + times * last_t, mask=known, other=-1).to(tl.int32)
    alive = known & (end >= owner)
    at = (batch * H + head) * T + times
    row_delta = tl.load(delta + at, mask=known, other=0.0)
    row_power = tl.load(power + at, mask=known, other=float("inf"))
    q_at = q + batch * q_b + head * q_h + times[:, None] * q_t + columns[None, :]
    g_at = grad + batch * g_b + head * g_h + times[:, None] * g_t + columns[None, :]
    queries = tl.load(q_at, mask=seen, other=0.0)
    given = tl.load(g_at, mask=seen, other=0.0)
    k += batch * k_b + head // G * k_h
    v += batch * v_b + head // G * v_h
    summed = tl.zeros((BM, BC), tl.float32)
    current = tl.min(tl.where(alive, owner, NEVER), 0)
    while current < NEVER:
        own = alive & (owner == current)
        stop = tl.max(tl.where(own, end, -1), 0) + 1
        shared = tl.min(tl.where(own, end, tl.where(alive, -1, NEVER)), 0) + 1
        whole = current + tl.maximum(shared - current, 0) // BN * BN
        for start in range(current, whole, BN):
            summed = _query_block(
                queries, given, row_delta, row_power, k, v, summed, start, stop, own, end, scale, C,
                k_s, v_s, BN, BC, IEEE, False,
            )  # fmt: skip
        for start in range(whole, stop, BN):
            summed = _query_block(
                queries, given, row_delta, row_power, k, v, summed, start, stop, own, end, scale, C,
                k_s, v_s, BN, BC, IEEE, True,
            )  # fmt: skip
        current = tl.min(tl.where(alive & (owner > current), owner, NEVER), 0)
    summed = tl.where(alive[:, None], summed * factor, 0.0)
    tl.store(grad_q + at[:, None] * C + columns[None, :], summed, mask=seen)


@triton.jit
def _query_block(
    queries, given, row_delta, row_power, k, v, summed, start, stop, own, end, scale, C, k_s, v_s,
    BN: tl.constexpr, BC: tl.constexpr, IEEE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    places = start + tl.arange(0, BN)
    columns = tl.arange(0, BC)
    seen = (columns < C)[None, :]
    if MASK:
        seen = seen & (places < stop)[:, None]
    keys = tl.load(k + places[:, None] * k_s + columns[None, :], mask=seen, other=0.0)
    values = tl.load(v + places[:, None] * v_s + columns[None, :], mask=seen, other=0.0)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    score = tl.dot(queries, tl.trans(keys), input_precision=precision)
    p = tl.exp2(tl.fma(score, scale, -row_power[:, None]))
    if MASK:
        p = tl.where(own[:, None] & (places[None, :] <= end[:, None]), p, 0.0)
    towards = tl.dot(given, tl.trans(values), input_precision=precision)
    slope = p * (towards - row_delta[:, None])
    return tl.dot(slope.to(keys.dtype), keys, summed, input_precision=precision)


@triton.jit
def key_kernel(
    grad, q, k, v, delta, power, first, last, grad_k, grad_v, H, G, T, S, C, scale, factor,
    g_b, g_h, g_t, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, first_b, first_t, last_b, last_t,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys and values: over segments, heads, blocks of queries."""
    place = tl.program_id(0) * BN
    key_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    places = place + tl.arange(0, BN)
    columns = tl.arange(0, BC)
    seen = (places < S)[:, None] & (columns < C)[None, :]
    k_at = k + batch * k_b + key_head * k_h + places[:, None] * k_s + columns[None, :]
    v_at = v + batch * v_b + key_head * v_h + places[:, None] * v_s + columns[None, :]
    keys = tl.load(k_at, mask=seen, other=0.0)
    values = tl.load(v_at, mask=seen, other=0.0)
    first += batch * first_b
    last += batch * last_b
    sum_k = tl.zeros((BN, BC), tl.float32)
    sum_v = tl.zeros((BN, BC), tl.float32)
    _, _, _, begin = _range(first, last, first_t, last_t, place, -1, T, BN, BT)
    while begin < NEVER:
        # The queries of one segment that see the tile: begin..stop, from `whole` on all of it.
        segment = tl.load(first + begin * first_t).to(tl.int32)
        _, stop, whole, following = _range(first, last, first_t, last_t, place, segment, T, BN, BT)
        start = begin - ((begin - segment) % BM + BM) % BM
        whole = start + tl.maximum(tl.minimum(whole, stop) - start + BM - 1, 0) // BM * BM
        whole = tl.where(segment <= place, whole, stop)
        for member in range(G):
            head = key_head * G + member
            q_of, g_of = q + batch * q_b + head * q_h, grad + batch * g_b + head * g_h
            row = (batch * H + head) * T
            for block in range(start, tl.minimum(whole, stop), BM):
                sum_k, sum_v = _key_block(
                    q_of, g_of, delta + row, power + row, last, keys, values, sum_k, sum_v, block,
                    begin, stop, segment, places, scale, C, q_t, g_t, last_t, BM, BC, IEEE, True,
                )  # fmt: skip
            for block in range(whole, stop, BM):
                sum_k, sum_v = _key_block(
                    q_of, g_of, delta + row, power + row, last, keys, values, sum_k, sum_v, block,
                    begin, stop, segment, places, scale, C, q_t, g_t, last_t, BM, BC, IEEE, False,
                )  # fmt: skip
        begin = following
    at = ((batch * tl.num_programs(1) + key_head) * S + places)[:, None] * C + columns[None, :]
    tl.store(grad_k + at, sum_k * factor, mask=seen)
    tl.store(grad_v + at, sum_v, mask=seen)


@triton.jit
def _range(first, last, first_t, last_t, place, segment, T, BN: tl.constexpr, BT: tl.constexpr):
    """Return of the segment's queries that see the tile: the first, the end, the first that sees
    all of it; and the first query of a later segment that sees the tile."""
    begin = tl.full((), NEVER, tl.int32)
    stop = tl.full((), 0, tl.int32)
    whole = tl.full((), NEVER, tl.int32)
    following = tl.full((), NEVER, tl.int32)
    for start in range(0, T, BT):
        times = start + tl.arange(0, BT)
        owner = tl.load(first + times * first_t, mask=times < T, other=0).to(tl.int32)
        end = tl.load(last + times * last_t, mask=times < T, other=-1).to(tl.int32)
        sees = (end >= owner) & (end >= place) & (owner < place + BN)
        own = sees & (owner == segment)
        begin = tl.minimum(begin, tl.min(tl.where(own, times, NEVER), 0))
        stop = tl.maximum(stop, tl.max(tl.where(own, times + 1, 0), 0))
        full = own & (end >= place + BN - 1)
        whole = tl.minimum(whole, tl.min(tl.where(full, times, NEVER), 0))
        following = tl.minimum(
            following, tl.min(tl.where(sees & (owner > segment), times, NEVER), 0)
        )
    return begin, stop, whole, following


@triton.jit
def _key_block(
    q, grad, delta, power, last, keys, values, sum_k, sum_v, block, begin, stop, segment, places,
    scale, C, q_t, g_t, last_t,
    BM: tl.constexpr, BC: tl.constexpr, IEEE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    times = block + tl.arange(0, BM)
    columns = tl.arange(0, BC)
    known = (times >= begin) & (times < stop)
    seen = known[:, None] & (columns < C)[None, :]
    queries = tl.load(q + times[:, None] * q_t + columns[None, :], mask=seen, other=0.0)
    given = tl.load(grad + times[:, None] * g_t + columns[None, :], mask=seen, other=0.0)
    row_power = tl.load(power + times, mask=known, other=float("inf"))
    row_delta = tl.load(delta + times, mask=known, other=0.0)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    score = tl.dot(keys, tl.trans(queries), input_precision=precision)
    p = tl.exp2(tl.fma(score, scale, -row_power[None, :]))
    if MASK:
        end = tl.load(last + times * last_t, mask=known, other=-1).to(tl.int32)
        p = tl.where((places[:, None] <= end[None, :]) & (places >= segment)[:, None], p, 0.0)
    sum_v = tl.dot(p.to(given.dtype), given, sum_v, input_precision=precision)
    towards = tl.dot(values, tl.trans(given), input_precision=precision)
    slope = p * (towards - row_delta[None, :])
    sum_k = tl.dot(slope.to(queries.dtype), queries, sum_k, input_precision=precision)
    return sum_k, sum_v

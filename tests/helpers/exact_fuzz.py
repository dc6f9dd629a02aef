"""Random cases of the exact kernels: a row has the same bits in any company.

    python tests/helpers/exact_fuzz.py --cases 10000 --device cpu [--op linear] [--seed 0]

Each case computes some rows twice, in two arrangements: alone or among others, at other places,
from other strides, in chunks, packed, or on pages. `torch.equal` must hold, within one number of
threads, which is drawn, too.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from exact_draws import Draw, Heads, Pair, block_sums, by_rows
from torch import Tensor


def linear(draw: Draw) -> Iterator[Pair]:
    small = draw.random() < 0.97
    depth, columns = (draw.width(), draw.width()) if small else (draw.choice((64, 576, 1536)), 9000)
    rows = draw.count() if draw.random() < 0.97 else draw.randint(500, 5000)
    weight, bias = draw.normal(columns, depth, scale=0.1), draw.normal(columns)
    weight = weight if draw.random() < 0.5 else weight.mT.contiguous().mT
    bias = draw.choice((None, bias))
    yield from by_rows(
        draw, lambda x: draw.kernels.linear(x, weight, bias), draw.normal(rows, depth)
    )


def norm(draw: Draw) -> Iterator[Pair]:
    rows, width, offset = draw.count(), draw.width(), draw.choice((0.0, 1.0))
    x, delta, grad = (draw.normal(rows, width) for _ in range(3))
    weight, kernels = draw.normal(width), draw.kernels
    yield from by_rows(draw, lambda x: kernels.rms_norm(x, weight, 1e-5, offset), x)
    yield from by_rows(draw, lambda *a: kernels.add_rms_norm(*a, weight, 1e-5, offset), x, delta)

    def gradient(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return kernels.rms_norm_gradients(grad, x, weight, scale[:, 0], offset)[0]

    scale = kernels.rms_norm(x, weight, 1e-5, offset)[1][:, None]
    yield from by_rows(draw, gradient, grad, x, scale)


def gate(draw: Draw) -> Iterator[Pair]:
    rows, width = draw.count(), draw.width()
    gate, up, grad = (draw.normal(rows, width, scale=4.0) for _ in range(3))
    name = draw.choice(("swiglu", "geglu", "sigmoid_gate"))
    yield from by_rows(draw, getattr(draw.kernels, name), gate, up)
    yield from by_rows(draw, getattr(draw.kernels, f"{name}_gradients"), grad, gate, up)


def rotary(draw: Draw) -> Iterator[Pair]:
    batch, heads, length = draw.count(), draw.randint(1, 5), draw.randint(1, 20)
    width, inverse = draw.choice((8, 16, 24, 64, 80)), draw.random() < 0.5
    x = draw.normal(batch, heads, length, width)
    rotation = draw.normal(batch, 2, length, width, dtype=torch.float32)

    def rotate(x: Tensor, rotation: Tensor) -> Tensor:
        return draw.kernels.rotate(x, rotation.transpose(0, 1), inverse)

    yield from by_rows(draw, rotate, x, rotation)
    at = draw.randrange(length)
    alone = rotate(x[:, :, at : at + 1], rotation[:, :, at : at + 1])
    yield rotate(x, rotation)[:, :, at : at + 1], alone


def scores(draw: Draw) -> Iterator[Pair]:
    large = draw.random() < 0.01
    rows = draw.choice((1, 2, 5)) if large else draw.count()
    width = draw.randint(32_768, 70_000) if large else draw.randint(2, 40) + draw.width()
    logits, temperature = draw.normal(rows, width, scale=5.0), draw.choice((1.0, 0.7))
    if draw.random() < 0.3:
        hidden = (draw.integers(0, 2, rows, width) > 0).to(logits.device)
        logits = logits.masked_fill(hidden & (logits != logits.amax(-1, True)), -torch.inf)
    targets, kernels = draw.integers(0, width, rows, 1), draw.kernels

    def all_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return kernels.scores(logits, targets[:, 0], temperature)

    logprob, entropy, normaliser = all_of(logits, targets)
    yield from by_rows(draw, all_of, logits, targets)
    table = kernels.log_softmax(logits, temperature)
    yield kernels.logsumexp(logits, temperature), normaliser
    yield table.gather(1, targets)[:, 0], logprob
    yield from by_rows(draw, lambda x: kernels.log_softmax(x, temperature), logits)

    def gradient(*inputs: Tensor) -> Tensor:
        columns = (column[:, 0] for column in inputs[1:])
        return kernels.scores_gradients(inputs[0], *columns, temperature)

    grads = draw.normal(2, rows, 1, dtype=normaliser.dtype)
    columns = entropy[:, None], normaliser[:, None], *grads
    yield from by_rows(draw, gradient, logits, targets, *columns)


def sums(draw: Draw) -> Iterator[Pair]:
    """What has no rows has the same bits when it is computed again."""
    rows, width, columns = draw.count(), draw.width(), draw.width()
    x, grad = draw.normal(rows, width), draw.normal(rows, columns)
    tokens, kernels = draw.integers(0, 9, rows), draw.kernels
    yield kernels.weight_gradient(grad, x), kernels.weight_gradient(draw.strided(grad), x.clone())
    yield kernels.bias_gradient(grad), kernels.bias_gradient(draw.strided(grad))
    again = kernels.embedding_gradient(draw.strided(x), tokens.clone(), 9)
    yield kernels.embedding_gradient(x, tokens, 9), again
    if draw.random() < 0.05:  # as large as those that a library adds to a total
        width, columns = draw.randint(300, 600), draw.randint(300, 600)
    blocks = draw.choice((2, 4))
    rows = blocks * draw.count()
    x, grad = draw.normal(rows, width), draw.normal(rows, columns)
    tokens = draw.integers(0, 9, rows)
    yield from block_sums(kernels, grad, x, draw.normal(width), tokens, blocks)


def attention(draw: Draw) -> Iterator[Pair]:
    h, attend = Heads(draw), draw.kernels.attend
    out, normaliser = attend(h.q, h.k, h.v, h.first, h.last)
    yield from by_rows(draw, attend, h.q, h.k, h.v, h.first, h.last, most=30)
    # A chunk of a row on a cache, whose places after it hold anything.
    row, start = draw.randrange(h.batch), draw.randrange(h.length)
    stop = draw.choice((start + 1, draw.randint(start + 1, h.length)))
    cache = torch.full((2, 2, *h.k.shape[1:]), draw.choice((torch.nan, 3.0)), device=draw.device)
    cache = torch.nn.functional.pad(cache.to(draw.dtype), (0, 0, 0, draw.randint(0, 20)))
    other = draw.randrange(h.batch)
    for index, source in enumerate((row, other)):
        cache[0, index, :, :stop], cache[1, index, :, :stop] = (
            h.k[source, :, :stop],
            h.v[source, :, :stop],
        )
    at, part = torch.tensor([row, other], device=draw.device), slice(start, stop)
    chunk = attend(
        h.q[at, :, part],
        cache[0],
        cache[1],
        h.first[:1, part].expand(2, -1),
        h.last[:1, part].expand(2, -1),
    )
    yield chunk[0], out[at, :, part]
    yield chunk[1], normaliser[at, :, part]


def packed(draw: Draw) -> Iterator[Pair]:
    """Beginnings of rows, packed into two rows with padding, as whole rows of their own."""
    h, attend = Heads(draw), draw.kernels.attend
    out, normaliser = attend(h.q, h.k, h.v, h.first, h.last)
    segments = [
        (draw.randrange(h.batch), draw.randint(1, h.length)) for _ in range(draw.randint(1, 8))
    ]
    total = sum(length for _, length in segments) + draw.randint(0, 9)
    q, k, v = (x.new_full((2, x.shape[1], total, x.shape[3]), 2.0) for x in (h.q, h.k, h.v))
    first = torch.full((2, total), total, device=draw.device)
    last = first - 1
    for row, order in enumerate((segments, segments[::-1])):
        start = 0
        for source, length in order:
            at = slice(start, start + length)
            for target, x in ((q, h.q), (k, h.k), (v, h.v)):
                target[row, :, at] = x[source, :, :length]
            first[row, at], last[row, at] = start, start + h.last[source, :length]
            start += length
    result = attend(q, k, v, first, last)
    for row, order in enumerate((segments, segments[::-1])):
        start = 0
        for source, length in order:
            yield result[0][row, :, start : start + length], out[source, :, :length]
            yield result[1][row, :, start : start + length], normaliser[source, :, :length]
            start += length


def attention_gradients(draw: Draw) -> Iterator[Pair]:
    h, kernels = Heads(draw), draw.kernels
    results = kernels.attend(h.q, h.k, h.v, h.first, h.last)
    grad = draw.normal(*h.q.shape)
    inputs = grad, h.q, h.k, h.v, h.first, h.last, *results
    yield from by_rows(draw, kernels.attend_gradients, *inputs, most=30)


def paged(draw: Draw) -> Iterator[Pair]:
    h, size = Heads(draw), draw.choice((4, 8, 16, 32))
    out, _ = draw.kernels.attend(h.q, h.k, h.v, h.first, h.last)
    pages = -(-h.length // size)
    blocks = h.batch * pages + 3
    cache = torch.full(
        (blocks, h.k.shape[1], size, 2 * h.k.shape[3]), torch.nan, device=draw.device
    )
    cache = cache.to(draw.dtype)
    order = list(range(blocks))
    draw.shuffle(order)
    tables = torch.tensor(order[: h.batch * pages], device=draw.device).view(h.batch, pages)
    both = torch.cat((h.k, h.v), dim=-1)
    for place in range(h.length):
        cache[tables[:, place // size], :, place % size] = both[:, :, place]
    if draw.random() < 0.5:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    count = min(draw.count(), 30)
    request, last = draw.integers(0, h.batch, count), draw.integers(0, h.length, count)
    result = draw.kernels.attend_paged(h.q[request, :, last], cache, tables, request, last)
    yield result, out[request, :, last]


CASES = (
    linear, norm, gate, rotary, scores, sums, attention, packed, attention_gradients, paged,
)  # fmt: skip
OPS = {case.__name__: case for case in CASES}


def run_case(op: str, seed: int, device: str) -> str | None:
    """Return what differs in one case, or None."""
    draw = Draw(f"{op} {seed}", device)
    threads = torch.get_num_threads()
    torch.set_num_threads(draw.choice((1, 1, 1, 2)))
    try:
        for index, (first, second) in enumerate(OPS[op](draw)):
            if not torch.equal(first, second):
                wrong = int((first != second).sum())
                where = f"{op} {seed}: pair {index} {tuple(first.shape)}: {wrong} differ"
                return f"{where}, {draw.dtype}, threads {torch.get_num_threads()}"
    finally:
        torch.set_num_threads(threads)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--op", choices=OPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for op in [options.op] if options.op else OPS:
        start, differing = time.perf_counter(), 0
        for seed in range(options.seed, options.seed + options.cases):
            what = run_case(op, seed, options.device)
            if what is not None:
                differing += 1
                if differing <= 10:
                    print(what, flush=True)
            if (done := seed + 1 - options.seed) % 500 == 0:
                print(f"{op}: {done} done", flush=True)
        seconds = time.perf_counter() - start
        print(f"{op}: {options.cases} cases, {differing} differ, {seconds:.0f} s", flush=True)
        failed += differing
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

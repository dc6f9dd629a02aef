"""Kernels of the short causal convolution, which treat each number of a token by itself."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def conv_kernel(
    x, weight, history, since, grad, out, T,
    E: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write silu of the convolution of some tokens, or the gradient of the convolution itself."""
    sample = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (tokens < T)[:, None] & (columns < E)[None, :]
    begun = tl.load(since + sample * T + tokens, mask=tokens < T, other=0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        places = tokens - (TAPS - 1 - tap)
        seen = inside & (begun >= TAPS - 1 - tap)[:, None]
        at = (sample * T + places)[:, None] * E + columns[None, :]
        read = tl.load(x + at, mask=seen & (places >= 0)[:, None], other=0.0)
        at = (sample * (TAPS - 1) + places + TAPS - 1)[:, None] * E + columns[None, :]
        past = tl.load(history + at, mask=seen & (places < 0)[:, None], other=0.0)
        column = tl.load(weight + columns * TAPS + tap, mask=columns < E, other=0.0)
        column = column.to(read.dtype).to(tl.float32)
        # One of the two is 0.
        total += (read.to(tl.float32) + past.to(tl.float32)) * column[None, :]
    at = (sample * T + tokens)[:, None] * E + columns[None, :]
    sigmoid = 1.0 / (1.0 + tl.exp(-total))
    if GRADIENT:
        given = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        slope = sigmoid * (1.0 + total * (1.0 - sigmoid))
        tl.store(out + at, given * slope, mask=inside)
    else:
        tl.store(out + at, total / (1.0 + tl.exp(-total)), mask=inside)


@triton.jit(do_not_specialize=["T"])
def conv_gradient_kernel(
    grad_total, weight, since, grad_x, grad_history, T,
    E: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of what the taps of some tokens read, in x and before it."""
    sample = tl.program_id(2).to(tl.int64)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS) - (TAPS - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        tokens = places + (TAPS - 1 - tap)  # whose tap reads this place
        real = (tokens >= 0) & (tokens < T)
        begun = tl.load(since + sample * T + tokens, mask=real, other=0)
        seen = (real & (begun >= TAPS - 1 - tap))[:, None] & (columns < E)[None, :]
        at = (sample * T + tokens)[:, None] * E + columns[None, :]
        column = tl.load(weight + columns * TAPS + tap, mask=columns < E, other=0.0)
        column = column.to(grad_x.dtype.element_ty).to(tl.float32)
        total += tl.load(grad_total + at, mask=seen, other=0.0) * column[None, :]
    inside = (places < T)[:, None] & (columns < E)[None, :]
    at = (sample * T + places)[:, None] * E + columns[None, :]
    tl.store(grad_x + at, total, mask=inside & (places >= 0)[:, None])
    at = (sample * (TAPS - 1) + places + TAPS - 1)[:, None] * E + columns[None, :]
    tl.store(grad_history + at, total, mask=inside & (places < 0)[:, None])

"""The gated delta rule from token to token: one program holds some columns of a head's state."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "H"])
def recurrent_kernel(
    q, k, v, decay, beta, resets, state, outputs, last, T, H,
    CK: tl.constexpr, CV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write what each token reads, and the last state; a token's heads lie together in memory."""
    n = tl.program_id(0).to(tl.int64)
    wide, columns = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    narrow, filled = wide < CK, columns < CV
    within = narrow[:, None] & filled[None, :]
    at = n * (CK * CV) + wide[:, None] * CV + columns[None, :]
    memory = tl.load(state + at, mask=within, other=0.0)
    row = (n // H) * T * H + n % H
    for _ in range(T):
        key = tl.load(k + row * CK + wide, mask=narrow, other=0.0).to(tl.float32)
        query = tl.load(q + row * CK + wide, mask=narrow, other=0.0).to(tl.float32)
        value = tl.load(v + row * CV + columns, mask=filled, other=0.0).to(tl.float32)
        share = tl.load(beta + row).to(tl.float32)
        memory *= tl.exp(tl.load(decay + row).to(tl.float32))
        memory = tl.where(tl.load(resets + row) != 0, 0.0, memory)
        missing = value - tl.sum(memory * key[:, None], 0)
        memory += key[:, None] * (missing * share)[None, :]
        tl.store(outputs + row * CV + columns, tl.sum(memory * query[:, None], 0), mask=filled)
        row += H
    tl.store(last + at, memory, mask=within)

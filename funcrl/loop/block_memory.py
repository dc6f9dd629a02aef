"""Estimates what funcrl's own network computes in: what its blocks keep, and for what."""

from typing import NamedTuple

from funcrl.config import TrainConfig
from funcrl.core.arguments import CountOrAll
from funcrl.generators.embedded.captured import captured_runs
from funcrl.models import TransformerConfig
from funcrl.models.config import Kind

FLOAT = 4  # bytes of a number of float32


class Rows(NamedTuple):
    """How many rows a micro-batch has and how long they are; and the samples of a generator."""

    rows: int
    padded: int
    slots: int
    length: int
    shared: int  # tokens of the slots that are also another sample's


class Work(NamedTuple):
    """The bytes that a network computes in, and what its sampler does with its weights."""

    kept: int  # for the backward pass
    logits: int  # and their matrix's gradient
    of_teacher: int  # logits
    recomputed: int
    cache: int
    is_captured: bool  # the sampler
    has_layout: bool  # the sampler: another than the parameters'


def work_of_shape(config: TrainConfig, shape: TransformerConfig, sizes: Rows, logits: int) -> Work:
    """Return what funcrl's own network computes in, with `logits_bytes`."""
    rows, padded, slots, length, shared = sizes
    compute, tokens, remat = number_bytes(config), rows * padded, remat_of(config)
    scores = padded if config.attend == "native" else 0
    kept, again = kept_and_recomputed(shape, remat, scores, compute)
    logits *= shape.vocab_size
    head = 0 if config.lora.rank else FLOAT * shape.width * shape.vocab_size
    on_gpu = config.device == "cuda"
    draws = config.generator == "sampler" and on_gpu and config.dtype == "bfloat16"
    is_captured = draws and captured_runs(shape)
    cache = slots * sum(kept_by_sampler(shape, kind, length, compute) for kind in shape.kinds)
    if is_captured:  # a prompt's pages are those of all its samples
        cache -= cache * shared // (slots * length)
    return Work(
        kept=tokens * kept,
        logits=logits + head,
        of_teacher=logits,
        recomputed=tokens * again + head if remat != "none" else 0,
        cache=cache,
        is_captured=is_captured,
        has_layout=not on_gpu,
    )


def number_bytes(config: TrainConfig) -> int:
    """Return the bytes of a number in the dtype that is computed in."""
    return 2 if config.dtype == "bfloat16" else FLOAT


def remat_of(config: TrainConfig) -> str:
    """Return which activations are computed again; for a budget, which keeps what fits, none."""
    remat = "none" if config.compile is None else config.compile.remat
    return "none" if remat == "budget" else remat


def logits_bytes(config: TrainConfig, tokens: int, chunk: CountOrAll | None) -> int:
    """Return the bytes for each token of the vocabulary: of all tokens' logits, or a chunk's.

    A chunk's are widened, exponentiated and differentiated; kept ones are there besides.
    """
    if isinstance(chunk, int):
        return min(chunk, tokens) * 3 * FLOAT
    compute = number_bytes(config)
    has_kernel = chunk == "all" and config.device == "cuda" and config.dtype == "bfloat16"
    return tokens * (2 * compute if has_kernel else compute + 3 * FLOAT)


def kept_and_recomputed(
    c: TransformerConfig, remat: str, scores: int, compute: int
) -> tuple[int, int]:
    """Return a token's bytes that all blocks keep, and those that one block computes again."""
    kept, all_of_it = (
        [_kept_by_block(c, kind, policy, scores).bytes(compute) for kind in c.kinds]
        for policy in (remat, "none")
    )
    return sum(kept), max(whole - part for whole, part in zip(all_of_it, kept, strict=True))


class _Kept(NamedTuple):
    """The numbers of a token that a block keeps from its forward pass for its backward pass."""

    compute: int = 0  # in the dtype that is computed in
    wide: int = 0  # float32 in any case

    def bytes(self, compute: int) -> int:
        return compute * self.compute + FLOAT * self.wide


def _kept_by_block(c: TransformerConfig, kind: Kind, remat: str, scores: int) -> _Kept:
    """Return what a block keeps by a policy of recomputation, as its traced graph shows it.

    Args:
        c: the shape.
        kind: of the block.
        remat: "none", "selective" or "full".
        scores: the numbers that attention keeps of a head.
    """
    heads, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    keys, values = c.delta_key_heads * c.delta_key_width, c.delta_heads * c.delta_value_width
    if remat == "full":
        return _Kept(c.width)
    if remat == "selective":  # products, what attends or scans, and the block's own result
        products = 2 * c.width + 2 * c.mlp_width + (c.width if c.post_norms else 0)
        if kind == "delta":
            return _Kept(products + c.delta_channels + values, values)
        gate = heads if c.attention_gate else 0
        return _Kept(products + 2 * heads + 2 * kv + gate, c.num_heads)
    norms, offset = 4 if c.post_norms else 2, bool(c.norm_offset)
    block, wide = norms * (2 - offset) * c.width, norms * (1 + offset) * c.width
    block += 4 * c.mlp_width
    if kind == "delta":
        repeated = c.delta_heads * c.delta_key_width
        # The convolution before and after each of its places, queries and keys normed and
        # repeated, the state's outputs, and the gate.
        block += c.delta_channels + 2 * repeated + 5 * values
        return _Kept(block, wide + (c.delta_conv + 1) * c.delta_channels + 2 * keys + 3 * values)
    normed = heads + kv if c.qk_norm else 0
    gate = 2 * heads if c.attention_gate else 0
    # Rotated queries and keys, values, what heads have seen, and that laid out for the output.
    block += normed + 3 * heads + 2 * kv + gate + c.num_heads * scores
    return _Kept(block, wide + normed)


def kept_by_sampler(c: TransformerConfig, kind: Kind, length: int, compute: int) -> int:
    """Return the bytes that a layer keeps of a sample: keys and values, or a state."""
    if kind != "delta":
        return 2 * c.num_kv_heads * c.head_width * length * compute
    state = c.delta_heads * c.delta_key_width * c.delta_value_width
    return (c.delta_conv - 1) * c.delta_channels * compute + state * FLOAT


def read_and_found(c: TransformerConfig, kind: Kind) -> int:
    """Return the numbers of a token that a block's parameters read, and those that they give."""
    norms = 2 * (4 if c.post_norms else 2) * c.width
    mlp = 2 * c.width + 3 * c.mlp_width  # the first two matrices read the same
    if kind == "delta":
        inside = c.delta_heads * c.delta_value_width
        # With a convolution, which reads each place once for each of its weights.
        given = (2 + c.delta_conv) * c.delta_channels + inside
        norms += 2 * inside
    else:
        inside, kv = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
        given = inside + 2 * kv + (inside if c.attention_gate else 0)
        norms += 2 * (inside + kv) if c.qk_norm else 0
    return norms + mlp + (c.width + given) + (inside + c.width)

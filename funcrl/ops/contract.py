"""What a `Transformer` computes with, as a value whose fields may be replaced."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core.types import Absent

# (x [..., I], weight [O, I], bias [O]) -> [..., O]
LinearFn: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Matrices [O, I], each with its bias [O] or None.
Weights: TypeAlias = Sequence[tuple[Tensor, Tensor | None]]
# (q [..., H, T, C], k [..., K, S, C], v [..., K, S, C]) -> [..., H, T, C], where K divides H. A
# sliding layer gives `window=` besides, the number of tokens that a query sees, itself included.
AttendFn: TypeAlias = Callable[..., Tensor]
# (segment_ids [..., T], prefix_ids [..., T] or () for none) -> attention of packed rows
AttendSegmentsFn: TypeAlias = Callable[[Tensor, Tensor | Absent], AttendFn]

# (q, k [..., H, T, Ck], v [..., H, T, Cv], decay, beta [..., H, T], state [..., H, Ck, Cv] or None,
# resets [..., T] or None) -> outputs [..., H, T, Cv], state
GatedDeltaFn: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]
]


class Ops(NamedTuple):
    """The operations of a `Transformer`; each takes any leading axes.

    Every one is a pure function of its arguments. Those that a generator alone calls, the last
    three, need no gradient. `NATIVE._replace(swiglu=...)` has one of one's own.
    """

    # (tokens [..., T], weight [V, D], dtype or None for the weight's) -> [..., T, D]
    embed: Callable[[Tensor, Tensor, torch.dtype | None], Tensor]
    linear: LinearFn  # (x, weight, bias) -> x W^T + b
    project: Callable[[Tensor, Weights], Sequence[Tensor]]  # (x, [(weight, bias), ...]) -> linears
    # (x, weight, eps), and an offset that is added to the weight, where there is one
    rms_norm: Callable[..., Tensor]
    # (x, delta, weight, eps), and an offset where there is one -> (x + delta, its norm), at once;
    # None for a sum and a norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None
    swiglu: Callable[[Tensor, Tensor], Tensor]  # (gate, up) -> silu(gate) * up
    geglu: Callable[[Tensor, Tensor], Tensor]  # (gate, up) -> gelu(gate) * up, by tanh
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor]  # (gate, x) -> sigmoid(gate) * x
    # (positions [..., T], head width, theta), and a scaling where there is one -> the factors that
    # `rotate` takes
    rotation: Callable[..., Tensor]
    rotate: Callable[[Sequence[Tensor], Tensor], Sequence[Tensor]]  # each part [..., heads, T, C]
    # (q, k, weights of their norms or None, eps, factors): both normed where there are weights, and
    # rotated, at once, from [..., T, heads, C] to [..., heads, T, C]; None for these one by one
    norm_rotate: (
        Callable[
            [Tensor, Tensor, tuple[Tensor, Tensor] | None, float, Tensor], tuple[Tensor, Tensor]
        ]
        | None
    )
    # (x [..., T, E], weight [E, K], history [..., K - 1, E] or None, resets [..., T] or None)
    # -> silu of the causal convolution, and the new history
    short_conv: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    # (a, b [..., T, H], log_rate, step_bias [H]) -> decay, beta of the gated delta rule
    delta_gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_delta: GatedDeltaFn
    attend_causal: AttendFn
    attend_segments: AttendSegmentsFn
    # (hidden [T, D], weight [V, D], targets [T], temperature, chunk or "all"), and a cap of logits
    # where there is one -> log-probs, entropies
    scores: Callable[..., tuple[Tensor, Tensor]]
    log_softmax: Callable[[Tensor, float], Tensor]  # (logits [B, V], temperature)
    attend_prompts: AttendFn  # causal
    # (positions [n] of one token a sample, a layer of the cache [n, K, S, 2 C], the number of
    # places in use) -> attention of q [n, H, 1, C] over k and v [n, K, S, C] up to each position
    attend_last: Callable[[Tensor, Tensor, int], AttendFn]
    # Whether a row's result is a function of that row alone, and weights may have another dtype.
    exact: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ops":
        """Return itself: a copy of a module computes with the same functions."""
        return self

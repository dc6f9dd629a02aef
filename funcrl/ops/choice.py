"""The operations that a name stands for."""

from collections.abc import Callable
from typing import Any

from torch import nn

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.ops import arithmetic, attention
from funcrl.ops.attention import attend_causal, attend_segments
from funcrl.ops.chunked import linear_scores
from funcrl.ops.contract import Ops
from funcrl.ops.delta import delta_gates, gated_delta_scan, short_conv
from funcrl.ops.exact import EXACT

# torch's fastest operations.
NATIVE = Ops(
    embed=arithmetic.embed,
    linear=nn.functional.linear,
    project=arithmetic.project,
    rms_norm=arithmetic.rms_norm,
    add_rms_norm=None,
    swiglu=arithmetic.swiglu,
    geglu=arithmetic.geglu,
    sigmoid_gate=arithmetic.sigmoid_gate,
    rotation=arithmetic.rotation,
    rotate=arithmetic.rotate_heads,
    norm_rotate=None,
    short_conv=short_conv,
    delta_gates=delta_gates,
    gated_delta=gated_delta_scan,
    attend_causal=attend_causal,
    attend_segments=attend_segments,
    scores=linear_scores,
    log_softmax=arithmetic.log_softmax,
    attend_prompts=attention.attend_prompts,
    attend_last=attention.attend_last,
)
_NAMED = {"native": NATIVE, "exact": EXACT}


@checked
def choose_ops(function: str, ops: str | Ops) -> Ops:
    """Return the named operations, or `ops` itself if it is an `Ops`.

    Example:
        >>> import funcrl
        >>> funcrl.ops.choose_ops("Transformer", "native") is funcrl.ops.NATIVE
        True
    """
    if isinstance(ops, Ops):
        return ops
    checks.check_choice(function, "ops", ops, tuple(_NAMED))
    return _NAMED[ops]


@checked
def ops_of(model: nn.Module) -> Ops:
    """Return the operations of a network: the native ones where it does not name its own.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.ops_of(torch.nn.Linear(2, 2)) is funcrl.ops.NATIVE
        True
    """
    own = getattr(model, "ops", None)
    return own if isinstance(own, Ops) else NATIVE


def replace_ops(network: nn.Module, change: Callable[[str, Ops], Ops]) -> None:
    """Give every part of a network that names its operations others, in place.

    Args:
        network: a copy that is its owner's alone.
        change: of the path of a part within the network, and its operations.
    """
    for path, module in network.named_modules():
        part: Any = module
        if isinstance(getattr(part, "ops", None), Ops):
            part.ops = change(path, part.ops)

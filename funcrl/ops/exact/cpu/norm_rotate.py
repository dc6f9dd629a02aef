"""The norm of each head of queries and keys and its rotation, one after the other."""

from collections.abc import Sequence

from torch import Tensor

from funcrl.ops.exact.cpu.elements import rotate
from funcrl.ops.exact.cpu.norm import rms_norm, rms_norm_gradients


def norm_rotate(
    q: Tensor, k: Tensor, gains: Sequence[Tensor] | None, eps: float, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, C] and k [B, T, K, C] as [B, H, T, C]: normed, then rotated.

    Args:
        q: queries of each token.
        k: keys of each token.
        gains: the weights [C] of the two norms, None for no norm.
        eps: of the norms.
        rotation: [2, B, T, C].
    """
    if gains is not None:
        q, k = (
            rms_norm(part.reshape(-1, part.shape[-1]), gain, eps, 0.0)[0].view(part.shape)
            for part, gain in zip((q, k), gains, strict=True)
        )
    return rotate(q.transpose(1, 2), rotation, False), rotate(k.transpose(1, 2), rotation, False)


def norm_rotate_gradients(
    grad: Tensor, x: Tensor, gain: Tensor | None, eps: float, rotation: Tensor, blocks: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x [B, T, H, C] and, in at least float32, of the gain if there is one.

    Args:
        grad: [B, H, T, C].
        x: queries or keys of each token.
        gain: the weight [C] of their norm, None for no norm.
        eps: of the norm.
        rotation: [2, B, T, C].
        blocks: of rows, each of which is summed for itself, and then they are added in pairs.
    """
    turned = rotate(grad, rotation, True).transpose(1, 2)
    if gain is None:
        return turned.contiguous(), None
    rows = x.reshape(-1, x.shape[-1])
    _, scale = rms_norm(rows, gain, eps, 0.0)
    grads = rms_norm_gradients(turned.reshape(rows.shape), rows, gain, scale, 0.0, blocks)
    return grads[0].view(x.shape), grads[1]

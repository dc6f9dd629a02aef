"""The gated delta rule as its definition: torch's operations, one token after the other."""

import torch
from torch import Tensor


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [..., H, T, Cv] and the last state, with all derivatives."""
    wide = state.dtype
    outputs = []
    for token in range(q.shape[-2]):
        query, key, value = (part[..., token, :].to(wide) for part in (q, k, v))
        kept = decay[..., token, None, None].to(wide).exp()
        state = torch.where(resets[..., None, token, None, None], 0, kept * state)
        missing = value - torch.einsum("...kv,...k->...v", state, key)
        learned = beta[..., token, None].to(wide) * missing
        state = state + key[..., :, None] * learned[..., None, :]
        outputs.append(torch.einsum("...kv,...k->...v", state, query))
    return torch.stack(outputs, dim=-2).to(v.dtype), state

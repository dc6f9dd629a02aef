"""The loss of a GRPO step as one writes it without transforms: funcrl is compared with it."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcrl import ops
from funcrl.core.types import Batch, Params
from funcrl.models import Transformer, rotary_angles, rotary_factors


def with_weights(model: Transformer, params: Params) -> Transformer:
    """Return an ordinary module that holds a copy of the parameters."""
    module = Transformer(model.config)
    module.load_state_dict(
        {name: leaf.clone() for name, leaf in params.items()}, strict=False, assign=True
    )
    if model.config.tied:
        module.unembed.weight = module.embed.weight
    return module.requires_grad_()


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by the kernel that torch chooses, flash where it can."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def ordinary_loss(
    module: Transformer,
    batch: Batch,
    dtype: torch.dtype | None = None,
    chunk: int | Literal["all"] | None = None,
    checkpointed: bool = False,
    attend: ops.AttendFn = ops.attend_causal,
) -> Tensor:
    """Return the loss on whole [B, T] tensors, its metrics computed and thrown away.

    With the arguments of `funcrl.logprob_fn`; `checkpointed` keeps of each block its input alone.
    """
    hidden, weight = _hidden(module, batch, dtype, checkpointed, attend)
    targets = batch.tokens[:, 1:]
    if chunk is None:
        logits = (hidden @ weight.T)[:, :-1].float()
        log_softmax = torch.log_softmax(logits, dim=-1)
        logprobs = log_softmax.gather(-1, targets[..., None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    else:
        flat = ops.linear_scores(
            hidden[:, :-1].flatten(0, 1), weight, targets.flatten(), chunk=chunk
        )
        logprobs, entropy = (values.view(targets.shape) for values in flat)
    mask, behavior = batch.mask[:, 1:], batch.behavior_logprobs[:, 1:]
    ratio = torch.exp(logprobs - behavior)
    advantages = batch.advantages[:, 1:]
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    with torch.no_grad():
        metrics = [entropy, (logprobs - behavior).abs(), ratio, (ratio > 1.2).float()]
        _ = [(values * mask).sum() for values in metrics]
    return -(batch.token_weights[:, 1:] * mask * objective).sum()


def _hidden(
    module: Transformer,
    batch: Batch,
    dtype: torch.dtype | None,
    checkpointed: bool,
    attend: ops.AttendFn,
) -> tuple[Tensor, Tensor]:
    """Return the last layer's output [B, T, D] and the output matrix [V, D]."""
    params = {
        name: leaf if dtype is None else leaf.to(dtype) for name, leaf in module.named_parameters()
    }
    config = module.config
    x = torch.nn.functional.embedding(batch.tokens, params["embed.weight"])
    angles = rotary_angles(batch.positions, config.head_width, config.rope_theta)
    rotation = rotary_factors(angles).unsqueeze(-3)
    for index, block in enumerate(module.blocks):
        start = f"blocks.{index}."
        own = {name.removeprefix(start): p for name, p in params.items() if name.startswith(start)}
        # The parameters are given, not held: the second forward pass must see the cast ones, too.
        run = partial(functional_call, block, own)
        if checkpointed:
            x = checkpoint(run, (x, rotation, attend), use_reentrant=False)
        else:
            x = run((x, rotation, attend))
    x = functional_call(module.norm, {"weight": params["norm.weight"]}, (x,))
    return x, params["embed.weight" if config.tied else "unembed.weight"]

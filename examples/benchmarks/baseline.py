"""The loss of a GRPO step as one writes it without transforms: funcrl is compared with it."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from funcrl import ops
from funcrl.core.types import Batch, Params
from funcrl.models import Transformer, recur_causal
from funcrl.ops.arithmetic import cap_logits


def with_weights(model: Transformer, params: Params) -> Transformer:
    """Return an ordinary module that holds a copy of the parameters."""
    module = Transformer(model.config)
    module.load_state_dict(
        {name: leaf.clone() for name, leaf in params.items()}, strict=False, assign=True
    )
    if model.config.tied:
        module.unembed.weight = module.embed.weight
    return module.requires_grad_()


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
    targets, cap = batch.tokens[:, 1:], module.config.logit_cap
    if chunk is None:
        logits = cap_logits(hidden @ weight.T, cap)[:, :-1].float()
        log_softmax = torch.log_softmax(logits, dim=-1)
        logprobs = log_softmax.gather(-1, targets[..., None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    else:
        flat = ops.linear_scores(
            hidden[:, :-1].flatten(0, 1), weight, targets.flatten(), chunk=chunk, cap=cap
        )
        logprobs, entropy = (values.view(targets.shape) for values in flat)
    mask, behavior = batch.mask[:, 1:], batch.behavior_logprobs[:, 1:]
    ratio = torch.exp(logprobs - behavior)
    advantages = batch.advantages[:, 1:]
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    with torch.no_grad():
        metrics = [entropy, (logprobs - behavior).abs(), ratio, (ratio > 1.2).float()]
        _ = [(values * mask).sum() for values in metrics]
    assert isinstance(batch.token_weights, Tensor)
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
    x = x if config.embed_scale == 1 else x * config.embed_scale
    rotations = module.rotations(batch.positions)
    layers = module.each_layer(attend, recur_causal)
    each = zip(module.blocks, config.kinds, layers, strict=True)
    for index, (block, kind, layer_fn) in enumerate(each):
        start = f"blocks.{index}."
        own = {name.removeprefix(start): p for name, p in params.items() if name.startswith(start)}
        # The parameters are given, not held: the second forward pass must see the cast ones, too.
        run = partial(functional_call, block, own)
        inputs = x, rotations.get(kind), layer_fn
        x = checkpoint(run, inputs, use_reentrant=False) if checkpointed else run(inputs)
    x = functional_call(module.norm, {"weight": params["norm.weight"]}, (x,))
    return x, params["embed.weight" if config.tied else "unembed.weight"]

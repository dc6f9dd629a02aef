"""Small networks of each layer kind and option, and a literal float64 forward pass of them."""

import torch
from cases import tiny_model
from torch import Tensor

import funcrl
from funcrl.models import TransformerConfig, rotary_angles

DELTA = {
    "delta_heads": 4, "delta_key_heads": 2, "delta_key_width": 6, "delta_value_width": 4,
    "delta_conv": 3,
}  # fmt: skip
# Each option alone, and all of them.
OPTIONS = {
    "full": {},
    "sliding": {"layers": ("sliding",), "window": 3},
    "another theta in sliding layers": {
        "layers": ("sliding", "full"), "window": 2, "local_rope_theta": 50.0, "rope_factor": 8.0,
    },
    "delta": {"layers": ("delta",), **DELTA},
    "delta and full": {"layers": ("delta", "full"), **DELTA},
    "gate": {"attention_gate": True},
    "gate and biases": {"attention_gate": True, "qkv_bias": True},
    "partial rotation": {"rotary_width": 4},
    "partial rotation without norms": {"rotary_width": 4, "qk_norm": False},
    "scale": {"attention_scale": 0.2},
    "cap": {"logit_cap": 0.7},
    "offset": {"norm_offset": 1.0},
    "post norms": {"post_norms": True},
    "gelu": {"activation": "gelu_tanh"},
    "scaled embedding": {"embed_scale": 4.1},
    "all": {
        "layers": ("delta", "sliding", "full"), "num_layers": 4, "window": 3,
        "local_rope_theta": 50.0, "rope_factor": 3.0, "rotary_width": 4, "attention_gate": True,
        "attention_scale": 0.2, "logit_cap": 2.0, "norm_offset": 1.0, "post_norms": True,
        "activation": "gelu_tanh", "embed_scale": 4.1, "num_kv_heads": 2, "num_heads": 4, **DELTA,
    },
}  # fmt: skip
# What layers do differently, all that a packed row or a cache may get wrong.
KINDS = ("full", "sliding", "delta", "delta and full", "gate", "offset", "post norms",
         "partial rotation", "all")  # fmt: skip


def hybrid(name: str, **options: object) -> funcrl.models.Transformer:
    """Return a network with the options of a name."""
    return tiny_model(**{**OPTIONS[name], **options})


def spread_params(model: funcrl.models.Transformer, dtype=torch.float64) -> dict[str, Tensor]:
    """Return parameters away from their neutral start, so that each is seen."""
    params = funcrl.init_params(model, seed=3)
    return {
        name: (leaf + 0.3 * torch.randn(leaf.shape, generator=funcrl.rng.generator(5, n))).to(dtype)
        for n, (name, leaf) in enumerate(params.items())
    }


def literal_logits(c: TransformerConfig, params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits [T, V] of one sample, token by token and head by head."""
    x = [params["embed.weight"][token] * c.embed_scale for token in tokens]
    for layer in range(c.num_layers):
        kind = c.layers[layer % len(c.layers)]
        start = f"blocks.{layer}."
        own = {
            name.removeprefix(start): leaf
            for name, leaf in params.items()
            if name.startswith(start)
        }
        normed = [_norm(row, own["attention_norm.weight"], c.norm_offset, c.norm_eps) for row in x]
        mixed = _delta(c, own, normed) if kind == "delta" else _attention(c, own, normed, kind)
        x = [row + _post(c, own, "attention", part) for row, part in zip(x, mixed, strict=True)]
        normed = [_norm(row, own["mlp_norm.weight"], c.norm_offset, c.norm_eps) for row in x]
        gated = [_mlp(c, own, row) for row in normed]
        x = [row + _post(c, own, "mlp", part) for row, part in zip(x, gated, strict=True)]
    x = [_norm(row, params["norm.weight"], c.norm_offset, c.norm_eps) for row in x]
    logits = torch.stack([params["embed.weight"] @ row for row in x])
    return logits if c.logit_cap is None else c.logit_cap * torch.tanh(logits / c.logit_cap)


def _norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * (offset + weight)


def _post(c: TransformerConfig, own: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    if not c.post_norms:
        return x
    return _norm(x, own[f"{part}_post_norm.weight"], c.norm_offset, c.norm_eps)


def _mlp(c: TransformerConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = own["mlp.gate.weight"] @ x, own["mlp.up.weight"] @ x
    if c.activation == "silu":
        active = gate / (1 + torch.exp(-gate))
    else:
        cubic = gate + 0.044715 * gate**3
        active = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cubic))
    return own["mlp.down.weight"] @ (active * up)


def _attention(
    c: TransformerConfig, own: dict[str, Tensor], x: list[Tensor], kind: str
) -> list[Tensor]:
    heads = [_heads(c, own, "q", row, place, kind) for place, row in enumerate(x)]
    keys = [_heads(c, own, "k", row, place, kind) for place, row in enumerate(x)]
    values = [_projected(own, "v", row).view(c.num_kv_heads, -1) for row in x]
    scale = c.head_width**-0.5 if c.attention_scale is None else c.attention_scale
    out = []
    for place, row in enumerate(x):
        first = max(0, place - c.window + 1) if kind == "sliding" else 0
        parts = []
        for head in range(c.num_heads):
            key = head * c.num_kv_heads // c.num_heads
            seen = range(first, place + 1)
            scores = torch.stack([heads[place][head] @ keys[s][key] * scale for s in seen])
            weights = torch.softmax(scores, 0)
            parts.append(sum(w * values[s][key] for w, s in zip(weights, seen, strict=True)))
        mixed = torch.cat(parts)
        if c.attention_gate:
            mixed = mixed / (1 + torch.exp(-own["attention.gate.weight"] @ row))
        out.append(own["attention.o.weight"] @ mixed)
    return out


def _projected(own: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    bias = own.get(f"attention.{part}.bias", torch.zeros((), dtype=x.dtype))
    return own[f"attention.{part}.weight"] @ x + bias


def _heads(
    c: TransformerConfig, own: dict[str, Tensor], part: str, x: Tensor, place: int, kind: str
) -> list[Tensor]:
    """Return each head's query or key of one token, normed and rotated."""
    width = c.head_width if c.rotary_width is None else c.rotary_width
    theta, position = c.rope_theta, torch.tensor(place) * (1.0 / c.rope_factor)
    if kind == "sliding":
        theta, position = c.local_rope_theta or c.rope_theta, torch.tensor(place)
    angles = rotary_angles(position, width, theta)
    cos, sin = angles.cos(), angles.sin()  # in float32, as every network has them
    out = []
    for head in _projected(own, part, x).view(-1, c.head_width):
        if c.qk_norm:
            weight = own[f"attention.{part}_norm.weight"]
            head = _norm(head, weight, c.norm_offset, c.norm_eps)
        low, high = head[: width // 2], head[width // 2 : width]
        turned = [low * cos - high * sin, high * cos + low * sin, head[width:]]
        out.append(torch.cat(turned))
    return out


def _delta(c: TransformerConfig, own: dict[str, Tensor], x: list[Tensor]) -> list[Tensor]:
    keys, values = c.delta_key_heads * c.delta_key_width, c.delta_heads * c.delta_value_width
    inputs = [own["delta.qkv.weight"] @ row for row in x]
    states = [
        torch.zeros(c.delta_key_width, c.delta_value_width, dtype=x[0].dtype)
        for _ in range(c.delta_heads)
    ]
    out = []
    for place, row in enumerate(x):
        summed = torch.zeros_like(inputs[0])
        for tap in range(min(c.delta_conv, place + 1)):
            summed = summed + own["delta.conv"][:, -1 - tap] * inputs[place - tap]
        active = summed / (1 + torch.exp(-summed))
        q, k, v = active.split([keys, keys, values])
        z, a, b = (own[f"delta.{part}.weight"] @ row for part in "zab")
        parts = []
        for head in range(c.delta_heads):
            of_key = head * c.delta_key_heads // c.delta_heads
            query, key = (part.view(-1, c.delta_key_width)[of_key] for part in (q, k))
            query = query / torch.sqrt((query * query).sum() + 1e-6) * c.delta_key_width**-0.5
            key = key / torch.sqrt((key * key).sum() + 1e-6)
            value = v.view(-1, c.delta_value_width)[head]
            step = torch.log(1 + torch.exp(a[head] + own["delta.step_bias"][head]))
            state = torch.exp(-torch.exp(own["delta.log_rate"][head]) * step) * states[head]
            learned = (value - state.T @ key) / (1 + torch.exp(-b[head]))
            states[head] = state + torch.outer(key, learned)
            read = _norm(states[head].T @ query, own["delta.norm.weight"], 0.0, c.norm_eps)
            gate = z.view(-1, c.delta_value_width)[head]
            parts.append(read * gate / (1 + torch.exp(-gate)))
        out.append(own["delta.o.weight"] @ torch.cat(parts))
    return out

"""The one network: a decoder-only transformer whose options make it many a published one.

Llama, Qwen2, Qwen3, Qwen3.5 and Gemma 3 are configurations of it. It takes one sample, or any
leading batch axes; letters: T tokens, D width, H query heads, C head width, V vocabulary. The
module is built on the meta device and holds no weights; parameters are a separate flat dictionary.
Three parts of it are arguments: the arithmetic (`ops`), which tokens see which (`attend`), and what
becomes of the last layer's output (`head`).
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks
from funcrl.models.config import Kind, TransformerConfig
from funcrl.models.layers import (
    MLP,
    Attention,
    GatedDelta,
    Linear,
    RecurFn,
    add_and_norm,
    empty_embedding,
    recur_causal,
    stream_norm,
)
from funcrl.ops import AttendFn, Ops, choose_ops
from funcrl.ops.arithmetic import cap_logits

# (the last layer's output [..., T, D], the output matrix [V, D]) -> anything
HeadFn: TypeAlias = Callable[[Tensor, Tensor], Any]
# What a layer sees: attention's function, or that of a delta layer.
LayerFn: TypeAlias = Callable[..., Tensor]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Block(nn.Module):
    """Attention, or a gated delta layer, and an MLP, each on a normalised residual stream."""

    def __init__(self, config: TransformerConfig, ops: Ops, kind: Kind = "full") -> None:
        super().__init__()
        post = config.post_norms
        self.attention_norm = stream_norm(config, ops)
        if kind == "delta":
            self.delta = GatedDelta(config, ops)
        else:
            self.attention = Attention(config, ops, kind)
        self.attention_post_norm = stream_norm(config, ops) if post else nn.Identity()
        self.mlp_norm = stream_norm(config, ops)
        self.mlp = MLP(config, ops)
        self.mlp_post_norm = stream_norm(config, ops) if post else nn.Identity()
        self.ops = ops
        self.kind = kind

    def forward(self, x: Tensor, rotation: Tensor | None, layer_fn: LayerFn) -> Tensor:
        """Return the residual stream [..., T, D] after the block.

        Args:
            x: the residual stream before.
            rotation: of attention, by `ops.rotation`; a delta layer has none.
            layer_fn: `attend`, or `recur` for a delta layer.
        """
        normalised = self.attention_norm(x)
        if self.kind == "delta":
            mixed = self.delta(normalised, layer_fn)
        else:
            mixed = self.attention(normalised, rotation, layer_fn)
        x, normalised = add_and_norm(x, self.attention_post_norm(mixed), self.mlp_norm, self.ops)
        out: Tensor = x + self.mlp_post_norm(self.mlp(normalised))
        return out


class Transformer(nn.Module):
    """A decoder-only transformer, `model(tokens, positions) -> logits`, without weights of its own.

    Two more arguments of the call are functions, and `dtype` is the one to compute in where exact
    operations cast weights themselves. `attend` says which tokens see which: a causal
    sample when left out, `funcrl.ops.attend_segments(segment_ids)` for a packed row, a sequence
    with one function a layer where layers differ, as on a cache; a delta layer's is
    `funcrl.models.recur_causal`, or `recur_segments(segment_ids)`. `head` is called with the last
    layer's output [..., T, D] and the output matrix [V, D], and its result is the model's: all
    logits when left out.

    Args:
        config: its shape and its numerics.
        ops: the arithmetic, "native", "exact" or a `funcrl.ops.Ops`; that of `config.numerics` when
            left out.

    Example:
        >>> import torch, funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8)
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> apply = funcrl.functional(model)
        >>> apply(params, torch.tensor([1, 2, 3]), torch.arange(3)).shape
        torch.Size([3, 7])
        >>> apply(params, torch.tensor([1, 2]), torch.arange(2), head=lambda x, w: x).shape
        torch.Size([2, 8])
    """

    def __init__(self, config: TransformerConfig, ops: str | Ops | None = None) -> None:
        super().__init__()
        self.config = config
        self.ops = chosen = choose_ops("Transformer", config.numerics if ops is None else ops)
        with torch.device("meta"):
            self.embed = empty_embedding(config.vocab_size, config.width)
            self.blocks = nn.ModuleList(Block(config, chosen, kind) for kind in config.kinds)
            self.norm = stream_norm(config, chosen)
            self.unembed = Linear(config.width, config.vocab_size, False, chosen)
        if config.tied:
            self.unembed.weight = self.embed.weight
        # Rounded to each dtype here, where nothing is traced.
        scale = config.embed_scale
        self._embed_scales = {
            dtype: torch.tensor(scale, dtype=dtype, device="cpu").item() for dtype in _DTYPES
        }

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: AttendFn | Sequence[LayerFn] | None = None,
        head: HeadFn | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return logits [..., T, V], where `logits[t]` predicts the token after `tokens[t]`."""
        checks.check_shape("Transformer", "positions", positions, "tokens", tokens.shape)
        if dtype is not None and not self.ops.exact:
            raise ValueError(
                f"Transformer expects no dtype= with native operations, whose weights say it, got "
                f"{dtype}; cast the parameters."
            )
        layers = self._layer_fns(attend)
        x = self.ops.embed(tokens, self.embed.weight, dtype)
        if self.config.embed_scale != 1.0:
            x = x * self._embed_scales[x.dtype]
        rotations = self.rotations(positions)
        for block, kind, layer_fn in zip(self.blocks, self._kinds(), layers, strict=True):
            x = block(x, rotations.get(kind), layer_fn)
        x = self.norm(x)
        return self.logits(x) if head is None else head(x, self.unembed.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of the last layer's output [..., D]."""
        return cap_logits(self.unembed(hidden), self.config.logit_cap)

    def each_layer(self, attend: AttendFn, recur: RecurFn) -> list[LayerFn]:
        """Return the function of each layer: `recur` for a delta layer, `attend` for others."""
        return [recur if kind == "delta" else attend for kind in self._kinds()]

    def rotations(self, positions: Tensor) -> dict[Kind, Tensor]:
        """Return the rotation, by `ops.rotation`, of each kind of attention in the network."""
        c = self.config
        rotations: dict[Kind, Tensor] = {}
        if "full" in c.kinds:
            # A product, which every compiler rounds alike, unlike a quotient.
            places = positions if c.rope_factor == 1.0 else positions * (1.0 / c.rope_factor)
            scaling = (c.rope_scaling,) if c.rope_scaling else ()
            rotations["full"] = self.ops.rotation(places, c.rotated_width, c.rope_theta, *scaling)
        if "sliding" in c.kinds:
            theta = c.local_rope_theta or c.rope_theta
            scaled = c.rope_factor != 1.0 or bool(c.rope_scaling)
            same = theta == c.rope_theta and not scaled and "full" in rotations
            rotations["sliding"] = (
                rotations["full"] if same else self.ops.rotation(positions, c.rotated_width, theta)
            )
        return rotations

    def _kinds(self) -> list[Kind]:
        """Return the kind of each block that is there, which a caller may have added to."""
        blocks: Iterable[Any] = self.blocks
        return [block.kind for block in blocks]

    def _layer_fns(self, attend: AttendFn | Sequence[LayerFn] | None) -> Sequence[LayerFn]:
        """Return the function of each layer; raise unless there is one, with a window if needed."""
        kinds = self._kinds()
        if attend is None:
            return self.each_layer(self.ops.attend_causal, recur_causal)
        if callable(attend):
            if "delta" in kinds:
                raise ValueError(
                    f"Transformer expects attend= with one function a layer for a network with "
                    f"delta layers, such as model.each_layer(attend, recur), got {_name(attend)} "
                    f"alone."
                )
            attend = [attend] * len(kinds)
        if len(attend) != len(kinds):
            raise ValueError(
                f"Transformer expects attend= with one function a layer, {len(kinds)}, got "
                f"{len(attend)}."
            )
        if "sliding" in kinds:
            for kind, layer_fn in zip(kinds, attend, strict=True):
                if kind == "sliding" and not _takes_window(layer_fn):
                    raise ValueError(
                        f"Transformer expects an attend(q, k, v, window) for a sliding layer, got "
                        f"{_name(layer_fn)}, which takes no window."
                    )
        return attend


def has_delta(model: nn.Module) -> bool:
    """Return whether a network is a `Transformer` with gated delta layers."""
    return isinstance(model, Transformer) and "delta" in model.config.kinds


def _takes_window(attend: LayerFn) -> bool:
    given = inspect.signature(attend).parameters
    return "window" in given or any(each.kind == each.VAR_KEYWORD for each in given.values())


def _name(function: LayerFn) -> str:
    return getattr(function, "__name__", type(function).__name__)

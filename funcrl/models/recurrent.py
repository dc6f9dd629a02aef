"""The recurrent network: an embedding, layers of LSTM or GRU cells, and an output projection.

It takes one sample, or any leading batch axes; letters: T tokens, D width, L layers, V vocabulary.
Like `Transformer` the module is built on the meta device and holds no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core import checks, numerics
from funcrl.core.arguments import Count, check_fields
from funcrl.models.config import LARGEST
from funcrl.models.layers import Linear, empty_embedding
from funcrl.models.transformer import HeadFn
from funcrl.ops import choose_ops, gru_scan, lstm_scan
from funcrl.ops.recurrent import Cell, Recompute

# What a layer carries from token to token: h and c [..., L, D] of an LSTM, h [..., L, D] of a GRU.
RecurrentState: TypeAlias = tuple[Tensor, Tensor] | Tensor
_SCANS: dict[str, Any] = {"lstm": lstm_scan, "gru": gru_scan}
_GATES = {"lstm": 4, "gru": 3}


@dataclass(frozen=True)
class RecurrentConfig:
    """The shape of a `Recurrent`.

    No size may be above that in `funcrl.models.LARGEST`.

    Args:
        vocab_size: V.
        width: D, of the embedding and of every layer's state.
        num_layers: L.
        cell: "lstm" or "gru".
        tied: whether the output projection is the embedding.
        context_length: the longest sample, prompt and completion, that a generator makes.
        backend: what runs the layers over the tokens; see `funcrl.ops.lstm_scan`.
        recompute: what the backward pass computes again to save memory; see there.
        numerics: "native", torch's fastest operations; or "exact", on a CPU, operations whose
            result for a sample depends on that sample alone, so that trainer and generator agree to
            the last bit. `backend` is then left at "auto".
    """

    vocab_size: Count = 512
    width: Count = 128
    num_layers: Count = 1
    cell: Cell = "lstm"
    tied: bool = False
    context_length: Count = 4096
    backend: Literal["auto", "loop", "op", "triton", "cudnn"] = "auto"
    recompute: Recompute = "none"
    numerics: Literal["native", "exact"] = "native"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("vocab_size", "width", "num_layers", "context_length"):
            value = getattr(self, name)
            checks.check_range("RecurrentConfig", name, value, 1, LARGEST[name])
        if self.numerics == "exact" and self.backend != "auto":
            raise ValueError(
                f"RecurrentConfig expects backend='auto' with numerics='exact', which has a "
                f"backend of its own, got {self.backend!r}."
            )


class RecurrentLayers(nn.Module):
    """Layers of cells, one above the other; parameters have the names of `torch.nn.LSTM`'s."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        rows, width = _GATES[config.cell] * config.width, config.width
        for layer in range(config.num_layers):
            for matrix in (f"weight_ih_l{layer}", f"weight_hh_l{layer}"):
                self.register_parameter(matrix, nn.Parameter(torch.empty(rows, width)))
            for bias in (f"bias_ih_l{layer}", f"bias_hh_l{layer}"):
                self.register_parameter(bias, nn.Parameter(torch.empty(rows)))

    def forward(
        self, x: Tensor, state: RecurrentState | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Return the last layer's output [..., T, D] in the dtype of x, and the last state."""
        c, scan = self.config, _SCANS[self.config.cell]
        params: dict[str, Tensor] = dict(self.named_parameters())
        if c.numerics == "exact":  # which casts weights where they are used
            params = {name: leaf.to(x.dtype) for name, leaf in params.items()}
        backend = "exact" if c.numerics == "exact" else c.backend
        found: tuple[Tensor, RecurrentState] = scan(
            x, params, state, resets, backend=backend, recompute=c.recompute
        )
        return found


class Recurrent(nn.Module):
    """An LSTM or a GRU, `model(tokens, positions) -> logits`, without weights of its own.

    A token sees those before it by the state that they leave, so that positions are not read. Two
    more arguments of the call: `resets` [..., T] is True where a new sample or episode begins, for
    which the state before is zero, and `head` is called with the last layer's output [..., T, D]
    and the output matrix [V, D], as in a `Transformer`.

    Args:
        config: its shape, and how its layers are computed.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Recurrent(funcrl.models.RecurrentConfig(vocab_size=7, width=8))
        >>> params = funcrl.init_params(model, seed=0)
        >>> sorted(params)[:3]
        ['embed.weight', 'layers.bias_hh_l0', 'layers.bias_ih_l0']
        >>> apply = funcrl.functional(model)
        >>> apply(params, torch.tensor([1, 2, 3]), torch.arange(3)).shape
        torch.Size([3, 7])
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.ops = choose_ops("Recurrent", config.numerics)
        with torch.device("meta"):
            self.embed = empty_embedding(config.vocab_size, config.width)
            self.layers = RecurrentLayers(config)
            self.unembed = Linear(config.width, config.vocab_size, False, self.ops)
        if config.tied:
            self.unembed.weight = self.embed.weight

    @property
    def deviations(self) -> Mapping[str, float]:
        """The standard deviations of new matrices; torch's, for those that are not the output."""
        layers = dict.fromkeys(
            (f"layers.{name}" for name, _ in self.layers.named_parameters()),
            1 / math.sqrt(3 * self.config.width),
        )
        return layers if self.config.tied else {"embed.weight": 1.0, **layers}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        resets: Tensor | None = None,
        head: HeadFn | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return logits [..., T, V], where `logits[t]` predicts the token after `tokens[t]`."""
        checks.check_shape("Recurrent", "positions", positions, "tokens", tokens.shape)
        if dtype is not None and not self.ops.exact:
            raise ValueError(
                f"Recurrent expects no dtype= with native numerics, whose weights say it, got "
                f"{dtype}; cast the parameters."
            )
        hidden, _ = self.layers(self.ops.embed(tokens, self.embed.weight, dtype), None, resets)
        return self.unembed(hidden) if head is None else head(hidden, self.unembed.weight)

    def read(
        self, tokens: Tensor, state: RecurrentState | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Return the last layer's output [..., T, D], and the state after the last token."""
        embedded = self.ops.embed(tokens, self.embed.weight, None)
        found: tuple[Tensor, RecurrentState] = self.layers(embedded, state, resets)
        return found

    def next_logits(self, state: RecurrentState) -> Tensor:
        """Return the logits [..., V] of what follows: the last layer's output is its state."""
        h = state if isinstance(state, Tensor) else state[0]
        logits: Tensor = self.unembed(h[..., -1, :])
        return logits

    def zero_state(self) -> RecurrentState:
        """Return the state of a sample before its first token."""
        h = self.embed.weight.new_zeros(self.config.num_layers, self.config.width)
        wide = numerics.at_least_float32(h.dtype)  # as the scan has c
        return (h, torch.zeros_like(h, dtype=wide)) if self.config.cell == "lstm" else h

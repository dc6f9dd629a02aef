"""What a fuzz of the exact kernels draws: shapes, numbers, strides and the company of rows."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from exact_implementations import implementations
from torch import Tensor

from funcrl.core.numerics import pairwise_sum

Pair = tuple[Tensor, Tensor]
COMPANY = (1, 1, 2, 3, 7, 16, 17, 64, 65, 256)


class Draw(Random):
    """A source of random shapes and tensors on one device."""

    def __init__(self, seed: str, device: str):
        super().__init__(seed)
        self.device = torch.device(device)
        self.dtype = self.choice((torch.float32, torch.bfloat16))
        self.generator = torch.Generator().manual_seed(self.getrandbits(60))
        self.kernels = implementations(
            "funcrl.ops.exact" + (".cuda" if self.device.type == "cuda" else "")
        )

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.to(self.device, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def width(self, step: int = 1) -> int:
        """A width of rows: mostly small, and often no multiple of a SIMD width."""
        widest = self.choice((40, 40, 130, 130, 600, 1600)) // step
        return step * self.randint(1, widest)

    def count(self) -> int:
        return self.choice(COMPANY) + self.choice((0, 0, self.randint(0, 40)))

    def strided(self, x: Tensor) -> Tensor:
        """The same numbers, perhaps with other strides or at an odd address."""
        kind = self.randint(0, 3)
        if kind == 0:
            return x
        if kind == 1:  # a part of a wider tensor
            before = self.randint(0, 3)
            wider = torch.nn.functional.pad(x, (before, self.randint(1, 5)))
            return wider[..., before : before + x.shape[-1]]
        if kind == 2:  # every other row
            return torch.stack((x, x), dim=1).flatten(0, 1)[::2]
        return x.mT.contiguous().mT


def arrangements(
    draw: Draw, most: int, *inputs: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Inputs as drawn; some of their rows among copies of others; the rows' places in both."""
    total = inputs[0].shape[0]
    count = min(draw.count(), most)
    chosen = draw.integers(0, total, count)
    kept = draw.integers(0, count, min(count, 8))
    return list(inputs), [draw.strided(x[chosen]) for x in inputs], chosen[kept], kept


def by_rows(
    draw: Draw, fn: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor, most: int = 400
) -> Iterator[Pair]:
    """Compare the rows of every result of `fn`, whose arguments all have rows."""
    whole, part, places, kept = arrangements(draw, most, *inputs)
    first, second = fn(*whole), fn(*part)
    first, second = ((r,) if isinstance(r, Tensor) else r for r in (first, second))
    for a, b in zip(first, second, strict=True):
        yield a[places], b[kept]


def block_sums(
    kernels: Any, grad: Tensor, x: Tensor, weight: Tensor, tokens: Tensor, blocks: int
) -> Iterator[Pair]:
    """Compare each sum over blocks of rows with the sum of those of each block alone."""
    scale = kernels.rms_norm(x, weight, 1e-6, 0.0)[1]
    vocab_size = int(tokens.max()) + 2

    def embedding(grad: Tensor, tokens: Tensor, blocks: int = 1) -> Tensor:
        return kernels.embedding_gradient(grad, tokens, vocab_size, blocks)

    def norm(grad: Tensor, x: Tensor, scale: Tensor, blocks: int = 1) -> Tensor:
        return kernels.rms_norm_gradients(grad, x, weight, scale, 0.0, blocks)[1]

    for fn, inputs in (
        (kernels.weight_gradient, (grad, x)),
        (kernels.bias_gradient, (grad,)),
        (embedding, (grad, tokens)),
        (norm, (x, x, scale)),
    ):
        parts = zip(*(each.chunk(blocks) for each in inputs), strict=True)
        yield fn(*inputs, blocks=blocks), pairwise_sum(fn(*part) for part in parts)
    total = torch.ones(grad.shape[1], x.shape[1], device=x.device)
    expected = total + kernels.weight_gradient(grad, x)
    yield kernels.add_weight_gradient(total, grad, x), expected


class Heads:
    """Drawn queries, keys and values of a few rows, causal."""

    def __init__(self, draw: Draw):
        keys, group, width = (
            draw.choice((1, 2, 3)),
            draw.choice((1, 2, 3)),
            draw.choice((8, 16, 24) if draw.device.type == "cuda" else (6, 8, 10, 16, 24)),
        )
        self.batch, self.length = draw.choice((1, 2, 3, 8, 20)), draw.randint(1, 24)
        if draw.random() < 0.1:
            group, width = draw.choice((1, 4, 8)), draw.choice((32, 64, 80, 128, 256))
        if draw.random() < 0.03:
            self.batch, self.length = draw.choice((1, 2)), draw.choice((70, 130, 300))
        self.q = draw.normal(self.batch, keys * group, self.length, width)
        self.k, self.v = (draw.normal(self.batch, keys, self.length, width) for _ in range(2))
        self.last = torch.arange(self.length, device=draw.device).expand(self.batch, -1)
        self.first = torch.zeros_like(self.last)

"""Adam whose two moments are kept in eight bits a number (arXiv:2110.02861)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.core.arguments import Decay, NotNegative, TensorTree, checked
from funcrl.core.numerics import in_blocks, of_levels
from funcrl.core.types import GradientTransformation, Params, Tree
from funcrl.optim.base import bias_correction, zero_count

BLOCK, _LEAST = 256, 64  # numbers of a row that share a scale: at most, and at least
_DECADES = 7  # of the levels' magnitudes
_HALF = 1 << 15  # of the numbers of bfloat16


class EightBits(NamedTuple):
    """Moments like the parameters: a level of each number, and a scale of each block of a row."""

    codes: Tree  # uint8; of a leaf without long rows the moment itself, in float32
    scales: Tree  # [..., I / block] float32, the largest magnitude of each block; [] without blocks


class ScaleByAdam8bitState(NamedTuple):
    """The number of updates done, and the two moments."""

    num_updates: Tensor  # [] int64
    mean: EightBits
    square: EightBits


class _Levels(NamedTuple):
    values: Tensor  # [256]
    codes: Tensor  # [65536] uint8, the nearest level to each number of bfloat16, by its bits


@checked
def scale_by_adam_8bit(
    betas: tuple[Decay, Decay] = (0.9, 0.999), eps: NotNegative = 1e-8
) -> GradientTransformation:
    """Return `scale_by_adam` with moments in eight bits, a quarter of the memory of float32.

    A moment is a level times the largest magnitude of its block, which is up to 256 numbers of a
    row: of 256 levels, denser towards 0 over seven decades ("dynamic"), the nearest to the share
    in bfloat16. Leaves whose rows are no multiple of 64 numbers, and vectors, have moments in
    float32. A square above 0 keeps a level above 0, so that no update is divided by eps alone.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.scale_by_adam_8bit()
        >>> grads = {"w": torch.full((1, 64), 4.0)}
        >>> updates, state = tx.update(grads, tx.init(grads), grads)
        >>> updates["w"][0, 0], state.mean.codes["w"].dtype
        (tensor(1.), torch.uint8)
    """
    b1, b2 = betas

    @checked
    def init(params: Params) -> ScaleByAdam8bitState:
        return ScaleByAdam8bitState(zero_count(params), _zeros(params), _zeros(params))

    @checked
    def update(
        grads: TensorTree, state: ScaleByAdam8bitState, params: Params
    ) -> tuple[Tree, ScaleByAdam8bitState]:
        del params
        name, like = "scale_by_adam_8bit", "the parameters of init"
        tree.check_same_shapes(name, "gradients", grads, like, state.mean.codes)
        num_updates = state.num_updates + 1
        mean_scale, square_scale = (bias_correction(beta, num_updates) for beta in betas)
        values, unflatten = tree.flatten(grads)
        signed, positive = (_levels(is_signed, values[0].device) for is_signed in (True, False))

        # Leaf by leaf: the moments of one are in float32 at a time.
        def of_leaf(
            grad: Tensor, mean: Tensor, mean_scales: Tensor, square: Tensor, square_scales: Tensor
        ) -> tuple[Tensor, ...]:
            mean = _read(mean, mean_scales, signed)
            square = _read(square, square_scales, positive)
            grad = grad.to(mean.dtype)
            mean = torch.lerp(mean, grad, 1 - b1)
            square = torch.addcmul(b2 * square, grad, grad, value=1 - b2)
            change = (mean / mean_scale) / ((square / square_scale).sqrt() + eps)
            kept = *_kept(mean, mean_scales, signed), *_kept(square, square_scales, positive)
            return change.to(mean.dtype), *kept

        moments = [tree.leaves(part) for part in (*state.mean, *state.square)]
        found = [of_leaf(*each) for each in zip(values, *moments, strict=True)]
        updates, *new = (unflatten(list(column)) for column in zip(*found, strict=True))
        return updates, ScaleByAdam8bitState(num_updates, EightBits(*new[:2]), EightBits(*new[2:]))

    return GradientTransformation(init, update)


@checked
def dynamic_levels(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 levels of eight bits in rising order, from -1 or 0 to 1.

    Decade by decade up to 1 there are twice as many, at equal distances within each.

    Example:
        >>> import torch
        >>> from funcrl.optim.eight_bits import dynamic_levels
        >>> dynamic_levels(False, torch.device("cpu"))[[0, 1, 2, 255]]
        tensor([0.0000e+00, 3.2500e-07, 7.7500e-07, 1.0000e+00])
    """
    decades = []
    for index in range(_DECADES):
        count = 2**index if is_signed else 2 ** (index + 1)
        places = torch.arange(count, dtype=torch.float64, device=device)
        decades.append((0.1 + 0.9 * (places + 0.5) / count) * 10.0 ** (index + 1 - _DECADES))
    above = torch.cat([*decades, torch.ones_like(decades[0][:1])])
    below = -above[:-1].flip(0) if is_signed else above[:0]
    return torch.cat([below, torch.zeros_like(above[:1]), above]).float()


def _levels(is_signed: bool, device: torch.device) -> _Levels:
    values = dynamic_levels(is_signed, device)
    bounds = (values[1:] + values[:-1]) / 2
    if not is_signed:  # what is above 0 stays above 0
        bounds = torch.cat([values[:1], bounds[1:]])
    bits = torch.arange(-_HALF, _HALF, dtype=torch.int16, device=device)
    shares = bits.view(torch.bfloat16).float()
    return _Levels(values, torch.bucketize(shares, bounds, out_int32=True).to(torch.uint8))


def _block(leaf: Tensor) -> int:
    """Return how many numbers of a row share a scale, 0 for a leaf that is kept whole."""
    size = math.gcd(BLOCK, leaf.shape[-1]) if leaf.ndim > 1 else 0
    return size if size >= _LEAST else 0


def _zeros(params: Params) -> EightBits:
    def codes(leaf: Tensor) -> Tensor:
        return torch.zeros_like(leaf, dtype=torch.uint8 if _block(leaf) else torch.float32)

    def scales(leaf: Tensor) -> Tensor:
        size = _block(leaf)
        shape = (*leaf.shape[:-1], leaf.shape[-1] // size) if size else ()
        return torch.zeros(shape, dtype=torch.float32, device=leaf.device)

    return EightBits(tree.map(codes, params), tree.map(scales, params))


def _read(codes: Tensor, scales: Tensor, levels: _Levels) -> Tensor:
    return codes if not scales.ndim else of_levels(codes, scales, levels.values)


def _kept(moment: Tensor, scales: Tensor, levels: _Levels) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a moment, in blocks as the last ones were."""
    if not scales.ndim:
        return moment, scales
    shares, scales = in_blocks(moment, moment.shape[-1] // scales.shape[-1])
    # A table is a tenth of the time of a search among the levels for each number.
    bits = shares.to(torch.bfloat16).view(torch.int16).flatten().int() + _HALF
    return levels.codes.index_select(0, bits).view(moment.shape), scales

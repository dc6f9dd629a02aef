"""Matrices in few bits: levels by their formula, codes by a loop; products of adapted ones."""

import math

import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl.ops import adapted, adapted_linear, dequantize, quantize


def weight_of(rows=6, columns=192, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    """QLoRA, section 3: 8 quantiles above 0 and 7 below, as many as give -1, 0 and 1 exactly."""
    offset = 0.9677083  # mean of 1 - 1/32 and 1 - 1/30: the outermost quantile

    def normal(shares):
        return torch.special.ndtri(shares)

    above = normal(torch.linspace(offset, 0.5, 9, dtype=torch.float64))[:-1]
    below = -normal(torch.linspace(offset, 0.5, 8, dtype=torch.float64))[:-1]
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    levels = levels / levels.abs().max()
    found = quantize(weight_of(), "nf4").levels
    assert (found - levels).abs().max() < 1e-6
    assert found.tolist() == sorted(found.tolist())
    assert {-1.0, 0.0, 1.0} <= set(found.tolist())


@pytest.mark.parametrize("bits", ["nf4", "int8"])
@pytest.mark.parametrize("columns", [192, 64, 48, 2])
def test_each_number_is_the_nearest_level_of_its_block(bits, columns):
    weight = weight_of(columns=columns)
    weight[1] = 0.0
    found = quantize(weight, bits)
    block = math.gcd(64, columns)
    assert found.codes.shape == (6, columns // 2 if bits == "nf4" else columns)
    assert found.scales.shape == (6, columns // block)
    wide = dequantize(found, torch.float64)
    for row in range(6):
        for first in range(0, columns, block):
            part = weight[row, first : first + block].double()
            scale = part.abs().max()
            values = found.levels.double() * scale
            for place, number in enumerate(part):
                error = (number - wide[row, first + place]).abs()
                assert error <= (number - values).abs().min() + 1e-6 * scale
    assert torch.equal(wide[1], torch.zeros(columns, dtype=torch.float64))


def test_the_bits_of_nf4_are_those_of_bitsandbytes():
    """Of 0.50.2, without its second rounding of the scales."""
    from bitsandbytes import functional as peer

    weight = weight_of(96, 256)
    codes, state = peer.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    found = quantize(weight, "nf4")
    assert torch.equal(found.codes.flatten(), codes.flatten())
    assert torch.equal(found.scales.flatten(), state.absmax)
    assert torch.equal(dequantize(found), peer.dequantize_4bit(codes, state))


KEPT = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16(),
    "int8": lambda weight: quantize(weight, "int8"),
    "nf4": quantize,
}


def change_of(dtype=torch.float32, rank=3):
    generator = torch.Generator().manual_seed(1)
    down, up = (
        torch.randn(rank, 192, generator=generator),
        torch.randn(6, rank, generator=generator),
    )
    return down.to(dtype), up.to(dtype)


def inputs(dtype, *shape):
    return torch.randn(*shape, 192, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_sum_written_out(kept, dtype):
    frozen, (down, up), x = KEPT[kept](weight_of()), change_of(), inputs(dtype, 4, 5)
    whole = adapted(frozen, down, up, 0.5).to(dtype)
    found = adapted_linear(x, frozen, down, up, 0.5)
    assert torch.equal(found, torch.nn.functional.linear(x, whole))
    cotangent = torch.ones(4, 5, 6, dtype=dtype)
    _, pull = vjp(lambda x: adapted_linear(x, frozen, down, up, 0.5), x)
    assert torch.equal(pull(cotangent)[0], cotangent @ whole)


def losses(kept):
    """The loss of a sample by the operation, and by autograd of the sum in float64."""
    frozen = KEPT[kept](weight_of().double() if kept == "float32" else weight_of())

    def loss(x, down, up):
        return adapted_linear(x, frozen, down, up, 0.5).square().sum()

    def wanted(x, down, up):
        wide = adapted(frozen, torch.zeros_like(down), torch.zeros_like(up), 0.0)
        return torch.nn.functional.linear(x, wide + 0.5 * (up @ down)).square().sum()

    return loss, wanted


@pytest.mark.parametrize("kept", KEPT)
def test_gradients_of_each_sample_their_sum_and_a_trace(kept):
    loss, wanted = losses(kept)
    x, change = inputs(torch.float64, 3, 5), change_of(torch.float64)

    def each(fn):
        return lambda x, *change: vmap(grad(fn, (0, 1, 2)), (0, None, None))(x, *change)

    def summed(fn):
        return grad(lambda *all: vmap(fn, (0, None, None))(*all).sum(), (0, 1, 2))

    for transform in (each, summed):
        found, by_hand = transform(loss)(x, *change), transform(wanted)(x, *change)
        for leaf, right in zip(found, by_hand, strict=True):
            assert (leaf - right).abs().max() <= 1e-12 * right.abs().max()
        traced = make_fx(transform(loss))(x, *change)
        for leaf, again in zip(found, traced(x, *change), strict=True):
            assert torch.equal(leaf, again)


def test_adapters_may_be_those_of_each_sample():
    loss, wanted = losses("nf4")
    x = inputs(torch.float64, 3, 5)
    changes = [torch.stack([leaf, 2 * leaf, -leaf]) for leaf in change_of(torch.float64)]
    found = vmap(grad(loss, (1, 2)))(x, *changes)
    for leaf, right in zip(found, vmap(grad(wanted, (1, 2)))(x, *changes), strict=True):
        assert (leaf - right).abs().max() <= 1e-12 * right.abs().max()


def test_what_is_asked_for_in_vain_is_an_error():
    frozen, change, x = quantize(weight_of()), change_of(), inputs(torch.float32, 2)

    def slope(x):
        return grad(lambda x: adapted_linear(x, frozen, *change, 1.0).square().sum())(x).sum()

    with pytest.raises(RuntimeError, match="^adapted_linear has a first derivative only"):
        grad(slope)(x)
    with pytest.raises(ValueError, match="^adapted_linear expects a constant matrix"):
        grad(lambda s: adapted_linear(x, frozen._replace(scales=s), *change, 1.0).sum())(
            frozen.scales
        )


@pytest.mark.parametrize(
    ("weight", "bits", "problem"),
    [(torch.ones(2, 3), "nf4", "an even number of columns for nf4, got 3"),
     (torch.ones(4), "int8", "weight"), (torch.ones(2, 2), "int3", "bits"),
     (torch.tensor([[math.nan, 1.0]]), "int8", "finite numbers"),
     (torch.ones(2, 2, dtype=torch.int64), "int8", "floating-point numbers, got torch.int64")],
)  # fmt: skip
def test_what_cannot_be_rounded_is_refused(weight, bits, problem):
    with pytest.raises((ValueError, TypeError), match=rf"^quantize expects.*{problem}"):
        funcrl.ops.quantize(weight, bits)

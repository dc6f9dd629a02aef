"""Matrices in few bits: levels by their formula, codes by a loop, a product by the dense one."""

import math

import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl.ops import dequantize, quantize, quantized_linear


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
    peer = pytest.importorskip("bitsandbytes").functional
    weight = weight_of(96, 256)
    codes, state = peer.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    found = quantize(weight, "nf4")
    assert torch.equal(found.codes.flatten(), codes.flatten())
    assert torch.equal(found.scales.flatten(), state.absmax)
    assert torch.equal(dequantize(found), peer.dequantize_4bit(codes, state))


@pytest.mark.parametrize("bits", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_matrix_written_out(bits, dtype):
    found = quantize(weight_of(), bits)
    dense = dequantize(found, dtype)
    x = torch.randn(4, 5, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(quantized_linear(x, found), torch.nn.functional.linear(x, dense))
    cotangent = torch.ones(4, 5, 6, dtype=dtype)
    _, pull = vjp(lambda x: quantized_linear(x, found), x)
    assert torch.equal(pull(cotangent)[0], cotangent @ dense)


def test_gradients_of_each_sample_and_of_a_trace():
    found = quantize(weight_of(), "nf4")
    dense = dequantize(found, torch.float64)
    x = torch.randn(3, 5, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(x):
        return quantized_linear(x, found).square().sum()

    def wanted(x):
        return torch.nn.functional.linear(x, dense).square().sum()

    each, by_hand = vmap(grad(loss))(x), vmap(grad(wanted))(x)
    assert (each - by_hand).abs().max() <= 1e-12 * by_hand.abs().max()
    traced = make_fx(vmap(grad(loss)))(x)
    assert torch.equal(traced(x), each)


def test_what_is_asked_for_in_vain_is_an_error():
    found = quantize(weight_of())
    x = torch.randn(2, 192)
    with pytest.raises(RuntimeError, match="^quantized_linear has a first derivative only"):
        grad(lambda x: grad(lambda x: quantized_linear(x, found).square().sum())(x).sum())(x)
    with pytest.raises(ValueError, match="^quantized_linear expects a constant matrix"):
        grad(lambda s: quantized_linear(x, found._replace(scales=s)).sum())(found.scales)


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

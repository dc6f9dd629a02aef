"""LSTM and GRU scans by Triton, against the loop in float64 and against themselves.

The cases run on a GPU, and on tiny shapes through Triton's interpreter on a machine without one, in
a process of its own, as Triton reads its switch when it is imported.
"""

import optree
import pytest
import torch
from kernels import DEVICE, INTERPRETED, ON_GPU, interpreting, kernel_case, run_interpreted

from funcrl.ops import recurrent

SCANS = {"lstm": recurrent.lstm_scan, "gru": recurrent.gru_scan}
cells = pytest.mark.parametrize("cell", ["lstm", "gru"])
UNIT = 2.0**-8  # of bfloat16: half the distance of 1 and the next number

if ON_GPU or INTERPRETED:
    from funcrl.ops.recurrent.cuda import scan
    from funcrl.ops.recurrent.cuda import scan as products
    from funcrl.ops.recurrent.cuda.scan import scan_kernels


@interpreting
def test_the_cases_hold_under_the_interpreter():
    run_interpreted(__file__)


def drawn(cell, rows, steps, inputs, width, *, layers=1, bias=True, dtype=torch.float32):
    """x, parameters, first states and resets."""
    generator = torch.Generator().manual_seed(rows + steps)
    gates = {"lstm": 4, "gru": 3}[cell] * width

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    params = {}
    for n in range(layers):
        shapes = {"weight_ih": (gates, inputs if n == 0 else width), "weight_hh": (gates, width)}
        if bias:
            shapes |= {"bias_ih": (gates,), "bias_hh": (gates,)}
        for kind, shape in shapes.items():
            params[f"{kind}_l{n}"] = (randn(*shape) * width**-0.5).to(dtype)
    h, c = randn(rows, layers, width).tanh().to(dtype), randn(rows, layers, width)
    resets = (torch.rand(rows, steps, generator=generator) < 0.2).to(DEVICE)
    return randn(rows, steps, inputs).to(dtype), params, (h, c) if cell == "lstm" else h, resets


def leaves_of(x, params, state):
    return [x, *params.values(), *(state if isinstance(state, tuple) else (state,))]


def results(cell, x, params, state, resets, **options):
    """Outputs, last states, and the gradients of a sum of them with fixed weights."""
    x, params, state = optree.tree_map(
        lambda leaf: leaf.detach().clone().requires_grad_(), (x, params, state)
    )
    outputs, last = SCANS[cell](x, params, state, resets, **options)
    values = [outputs, *(last if isinstance(last, tuple) else (last,))]
    total = sum((value * _weights(value)).sum() for value in values)
    return values, torch.autograd.grad(total, leaves_of(x, params, state))


def _weights(value):
    generator = torch.Generator().manual_seed(value.numel())
    return torch.randn(value.shape, generator=generator).to(value)


def oracle(cell, x, params, state, resets):
    wide = optree.tree_map(torch.Tensor.double, (x, params, state))
    return results(cell, *wide, resets, backend="loop")


def assert_near(found, expected, outputs=1e-5, gradients=1e-5):
    """Outputs differ by no more than a bound, gradients by a part of their largest number."""
    for ours, wide in zip(found[0], expected[0], strict=True):
        assert (ours.double() - wide).abs().max() < outputs
    for ours, wide in zip(found[1], expected[1], strict=True):
        assert (ours.double() - wide).abs().max() < gradients * wide.abs().max().clamp(min=1)


@kernel_case
@cells
@pytest.mark.parametrize(
    ("rows", "steps", "width", "layers", "bias"),
    [(300, 33, 256, 1, True), (4200, 9, 96, 2, False), (1, 70, 40, 1, True)]
    if ON_GPU
    else [(5, 4, 7, 2, True), (17, 2, 16, 1, False)],
)
def test_a_scan_is_that_of_the_loop_whatever_is_recomputed(cell, rows, steps, width, layers, bias):
    drawn_inputs = drawn(cell, rows, steps, 6, width, layers=layers, bias=bias)
    expected = oracle(cell, *drawn_inputs)
    kept = results(cell, *drawn_inputs, backend="triton", recompute="none")
    assert_near(kept, expected)
    for recompute in ("chunk", "full"):
        again = results(cell, *drawn_inputs, backend="triton", recompute=recompute)
        for ours, other in zip((*kept[0], *kept[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(ours, other)
    with torch.no_grad():
        plain, _ = SCANS[cell](*drawn_inputs, backend="triton")
    assert torch.equal(plain, kept[0][0])


def piece_of(cell, steps, rows, width):
    """The arguments of `forward` on one piece, with memory for what it keeps."""
    x, params, state, resets = drawn(cell, rows, steps, width, width)
    h, c = (each[:, 0] for each in state) if cell == "lstm" else (state[:, 0], state[:, 0, :0])
    bias = None if cell == "lstm" else params["bias_hh_l0"][2 * width :]
    kept = [x.new_empty(steps, rows, size) for size in (width, 4 * width, c.shape[1])]
    weights = params["weight_ih_l0"], params["weight_hh_l0"]
    return x.transpose(0, 1), *weights, bias, h, c, resets.T.contiguous(), kept


def scanned(kernels, piece, cuts):
    """The forward and the backward pass of some steps, in pieces that end at `cuts`."""
    x, weight_ih, weight, bias, h, c, resets, (outputs, gates, cells) = piece
    steps = [slice(first, last) for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True)]
    starts = []
    for cut in steps:
        starts.append((h, c))
        written = outputs[cut], gates[cut], cells[cut]
        pre = kernels.project(x[cut], weight_ih, None)
        c = kernels.forward(pre, weight, bias, h, c, resets[cut], *written)
        h = outputs[cut][-1]
    grad_h, grad_c, grads = torch.ones_like(h), torch.ones_like(c), torch.empty_like(gates)
    before = torch.cat([starts[0][0][None], outputs[:-1]]).masked_fill(resets[..., None], 0.0)
    for cut, (_, start) in zip(reversed(steps), reversed(starts), strict=True):
        grad_h, grad_c = kernels.backward(
            outputs[cut], gates[cut], cells[cut], before[cut], start, weight, resets[cut], grad_h,
            grad_c, grads[cut],
        )  # fmt: skip
    return [each.clone() for each in (outputs, gates, cells, c, grads, grad_h, grad_c)]


@kernel_case
@cells
def test_pieces_and_launches_do_not_change_a_bit(cell):
    """One piece, three pieces; a launch a step, a launch a piece; gates written over."""
    piece = piece_of(cell, 5, *((70, 80) if ON_GPU else (18, 20)))
    tile = scan.Tile(16, 16, 16, 4, 2)
    by_step, by_piece = (
        scan_kernels(cell, "ieee", lambda *_, launch=launch: scan.Plan(tile, tile, launch))
        for launch in ("step", "piece")
    )
    expected = scanned(by_step, piece, [])
    for kernels, cuts in ((by_step, [1, 3]), (by_piece, []), (by_piece, [2])):
        for ours, other in zip(scanned(kernels, piece, cuts), expected, strict=True):
            assert torch.equal(ours, other)
    x, weight_ih, *given, kept = piece
    last = by_step.forward(
        by_step.project(x, weight_ih, None), *given, torch.empty_like(kept[0]), None, None
    )
    assert torch.equal(last, expected[3])


@kernel_case
@pytest.mark.parametrize(
    ("size", "width", "other"), [(5000, 300, 260), (16384, 1024, 256)] if ON_GPU else [(40, 20, 9)]
)
def test_a_product_in_tf32(size, width, other):
    rows = torch.randn(size, width + 16, device=DEVICE)[:, 16:]
    weight, bias = torch.randn(width, other, device=DEVICE).mT, torch.randn(other, device=DEVICE)
    expected = rows.double() @ weight.double().T + bias
    error = (products.linear(rows, weight, bias) - expected).abs()
    # A factor loses at most 2^-10 of itself, and each of the sums in float32 2^-24.
    sizes = rows.double().abs() @ weight.double().abs().T + bias.abs()
    assert (error <= (2.0**-9 + 2.0**-20 + width * 2.0**-24) * sizes).all()


@kernel_case
@cells
def test_rows_with_any_strides(cell):
    """The gradient of a sum is one number for all; rows of x may be a part of wider ones."""
    x, params, state, resets = drawn(cell, 3, 2, 5, 6)
    strided = torch.stack([x, x], dim=-1)[..., 0].requires_grad_()
    outputs, _ = SCANS[cell](strided, params, state, resets, backend="triton")
    (found,) = torch.autograd.grad(outputs.sum(), strided)
    x.requires_grad_()
    expected, _ = SCANS[cell](x, params, state, resets, backend="loop")
    assert (outputs - expected).abs().max() < 1e-5
    assert (found - torch.autograd.grad(expected.sum(), x)[0]).abs().max() < 1e-5


@cells
def test_what_the_kernels_do_not_take_is_refused_by_name(cell):
    pytest.importorskip("triton")
    x, params, state, _ = drawn(cell, 2, 3, 4, 5)
    wide = optree.tree_map(torch.Tensor.double, (x, params, state))
    with pytest.raises(ValueError, match=rf"{cell}_scan .*float32, bfloat16 or float16, got.*64"):
        SCANS[cell](*wide, backend="triton")
    if not (ON_GPU or INTERPRETED):
        with pytest.raises(ValueError, match=rf"{cell}_scan .*x on a GPU, got cpu"):
            SCANS[cell](x, params, state, backend="triton")


@pytest.mark.gpu
@cells
def test_tf32_products_have_the_errors_of_tf32(cell):
    """Inputs of a product are cut to 10 bits: one that is sharper would not be tf32."""
    inputs = drawn(cell, 300, 20, 64, 256)
    expected = oracle(cell, *inputs)
    found = results(cell, *inputs, backend="triton", precision="tf32")
    assert_near(found, expected, outputs=2e-2, gradients=2e-2)
    assert (found[0][0].double() - expected[0][0]).abs().max() > 2e-5


@pytest.mark.gpu
def test_bfloat16_is_within_the_bound_of_its_roundings():
    """The outputs of an LSTM; its gradients err no more than those of torch's operations."""
    x, params, (h, c), _ = drawn("lstm", 256, 48, 64, 256, dtype=torch.bfloat16)
    inputs = x, params, (h, c), None
    expected = oracle("lstm", *inputs)
    found = results("lstm", *inputs, backend="triton")
    bound = roundings_of_lstm(*(each.double() for each in (x, *params.values(), h[:, 0], c[:, 0])))
    assert ((found[0][0].double() - expected[0][0]).abs() < bound).all()
    theirs = results("lstm", *inputs, backend="op")
    for ours, other, wide in zip(found[1], theirs[1], expected[1], strict=True):
        assert (ours.double() - wide).norm() < 1.5 * (other.double() - wide).norm()


def roundings_of_lstm(x, weight_ih, weight_hh, bias_ih, bias_hh, h, c):
    """Bound the errors of outputs [N, T, H] whose input product and h are rounded at each step.

    Of each number the standard deviation is carried on, for independent roundings, each uniform in
    +-UNIT of its number; the bound is 6 deviations.
    """
    rounding = UNIT / 3**0.5
    error_h, error_c, bounds = torch.zeros_like(h), torch.zeros_like(c), []
    for step in range(x.shape[1]):
        projected = x[:, step] @ weight_ih.T + bias_ih + bias_hh
        error = (error_h.square() @ weight_hh.square().T + (rounding * projected).square()).sqrt()
        i, f, g, o = (projected + h @ weight_hh.T).chunk(4, dim=-1)
        error_i, error_f, error_g, error_o = error.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        error_c = f * error_c + c.abs() * f * (1 - f) * error_f
        error_c += g.abs() * i * (1 - i) * error_i + i * (1 - g * g) * error_g
        c = f * c + i * g
        h = o * c.tanh()
        error_h = o * (1 - c.tanh().square()) * error_c + c.tanh().abs() * o * (1 - o) * error_o
        error_h += rounding * h.abs()
        bounds.append(6 * error_h)
    return torch.stack(bounds, dim=1)


@pytest.mark.gpu
@cells
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_captured_step_runs_on_new_inputs(cell, recompute):
    x, params, _, resets = drawn(cell, 256, 40, 64, 256)

    def step():
        # New leaves each time: torch binds a leaf's gradient to the first stream it is used on.
        inputs, *weights = (each.detach().requires_grad_() for each in (x, *params.values()))
        named = dict(zip(params, weights, strict=True))
        outputs, _ = SCANS[cell](inputs, named, None, resets, backend="triton", recompute=recompute)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), [inputs, *weights])]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    resets.copy_(~resets)
    graph.replay()
    found = [each.clone() for each in captured]
    assert all(torch.equal(ours, other) for ours, other in zip(found, step(), strict=True))

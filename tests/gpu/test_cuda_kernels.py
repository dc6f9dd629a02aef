"""The exact kernels of a GPU, against float64 and against themselves in other company.

The cases run on a GPU, and smaller ones through Triton's interpreter on a machine without one, in a
process of its own, as Triton reads its switch when it is imported.
"""

import pytest
import torch
from exact_draws import block_sums
from exact_implementations import implementations
from kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU, interpreting, kernel_case, run_interpreted

if ON_GPU or INTERPRETED:
    from funcrl.ops.exact.cuda.linear import DEFINITION, FEW_ROWS, tiled

    exact = implementations("funcrl.ops.exact.cuda")
OF_LIBRARY = DTYPES if ON_GPU else [torch.float32]  # a CPU has no product of bfloat16 in float32


@interpreting
def test_the_cases_hold_under_the_interpreter():
    run_interpreted(__file__, __file__.replace("kernels", "attention"))


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_near(ours, oracle, dtype):
    """The relative error is that of one rounding of the result and of the operands."""
    assert torch.isfinite(ours).all()
    error = (ours.double() - oracle.double()).norm() / oracle.double().norm().clamp(min=1e-30)
    assert error < (8e-3 if dtype == torch.bfloat16 else 2e-6), error


def strided(x):
    """The same numbers in the middle of wider rows."""
    wide = x.new_full((x.shape[0], x.shape[1] + 48), float("nan"))
    wide[:, 16 : 16 + x.shape[1]] = x
    return wide[:, 16 : 16 + x.shape[1]]


def assert_rows_alone(function, *inputs, sizes=(1, 2, 7, 16, 33)):
    """Rows of the results are the same for a few rows, for each place, and for strided inputs."""
    whole = function(*inputs)
    whole = whole if isinstance(whole, tuple) else (whole,)
    total = inputs[0].shape[0]
    for size in [size for size in sizes if size <= total]:
        for start in {0, (total - size) // 2, total - size}:
            few = function(*[part[start : start + size] for part in inputs])
            few = few if isinstance(few, tuple) else (few,)
            for ours, other in zip(few, whole, strict=True):
                assert torch.equal(ours, other[start : start + size]), (size, start)
    again = function(*[strided(part) if part.ndim == 2 else part for part in inputs])
    again = again if isinstance(again, tuple) else (again,)
    assert all(torch.equal(ours, other) for ours, other in zip(again, whole, strict=True))


@kernel_case
@pytest.mark.parametrize("dtype", OF_LIBRARY)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(96, 64), (50, 40)] if ON_GPU else [(50, 40)])
def test_linear(dtype, transposed, biased, columns, inner):
    x, weight = randn(40, inner, dtype=dtype), randn(columns, inner, dtype=dtype)
    if transposed:
        weight = weight.t().contiguous().t()
    bias = randn(columns, dtype=dtype) if biased else None
    wide = bias.double() if biased else 0
    assert_near(exact.linear(x, weight, bias), x.double() @ weight.double().t() + wide, dtype)
    assert_rows_alone(lambda x: exact.linear(x, weight, bias), x)
    assert exact.linear(x[:0], weight, bias).shape == (0, columns)


@kernel_case
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_tiles_for_few_rows(rows):
    x, weight = randn(20, 300), randn(70, 300)
    if ON_GPU:
        x, weight = x.bfloat16(), weight.bfloat16()
    for tile in FEW_ROWS[rows].values():
        ours = tiled(x, weight, None, tile)
        if ON_GPU:
            assert torch.equal(ours, tiled(x, weight, None, DEFINITION))
        assert_near(ours, x.double() @ weight.double().t(), x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "inner"), [(4096, 1024), (1024, 2048), (1024, 3072), (576, 1536)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_of_many_rows(columns, inner, transposed):
    x, weight = randn(4096, inner).bfloat16(), randn(columns, inner).bfloat16()
    if transposed:
        weight = weight.t().contiguous().t()
    sizes = (1, 2, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 1000, 2048)
    assert_rows_alone(lambda x: exact.linear(x, weight, None), x, sizes=sizes)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_gradients(dtype):
    grad, x = randn(70, 24, dtype=dtype), randn(70, 40, dtype=dtype)
    if DEVICE == "cuda" or dtype == torch.float32:
        ours = exact.weight_gradient(grad, x)
        assert ours.dtype == torch.float32
        assert_near(ours, grad.double().t() @ x.double(), torch.float32)
    assert_near(exact.bias_gradient(grad), grad.double().sum(0), torch.float32)
    assert exact.weight_gradient(grad[:0], x[:0]).eq(0).all()


@kernel_case
@pytest.mark.parametrize("dtype", OF_LIBRARY)
@pytest.mark.parametrize("rows", [96, 8192] if ON_GPU else [96])
@pytest.mark.parametrize("blocks", [2, 4])
def test_sums_of_blocks_are_those_of_each_alone(dtype, rows, blocks):
    x, grad = randn(rows, 72, dtype=dtype), randn(rows, 72, dtype=dtype, seed=1)
    weight, tokens = randn(72, dtype=dtype, seed=2), (randn(rows, seed=3) * 3).abs().long()
    for number, pair in enumerate(block_sums(exact, grad, x, weight, tokens, blocks)):
        assert torch.equal(*pair), number


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128, 576, 1024, 3000] if ON_GPU else [72])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_and_their_gradients(dtype, width, offset):
    x, delta, grad = (randn(40, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    weight = randn(width, dtype=dtype, seed=4)

    def oracle(x, weight):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * (weight + offset)

    leaves = [part.double().requires_grad_() for part in (x, weight)]
    out, scale = exact.rms_norm(x, weight, 1e-6, offset)
    assert_near(out, oracle(*leaves), dtype)
    expected = torch.autograd.grad(oracle(*leaves), leaves, grad.double())
    grad_x, grad_weight = exact.rms_norm_gradients(grad, x, weight, scale, offset)
    assert grad_weight.dtype == scale.dtype == torch.float32
    assert_near(grad_x, expected[0], dtype)
    assert_near(grad_weight, expected[1], dtype)
    total, added, _ = exact.add_rms_norm(x, delta, weight, 1e-6, offset)
    assert torch.equal(total, x + delta)
    assert torch.equal(added, exact.rms_norm(total, weight, 1e-6, offset)[0])
    assert_rows_alone(lambda x: exact.rms_norm(x, weight, 1e-6, offset), x)
    assert_rows_alone(lambda x, y: exact.add_rms_norm(x, y, weight, 1e-6, offset), x, delta)
    assert_rows_alone(
        lambda g, x, s: exact.rms_norm_gradients(g, x, weight, s, offset)[0], grad, x, scale
    )


GATES = {
    "swiglu": torch.nn.functional.silu,
    "geglu": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    "sigmoid_gate": torch.sigmoid,
}


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 1500] if ON_GPU else [96])
@pytest.mark.parametrize("name", GATES)
def test_gates_and_their_gradients(name, dtype, width):
    value, gradients = getattr(exact, name), getattr(exact, f"{name}_gradients")
    gate, up, grad = (randn(40, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    leaves = [part.double().requires_grad_() for part in (gate, up)]
    oracle = GATES[name](leaves[0]) * leaves[1]
    assert_near(value(gate, up), oracle, dtype)
    expected = torch.autograd.grad(oracle, leaves, grad.double())
    for ours, wide in zip(gradients(grad, gate, up), expected, strict=True):
        assert_near(ours, wide, dtype)
    assert_rows_alone(value, gate, up)
    assert_rows_alone(gradients, grad, gate, up)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 80, 128] if ON_GPU else [20])
def test_rotation_and_its_inverse(dtype, width):
    x = randn(3, 5, 3, 2 * width, dtype=dtype)[..., :width].transpose(1, 2)
    rotation = randn(2, 1, 5, width).expand(2, 3, 5, width)
    cos, sin = rotation[:, :, None].double().unbind(0)
    wide = x.double().requires_grad_()
    oracle = wide * cos + wide.roll(width // 2, -1) * sin
    out = exact.rotate(x, rotation, False)
    assert_near(out, oracle, dtype)
    (expected,) = torch.autograd.grad(oracle, wide, x.double())
    assert_near(exact.rotate(x, rotation, True), expected, dtype)
    one = exact.rotate(x[1:2, 1:, 2:3], rotation[:, 1:2, 2:3], False)
    assert torch.equal(one, out[1:2, 1:, 2:3])


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [13, 1600, 9000] if ON_GPU else [9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7] if ON_GPU else [0.7])
def test_scores_and_their_gradients(dtype, vocabulary, temperature):
    logits = randn(12, vocabulary, dtype=dtype) * 3
    logits[:, 5] = -torch.inf
    targets = torch.randint(6, vocabulary, (12,), generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    targets[0] = 5
    grads = randn(12, seed=1), randn(12, seed=2)
    grads[0][0] = 0
    logprob, entropy, normaliser = exact.scores(logits, targets, temperature)
    assert logprob[0] == -torch.inf
    wide = logits.double().requires_grad_()
    table = torch.log_softmax(wide / temperature, -1)
    oracle = table.gather(-1, targets[:, None])[1:, 0], torch.special.entr(table.exp()).sum(-1)
    assert_near(logprob[1:], oracle[0], torch.float32)
    assert_near(entropy, oracle[1], torch.float32)
    finite = table.clamp(min=-1e30)
    total = (finite.gather(-1, targets[:, None])[:, 0] * grads[0]).sum()
    total = total - ((finite.exp() * finite).sum(-1) * grads[1]).sum()
    (expected,) = torch.autograd.grad(total, wide)
    ours = exact.scores_gradients(logits, targets, entropy, normaliser, *grads, temperature)
    assert ours.dtype == dtype
    assert_near(ours, expected, dtype)
    assert torch.equal(exact.logsumexp(logits, temperature), normaliser)
    everything = exact.log_softmax(logits, temperature)
    assert torch.equal(everything.gather(-1, targets[:, None])[:, 0], logprob)
    assert_rows_alone(lambda x, t: exact.scores(x, t, temperature), logits, targets)
    assert_rows_alone(lambda x: exact.log_softmax(x, temperature), logits)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gradient(dtype):
    grad = randn(300, 70, dtype=dtype)
    tokens = torch.randint(0, 20, (300,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tokens[40:140] = 3
    ours = exact.embedding_gradient(grad, tokens, 25)
    oracle = torch.zeros(25, 70, dtype=torch.float64, device=DEVICE).index_add(
        0, tokens, grad.double()
    )
    assert_near(ours, oracle, torch.float32)
    assert ours[20:].eq(0).all()
    assert torch.equal(ours, exact.embedding_gradient(grad, tokens, 25))


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width"),
    [(16, 8, 128), (9, 3, 64), (40, 8, 80), (4, 4, 256)] if ON_GPU else [(3, 1, 20)],
)
def test_norm_and_rotation_at_once_have_the_bits_of_each(heads, key_heads, width, normed, dtype):
    # Queries and keys lie in one row, as a joined product leaves them.
    row = randn(2, 3, (heads + key_heads) * width, dtype=dtype)
    q, k = row.unflatten(-1, (-1, width)).split([heads, key_heads], dim=2)
    rotation = randn(2, 2, 3, width)
    gains = tuple(randn(width, dtype=dtype, seed=seed) for seed in (1, 2)) if normed else None
    for number, (out, part) in enumerate(
        zip(exact.norm_rotate(q, k, gains, 1e-6, rotation), (q, k), strict=True)
    ):
        flat = part.reshape(-1, width)
        if gains is not None:
            flat = exact.rms_norm(flat, gains[number], 1e-6, 0.0)[0]
        expected = exact.rotate(flat.view(part.shape).transpose(1, 2), rotation, False)
        assert torch.equal(out, expected)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 300, 16384, 151936] if ON_GPU else [1, 300, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_invert_the_cumulative_distribution(dtype, vocabulary, temperature):
    rows = 32 if ON_GPU else 6
    logits = randn(rows, vocabulary, dtype=dtype) * 3
    logits[:, 1::7] = -torch.inf
    generator = torch.Generator().manual_seed(vocabulary)
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).to(DEVICE)
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    tokens, logprobs = exact.draw(logits, uniforms, temperature)
    assert torch.equal(logprobs, exact.scores(logits, tokens, temperature)[0])
    # A weight is a float32 exponential: its error, a few units of 2^-24 and those of its exponent,
    # which is at most 40 here, is that of the cumulative probability.
    wide = torch.softmax(logits.double() / temperature, dim=-1)
    cumulative = wide.cumsum(-1)
    after = cumulative.gather(1, tokens[:, None]).squeeze(1)
    before = after - wide.gather(1, tokens[:, None]).squeeze(1)
    bound = 64 * 2.0**-24
    assert (before - bound <= uniforms).all()
    assert (uniforms <= after + bound).all()
    assert (wide.gather(1, tokens[:, None]) > 0).all()


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("shape", "width"), [((2, 96, 16), 128), ((3, 50, 9), 64)] if ON_GPU else [((2, 3, 4), 20)]
)
def test_gradients_of_norm_and_rotation_at_once(shape, width, normed, dtype):
    x = randn(*shape, 2 * width, dtype=dtype)[..., :width]  # as a joined product leaves it
    grad = randn(*shape, width, dtype=dtype, seed=1).transpose(1, 2)
    rotation, gain = randn(2, *shape[:2], width), randn(width, dtype=dtype, seed=2)
    leaves = [part.double().requires_grad_() for part in (x, gain)]
    scale = torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + 1e-6)
    rows = leaves[0] * scale * leaves[1] if normed else leaves[0]
    cos, sin = rotation.double()[:, :, :, None]
    turned = (rows * cos + rows.roll(width // 2, -1) * sin).transpose(1, 2)
    wanted = leaves if normed else leaves[:1]
    expected = torch.autograd.grad(turned, wanted, grad.double())
    given = (grad, x, gain if normed else None, 1e-6, rotation)
    found = exact.norm_rotate_gradients(*given)
    for ours, wide in zip(found, expected, strict=False):
        assert_near(ours, wide, dtype)
    if not normed:
        assert found[1] is None
        return
    # A sample's gradient is its own, and the sum over two blocks is that of their sums.
    half = [exact.norm_rotate_gradients(*_samples(given, part)) for part in _halves(shape[0])]
    if shape[0] % 2 == 0:
        blocks = exact.norm_rotate_gradients(*given, blocks=2)
        assert torch.equal(blocks[1], half[0][1] + half[1][1])
    assert torch.equal(found[0], torch.cat([half[0][0], half[1][0]]))


def _halves(size):
    return slice(0, size // 2), slice(size // 2, size)


def _samples(given, part):
    """The arguments of `norm_rotate_gradients` for some samples."""
    grad, x, gain, eps, rotation = given
    return grad[part], x[part], gain, eps, rotation[:, part]

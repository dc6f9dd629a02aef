"""The CPU kernels against plain formulas in float64; that rows stand alone is fuzzed elsewhere."""

import exact_fuzz
import pytest
import torch
from exact_implementations import implementations
from sharing import samples_under_way, with_new

cpu = implementations("funcrl.ops.exact")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def near(result, expected, dtype, factor=8.0):
    assert result.shape == expected.shape
    assert result.is_contiguous()
    eps = torch.finfo(dtype).eps
    scale = expected.abs().amax() if expected.numel() else 1.0
    torch.testing.assert_close(
        result.double(), expected, rtol=factor * eps, atol=float(factor * eps * scale)
    )


def drawn(*shape, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def oracle_attention(q, k, v, first, last):
    """The definition, one dense softmax; a query without keys gives 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    places = torch.arange(k.shape[2])
    seen = (places >= first[..., None]) & (places <= last[..., None])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen[:, None], -torch.inf)
    normaliser = scores.logsumexp(dim=-1)
    weights = (scores - normaliser[..., None]).exp().masked_fill(~seen[:, None], 0)
    return weights @ v, normaliser.masked_fill(~seen.any(-1)[:, None], 0)


# (first, last) of rows of 7 queries: causal, on a cache of 4, packed with padding, and shifted
MASKS = {
    "causal": ([0] * 7, list(range(7))),
    "a chunk": ([0] * 7, list(range(4, 11))),
    "packed": ([0, 0, 0, 3, 3, 3, 6], [0, 1, 2, 3, 4, -1, -1]),
    "shifted": ([2] * 7, list(range(2, 9))),
    "nothing": ([0] * 7, [-1] * 7),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_softmax_over_the_keys_seen(name, dtype):
    first, last = (torch.tensor([row, row]) for row in MASKS[name])
    q = drawn(2, 4, 7, 8, dtype=dtype)
    k, v = (drawn(2, 2, 11, 8, dtype=dtype, seed=s) for s in (1, 2))
    grad = drawn(2, 4, 7, 8, dtype=dtype, seed=3)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = oracle_attention(*leaves, first, last)
    out, normaliser = cpu.attend(q, k, v, first, last)
    near(out, expected[0].detach(), dtype)
    near(normaliser, expected[1].detach(), torch.promote_types(dtype, torch.float32), 64.0)
    expected_grads = torch.autograd.grad(expected[0], leaves, grad.double(), allow_unused=True)
    grads = cpu.attend_gradients(grad, q, k, v, first, last, out, normaliser)
    for result, value in zip(grads, expected_grads, strict=True):
        near(result, torch.nan_to_num(value), dtype, 32.0)


def test_attention_never_reads_what_nobody_sees():
    q, k = drawn(2, 2, 3, 8, dtype=torch.float32), drawn(2, 1, 40, 8, dtype=torch.float32)
    first, last = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[3, 4, 5], [7, 8, 9]])
    clean, _ = cpu.attend(q, k, k, first, last)
    for row, end in ((0, 6), (1, 10)):
        k[row, :, end:] = torch.nan
    assert torch.equal(cpu.attend(q, k, k, first, last)[0], clean)


def test_paged_attention_has_the_bits_of_attention():
    q, width = drawn(3, 4, 16, dtype=torch.float32), 16
    places = drawn(2, 2, 40, 2 * width, dtype=torch.float32, seed=1)
    cache = torch.full((11, 2, 8, 2 * width), torch.nan)
    tables = torch.tensor([[3, 9, 1, 7, 5], [2, 0, 10, 4, 6]])
    for request in range(2):
        for place in range(40):
            cache[tables[request, place // 8], :, place % 8] = places[request, :, place]
    request, last = torch.tensor([1, 0, 1]), torch.tensor([39, 17, 3])
    k, v = places[request].split(width, dim=-1)
    expected, _ = cpu.attend(q[:, :, None], k, v, torch.zeros(3, 1).long(), last[:, None])
    assert torch.equal(cpu.attend_paged(q, cache, tables, request, last), expected[:, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
def test_products_are_products(num_rows, dtype):
    x, grad = drawn(num_rows, 24, dtype=dtype), drawn(num_rows, 13, dtype=dtype, seed=1)
    weight, bias = drawn(13, 24, dtype=dtype, seed=2), drawn(13, dtype=dtype, seed=3)
    wide = torch.promote_types(dtype, torch.float32)
    near(cpu.linear(x, weight, None), x.double() @ weight.double().mT, dtype)
    near(cpu.linear(grad, weight.mT, None), grad.double() @ weight.double(), dtype)
    near(cpu.linear(x, weight, bias), x.double() @ weight.double().mT + bias.double(), dtype)
    near(cpu.weight_gradient(grad, x), grad.double().mT @ x.double(), wide)
    near(cpu.bias_gradient(grad), grad.double().sum(dim=0), wide)
    tokens = torch.arange(num_rows) % 5
    expected = torch.zeros(6, 24).double().index_add(0, tokens, x.double())
    near(cpu.embedding_gradient(x, tokens, 6), expected, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_and_their_gradients(offset, dtype):
    x, delta, grad = (drawn(5, 24, dtype=dtype, seed=s) for s in range(3))
    weight = drawn(24, dtype=dtype, seed=3)
    total, out, scale = cpu.add_rms_norm(x, delta, weight, 1e-5, offset)
    assert torch.equal(total, x + delta)
    leaves = [leaf.double().clone().requires_grad_() for leaf in (total, weight)]
    expected_scale = (leaves[0].square().mean(dim=-1) + 1e-5).rsqrt()
    expected = leaves[0] * expected_scale[:, None] * (leaves[1] + offset)
    near(out, expected.detach(), dtype)
    near(scale, expected_scale.detach(), torch.promote_types(dtype, torch.float32))
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    grads = cpu.rms_norm_gradients(grad, total, weight, scale, offset)
    for result, value in zip(grads, expected_grads, strict=True):
        near(result, value, dtype)


GATES = {
    "swiglu": torch.nn.functional.silu,
    "geglu": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    "sigmoid_gate": torch.sigmoid,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_gates_and_their_gradients(name, dtype):
    gate, up, grad = (drawn(5, 24, dtype=dtype, seed=s) for s in range(3))
    gate[0, 0], gate[0, 1] = -200.0, 200.0
    leaves = [leaf.double().clone().requires_grad_() for leaf in (gate, up)]
    expected = GATES[name](leaves[0]) * leaves[1]
    near(getattr(cpu, name)(gate, up), expected.detach(), dtype)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    found = getattr(cpu, f"{name}_gradients")(grad, gate, up)
    for result, value in zip(found, expected_grads, strict=True):
        near(result, value, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_its_transpose(dtype):
    x, other = (drawn(2, 3, 5, 8, dtype=dtype, seed=s) for s in range(2))
    rotation = drawn(2, 2, 5, 8, dtype=torch.float32, seed=2)
    cos, sin = rotation.double()[:, :, None]
    near(cpu.rotate(x, rotation, False), x.double() * cos + x.double().roll(4, -1) * sin, dtype)
    back = other.double() * cos + (other.double() * sin).roll(4, -1)
    near(cpu.rotate(other, rotation, True), back, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_their_gradients(temperature, dtype):
    logits, wide = drawn(6, 19, dtype=dtype), torch.promote_types(dtype, torch.float32)
    logits[0, 3] = logits[4, 1:] = -torch.inf
    targets = torch.tensor([0, 1, 2, 3, 0, 5])
    leaf = logits.double().clone().requires_grad_()
    table = torch.log_softmax(leaf / temperature, dim=-1)
    expected = table[torch.arange(6), targets]
    entropy = torch.special.entr(table.detach().exp()).sum(dim=-1)
    logprob, own_entropy, normaliser = cpu.scores(logits, targets, temperature)
    near(logprob, expected.detach(), wide)
    near(own_entropy, entropy, wide)
    near(normaliser, torch.logsumexp(logits.double() / temperature, dim=-1), wide)
    assert torch.equal(cpu.logsumexp(logits, temperature), normaliser)
    log_softmax = cpu.log_softmax(logits, temperature)
    assert torch.equal(log_softmax.gather(-1, targets[:, None])[:, 0], logprob)
    grads = drawn(2, 6, dtype=wide, seed=3)
    result = cpu.scores_gradients(logits, targets, own_entropy, normaliser, *grads, temperature)
    p, finite = table.detach().exp(), table.detach().clamp(min=-1e30)
    onehot = torch.nn.functional.one_hot(targets, 19)
    g, h = grads.double()[..., None]
    value = g * (onehot - p) - h * p * (finite + entropy[:, None])
    near(result, value / temperature, dtype)


@pytest.mark.parametrize("op", exact_fuzz.OPS)
def test_a_row_has_the_same_bits_in_any_company(op):
    differing = [exact_fuzz.run_case(op, seed, "cpu") for seed in range(25)]
    assert [what for what in differing if what] == []


@pytest.mark.parametrize("seed", range(4))
def test_shared_pages_have_the_bits_of_pages(seed):
    case = samples_under_way(torch.float32, 4, 2, 16, 3, 3, 16, seed)
    case.last[seed] = -1
    case.sharing.members[case.sharing.members == 5] = -1  # in no group: writes nothing
    written = with_new(case)
    every = torch.arange(len(case.q))
    expected = cpu.attend_paged(case.q, written, case.tables, every, case.last)
    before = case.cache.clone()
    out = cpu.attend_new(*case)
    rest = [row for row in range(len(case.q)) if row not in (5, seed)]
    assert torch.equal(out[rest], expected[rest])
    assert not out[seed].any()
    for row in (5, seed):
        page = case.tables[row, -1]
        assert torch.equal(case.cache[page].nan_to_num(9), before[page].nan_to_num(9))


@pytest.mark.parametrize("normed", [True, False])
def test_norm_and_rotation_at_once_have_the_bits_of_each(normed):
    q, k, rotation = (
        drawn(*shape, dtype=torch.float32)
        for shape in ((2, 3, 4, 16), (2, 3, 2, 16), (2, 2, 3, 16))
    )
    gains = tuple(drawn(2, 16, dtype=torch.float32)) if normed else None
    for number, (out, part) in enumerate(
        zip(cpu.norm_rotate(q, k, gains, 1e-6, rotation), (q, k), strict=True)
    ):
        flat = part.reshape(-1, 16)
        if gains is not None:
            flat = cpu.rms_norm(flat, gains[number], 1e-6, 0.0)[0]
        expected = cpu.rotate(flat.view(part.shape).transpose(1, 2), rotation, False)
        assert torch.equal(out, expected)

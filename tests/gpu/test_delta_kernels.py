"""The kernels of the gated delta scan, against the loop in float64 and against themselves.

The cases run on a GPU, and through Triton's interpreter on a machine without one, in a process of
its own.
"""

import pytest
import torch
from exact_implementations import implementations
from kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU, interpreting, kernel_case, run_interpreted

import funcrl
from funcrl.ops import gated_delta_scan
from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.sequence_args import last_tokens

# The samples, heads, tokens and widths of keys and values.
cpu = implementations("funcrl.ops.exact")
SHAPES = [(2, 3, 200, 128, 128), (1, 2, 70, 40, 20)] if ON_GPU else [(1, 2, 70, 6, 20)]
CHUNK = 64

if ON_GPU or INTERPRETED:
    from funcrl.ops.delta import cuda as in_chunks

    exact = implementations("funcrl.ops.exact.cuda")


@interpreting
def test_the_cases_hold_under_the_interpreter():
    run_interpreted(__file__)


def draw(shape, dtype, resets=0.03):
    size, heads, length, key_width, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*shape):
        return torch.randn(size, heads, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(length, key_width), dim=-1) for _ in "qk")
    given = [q, k, normal(length, width), -0.3 * normal(length).abs(), normal(length).sigmoid()]
    begins = torch.rand(size, length, generator=generator) < resets
    given = [x.to(DEVICE, dtype) for x in given]
    return [*given, normal(key_width, width).to(DEVICE), begins.to(DEVICE)]


def oracle(given, grads):
    """Outputs, last state and gradients by the loop in float64."""
    leaves = [x.double().requires_grad_() for x in given[:6]]
    results = gated_delta_scan(*leaves, given[6], backend="loop")
    return [*results, *torch.autograd.grad(results, leaves, [x.double() for x in grads])]


def assert_near(found, expected, dtype):
    """The relative error of each result, in its norm.

    No step of the rule enlarges an error, as keys have length 1. In bfloat16 the factors of each
    product of matrices are rounded to 8 bits: a result has some ten such roundings in a row, and
    their errors are independent, so that its norm's error is some three times that of one.
    """
    limit = 1.5e-2 if dtype == torch.bfloat16 else 2e-5
    for number, (ours, wide) in enumerate(zip(found, expected, strict=True)):
        # A state before a first token that begins anew has a gradient of 0.
        error = (ours.double() - wide).norm() / wide.norm().clamp(min=1e-30)
        assert error < limit, (number, error)


def grads_like(given):
    generator = torch.Generator().manual_seed(1)
    parts = [(given[2].shape, given[2].dtype), (given[5].shape, torch.float32)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape, dtype in parts]


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scans_in_chunks(shape, dtype):
    given = draw(shape, dtype)
    grads = grads_like(given)
    expected = oracle(given, grads)
    tokens = Tokens(*given[:5], given[6])
    results = in_chunks.scan(tokens, given[5], CHUNK)
    found = [*results, *in_chunks.scan_gradients(*grads, tokens, given[5], CHUNK)]
    assert [x.dtype for x in found] == [dtype, torch.float32, *[dtype] * 5, torch.float32]
    assert_near(found, expected, dtype)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scans_from_token_to_token(shape, dtype):
    given = draw(shape, dtype)
    grads = grads_like(given)
    found = [*exact.gated_delta(*given), *exact.gated_delta_gradients(*grads, *given)]
    assert_near(found, oracle(given, grads), dtype)


@kernel_case
def test_keys_that_are_all_alike():
    """The system with the largest inverse: everything below the diagonal is 1."""
    given = draw((1, 1, 64, 16, 16), torch.float32)
    given[1] = given[1][:, :, :1].expand_as(given[1]).contiguous()
    given[3], given[4] = torch.zeros_like(given[3]), torch.ones_like(given[4])
    given[6] = torch.zeros_like(given[6])
    grads = grads_like(given)
    tokens = Tokens(*given[:5], given[6])
    results = in_chunks.scan(tokens, given[5], CHUNK)
    gradients = in_chunks.scan_gradients(*grads, tokens, given[5], CHUNK)
    assert_near([*results, *gradients], oracle(given, grads), torch.float32)


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_that_is_handed_on_has_the_bits_of_the_whole(shape, dtype):
    given = draw(shape, dtype)
    whole = exact.gated_delta(*given)
    for cuts in ([13], [1, 2, 30], list(range(1, shape[2]))):
        state, outputs = given[5], []
        pieces = [x.tensor_split(cuts, dim=2) for x in given[:5]]
        for *part, resets in zip(*pieces, given[6].tensor_split(cuts, dim=1), strict=True):
            out, state = exact.gated_delta(*part, state, resets)
            outputs.append(out)
        assert torch.equal(torch.cat(outputs, dim=2), whole[0])
        assert torch.equal(state, whole[1])


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_has_the_bits_that_it_has_alone(dtype):
    """In a batch of any size, its gradients too, and packed behind another one."""
    given = draw((5, 3, 150, 128, 128) if ON_GPU else (3, 2, 20, 6, 4), dtype)
    grads = grads_like(given)

    def run(given, grads):
        return [*exact.gated_delta(*given), *exact.gated_delta_gradients(*grads, *given)]

    whole = run(given, grads)
    for rows in (slice(0, 1), slice(1, 3), slice(2, 3)):
        few = run([x[rows] for x in given], [x[rows] for x in grads])
        assert all(torch.equal(a, b[rows]) for a, b in zip(few, whole, strict=True))
    # Heads of which there is one, whose tokens lie apart in memory.
    one = [x[:, :1] for x in given[:5]]
    one[0] = torch.cat((one[0], one[0]), dim=-1)[..., : one[0].shape[-1]]
    alone = exact.gated_delta(*one, given[5][:, :1], given[6])
    assert torch.equal(alone[0], whole[0][:, :1])
    given[6][:, 11] = True
    packed = exact.gated_delta(*given)
    later = [x[:, :, 11:] for x in given[:5]]
    alone = exact.gated_delta(*later, torch.zeros_like(given[5]), given[6][:, 11:])
    assert torch.equal(packed[0][:, :, 11:], alone[0])
    assert torch.equal(packed[1], alone[1])


@kernel_case
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 4])
def test_the_short_convolution(dtype, taps):
    size, length, width = (3, 70, 300) if ON_GPU else (2, 11, 5)
    generator = torch.Generator().manual_seed(taps)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    x, history, weight = (
        normal(size, length, width),
        normal(size, taps - 1, width),
        normal(width, taps),
    )
    grad = normal(size, length, width)
    resets = (torch.rand(size, length, generator=generator) < 0.2).to(DEVICE)
    out = exact.short_conv(x, weight, history, resets)
    found = exact.short_conv_gradients(grad, x, weight, history, resets)
    wide = [part.double() for part in (grad, x, weight, history)]
    expected = cpu.short_conv_gradients(*wide, resets)
    assert_near(
        [out, *found[:: 1 if taps > 1 else 2]],
        [cpu.short_conv(*wide[1:], resets), *expected[:: 1 if taps > 1 else 2]],
        dtype,
    )
    for cuts in ([4], list(range(1, length))):
        before, outs = history, []
        for part, begins in zip(
            x.tensor_split(cuts, dim=1), resets.tensor_split(cuts, dim=1), strict=True
        ):
            outs.append(exact.short_conv(part, weight, before, begins))
            before = last_tokens(part, before, begins)
        assert torch.equal(torch.cat(outs, dim=1), out)
    few = exact.short_conv_gradients(grad[1:], x[1:], weight, history[1:], resets[1:])
    assert all(torch.equal(a, b[1:]) for a, b in zip(few, found, strict=True))


@pytest.mark.gpu
def test_a_compiled_step_with_a_cuda_graph_runs_the_kernels():
    *given, resets = draw((4, 2, 96, 64, 64), torch.bfloat16)

    def loss(given, resets):
        outputs, last = gated_delta_scan(*given, resets, backend="triton")
        return outputs.float().sum() + last.sum()

    def step(given, resets):
        return torch.func.vmap(torch.func.grad(loss))(given, resets)

    traced = funcrl.trace(step, given, resets)
    with torch.no_grad():
        compiled = torch.compile(traced, backend="inductor")
        for _ in range(2):
            compiled(given, resets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = compiled(given, resets)
    graph.replay()
    assert all(map(torch.equal, found, step(given, resets)))

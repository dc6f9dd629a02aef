"""Operations in Inductor's words: the same bits, and others left alone."""

from collections import Counter

import pytest
import torch
from cases import equal

import funcrl
from funcrl.graph.lowering import embedding_by_kernel, scalars_as_elements, select_for_scatter
from funcrl.graph.nodes import origin_of

aten = torch.ops.aten
B, T, D, V = 3, 7, 5, 11


def targets(graph) -> Counter:
    return Counter(node.target for node in graph.graph.nodes if node.op == "call_function")


def lowered(fn, *args):
    """The graph and the rewritten one, which leaves the first as it was and has its bits."""
    graph = funcrl.trace(fn, *args)
    before = str(graph.graph)
    again = select_for_scatter(graph)
    assert str(graph.graph) == before
    with torch.no_grad():
        assert equal(again(*args), graph(*args))
    return graph, again


def head_gradient(chunk):
    def loss(weight, hidden, targets):
        logprobs, entropy = funcrl.ops.linear_scores(hidden, weight, targets, 0.7, chunk)
        return (logprobs.sin() + 0.5 * entropy).sum()

    return torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [3, T])
def test_the_chunked_heads_gradient_has_the_same_bits(chunk, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    graph, again = lowered(head_gradient(chunk), weight, hidden, tokens)
    count = targets(graph)[aten.scatter_add.default]
    assert count >= -(-T // chunk)
    assert targets(again)[aten.scatter_add.default] == 0
    assert (targets(again) - targets(graph))[aten.where.self] == count


def added(axis, index, source=None):
    source = (
        torch.arange(1.0, index.numel() + 1).view(index.shape) / 3 if source is None else source
    )
    return lambda x: x.scatter_add(axis, index, source)


@pytest.mark.parametrize("axis", [-1, 1])
def test_one_place_a_row_is_a_choice(axis):
    """By hand: 1/3 into place 2 of the first row, 2/3 into place 0 of the second."""
    index = torch.tensor([[2], [0]])
    _, again = lowered(added(axis, index), torch.zeros(2, 3))
    assert targets(again)[aten.scatter_add.default] == 0
    third = torch.tensor(1.0) / 3
    zero = torch.zeros(())
    wanted = torch.stack([torch.stack([zero, zero, third]), torch.stack([2 * third, zero, zero])])
    assert torch.equal(again(torch.zeros(2, 3)), wanted)
    # What is not written keeps its bits, the sign of zero, infinities and NaN among them.
    x = torch.tensor([[-0.0, float("inf"), 1.0], [1.0, -0.0, float("nan")]])
    assert again(x).signbit().tolist() == [[True, False, False], [False, True, False]]
    assert torch.equal(again(x)[:, 1], x[:, 1])
    assert again(x)[1, 2].isnan()


@pytest.mark.parametrize(
    ("shape", "axis", "index"),
    [
        ((2, 3), -1, [[2, 2], [0, 1]]),  # several places a row, one of them twice
        ((2, 3), 0, [[1, 0, 1]]),  # along another axis
        ((1, 3), 0, [[0]]),  # another axis, though the shape is that of one a row
        ((3, 3), -1, [[1], [2]]),  # not every row
    ],
)
def test_other_additions_are_left_alone(shape, axis, index):
    graph, again = lowered(added(axis, torch.tensor(index)), torch.ones(shape))
    assert targets(again) == targets(graph)


def test_a_larger_source_is_left_alone():
    """torch reads the part of it that the index covers."""
    source = torch.arange(6.0).view(2, 3)
    graph, again = lowered(added(-1, torch.tensor([[2], [0]]), source), torch.ones(2, 3))
    assert targets(again) == targets(graph)


def test_a_single_row_without_other_axes_and_a_graph_without_scatters():
    _, again = lowered(added(0, torch.tensor([1])), torch.ones(4))
    assert targets(again)[aten.scatter_add.default] == 0
    graph, again = lowered(torch.sin, torch.ones(4))
    assert str(graph.graph) == str(again.graph)


def test_an_embeddings_gradient_is_summed_by_the_kernel():
    """Of the batch, and of clipped samples; integers have exact sums, whatever their order."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (B, T), generator=generator)  # repeated ones, in and across rows
    factors = torch.randint(-8, 9, (B, T, D), generator=generator).to(torch.bfloat16)

    def gradient(weight, tokens, factors):
        def loss(weight, tokens, factors):
            return (torch.nn.functional.embedding(tokens, weight) * factors).sum()

        each = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weight, tokens, factors)
        return each.sum(dim=0)

    def of_batch(weight, tokens, factors):
        rows = torch.vmap(lambda row: torch.nn.functional.embedding(row, weight))(tokens)
        return (rows * factors).sum()

    args = torch.zeros(V, D, dtype=torch.bfloat16), tokens, factors
    wanted = torch.zeros(V, D)
    for token, row in zip(tokens.flatten().tolist(), factors.flatten(0, 1).float(), strict=True):
        wanted[token] += row
    for fn in (torch.func.grad(of_batch), gradient):
        graph = funcrl.fuse_per_sample(funcrl.trace(fn, *args))
        again = embedding_by_kernel(graph, lambda rows: rows.dtype == torch.bfloat16)
        ops = [targets(each) for each in (graph, again)]
        assert [each[aten.embedding_dense_backward.default] for each in ops] == [1, 0]
        assert ops[1][torch.ops.funcrl.embedding_gradient.default] == 1
        assert torch.equal(again(*args).float(), wanted)
        assert equal(again(*args), graph(*args))
        # On a CPU nothing is replaced.
        assert targets(embedding_by_kernel(graph)) == ops[0]


@pytest.mark.gpu
def test_an_embeddings_gradient_on_a_gpu_is_rounded_once():
    """bfloat16 has 8 bits: one rounding is 2^-8 of an entry; the float32 sum adds 2^-24 a row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (8, 512), generator=generator).cuda()
    grad = torch.randn(8, 512, 64, generator=generator).to("cuda", torch.bfloat16)

    def gradient(weight):
        loss = lambda w: (torch.nn.functional.embedding(tokens, w) * grad).sum()  # noqa: E731
        return torch.func.grad(loss)(weight)

    weight = torch.zeros(60, 64, device="cuda", dtype=torch.bfloat16)
    again = embedding_by_kernel(funcrl.trace(gradient, weight))
    assert targets(again)[torch.ops.funcrl.embedding_gradient.default] == 1
    wanted, sizes = torch.zeros(2, 60, 64, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    sizes.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double().abs())
    bound = wanted.abs() * 2.0**-8 + sizes * 512 * 2.0**-24
    assert ((again(weight).double() - wanted).abs() <= bound).all()


@pytest.mark.slow
def test_what_is_written_knows_where_it_comes_from():
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=V))
    model_fn = funcrl.logprob_fn(model, chunk=2)
    sample = funcrl.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
    params = funcrl.init_params(model, seed=0)
    graph = funcrl.trace(
        torch.func.grad(lambda params, sample: model_fn(params, sample).logprobs.sum()),
        params, sample,
    )  # fmt: skip
    again = select_for_scatter(graph)
    chosen = again.graph.find_nodes(op="call_function", target=aten.where.self)
    replaced = graph.graph.find_nodes(op="call_function", target=aten.scatter_add.default)
    assert chosen
    assert replaced
    wanted = {origin_of(node).phase for node in replaced}
    assert {origin_of(node).phase for node in chosen} >= wanted


def test_scalars_are_passed_as_one_element_of_the_same_memory():
    def update(rate, weight, count):
        new = weight - rate * weight
        rate.copy_(rate / 2)
        count.copy_(count + 1)
        return new

    def arguments():
        return [torch.tensor(0.5, dtype=torch.float64), torch.ones(2), torch.tensor(3)]

    graph, mine, theirs = funcrl.trace(update, *arguments()), arguments(), arguments()
    assert scalars_as_elements(graph) == [0, 2]
    result = graph(mine[0].view(1), mine[1], mine[2].view(1))
    assert equal((result, mine), (update(*theirs), theirs))
    assert mine[0] == 0.25
    assert mine[2] == 4

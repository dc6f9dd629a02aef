"""What a traced function writes: the same bits as in place, wherever else the memory is seen."""

from random import Random

import pytest
import torch
from cases import equal
from torch.nn.functional import pad

import funcrl
from funcrl.graph.aliases import is_view, overlap, overlaps_itself, writes, written_by
from funcrl.graph.nodes import origin_of

X = torch.arange(12, dtype=torch.float64).view(3, 4) / 7 - 0.6


def windows_of_a_buffer_filled_later(x):
    buffer = torch.zeros(6, dtype=x.dtype)
    windows = buffer.unfold(0, 3, 1)
    buffer.copy_(pad(x[0], (2, 0)))
    return windows.sum(-1)


def written_windows(x):
    y = x[0].clone()
    y.unfold(0, 2, 2).mul_(3)
    return y


def rotated_pairs(x):
    y = x.clone()
    torch.view_as_complex(y.view(3, 2, 2)).mul_(1j)
    return y


def real_and_imaginary_parts(x):
    y = torch.complex(x, x)
    y.real.mul_(2)
    y.imag.add_(1)
    return torch.view_as_real(y), y


def bits(x):
    y = x.clone()
    y.view(torch.int64).bitwise_xor_(1)
    return y


def swapped_halves(x):
    y = x.clone()
    y[:, :2], y[:, 2:] = y[:, 2:].clone(), y[:, :2].clone()
    return y


def a_half_added_to_the_other(x):
    y = x.clone()
    y[:, :2].add_(y[:, 2:])
    return y


def parts_of_one_whole(x):
    first, second, third = (y := x.clone()).unbind(0)
    first.add_(second)
    second.add_(third)
    third.add_(first)
    return y


def parts_filled_in_a_wider_dtype(x):
    y = torch.empty(4, 4)
    first, second = y.split(2)
    first.copy_(x[:2]).mul_(x[:2])
    second.copy_(x[1:]).add_(1)
    return y


def one_part_filled_from_another(x):
    y = torch.empty(4, 4, dtype=x.dtype)
    first, second = y.split(2)
    first.copy_(x[:2])
    total = first.sum()
    second.copy_(x[1:]).add_(total)
    return y


def two_parts_of_one_shape(x):
    y = torch.cat([x, x + 1])
    return y.as_strided((3, 4), (4, 1), 0) - y.as_strided((3, 4), (4, 1), 12)


def a_part_placed_where_another_is(x):
    top = x.clone()[:2]
    return top - top.as_strided((2, 4), (4, 1), 4)


def narrow_sum_of_wider_numbers(x):
    return x.to(torch.bfloat16).clone().add_(x.to(torch.float32))


def booleans_as_numbers(x):
    return x.clone().gt_(0), x.to(torch.float32).clone().logical_not_()


def powers(x):
    return x.clone().pow_(2), x.abs().pow_(x[:1])


def other_strides(x):
    y = torch.zeros(4, 3, dtype=x.dtype).t()
    y.add_(x)
    return y, y.t().view(12)


def lists_and_outputs(x):
    y, z = x.clone(), torch.empty_like(x)
    torch._foreach_mul_([y], 2.0)
    torch.mul(y, 3, out=z)
    w = z + 1
    torch.mul(y, 5, out=z)
    return w, z


def names_that_look_otherwise(x):
    y = x.clone()
    z = y.view(12)
    y.t_()
    y[0] = 5.0
    return y, z


def running_statistics(x):
    mean = torch.zeros(4, dtype=x.dtype)
    y = torch.nn.functional.batch_norm(x, mean, torch.ones(4, dtype=x.dtype), training=True)
    return y, mean


def parts_that_autograd_does_not_see(x):
    y = x.clone()
    y.unsafe_split(1)[1].round_()
    return y


def an_expanded_name_of_its_own_size(x):
    y = x.to(torch.float32)
    y[:2].expand(2, 4).tanh_()
    y[2].expand(1, 4).tanh_()
    return y


def a_constant_that_was_made(x):
    return torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype).add_(x[0])


FUNCTIONS = [
    windows_of_a_buffer_filled_later, written_windows, rotated_pairs, real_and_imaginary_parts,
    bits, swapped_halves, a_half_added_to_the_other, parts_of_one_whole,
    parts_filled_in_a_wider_dtype,
    one_part_filled_from_another, two_parts_of_one_shape, a_part_placed_where_another_is,
    narrow_sum_of_wider_numbers, booleans_as_numbers, powers, other_strides, lists_and_outputs,
    names_that_look_otherwise, running_statistics, a_constant_that_was_made,
    parts_that_autograd_does_not_see, an_expanded_name_of_its_own_size,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_graph_has_the_bits_of_what_was_written_in_place(fn):
    graph = funcrl.trace(fn, X)
    assert equal(graph(X), fn(X))
    assert not any(writes(node) for node in graph.graph.nodes)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1], lambda x: x.t()[:2]])
def test_a_write_into_an_argument_stays_one_and_comes_last(part):
    def fn(x):
        part(x).mul_(2)
        read = x.sum()
        part(x).add_(read)
        return x, read

    graph, mine, theirs = funcrl.trace(fn, X), X.clone(), X.clone()
    result, read = graph(mine)
    assert equal((fn(theirs), theirs), ((result, read), mine))
    assert result is mine
    *before, last, _ = graph.graph.nodes
    assert str(last.target) == "aten.copy_.default"
    assert not any(writes(node) for node in before)


def test_a_write_into_a_tensor_of_the_function_s_own_is_refused():
    held = torch.ones(3, 4, dtype=X.dtype)
    with pytest.raises(ValueError, match=r"trace.*aten\.add_.*itself"):
        funcrl.trace(lambda x: held.add_(x), X)
    assert equal(funcrl.trace(lambda x: held + x, X)(X), 1 + X)


def test_a_write_into_an_argument_that_shares_memory_is_refused():
    row = X.clone()
    with pytest.raises(ValueError, match="trace.*'0'.*'1'"):
        funcrl.trace(lambda x, y: x.add_(1) + y, row, row[0])
    assert equal(funcrl.trace(lambda x, y: x + y, row, row[0])(row, row[0]), row + row[0])


def shifted(x):
    y = x.clone()
    y[:, 1:] -= y[:, :-1]
    return y


def one_memory_twice(x):
    y = x.clone()
    torch._foreach_exp_([y.view(12), y])
    return y


def expanded(x):
    y = x.clone()
    y.expand(2, 3, 4)[1].add_(1)
    return y


def strided_part(x):
    y = x.clone()
    y[1].as_strided((2,), (1,), 3).zero_()
    return y


def a_sum_in_a_wider_dtype(x):
    y = torch.empty(4, dtype=x.dtype)
    torch.sum(x.to(torch.bfloat16), 0, out=y)
    return y


DOUBTFUL = {
    shifted: "sub_", one_memory_twice: "foreach_exp", expanded: "add_", strided_part: "as_strided",
    a_sum_in_a_wider_dtype: "sum.IntList_out",
}  # fmt: skip


@pytest.mark.parametrize("fn", DOUBTFUL, ids=lambda fn: fn.__name__)
def test_a_write_whose_result_is_in_doubt_is_refused(fn):
    with pytest.raises(ValueError, match=rf"trace.*aten\.\w*{DOUBTFUL[fn]}"):
        funcrl.trace(fn, X)


def test_nodes_of_a_graph_with_views_still_know_where_they_come_from():
    """Beside the same function that does not write through a view."""

    class Rotary(torch.nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.linear, self.in_place = torch.nn.Linear(4, 4, dtype=X.dtype), in_place

        def forward(self, x):
            x = self.linear(x)
            if self.in_place:
                x = x.clone()
                torch.view_as_complex(x.view(3, 2, 2)).mul_(2)
            return x.square().sum()

    def described(in_place):
        module = Rotary(in_place)
        params = {name: leaf.detach() for name, leaf in module.named_parameters()}
        apply = funcrl.functional(module)
        graph = funcrl.trace(torch.func.grad(apply), params, X).graph
        names = {node.name for node in graph.nodes}
        products = [node for node in graph.nodes if "mm" in str(node.target)]
        assert all(origin_of(n).forward in {*names, ""} for n in graph.nodes)
        return [(origin_of(node).phase, origin_of(node).module) for node in products]

    assert described(in_place=True) == described(in_place=False)
    assert ("backward", "linear") in described(in_place=True)


def test_what_views_and_what_writes_is_read_from_schemas():
    def fn(x, y):
        torch.add(x, 1, out=y)
        return x.unfold(0, 2, 1), x.split(1), torch.ops.aten._unsafe_view(x, [12]), x.exp()

    graph = torch.fx.experimental.proxy_tensor.make_fx(fn)(X, X.clone()).graph
    viewing = [str(node.target) for node in graph.nodes if is_view(node)]
    assert viewing[:2] == ["aten.unfold.default", "aten.split.Tensor"]
    assert viewing[-1] == "aten._unsafe_view.default"
    (write,) = (node for node in graph.nodes if writes(node))
    assert [node.name for node in written_by(write)] == ["y_1"]


def test_overlap_of_two_views_is_what_their_places_say():
    """Against a list of all bytes; the views step alike or not, in dtypes of two widths."""
    draw = Random(0)
    met, own = [], []
    for _ in range(300):
        common = [(draw.randint(1, 7), draw.randint(1, 3)) for _ in range(2)]
        first, second = some_view(draw, common), some_view(draw, common)
        met.append(not set(all_bytes(first)).isdisjoint(all_bytes(second)))
        assert overlap(first, second) == met[-1]
        own.append(len(set(all_bytes(first))) < len(all_bytes(first)))
        assert overlaps_itself(first) == own[-1]
    assert 50 < sum(met) < 250
    assert 20 < sum(own) < 280


def some_view(draw, common):
    own = draw.choice([common, [(draw.randint(1, 7), draw.randint(1, 3)) for _ in range(2)]])
    base = torch.zeros(64, dtype=draw.choice([torch.float32, torch.float64]))
    steps, sizes = zip(*own, strict=True)
    return base.as_strided(sizes, steps, draw.randint(0, 9))


def all_bytes(x):
    width = x.element_size()
    return [
        width * (x.storage_offset() + i * x.stride(0) + j * x.stride(1)) + byte
        for i in range(x.shape[0]) for j in range(x.shape[1]) for byte in range(width)
    ]  # fmt: skip

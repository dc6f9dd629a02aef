"""Operations that are written down because an earlier one was like them: the graph is torch's."""

import pytest
import torch
from cases import tiny_batch, tiny_model
from torch import Tensor
from torch.fx.experimental import proxy_tensor

import funcrl
from funcrl import optim
from funcrl.graph.repeats import Repeats

BATCH = tiny_batch()
ADAMW = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))


def described(graph):
    """Return all that a graph says of each node: its text, its tensors, its origin."""

    def look(value):
        if not isinstance(value, Tensor):
            return [look(each) for each in value] if isinstance(value, list | tuple) else value
        place = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
        return (type(value), value.requires_grad, *place)

    return [
        (node.format_node(), look(node.meta.get("val")), node.meta["origin"], sorted(node.meta))
        for node in graph.graph.nodes
    ]


def by_torch_alone(monkeypatch, fn, *args):
    """Return the trace in which no operation is taken for a repetition."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Repeats, "run", lambda self, operation, args, kwargs: operation(*args, **kwargs)
        )
        return funcrl.trace(fn, *args)


def step_of(num_layers, **options):
    model = tiny_model(qkv_bias=True, num_layers=num_layers)
    step = funcrl.donate(funcrl.grpo_step(funcrl.logprob_fn(model), **options))
    return step, step.init(funcrl.init_params(model, seed=0))


OPTIONS = {
    "adamw": {"optimizer": ADAMW},
    "micro-batches": {"microbatch": 3},
    "clipped": {"per_sample": funcrl.clip_per_sample(0.1)},
    "momentum": {"optimizer": optim.sgd(0.1, momentum=0.9, nesterov=True)},
    "muon": {"optimizer": optim.masked(optim.muon(0.1), lambda path, leaf: leaf.ndim == 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_the_graph_of_a_step_is_the_one_that_torch_writes(name, monkeypatch):
    step, state = step_of(2, **OPTIONS[name])
    expected = by_torch_alone(monkeypatch, step.update, state, BATCH)
    assert described(funcrl.trace(step.update, state, BATCH)) == described(expected)


HELD = torch.tensor([2.0, 3.0])


def held(x):
    return x * HELD + x * HELD


def numbers_of_all_types(x):
    y = x.long()
    return y * 1, y * 1.0, y * True, y + 1, y + 1.0, torch.full((2,), 1), torch.full((2,), 1.0)


def in_place_twice(x):
    a, b = x * 2, x * 2
    a.add_(1)
    b.add_(1)
    a.t_()
    return a[None], b[None], a.add_(b), b


def views_of_views(x):
    a, b = x.view(2), x.view(2)
    c, d = a[1:], b[1:]
    c.mul_(3)
    d.mul_(5)
    return a, b, x + 0


def other_strides(x):
    y = torch.outer(x, x[:1].expand(3))
    return y + y, y.t() + y.t(), (y.t() + y.t()).contiguous().view(-1), y.view(-1)


def constants(x):
    two = torch.tensor(2.0)
    return x * two, x * torch.tensor(2.0), x * float(torch.tensor(3.0) + 1), x * 2


def complex_numbers(x):
    z = torch.view_as_complex(x[None])
    return torch.view_as_real(z.conj() * z.conj()), torch.view_as_real(z * z), (z.imag - z.imag)


def several_results(x):
    return (*x.split(1), *x.split(1), *x.max(dim=0), *x.max(dim=0), *x.unbind())


def dtypes_of_sums(x):
    half = x.bfloat16()
    sums = half.sum(), half.sum(dtype=torch.float32), half.sum(), half.sum(dtype=torch.float32)
    return (*sums, half + x, half + x.sum(), half + x.double(), half + 1.5)


def derivatives(x):
    def loss(x, scale):
        return (x.sin() * scale).exp().sum()

    rows = torch.stack([x, x])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(rows, x)
    return each, torch.func.grad(loss)(x, x), torch.func.hessian(loss)(x, x)


def autograd(x):
    y = x.detach().requires_grad_()
    with torch.enable_grad():
        (first,) = torch.autograd.grad((y * y).sin().sum(), y, create_graph=True)
        return torch.autograd.grad(first.sum(), y)


FUNCTIONS = [
    held, numbers_of_all_types, in_place_twice, views_of_views, other_strides, constants,
    complex_numbers, several_results, dtypes_of_sums, derivatives, autograd,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_graph_of_a_function_is_the_one_that_torch_writes(fn, monkeypatch):
    x = torch.tensor([0.5, -1.5])
    expected = by_torch_alone(monkeypatch, fn, x.clone())
    graph = funcrl.trace(fn, x.clone())
    assert described(graph) == described(expected)
    results = (funcrl.tree.leaves(run(x.clone())) for run in (graph, fn))
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_random_numbers_are_drawn_as_often_as_the_function_draws_them():
    graph = funcrl.trace(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.ones(3))
    assert [node.name for node in graph.graph.nodes][1:3] == ["rand_like", "rand_like_1"]


def test_another_default_dtype_is_another_operation():
    def fn(x):
        before = torch.get_default_dtype()
        first = torch.ones(2) + x
        torch.set_default_dtype(torch.float64)
        try:
            return first, torch.ones(2) + x
        finally:
            torch.set_default_dtype(before)

    graph = funcrl.trace(fn, torch.ones(2))
    ones = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)
    assert [node.meta["val"].dtype for node in ones] == [torch.float32, torch.float64]


def test_a_view_that_is_written_down_shares_the_memory_of_its_own_argument():
    def fn(x, y):
        first, second = x.view(2, 1), y.view(2, 1)
        places = [each.untyped_storage()._cdata for each in (x, first, y, second)]
        same.append((places[0] == places[1], places[2] == places[3], places[0] == places[2]))
        return first + second

    same = []
    funcrl.trace(fn, torch.ones(2), torch.ones(2))
    assert same == [(True, True, False)]


def test_what_a_gpu_allocates_for_a_tensor_without_data_is_no_node(monkeypatch):
    # There, torch allocates an element whenever it makes such a tensor.
    step, state = step_of(2)
    expected = described(funcrl.trace(step.update, state, BATCH))
    fake = torch._subclasses.fake_tensor.FakeTensor
    allocated, new = [], fake.__new__

    def allocating(*args, **kwargs):
        allocated.append(torch.empty(1))
        return new(*args, **kwargs)

    monkeypatch.setattr(fake, "__new__", staticmethod(allocating))
    assert described(funcrl.trace(step.update, state, BATCH)) == expected
    assert len(allocated) > 100


def test_what_is_left_to_torch_does_not_grow_with_depth(monkeypatch):
    def count(num_layers):
        calls = []
        original = proxy_tensor.proxy_call

        def counted(mode, operation, *args):
            calls.append(operation)
            return original(mode, operation, *args)

        step, state = step_of(num_layers, optimizer=ADAMW)
        with monkeypatch.context() as patch:
            patch.setattr(proxy_tensor, "proxy_call", counted)
            graph = funcrl.trace(step.update, state, BATCH)
        return len(calls), len(graph.graph.nodes)

    (calls, nodes), (more_calls, more_nodes) = count(2), count(6)
    assert more_nodes - nodes > 4 * 400
    assert more_calls - calls <= 4 * 4  # operations of several results alone

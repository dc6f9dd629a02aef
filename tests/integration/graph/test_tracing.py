"""The traced step: the same bits, no memory while it is made, nodes that know where they belong."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import equal, tiny_batch, tiny_model

import funcrl
from funcrl import optim
from funcrl.graph.aliases import writes
from funcrl.graph.nodes import count_flops, origin_of

MODEL = tiny_model(qkv_bias=True)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
BATCH = tiny_batch()
ONE_LAYER = tiny_model(qkv_bias=True, num_layers=1)


def nodes(graph, target):
    return [node for node in graph.graph.nodes if str(node.target) == f"aten.{target}"]


SGD = {"optimizer": optim.sgd(0.1)}  # few operations, where the optimizer is not looked at
OPTIONS = {
    "plain": {},
    "micro-batches": {**SGD, "microbatch": 4},
    "clipped": {**SGD, "per_sample": funcrl.clip_per_sample(0.1)},
    "prepared": {**SGD, "prepare": funcrl.top_entropy(0.5)},
    "muon": {"optimizer": optim.chain(
        optim.masked(optim.muon(0.1), lambda path, leaf: leaf.ndim == 2),
        optim.masked(optim.adamw(0.1), lambda path, leaf: leaf.ndim < 2))},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"),  # each choice with chunks and without, but for optimizers
    [*((name, None) for name in OPTIONS), ("micro-batches", 3), ("clipped", 3), ("prepared", 3)],
)
def test_a_traced_step_is_the_step(name, chunk):
    step = funcrl.grpo_step(funcrl.logprob_fn(ONE_LAYER, chunk=chunk), **OPTIONS[name])
    state = step.init(funcrl.init_params(ONE_LAYER, seed=0, dtype=torch.float64))
    graph = funcrl.trace(step.update, state, BATCH)
    new, metrics = graph(state, BATCH)
    assert isinstance(new, funcrl.TrainState)
    assert equal((new, metrics), step(state, BATCH))
    # Nothing of the state was baked in: the graph goes on from where it came to.
    other = BATCH._replace(advantages=-BATCH.advantages)
    assert equal(graph(new, other), step(new, other))
    assert not any(writes(node) for node in graph.graph.nodes)


def test_a_dictionary_in_another_order_is_the_same_argument():
    graph = funcrl.trace(lambda x: x["a"] - x["b"], {"b": torch.ones(1), "a": torch.zeros(1)})
    assert graph({"a": torch.tensor([5.0]), "b": torch.tensor([2.0])}) == 3


def test_a_tensor_that_comes_twice_is_two_inputs():
    ones = torch.ones(2)
    graph = funcrl.trace(lambda x, y: x - 2 * y, ones, ones)
    assert graph(torch.tensor([5.0, 6.0]), torch.tensor([1.0, 2.0])).tolist() == [3.0, 2.0]


@pytest.mark.slow
def test_the_number_of_nodes_does_not_depend_on_the_number_of_rows():
    step = funcrl.grpo_step(funcrl.logprob_fn(ONE_LAYER), **OPTIONS["clipped"])
    state = step.init(funcrl.init_params(ONE_LAYER, seed=0, dtype=torch.float64))
    graphs = [funcrl.trace(step.update, state, tiny_batch(rows=rows)) for rows in (2, 6)]
    assert len({len(graph.graph.nodes) for graph in graphs}) == 1


@pytest.mark.slow
def test_nodes_know_their_phase_and_module():
    step = funcrl.grpo_step(funcrl.logprob_fn(MODEL), per_sample=lambda grads: grads, **SGD)
    graph = funcrl.trace(step.update, step.init(PARAMS), BATCH)
    origins = {node: origin_of(node) for node in graph.graph.nodes}
    phases = {origin.phase for origin in origins.values()}
    assert phases == {"input", "forward", "backward", "optimizer", "output"}
    paths = {origin.path for origin in origins.values() if origin.phase == "input"}
    assert {"0.params.blocks.1.attention.q.weight", "0.seed", "1.tokens"} <= paths

    weights = [path.removesuffix(".weight") for path in PARAMS if PARAMS[path].ndim == 2]
    weights[weights.index("embed")] = "unembed"  # an embedding is no product
    products = [*nodes(graph, "mm.default"), *nodes(graph, "addmm.default")]
    forward = [origins[n].module for n in products if origins[n].phase == "forward"]
    assert sorted(forward) == sorted(weights)
    # Each product has two in the backward: the gradient of its weight and that of its input.
    backward = [
        node for node in graph.graph.nodes
        if origins[node].phase == "backward" and origins[node].module in forward
        and str(node.target) in ("aten.mm.default", "aten.bmm.default")
    ]  # fmt: skip
    assert sorted(origins[node].module for node in backward) == sorted(2 * forward)
    named = {node.name: node for node in graph.graph.nodes}
    for node in backward:
        assert origins[named[origins[node].forward]].module == origins[node].module


@pytest.mark.slow
def test_the_phases_are_in_order():
    step = funcrl.grpo_step(funcrl.logprob_fn(MODEL))
    graph = funcrl.trace(step.update, step.init(PARAMS), BATCH)
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            if origin_of(node).phase == "forward":
                assert origin_of(source).phase in ("input", "forward")
            if origin_of(node).phase == "backward":
                assert origin_of(source).phase != "optimizer"


def test_module_hooks_are_gone_after_an_error():
    hooks = torch.nn.modules.module._global_forward_hooks

    def fails(params):
        torch.func.functional_call(torch.nn.Linear(2, 1), params, torch.ones(3))

    with pytest.raises(RuntimeError):
        funcrl.trace(fails, {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    assert not hooks


@pytest.mark.parametrize("read", [float, bool, lambda x: x.item()])
def test_a_value_read_in_python_is_refused(read):
    def reading(x):
        return x * read(x.sum())

    named = r"^trace expects .* reads no .* at line \d+ of test_tracing\.py\.$"
    with pytest.raises(ValueError, match=named):
        funcrl.trace(reading, torch.ones(2))


def test_a_value_that_is_known_may_be_read():
    scale = torch.tensor(3.0)
    traced = funcrl.trace(lambda x: x * float(scale) + torch.tensor(2.0).item(), torch.ones(2))
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 5.0))


def test_a_number_among_the_arguments_is_refused():
    with pytest.raises(TypeError, match=r"trace.*0\.1.*'1\.lr'"):
        funcrl.trace(lambda x, o: x * o["lr"], torch.ones(2), {"lr": 0.1})
    with pytest.raises(TypeError, match="trace.*fn"):
        funcrl.trace(3, torch.ones(2))


def test_in_place_operations_become_others_that_give_the_same():
    def through_parts(x):
        whole = torch.zeros(5, 2)
        for part, rows in zip(whole.split(2), x.split(2), strict=True):
            part += rows
            part *= 2
        return whole

    def through_views(x):
        y = x * 2
        y[1:3, 0] = 7
        y.view(-1)[0].add_(1)
        return y, y.sum()

    def plain(x):
        y = x.sin()
        z = y + 1
        y.mul_(3).add_(z)
        return y - z

    x = torch.randn(5, 2)
    for fn in (through_parts, through_views, plain):
        graph = funcrl.trace(fn, x)
        assert equal(graph(x), fn(x)), fn
        assert not any(writes(node) for node in graph.graph.nodes), fn
        assert len({origin_of(node).phase for node in graph.graph.nodes}) == 3, fn


def test_an_input_that_is_written_into_twice_holds_the_second_value():
    def add(x, u):
        x.copy_(u)
        x.add_(1)

    def copy(x, u):
        x.copy_(u)
        y = x.sin()
        x.copy_(y)
        return y

    def part(x, u):
        x.copy_(u)
        x[:1].mul_(2)
        return u + 1

    for fn in (add, copy, part):
        graph = funcrl.trace(fn, torch.zeros(2), torch.ones(2))
        x, y, u = torch.zeros(2), torch.zeros(2), torch.rand(2)
        fn(x, u)
        graph(y, u)
        assert torch.equal(x, y), fn


def test_a_thread_that_computes_meanwhile_is_not_in_the_trace():
    """Torch calls the hooks of modules in every thread."""
    inner, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.ReLU())
    apply = funcrl.functional(inner)
    params = {name: leaf.detach() for name, leaf in inner.named_parameters()}
    errors = []

    def compute():
        try:
            other(torch.ones(2))
        except IndexError as error:
            errors.append(error)

    def beside(params, x):
        def run(*_):
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()

        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: run() if isinstance(module, torch.nn.Linear) else None
        )
        try:
            return apply(params, x)
        finally:
            hook.remove()

    def origins(function):
        graph = funcrl.trace(function, params, torch.ones(2)).graph
        return [origin_of(node) for node in graph.nodes if node.op == "call_function"]

    assert origins(beside) == origins(apply)
    assert not errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_of_experts_is_traced_and_counted(dtype):
    """Ten tokens of three experts, one of which has none."""
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    tokens, weights = torch.randn(10, 16, dtype=dtype), torch.randn(3, 16, 8, dtype=dtype)

    def loss(tokens, weights):
        return F.grouped_mm(tokens, weights, offs=ends).float().square().sum()

    gradient = torch.func.grad(loss, (0, 1))
    graph = funcrl.trace(gradient, tokens, weights)
    assert equal(graph(tokens, weights), gradient(tokens, weights))
    counted = [count for node in graph.graph.nodes if (count := count_flops(node))]
    assert counted == 3 * [2 * 10 * 16 * 8]

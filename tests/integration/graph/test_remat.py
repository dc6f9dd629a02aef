"""Computing twice instead of keeping: the same bits, less memory, nothing undone by compilers."""

from collections import Counter
from functools import lru_cache

import pytest
import torch
from graphs import Flat, flat_step, flatten, flatten_as_written

import funcrl
from benchmarks.measure import peak_bytes
from funcrl.graph import add_fences, predict_peak, recomputed_cost
from funcrl.graph.nodes import Origin, is_late, origin_of, set_origin

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = ("none", "full", "selective", "budget", "function")


@pytest.fixture(scope="module")
def flats() -> dict[str, Flat]:
    sgd = funcrl.optim.sgd(0.1)
    return {
        "float32": flat_step(optimizer=sgd),
        "bfloat16": flat_step(dtype=torch.bfloat16, optimizer=sgd),
    }


@pytest.fixture(scope="module")
def peaks(flats) -> dict[str, int]:
    """The measured peaks of the graphs before any pass."""
    return {name: peak_bytes(flat.run) + flat.input_bytes for name, flat in flats.items()}


def apply(flat: Flat, policy: str):
    if policy == "budget":
        peak = predict_peak(flat.gm)
        budget = flat.input_bytes + int(0.7 * (peak - flat.input_bytes))
        return funcrl.remat(flat.gm, "budget", budget)
    if policy == "function":
        pointwise = ("silu", "mul", "exp", "rsqrt", "pow")
        return funcrl.remat(flat.gm, lambda node: node.name.startswith(pointwise))
    return funcrl.remat(flat.gm, policy)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def described(gm):
    return [(node.name, node.target, str(node.args)) for node in gm.graph.nodes]


def targets(gm) -> Counter:
    """Count ops, one that writes in place as the one that does not."""
    called = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    return Counter(name.replace("_.", ".") for name in called)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "dtype"), [*((each, "float32") for each in POLICIES), ("selective", "bfloat16")]
)
def test_same_bits_and_the_predicted_memory(flats, peaks, policy, dtype):
    flat = flats[dtype]
    again = apply(flat, policy)
    again.graph.lint()
    assert same(flat.run(), flat.run(again))
    measured = peak_bytes(lambda: flat.run(again)) + flat.input_bytes
    # What one op allocates for itself is in no graph: a few percent at this size.
    assert predict_peak(again) == pytest.approx(measured, rel=0.1)
    if policy not in ("none", "function"):
        assert predict_peak(again) < predict_peak(flat.gm)
        assert measured < peaks[dtype]
    assert (recomputed_cost(again) > 0) == (policy != "none")


@pytest.mark.slow
def test_policies_are_ordered_in_memory_and_in_work(flats):
    flat = flats["float32"]
    none, selective, full = (apply(flat, name) for name in ("none", "selective", "full"))
    assert predict_peak(none) > predict_peak(selective) > predict_peak(full)
    assert recomputed_cost(none) < recomputed_cost(selective) < recomputed_cost(full)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "selective", "function"])
def test_a_second_time_changes_nothing(flats, policy):
    flat = flats["float32"]
    once = apply(flat, policy)
    assert described(apply(flat._replace(gm=once), policy)) == described(once)


@pytest.mark.slow
def test_a_budget_that_is_kept_changes_nothing(flats):
    gm = flats["float32"].gm
    budget = predict_peak(gm) * 3 // 4
    once = funcrl.remat(gm, "budget", budget)
    assert described(funcrl.remat(once, "budget", budget)) == described(once)


@pytest.mark.slow
def test_policies_can_follow_one_another(flats):
    flat = flats["float32"]
    both = funcrl.remat(apply(flat, "selective"), "full")
    assert same(flat.run(), flat.run(both))
    assert predict_peak(both) < predict_peak(apply(flat, "selective"))


def test_the_graph_that_is_given_is_left_as_it_was(flats):
    flat = flats["float32"]
    before = described(flat.gm)
    apply(flat, "full")
    assert described(flat.gm) == before


def test_what_each_named_policy_computes_again(flats):
    """Per layer: 7 linear maps, 2 products of attention, 4 norms, a softmax and an activation."""
    flat = flats["float32"]

    def added(policy):
        return targets(apply(flat, policy)) - targets(apply(flat, "none"))

    selective, full = added("selective"), added("full")
    layers = 3
    for op, count in (("_softmax", 1), ("silu", 1), ("rsqrt", 4)):
        name = f"aten.{op}.default"
        assert selective[name] == full[name] == count * layers
    assert selective["aten.mm.default"] == 0
    assert selective["aten.bmm.default"] == layers  # the scores, [T, T], with their softmax
    # The down projection makes what the layer hands on: that one is kept.
    assert full["aten.mm.default"] == 6 * layers
    assert full["aten.bmm.default"] == 2 * layers


@pytest.mark.slow
def test_a_value_is_computed_again_once_just_before_it_is_read(flats):
    again = apply(flats["float32"], "full")
    nodes = list(again.graph.nodes)
    copies = [node for node in nodes if node.meta.get("recomputed")]
    assert len({node.name for node in copies}) == len(copies)
    late = {node for node in nodes if is_late(node)}
    for place, node in enumerate(nodes):
        if node in copies:
            run = next(n for n in nodes[place:] if n not in copies)
            assert run in late
            readers = {node}
            for other in nodes[place:]:
                if readers & set(other.all_input_nodes) and other in copies:
                    readers.add(other)
            assert readers & set(run.all_input_nodes), f"{node} is not needed by {run}"


def forward_layers(gm):
    """The layers of the forward pass, each micro-batch's own."""
    origins = [origin_of(node) for node in gm.graph.nodes if node.op == "call_function"]
    return {
        (each.microbatch, each.layer) for each in origins if each.phase == "forward" and each.layer
    }


KINDS = {
    "microbatches": {"microbatch": 2},
    "per sample": {"per_sample": funcrl.clip_per_sample(1.0)},
    "chunked head": {"chunk": 16, "dtype": torch.bfloat16},
    "sequence ratio": {"algorithm": funcrl.gspo()},
}


@lru_cache
def flat_of(kind):
    return flat_step(optimizer=funcrl.optim.sgd(0.1), num_layers=2, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_every_kind_of_step(kind, policy):
    flat = flat_of(kind)
    again = funcrl.remat(flat.gm, policy)
    assert same(flat.run(), flat.run(again))
    assert predict_peak(again) < predict_peak(flat.gm)
    turns = 2 if kind == "microbatches" else 1
    assert forward_layers(flat.gm) == {
        (turn, f"blocks.{layer}") for turn in range(turns) for layer in range(2)
    }


def test_each_micro_batch_computes_its_own():
    """What two backward passes read does not wait for the second one."""

    def fn(weight, x):
        shared = weight.sin()
        halves = [torch.func.grad(lambda a, x=x: (x @ a @ a).sum())(shared) for x in x]
        return halves[0] + halves[1]

    flat = flatten(fn, torch.randn(4, 4), torch.randn(2, 3, 4))
    again = funcrl.remat(flat.gm, lambda node: node.name == "sin")
    assert targets(again)["aten.sin.default"] == 3
    assert same(flat.run(), flat.run(again))


@pytest.mark.slow
def test_a_smaller_budget_costs_more_work_and_is_kept(flats):
    flat = flats["float32"]
    peak, least = predict_peak(flat.gm), predict_peak(apply(flat, "full"))
    costs = []
    for share in (1.0, 0.8, 0.5, 0.2, 0.0):
        budget = least + int(share * (peak - least))
        again = funcrl.remat(flat.gm, "budget", budget)
        assert predict_peak(again) <= budget
        assert same(flat.run(), flat.run(again))
        costs.append(recomputed_cost(again))
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert costs[-1] <= recomputed_cost(apply(flat, "full"))


@pytest.mark.slow
def test_an_impossible_budget_names_the_least_which_is_possible(flats):
    flat = flats["float32"]
    with pytest.raises(ValueError, match="remat.*budget.*bytes") as caught:
        funcrl.remat(flat.gm, "budget", flat.input_bytes)
    least = int(str(caught.value).split(" bytes")[0].split()[-1])
    assert predict_peak(funcrl.remat(flat.gm, "budget", least)) == least


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("most", None, "remat.*policy.*'most'"),
        ("full", 5, "remat.*policy 'full'.*budget 5"),
        ("budget", None, "remat.*policy 'budget'.*budget None"),
        ("budget", -1, "remat.*budget.*-1"),
    ],
)
def test_bad_arguments(flats, policy, budget, message):
    with pytest.raises((ValueError, TypeError), match=message):
        funcrl.remat(flats["float32"].gm, policy, budget)


def test_a_graph_without_a_backward_pass_or_layers_is_refused():
    x = torch.randn(3)
    with pytest.raises(ValueError, match="remat.*backward"):
        funcrl.remat(flatten(lambda x: x.exp().sum(), x).gm, "full")
    gradient = flatten(torch.func.grad(lambda x: x.exp().sin().sum()), x).gm
    with pytest.raises(ValueError, match="remat.*layers.*policy 'full'"):
        funcrl.remat(gradient, "full")


def test_random_ops_refuse_by_name():
    def loss(x):
        return (x * torch.rand_like(x)).sin().sum()

    gm = flatten(torch.func.grad(loss), torch.randn(3)).gm
    with pytest.raises(ValueError, match="remat.*'rand_like'"):
        funcrl.remat(gm, lambda node: True)
    # Kept, it hinders nobody.
    funcrl.remat(gm, lambda node: "rand" not in node.name)


def test_what_is_overwritten_is_not_computed_again():
    def loss(x):
        y = x.exp()
        z = y.sin()
        return z.mul_(2).cos().sum()

    flat = flatten_as_written(torch.func.grad(loss), torch.randn(3))
    phase = "forward"
    for node in flat.gm.graph.nodes:
        phase = "backward" if node.target is torch.ops.aten.ones_like.default else phase
        set_origin(node, Origin(phase))
    with pytest.raises(ValueError, match="remat.*policy.*in place"):
        funcrl.remat(flat.gm, lambda node: True)
    again = funcrl.remat(flat.gm, lambda node: node.name == "exp")
    assert same(flat.run(), flat.run(again))


@pytest.mark.parametrize("is_last", [False, True])
def test_what_reads_an_input_is_computed_again_if_its_write_comes_last(is_last):
    def step(weight, x):
        y = (weight * x).exp()
        update = torch.ones_like(y) * 2  # from here on backward
        if not is_last:
            weight.copy_(update)
        found = y + 1
        if is_last:
            weight.copy_(update)
        return found

    def run(gm):
        weight, x = torch.arange(3.0), torch.ones(3)
        return [*gm(weight, x), weight]

    flat = flatten_as_written(step, torch.arange(3.0), torch.ones(3))
    phase = "forward"
    for node in flat.gm.graph.nodes:
        phase = "backward" if node.target is torch.ops.aten.ones_like.default else phase
        set_origin(node, Origin(phase))

    def policy(node):
        return node.name in ("mul", "exp")

    wanted = run(flat.gm)
    if is_last:
        again = funcrl.remat(flat.gm, policy)
        assert [n.name for n in again.graph.nodes if n.meta.get("recomputed")] == [
            "mul_recomputed", "exp_recomputed",
        ]  # fmt: skip
        assert same(run(again), wanted)
    else:
        with pytest.raises(ValueError, match="remat.*policy.*in place.*'mul'"):
            funcrl.remat(flat.gm, policy)


def test_a_view_goes_with_what_it_looks_at():
    def loss(x):
        return x.exp().view(2, 3).t().sin().sum()

    flat = flatten(torch.func.grad(loss), torch.randn(6))
    again = funcrl.remat(flat.gm, lambda node: node.name == "exp")
    copies = [node.name for node in again.graph.nodes if node.meta.get("recomputed")]
    assert copies == ["exp_recomputed", "view_recomputed", "t_recomputed"]
    assert same(flat.run(), flat.run(again))


def test_fences_change_no_bit_and_come_after_a_gradient(flats):
    flat = flats["float32"]
    again = apply(flat, "full")
    fenced = add_fences(again)
    assert same(flat.run(), flat.run(fenced))
    fences = [n for n in fenced.graph.nodes if n.target is torch.ops.funcrl.fence.default]
    assert len(fences) == 3  # one a layer
    gradients = {node for node in fenced.graph.nodes if origin_of(node).is_seed}
    assert gradients
    for node in fenced.graph.nodes:
        if gradients & {*node.all_input_nodes}:
            gradients.add(node)
    assert all(fence.args[1] in gradients for fence in fences)
    assert predict_peak(fenced) == predict_peak(again)


def test_custom_ops_are_kept_by_selective_and_repeated_by_full():
    @torch.library.custom_op("funcrl_tests::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @square.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return x + (square((x @ self.weight).detach()) * x).sin()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(3, 4)
            self.layers = torch.nn.Sequential(Layer(4, 4, bias=False), Layer(4, 4, bias=False))

        def forward(self, tokens):
            return self.layers(self.embed(tokens)).sum()

    net = Net()
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    flat = flatten(torch.func.grad(funcrl.functional(net)), params, torch.tensor([0, 1, 2, 1]))
    counts = {}
    for policy in ("none", "selective", "full"):
        again = funcrl.remat(flat.gm, policy)
        assert same(flat.run(), flat.run(again))
        counts[policy] = targets(again)["funcrl_tests.square.default"]
    assert counts == {"none": 2, "selective": 2, "full": 4}


def test_trees_in_and_out_stay_trees():
    def loss(params):
        return params["a"].exp().sin().sum()

    params = {"a": torch.randn(3)}
    gm = funcrl.trace(torch.func.grad(loss), params)
    again = add_fences(funcrl.remat(gm, lambda node: node.name == "exp"))
    assert torch.equal(again(params)["a"], gm(params)["a"])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective"])
def test_nothing_is_merged_away_by_autograds_compiler(policy):
    from torch._dynamo.backends.common import aot_autograd

    flat, seen = flat_of("sequence ratio"), []

    def keep(gm, _):
        seen.append(gm)
        return gm.forward

    again = apply(flat, policy)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(again, backend=aot_autograd(fw_compiler=keep))(*flat.leaves)
    assert same(flat.run(), got)
    assert targets(seen[0]) == targets(again)
    assert predict_peak(seen[0]) == pytest.approx(predict_peak(again), rel=0.01)

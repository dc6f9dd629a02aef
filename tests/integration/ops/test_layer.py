"""The operator of a recurrent layer under every transform: equal to the loop of single steps."""

import pytest
import torch
from recurrent_cases import CELLS, SCANS, case, close, loss_of
from torch.func import grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl import tree

FORWARD = torch.ops.funcrl.recurrent_layer.default
BACKWARD = torch.ops.funcrl.recurrent_layer_gradients.default
RECOMPUTE = ["none", "full", "chunk"]
PER_SAMPLE = (0, None, 0, 0, 0)  # all but the parameters have a batch


def losses(cell, recompute="none"):
    """The loss by the operator, and by the oracle."""
    return loss_of(cell, backend="op", recompute=recompute), loss_of(cell, backend="loop")


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck(cell, recompute):
    x, params, state, resets, _ = case(cell, (2,), 5)
    names, num_states = list(params), len(tree.leaves(state))

    def fn(x, *leaves):
        given = leaves[0] if num_states == 1 else leaves[:2]
        named = dict(zip(names, leaves[num_states:], strict=True))
        outputs, last = SCANS[cell](x, named, given, resets, backend="op", recompute=recompute)
        return outputs, *tree.leaves(last)

    leaves = [each.requires_grad_() for each in (x, *tree.leaves(state), *params.values())]
    assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lead", [(), (2, 1, 3), (0,)])
def test_any_leading_axes(lead, cell, recompute):
    args = case(cell, lead, 9, layers=2)
    mine, oracle = losses(cell, recompute)
    close(grad(mine, (0, 1, 2))(*args), grad(oracle, (0, 1, 2))(*args))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_samples_are_those_of_each_alone(cell, bias, recompute):
    args = case(cell, (5, 2), 9, layers=2, bias=bias)
    mine, oracle = losses(cell, recompute)
    found = vmap(grad(mine, (0, 1, 2)), PER_SAMPLE)(*args)
    x, params, state, resets, weights = args
    for sample in range(5):
        alone = tree.map(lambda each, at=sample: each[at], (x, state, resets, weights))
        one = grad(oracle, (0, 1, 2))(alone[0], params, *alone[1:])
        close(tree.map(lambda each, at=sample: each[at], found), one)


@pytest.mark.parametrize("cell", CELLS)
def test_nested_batches_and_a_batch_inside_the_gradient(cell):
    args = case(cell, (2, 3), 9)
    mine, oracle = losses(cell)

    def twice(loss):
        return vmap(vmap(grad(loss, (0, 1, 2)), PER_SAMPLE), PER_SAMPLE)

    def summed(loss):
        return grad(
            lambda *given: vmap(vmap(loss, PER_SAMPLE), PER_SAMPLE)(*given).sum(), (0, 1, 2)
        )

    def between(loss):
        """Gradients of groups, each summed over its samples."""
        return vmap(
            grad(lambda *given: vmap(loss, PER_SAMPLE)(*given).sum(), (0, 1, 2)), PER_SAMPLE
        )

    for transform in (twice, summed, between):
        close(transform(mine)(*args), transform(oracle)(*args))


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_of_networks(cell):
    """Each has parameters of its own, x and the states are shared."""
    x, params, state, resets, weights = case(cell, (2,), 9)
    params = tree.map(lambda each: torch.stack([each, 2 * each, -each]), params)
    mine, oracle = losses(cell)
    args = (x, params, state, resets, weights)
    dims = (None, 0, None, None, None)
    close(*(vmap(grad(loss, (0, 1)), dims)(*args) for loss in (mine, oracle)))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("cell", CELLS)
def test_a_jacobian(cell, recompute):
    """A batch of gradients alone, at 70 steps: the forward pass cut them into pieces of 64."""
    x, params, _, resets, _ = case(cell, (), 70)

    def states(x, backend, recompute="none"):
        last = SCANS[cell](x, params, None, resets, backend=backend, recompute=recompute)[1]
        return torch.cat([each.flatten() for each in tree.leaves(last)])

    resets[:] = False
    close(jacrev(states)(x, "op", recompute), jacrev(states)(x, "loop"))


@pytest.mark.parametrize("cell", CELLS)
def test_a_second_derivative_is_refused(cell):
    x, *rest = case(cell)
    with pytest.raises(RuntimeError, match=rf"{cell}_scan has a first derivative only.*'?loop"):
        grad(lambda x: grad(losses(cell)[0])(x, *rest).sum())(x)
    assert grad(lambda x: grad(losses(cell)[1])(x, *rest).square().sum())(x).abs().sum() > 0


class Kept(TorchDispatchMode):
    """Records how many numbers the operator keeps for a backward pass."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is FORWARD:
            self.kept.append(tuple(each.numel() for each in results[3:]))
        return results


def kept_of(fn, *args):
    with Kept() as mode:
        fn(*args)
    return mode.kept


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_is_kept_where_nobody_asks_for_a_gradient(cell):
    args = case(cell, (3,), 70)
    width = args[4].shape[-1]
    cells = 1 if cell == "lstm" else 0
    gates, states = 3 * 70 * 4 * width, cells * 3 * 70 * width
    loss, _ = losses(cell)
    assert kept_of(loss, *args) == [(0, 0)]
    assert kept_of(vmap(loss, PER_SAMPLE), *args) == [(0, 0)]
    assert kept_of(vmap(grad(lambda w: (loss(*args) * w).sum())), torch.ones(2)) == [(0, 0)]

    needing = tree.map(lambda each: each.clone().requires_grad_(), args[1])
    asked = (args[0], needing, *args[2:])
    assert kept_of(loss, *asked) == [(gates, states)]
    assert kept_of(vmap(loss, PER_SAMPLE), *asked) == [(gates, states)]
    with torch.no_grad():
        assert kept_of(loss, *asked) == [(0, 0)]
        assert kept_of(vmap(loss, PER_SAMPLE), *asked) == [(0, 0)]
    assert kept_of(grad(loss), *args) == [(gates, states)]
    assert kept_of(vmap(grad(loss), PER_SAMPLE), *args) == [(gates, states)]
    inside = grad(lambda *given: vmap(loss, PER_SAMPLE)(*given).sum())
    assert kept_of(inside, *args) == [(gates, states)]
    assert kept_of(grad(losses(cell, "full")[0]), *args) == [(0, 0)]
    assert kept_of(grad(losses(cell, "chunk")[0]), *args) == [(0, cells * 3 * 2 * width)]


@pytest.mark.parametrize(("cell", "recompute"), [("lstm", "chunk"), ("gru", "none")])
def test_a_trace_has_one_call_a_layer_and_compiles(cell, recompute):
    """Three steps of gradient descent by per-sample gradients, in one graph."""
    x, params, *rest = case(cell, (4,), 9, layers=2, dtype=torch.float32)
    mine, oracle = losses(cell, recompute)

    def descend(loss):
        def run(params, x, *rest):
            for _ in range(3):
                grads = vmap(grad(loss, 1), PER_SAMPLE)(x, params, *rest)
                params = tree.map(lambda each, of: each - 0.01 * of.sum(0), params, grads)
            return params

        return run

    wanted = descend(oracle)(params, x, *rest)
    graph = make_fx(descend(mine))(params, x, *rest)
    called = [node.target for node in graph.graph.nodes]
    assert (called.count(FORWARD), called.count(BACKWARD)) == (6, 6)
    eager = descend(mine)(params, x, *rest)
    close(eager, wanted, 1e-5)
    assert all(map(torch.equal, tree.leaves(graph(params, x, *rest)), tree.leaves(eager)))
    with torch.no_grad():
        close(torch.compile(graph, backend="aot_eager")(params, x, *rest), eager, 1e-6)


def test_inductor_compiles_a_trace():
    args = case("lstm", (4,), 9, dtype=torch.float32)
    gradient = vmap(grad(losses("lstm", "full")[0], (0, 1, 2)), PER_SAMPLE)
    graph = make_fx(gradient)(*args)
    with torch.no_grad():
        close(torch.compile(graph, backend="inductor")(*args), gradient(*args), 1e-6)


@pytest.mark.parametrize(
    ("cell", "kept"), [("lstm", "gates"), ("lstm", "starts"), ("gru", "nothing")]
)
def test_the_operators_say_their_shapes_and_change_no_input(cell, kept):
    x, params, state, resets, weights = case(cell, (3,), 70)
    h, c = state if cell == "lstm" else (state, state[..., :0])
    order = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    inputs = (x, h[:, 0], c[:, 0], resets, *(params[name] for name in order))
    options = (cell, "op", "ieee")
    torch.library.opcheck(FORWARD, (*inputs, *options, kept))
    outputs, h, c, *saved = FORWARD(*inputs, *options, kept)
    given = (*inputs, outputs, *saved, weights, h, c)
    for wants in ((3, True, True), (1, False, False)):
        torch.library.opcheck(BACKWARD, (*given, *options, kept, *wants))

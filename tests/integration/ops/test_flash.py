"""Attention by torch's flash kernels: the numbers of `attend_causal`, without its [T, T] scores."""

import pytest
import torch
from cases import random_case, tiny_batch, tiny_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from benchmarks import step as bench_step
from benchmarks.inputs import StepBenchConfig, make_case
from funcrl import config, grads, tree
from funcrl.graph import nodes as nodes_
from funcrl.loop import build
from funcrl.ops import attend_causal, attend_flash, flash

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
B, C = 3, 8


def inputs(*lead, heads=4, kv_heads=2, length=7, width=C, dtype=torch.float64, device="cpu"):
    """Queries, keys, values, and the weights of a loss."""
    generator = torch.Generator().manual_seed(0)

    def randn(count):
        shape = (*lead, count, length, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return randn(heads), randn(kv_heads), randn(kv_heads), randn(heads)


def loss_of(attend):
    return lambda q, k, v, weights: (attend(q, k, v) * weights).sum()


def gradient_of(attend):
    return grad(loss_of(attend), (0, 1, 2))


def summed_gradient_of(attend):
    loss = vmap(loss_of(attend))
    return grad(lambda *args: loss(*args).sum(), (0, 1, 2))


def close(mine, theirs, bound=1e-12):
    """Equal to `bound`, relative to the largest entry of a leaf where that is above 1."""
    for a, b in zip(tree.leaves(mine), tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= bound * max(b.abs().max().item(), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 2, 7, 70])
def test_values_and_gradients_equal_those_of_attend_causal(lead, heads, kv_heads, length):
    q, k, v, weights = inputs(*lead, heads=heads, kv_heads=kv_heads, length=length)
    close(attend_flash(q, k, v), attend_causal(q, k, v))
    close(gradient_of(attend_flash)(q, k, v, weights), gradient_of(attend_causal)(q, k, v, weights))


@pytest.mark.parametrize("lead", [(), (2,), (0,)])
def test_nothing_in_nothing_out(lead):
    args = inputs(*lead, length=3 if lead == (0,) else 0)
    assert attend_flash(*args[:3]).shape == args[0].shape
    assert [part.shape for part in gradient_of(attend_flash)(*args)] == [x.shape for x in args[:3]]


def test_gradcheck():
    leaves = [part.requires_grad_() for part in inputs(2, length=3, width=2)[:3]]
    assert torch.autograd.gradcheck(attend_flash, leaves)


def test_the_model_s_own_memory_order_and_worse_ones():
    """Heads come as a transpose of [T, H, C]; the last axis may not be the innermost one."""
    q, k, v, weights = inputs(B)
    expected = gradient_of(attend_causal)(q, k, v, weights)
    for axes in [(0, 2, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)]:
        back = [axes.index(axis) for axis in range(4)]
        moved = [part.permute(axes).contiguous().permute(back) for part in (q, k, v, weights)]
        close(attend_flash(*moved[:3]), attend_causal(q, k, v))
        close(gradient_of(attend_flash)(*moved), expected)
    ones = grad(lambda q: attend_flash(q, k, v).sum())(q)  # a gradient of one number, expanded
    close(ones, grad(lambda q: attend_causal(q, k, v).sum())(q))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["each", "sum", "vjp", "nested"])
def test_transforms_are_right_eager_traced_and_compiled(transform):
    made = {
        "each": lambda attend: vmap(gradient_of(attend)),
        "sum": summed_gradient_of,
        "vjp": lambda attend: lambda *args: vjp(vmap(attend), *args[:3])[1](args[3]),
        "nested": lambda attend: vmap(lambda *args: vmap(gradient_of(attend))(*args)),
    }[transform]  # fmt: skip
    args = inputs(2, B) if transform == "nested" else inputs(B)
    eager = made(attend_flash)(*args)
    close(eager, made(attend_causal)(*args))
    gm = make_fx(made(attend_flash))(*args)
    compiled = torch.compile(gm, backend="aot_eager")
    for run in (gm, compiled):
        assert all(torch.equal(a, b) for a, b in zip(run(*args), eager, strict=True))


@pytest.mark.parametrize("transform", [lambda f: vmap(gradient_of(f)), summed_gradient_of])
def test_one_kernel_for_the_whole_batch(transform):
    graphs = [make_fx(transform(attend_flash))(*inputs(rows)).graph for rows in (2, 5)]
    assert len(graphs[0].nodes) == len(graphs[1].nodes)
    for graph in graphs:
        targets = [node.target for node in graph.nodes]
        assert targets.count(FORWARD) == targets.count(BACKWARD) == 1
        # The kernels take what comes: nothing is copied, moved or repeated on the way to them.
        kernels = [node for node in graph.nodes if node.target in (FORWARD, BACKWARD)]
        read = {source.target for node in kernels for source in node.all_input_nodes}
        assert aten.clone.default not in read


BATCHED = [(0, None, None), (None, 0, None), (None, 0, 0), (0, None, 0), (0, 0, 0), (1, 2, 0)]


@pytest.mark.parametrize("in_dims", BATCHED)
def test_gradients_are_right_whatever_is_batched(in_dims):
    *args, weights = inputs(B)
    args = [
        part[0] if at is None else part.movedim(0, at)
        for part, at in zip(args, in_dims, strict=True)
    ]
    whole = *args, weights
    mine, theirs = (
        vmap(gradient_of(attend), (*in_dims, 0))(*whole) for attend in (attend_flash, attend_causal)
    )
    close(mine, theirs)
    losses = [vmap(loss_of(attend), (*in_dims, 0)) for attend in (attend_flash, attend_causal)]
    mine, theirs = (grad(lambda *a, f=f: f(*a).sum(), (0, 1, 2))(*whole) for f in losses)
    close(mine, theirs)


def test_a_jacobian_equals_that_of_attend_causal():
    q, k, v, _ = inputs(length=3)
    for argument in range(3):
        mine, theirs = (jacrev(f, argument)(q, k, v) for f in (attend_flash, attend_causal))
        close(mine, theirs)


def test_a_second_derivative_is_refused():
    q, k, v, weights = inputs()

    def loss(q):
        return loss_of(attend_flash)(q, k, v, weights)

    def penalty(q):
        return (grad(loss)(q) ** 2).sum()

    def twice(q):
        leaf = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return torch.autograd.grad((first**2).sum(), leaf)

    message = "attend_flash has a first derivative only.*attend_causal has them all"
    for ask in (grad(penalty), twice, jacrev(jacrev(loss))):
        with pytest.raises(RuntimeError, match=message):
            ask(q)
    with pytest.raises(RuntimeError, match=message):
        vmap(grad(penalty))(torch.stack([q, q]))


def rounding(q, k, v, grad_out, unit):
    """Bounds of the errors of the output and of each gradient, all in float64: [H, T, C] each.

    A sum of n products, each rounded to 1 + unit, is off by at most n unit times the sum of their
    sizes. From scores S to weights P (exp turns an error into a factor), to the output O = P v, to
    dP = g v^T, D = g . O, dS = P (dP - D), dq = dS k, dk = dS^T q and dv = P^T g. Terms of second
    order are smaller than what is doubled at the end.
    """
    heads, length, width = q.shape
    group, root = heads // k.shape[0], width**-0.5
    q, k, v, grad_out = (part.abs() for part in (q, k, v, grad_out))
    keys, values = (part.repeat_interleave(group, dim=0) for part in (k, v))
    return_to = lambda part: part.unflatten(0, (-1, group)).sum(1)  # noqa: E731 (short)

    def bounds(weights):
        scores = (width + 2) * unit * root * (q @ keys.mT)
        relative = 2 * scores.amax(-1, keepdim=True) + (length + 6) * unit
        out = (relative + (length + 2) * unit) * (weights @ values)
        sizes = grad_out @ values.mT + (grad_out * (weights @ values)).sum(-1, keepdim=True)
        inner = width * unit * sizes + (grad_out * out).sum(-1, keepdim=True)
        d_scores = weights * ((relative + 3 * unit) * sizes + inner)
        d_scores = (d_scores + (length * group + 2) * unit * weights * sizes) * root
        d_values = (relative + (length * group + 2) * unit) * weights
        dk, dv = return_to(d_scores.mT @ q), return_to(d_values.mT @ grad_out)
        return [2 * part for part in (out, d_scores @ keys, dk, dv)]

    return bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_round_as_derived(dtype):
    rounded = [part.to(dtype) for part in inputs(length=33)]
    q, k, v, grad_out = exact = [part.double() for part in rounded]
    scores = q @ k.repeat_interleave(2, dim=0).mT * C**-0.5
    future = torch.ones(33, 33, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    mine = attend_flash(*rounded[:3]), *gradient_of(attend_flash)(*rounded)
    theirs = attend_causal(*exact[:3]), *gradient_of(attend_causal)(*exact)
    bounds = rounding(q, k, v, grad_out, torch.finfo(dtype).eps / 2)(weights)
    for got, expected, bound in zip(mine, theirs, bounds, strict=True):
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_further_from_the_truth_than_attend_causal(dtype):
    args = [part.to(dtype) for part in inputs(B, length=33)]
    check_errors(args, lambda f: vmap(gradient_of(f)))


def check_errors(args, transform):
    """No more than twice the error of `attend_causal`, and an ulp where that is all but exact.

    A single token's gradients of q and k are 0, as the difference of two equal sums of v times the
    incoming gradient: in float32 they differ by an ulp.
    """

    def results(attend, args):
        return vmap(attend)(*args[:3]), *transform(attend)(*args)

    q, k, v, incoming = (part.double().norm() for part in args)
    ulp = torch.finfo(torch.float32).eps * v * incoming * max(q, k)

    truth = results(attend_causal, [part.double() for part in args])
    pairs = zip(results(attend_flash, args), results(attend_causal, args), truth, strict=True)
    for mine, theirs, exact in pairs:
        error, own = ((part.double() - exact).norm() for part in (mine, theirs))
        assert error <= 2 * own + torch.finfo(mine.dtype).eps * exact.norm() + ulp


def test_bad_input_is_refused():
    q, k, v, _ = inputs(B)
    with pytest.raises(ValueError, match=r"attend_flash .*q .*\[3, 4, 7, 8\]"):
        attend_flash(q, k[:, :1].expand(B, 3, 7, C), v)
    with pytest.raises(ValueError, match="attend_flash .*q "):
        attend_flash(q[0, 0], k, v)
    with pytest.raises(ValueError, match="attend_flash .* v .*shape"):
        attend_flash(q, k, v[..., :4])
    with pytest.raises(ValueError, match="attend_flash .* k .*shape"):
        attend_flash(q, k[:, :, :5], v[:, :, :5])
    with pytest.raises(TypeError, match="attend_flash .* v .*torch.float64"):
        attend_flash(q, k, v.float())
    with pytest.raises(TypeError, match="attend_flash .*cuda.* got"):
        attend_flash(q.long(), k.long(), v.long())


# -- what a GPU's kernels are handed, without a GPU ------------------------------------------------


def both(q, k, v, grad_out):
    """Forward and backward as the functions are, since autograd needs a real device."""
    kept = flash._apply(flash._Attend, q, k, v)
    return kept[0], flash._apply(flash._Gradients, grad_out, q, k, v, *kept)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flash", "cudnn"])
@pytest.mark.parametrize("lead", [(B,), (2, B)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_gpu_s_kernels_are_called_as_their_schemas_say(monkeypatch, lead, kv_heads, kind):
    monkeypatch.setattr(flash, "_takes_cudnn", lambda q: kind == "cudnn")
    with FakeTensorMode():
        q, k = (
            torch.empty(*lead, heads, 7, C, device="cuda", dtype=torch.bfloat16)
            for heads in (4, kv_heads)
        )
        gm = make_fx(vmap(both))(q, k, k, q)
        out, results = gm(q, k, k, q)
    assert out.shape == q.shape
    assert [part.shape for part in results] == [q.shape, k.shape, k.shape]
    targets = [node.target for node in gm.graph.nodes]
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    kernels = [forward, backward]
    assert all(targets.count(kernel) == 1 for kernel in kernels)
    assert funcrl.graph.predict_peak(gm) > 0  # results that are None or a number have no bytes
    nodes = [node for node in gm.graph.nodes if node.target in kernels]
    rows = B * (2 if len(lead) == 2 else 1)
    assert [nodes_.count_flops(node) for node in nodes] == [
        products * 2 * rows * 4 * 7 * 7 * C for products in (2, 5)
    ]


def test_what_a_gpu_s_kernels_cannot_do_is_refused():
    with FakeTensorMode():
        narrow, single, wide = (
            torch.empty(4, 7, width, device="cuda", dtype=dtype)
            for width, dtype in [(12, torch.bfloat16), (8, torch.float32), (264, torch.float16)]
        )
        for x in (narrow, wide):
            with pytest.raises(ValueError, match="attend_flash .*head width.* (12|264)"):
                attend_flash(x, x, x)
        with pytest.raises(TypeError, match="attend_flash .*cuda.*torch.float32"):
            attend_flash(single, single, single)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 2, 70, 64), (4, 4, 256, 128), (6, 1, 33, 40), (4, 2, 1, 64)])
@pytest.mark.parametrize("transform", [lambda f: vmap(gradient_of(f)), summed_gradient_of])
def test_on_a_gpu_no_further_from_the_truth_than_attend_causal(shape, transform):
    heads, kv_heads, length, width = shape
    options = {"heads": heads, "kv_heads": kv_heads, "length": length, "width": width}
    args = inputs(B, **options, dtype=torch.bfloat16, device="cuda")
    check_errors(args, transform)
    gm = make_fx(transform(attend_flash))(*args)
    for run in (gm, torch.compile(gm, backend="aot_eager")):
        for traced, eager in zip(run(*args), transform(attend_flash)(*args), strict=True):
            # The gradient of q is added up in no fixed order.
            assert (traced - eager).norm() <= 0.01 * eager.norm()


# -- in a model, a step and the passes -------------------------------------------------------------

BATCH = tiny_batch(rows=4, length=16)


def step_of(attend, **options):
    model = tiny_model(**options.pop("model", {}))
    model_fn = funcrl.logprob_fn(model, attend=attend)
    step = funcrl.grpo_step(model_fn, optimizer=funcrl.optim.sgd(1.0), **options)
    return step, step.init(funcrl.init_params(model, seed=0, dtype=torch.float64))


def test_a_model_s_gradients_are_those_of_its_own_attention():
    model = tiny_model(num_heads=4, num_kv_heads=2)
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    plain, fast = (funcrl.logprob_fn(model, attend=attend) for attend in (None, attend_flash))

    def loss(model_fn):
        return lambda p, s: funcrl.policy_loss(funcrl.grpo(entropy=0.1), model_fn(p, s), s)

    with torch.no_grad():
        close(*(grads.summed_gradient(loss(fn))(params, BATCH).grads for fn in (fast, plain)))
        close(*(
            funcrl.per_sample_grad(lambda p, s, fn=fn: loss(fn)(p, s)[0], chunk=3)(params, BATCH)
            for fn in (fast, plain)
        ))  # fmt: skip


def test_attend_and_packed_rows_are_not_for_each_other():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0)
    packed = funcrl.pack(random_case(length=16).rollout, funcrl.grpo(), length=16)
    row = tree.map(lambda leaf: leaf[0], packed)
    with pytest.raises(ValueError, match=r"attend_segments= .*attend_flash alone"):
        funcrl.logprob_fn(model, attend=attend_flash)(params, row)
    with pytest.raises(TypeError, match="logprob_fn .*attend.* 'flash'"):
        funcrl.logprob_fn(model, attend="flash")


@pytest.mark.slow
@pytest.mark.parametrize("per_sample", [None, lambda g: g, funcrl.clip_per_sample(1e-3)])
def test_a_traced_and_fused_step_makes_no_per_sample_gradient(per_sample):
    """A vocabulary and widths much larger than T, so that nothing else is as large as [B, P, Q]."""
    shape = {"vocab_size": 211, "width": 40, "mlp_width": 104, "num_heads": 5}
    batch = tiny_batch(rows=4, length=5)
    step, state = step_of(attend_flash, model=shape, per_sample=per_sample)
    graph = funcrl.trace(step.update, state, batch)
    fused = funcrl.fuse_per_sample(graph)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            tree.leaves(graph(state, batch)), tree.leaves(step(state, batch)), strict=True
        )
    )
    close(fused(state, batch), step(state, batch))
    values = [
        node.meta.get("val") for node in fused.graph.nodes if "expand" not in str(node.target)
    ]
    largest = max(value.numel() for value in values if isinstance(value, Tensor))
    assert largest == max(leaf.numel() for leaf in state.params.values())
    targets = [node.target for node in fused.graph.nodes]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == 2  # one a layer


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "full", "budget"])
def test_recomputing_keeps_attention_where_products_are_kept(policy):
    step, state = step_of(attend_flash, model={"num_layers": 3})
    batch = tiny_batch(rows=4, length=32)
    graph = funcrl.trace(step.update, state, batch)
    peak = funcrl.graph.predict_peak(funcrl.remat(graph, "selective"))
    budget = peak if policy == "budget" else None
    again = funcrl.remat(graph, policy, budget)
    for a, b in zip(
        tree.leaves(again(state, batch)), tree.leaves(graph(state, batch)), strict=True
    ):
        assert torch.equal(a, b)
    kernels = [node for node in again.graph.nodes if node.target is FORWARD]
    assert all(nodes_.has_flops(node) for node in kernels)
    recomputed = [node for node in kernels if node.meta.get("recomputed")]
    assert len(recomputed) == (3 if policy == "full" else 0)
    if policy == "selective":
        # Its output and its log-normaliser go from the first copy straight to the backward pass.
        backward = [node for node in again.graph.nodes if node.target is BACKWARD]
        for node in backward:
            assert [node.args[place].args[0] in kernels for place in (4, 5)] == [True, True]
    assert funcrl.graph.recomputed_cost(again) > 0


@pytest.mark.slow
def test_attention_with_dropout_is_not_computed_again():
    step, state = step_of(attend_flash)
    graph = funcrl.trace(step.update, state, BATCH)
    for node in graph.graph.find_nodes(op="call_function", target=FORWARD):
        node.update_arg(3, 0.5)
    with pytest.raises(ValueError, match="remat expects deterministic ops"):
        funcrl.remat(graph, "full")


@pytest.mark.slow
def test_a_step_holds_no_scores():
    """At a T that outweighs all else, the predicted peak is under half."""
    batch = tiny_batch(rows=2, length=256)
    peaks = []
    for attend in (attend_flash, None):
        step, state = step_of(attend)
        peaks.append(funcrl.graph.predict_peak(funcrl.trace(step.update, state, batch)))
    assert peaks[0] < peaks[1] / 2


# -- the options -----------------------------------------------------------------------------------

SMALL = {"num_layers": (2,), "width": 16, "vocab_size": 11, "rows": 4, "length": 8, "repeats": 1}


@pytest.mark.slow
def test_the_benchmark_compares_equal_things_with_flash_on_both_sides():
    case = make_case(StepBenchConfig(**SMALL, attend="flash"), 2)
    assert "flash attention" in case.shape
    assert case.ordinary_attend is not attend_causal
    assert "flash" not in make_case(StepBenchConfig(**SMALL), 2).shape
    functions = list(bench_step._gradient_variants(case).values())
    graph = make_fx(functions[1])().graph
    assert FORWARD in {node.target for node in graph.nodes}
    names = [name for name, _ in case.model.named_parameters()]
    ordinary = dict(zip(names, functions[0](), strict=True))
    for other in functions[1:]:
        for name, leaf in other().grads.items():
            assert (leaf - ordinary[name]).abs().max() <= 1e-5 * ordinary[name].abs().max(), name
    with pytest.raises(ValueError, match="benchmarks step .*dtype .*attend"):
        StepBenchConfig(attend="flash", device="cuda")


@pytest.mark.slow
def test_training_takes_the_option():
    batch = tree.map(lambda leaf: leaf[0], BATCH)
    runs = {}
    for attend in ("native", "flash"):
        built = build.build(config.TrainConfig(attend=attend))
        params = funcrl.init_params(built.model, seed=0, dtype=torch.float64)
        gm = make_fx(built.model_fn)(params, batch)
        assert (FORWARD in {node.target for node in gm.graph.nodes}) == (attend == "flash")
        runs[attend] = built.model_fn(params, batch)
    close(runs["flash"], runs["native"])
    with pytest.raises(ValueError, match="train .*--dtype .*--attend"):
        config.TrainConfig(attend="flash", device="cuda")
    with pytest.raises(ValueError, match="train .*--attend"):
        config.TrainConfig(attend="fast")

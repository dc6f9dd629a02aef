"""Log-probabilities some tokens at a time: the same numbers, a fraction of the memory."""

import pytest
import torch
from cases import tiny_batch, tiny_model
from torch.func import grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import grads

T, D, V = 7, 5, 11


def plain(hidden, weight, targets, temperature=1.0, chunk=None):
    """What `token_scores` computes, all logits at once."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.log_softmax((hidden @ weight.mT).to(wide) / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), funcrl.ops.entropy(logprobs)


def inputs(dtype=torch.float64, rows=4):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, V, (rows, T), generator=generator)
    return randn(V, D), randn(rows, T, D), targets, randn(T), randn(T)


def loss_of(op, chunk, temperature, scale, entropy_scale):
    def loss(weight, hidden, targets):
        logprobs, entropy = op(hidden, weight, targets, temperature, chunk)
        return (scale * logprobs + entropy_scale * entropy).sum()

    return loss


def close(mine, theirs, bound):
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= bound * max(b.abs().max().item(), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "temperature"), [(1, 0.7), (3, 1.0), (T, 0.7), (100, 0.7)])
def test_values_and_gradients_equal_the_unchunked_ones(chunk, temperature):
    weight, hidden, targets, scale, entropy_scale = inputs()
    mine = funcrl.ops.linear_scores(hidden[0], weight, targets[0], temperature, chunk)
    close(mine, plain(hidden[0], weight, targets[0], temperature), 1e-12)
    losses = [
        loss_of(op, chunk, temperature, scale, entropy_scale)
        for op in (funcrl.ops.linear_scores, plain)
    ]

    def summed(loss):
        return lambda w, h, t: vmap(loss, (None, 0, 0))(w, h, t).sum()

    transforms = {
        "one": lambda loss: (grad(loss, (0, 1)), (weight, hidden[0], targets[0])),
        "each": lambda loss: (vmap(grad(loss, (0, 1)), (None, 0, 0)), (weight, hidden, targets)),
        "sum": lambda loss: (grad(summed(loss), (0, 1)), (weight, hidden, targets)),
    }
    for transform in transforms.values():
        (mine, args), (theirs, _) = (transform(loss) for loss in losses)
        close(mine(*args), theirs(*args), 1e-12)
        close(make_fx(mine)(*args)(*args), theirs(*args), 1e-12)


def test_gradcheck():
    weight, hidden, targets, _, _ = inputs()
    leaves = hidden[0].requires_grad_(), weight.requires_grad_()
    op = lambda h, w: funcrl.ops.linear_scores(h, w, targets[0], 0.7, 3)  # noqa: E731
    assert torch.autograd.gradcheck(op, leaves)


def test_batched_weights_are_right_too():
    weight, hidden, targets, _, _ = inputs()
    weights = torch.stack([weight, 2 * weight, 3 * weight, -weight])
    mine = vmap(lambda h, w, t: funcrl.ops.linear_scores(h, w, t, 1.0, 3))(hidden, weights, targets)
    for row in range(4):
        close([part[row] for part in mine], plain(hidden[row], weights[row], targets[row]), 1e-12)


@pytest.mark.parametrize("entropy_scale", [0.5, 2.0, 1024.0])
def test_a_token_of_probability_zero_does_no_harm(entropy_scale):
    """A logit of -inf: its probability, its part of the entropy and its gradient are 0."""
    hidden = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 0.0], [-1e300, 0.0], [0.5, 1.0]], dtype=torch.float64)
    hidden = hidden * torch.tensor([1e10, 1.0], dtype=torch.float64)  # 1e10 * -1e300 is -inf
    targets = torch.tensor([0, 2])
    ones = torch.ones(2, dtype=torch.float64)
    losses = [
        loss_of(op, 1, 1.0, ones, entropy_scale * ones) for op in (funcrl.ops.linear_scores, plain)
    ]
    mine, theirs = (grad(loss, (0, 1))(weight, hidden, targets) for loss in losses)
    assert (hidden @ weight.mT).isinf().any()
    assert all(part.isfinite().all() for part in mine)
    close(mine, theirs, 1e-12)


def scalar_of(op):
    return lambda w, h, t: sum(part.sum() for part in op(h, w, t, 0.7, 3))


BATCHED = [(None, None, 0), (0, None, None), (None, 0, None), (0, 0, None), (0, 0, 0), (0, None, 0)]


@pytest.mark.parametrize("in_dims", BATCHED)
def test_gradients_are_right_whatever_is_batched(in_dims):
    weight, hidden, targets, _, _ = inputs()
    whole = torch.stack([weight * k for k in range(1, 5)]), hidden, targets
    args = [part if at == 0 else part[0] for part, at in zip(whole, in_dims, strict=True)]
    mine, theirs = (
        vmap(grad(scalar_of(op), (0, 1)), in_dims)(*args)
        for op in (funcrl.ops.linear_scores, plain)
    )
    close(mine, theirs, 1e-12)


def test_a_jacobian_equals_the_unchunked_one():
    weight, hidden, targets, _, _ = inputs()
    for argument in (0, 1):
        mine, theirs = (
            jacrev(lambda h, w, op=op: op(h, w, targets[0], 0.7, 3)[0], argument)(hidden[0], weight)
            for op in (funcrl.ops.linear_scores, plain)
        )
        close([mine], [theirs], 1e-12)


def test_a_second_derivative_is_refused():
    """In every way to ask for one; a silent zero would be a wrong gradient penalty."""
    weight, hidden, targets, _, _ = inputs()

    def loss(h):  # linear in the log-probs: their gradient has no graph of its own
        return funcrl.ops.linear_scores(h, weight, targets[0], chunk=3)[0].sum()

    def penalty(h):
        return (grad(loss)(h) ** 2).sum()

    def twice(h):
        leaf = h.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return torch.autograd.grad((first**2).sum(), leaf)

    def norm_of_parameters(h):
        return grad(lambda w: (grad(lambda v: loss(h @ v))(w) ** 2).sum())(torch.eye(D).double())

    for ask in (grad(penalty), twice, jacrev(jacrev(loss)), norm_of_parameters):
        with pytest.raises(RuntimeError, match="linear_scores .*derivative"):
            ask(hidden[0])
    with pytest.raises(RuntimeError, match="linear_scores .*derivative"):
        vmap(grad(penalty))(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_round_like_the_unchunked_ones(dtype):
    """The logits are the same products; the softmax is in float32 on both sides."""
    weight, hidden, targets, _, _ = inputs(dtype)
    mine = funcrl.ops.linear_scores(hidden[0], weight, targets[0], 0.7, 3)
    theirs = plain(hidden[0], weight, targets[0], 0.7)
    assert mine[0].dtype == torch.float32
    # One product of D terms may be summed in another order in another shape: D ulps of a logit.
    bound = D * torch.finfo(dtype).eps * 4 / 0.7
    close(mine, theirs, bound)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("tied", [True, False])
def test_logprob_fn_in_chunks_equals_the_whole(chunk, tied):
    model, batch = tiny_model(tied=tied), tiny_batch()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)

    def gradient(model_fn):
        def loss(params, sample):
            return funcrl.policy_loss(funcrl.grpo(entropy=0.1), model_fn(params, sample), sample)

        with torch.no_grad():
            return grads.summed_gradient(loss)(params, batch)

    whole = gradient(funcrl.logprob_fn(model, 0.8))
    parts = gradient(funcrl.logprob_fn(model, 0.8, chunk=chunk))
    assert abs(whole.loss - parts.loss) <= 1e-12
    for name, leaf in whole.grads.items():
        assert (leaf - parts.grads[name]).abs().max() <= 1e-12, name
    each = [
        funcrl.per_sample_grad(
            lambda p, s, fn=fn: funcrl.policy_loss(funcrl.grpo(), fn(p, s), s)[0]
        )(params, batch)
        for fn in (funcrl.logprob_fn(model), funcrl.logprob_fn(model, chunk=chunk))
    ]
    for name, leaf in each[0].items():
        assert (leaf - each[1][name]).abs().max() <= 1e-12, name


def test_computing_in_bfloat16_gives_gradients_of_the_float32_parameters():
    model, batch = tiny_model(), tiny_batch(dtype=torch.float32)
    params = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model, chunk=4, dtype=torch.bfloat16)
    sample = funcrl.tree.map(lambda leaf: leaf[0], batch)
    cast = funcrl.logprob_fn(model, chunk=4)(funcrl.tree.cast(params, torch.bfloat16), sample)
    assert torch.equal(model_fn(params, sample).logprobs, cast.logprobs)
    found = grad(lambda p: model_fn(p, sample).logprobs.sum())(params)
    exact = grad(lambda p: funcrl.logprob_fn(model)(p, sample).logprobs.sum())(params)
    for name, leaf in found.items():
        assert leaf.dtype == torch.float32
        assert (leaf - exact[name]).norm() <= 0.05 * exact[name].norm() + 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("width", [128])
def test_the_peak_is_under_a_fifth(width):
    """At V = 49,152 and T = 512, forward and backward, all that is returned included."""
    weight, hidden = torch.randn(49_152, width) * 0.02, torch.randn(512, width)
    targets = torch.randint(0, 49_152, (512,))
    leaves = weight.requires_grad_(), hidden.requires_grad_()

    def run(op):
        return lambda: torch.autograd.grad(op(hidden, weight, targets, 1.0, 32)[0].sum(), leaves)

    assert peak_bytes(run(funcrl.ops.linear_scores)) < peak_bytes(run(plain)) / 5


@pytest.mark.slow
def test_a_batch_shares_one_gradient_of_the_weight():
    """Eight rows under vmap, summed: not eight [V, D]."""
    weight, hidden = torch.randn(8192, 64), torch.randn(8, 16, 64)
    targets = torch.randint(0, 8192, (8, 16))
    loss = loss_of(funcrl.ops.linear_scores, 16, 1.0, 1.0, 0.0)

    def run():
        summed = lambda w: vmap(loss, (None, 0, 0))(w, hidden, targets).sum()  # noqa: E731
        return torch.func.vjp(summed, weight)[1](torch.ones(()))

    assert peak_bytes(run) < 4 * weight.numel() * 4


def test_bad_input_is_refused():
    weight, hidden, targets, _, _ = inputs()
    with pytest.raises(ValueError, match="linear_scores .*temperature"):
        funcrl.ops.linear_scores(hidden[0], weight, targets[0], 0.0)
    with pytest.raises(ValueError, match="linear_scores .*chunk"):
        funcrl.ops.linear_scores(hidden[0], weight, targets[0], 1.0, 0)
    with pytest.raises(ValueError, match="linear_scores .*targets"):
        funcrl.ops.linear_scores(hidden[0], weight, targets[0, :3])
    with pytest.raises(ValueError, match="logprob_fn .*chunk"):
        funcrl.logprob_fn(tiny_model(), chunk=0)


def test_a_constant_weight_costs_no_gradient():
    """Three products a chunk and not four: logits twice, and the gradient of `hidden`."""
    hidden, weight = torch.randn(6, 8), torch.randn(11, 8)
    targets = torch.randint(0, 11, (6,))

    def loss(hidden, weight):
        return funcrl.ops.linear_scores(hidden, weight, targets, chunk=2)[0].sum()

    counts = []
    for wanted in (0, (0, 1)):
        with CountProducts() as count:
            torch.func.grad(loss, wanted)(hidden, weight)
        counts.append(count.products)
    assert counts == [9, 12]


class CountProducts(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))

"""The halves of a step: together its bits, and apart what a loop of one's own adds up."""

import pytest
import torch
from cases import equal, tiny_batch, tiny_model
from torch.func import grad, vmap

import funcrl
from funcrl import optim

MODEL = tiny_model()
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
MODEL_FN = funcrl.logprob_fn(MODEL)
OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.linear(1e-2, 0.0, 6)))


@pytest.mark.parametrize("microbatch", [None, 2, 1])
@pytest.mark.parametrize("algorithm", [funcrl.grpo(entropy=0.1), funcrl.sft(), funcrl.gspo()])
def test_the_halves_are_a_step_to_the_last_bit(algorithm, microbatch):
    step = funcrl.grpo_step(
        MODEL_FN, algorithm=algorithm, optimizer=OPTIMIZER, microbatch=microbatch
    )
    gradient = funcrl.forward_backward(MODEL_FN, algorithm=algorithm, microbatch=microbatch)
    update = funcrl.optim_step(OPTIMIZER)
    whole, halves = step.init(PARAMS, seed=3), update.init(PARAMS, seed=3)
    for seed in range(4):
        batch = tiny_batch(seed)._replace(ce_weights=torch.full((6, 7), 0.1).double())
        whole, metrics = step(whole, batch)
        found = gradient(halves.params, batch)
        scores = funcrl.score(MODEL_FN, halves.params, batch, microbatch)
        assert torch.equal(found.logprobs, scores.logprobs)
        halves, report = update(halves, found.grads)
        assert equal(whole, halves)
        assert torch.equal(metrics.means["loss"], found.loss)
        assert torch.equal(metrics.maxes["grad_norm"], report.maxes["grad_norm"])
        assert torch.equal(metrics.last["learning_rate"], report.last["learning_rate"])


def test_gradients_of_batches_add_up():
    batch = tiny_batch(0)
    gradient = funcrl.forward_backward(MODEL_FN)
    halves = [funcrl.tree.map(lambda leaf, at=at: leaf[at : at + 3], batch) for at in (0, 3)]
    first, second = (gradient(PARAMS, half) for half in halves)
    added = funcrl.tree.map(torch.add, first.grads, second.grads)
    whole = gradient(PARAMS, batch)
    loss = lambda params, row: funcrl.policy_loss(funcrl.grpo(), MODEL_FN(params, row), row)[0]  # noqa: E731
    plain = grad(lambda params: vmap(loss, (None, 0))(params, batch).sum())(PARAMS)
    for name, leaf in plain.items():
        torch.testing.assert_close(added[name], leaf, rtol=0, atol=1e-13)
        torch.testing.assert_close(whole.grads[name], leaf, rtol=0, atol=1e-13)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    update = funcrl.optim_step(optim.sgd(0.1))
    state = update.init(PARAMS)
    bad = funcrl.tree.map(lambda leaf: torch.full_like(leaf, torch.nan), PARAMS)
    after, metrics = update(state, bad)
    assert equal(after.params, state.params)
    assert metrics.last["num_skipped_updates"] == 1


def test_errors_name_the_half():
    with pytest.raises(TypeError, match="forward_backward expects model_fn to be a function"):
        funcrl.forward_backward(MODEL)
    with pytest.raises(TypeError, match="forward_backward.s gradient expects batch to be a Batch"):
        funcrl.forward_backward(MODEL_FN)(PARAMS, PARAMS)
    update = funcrl.optim_step()
    with pytest.raises(ValueError, match="optim_step expects"):
        update(update.init(PARAMS), {"w": torch.zeros(2)})

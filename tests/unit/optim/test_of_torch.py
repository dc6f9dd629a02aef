"""Torch's optimizers and schedules as transformations: the parameters of torch's own loop."""

from functools import partial

import pytest
import torch
import transformers

import funcrl
from funcrl import optim

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "adamax": partial(torch.optim.Adamax, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "radam": partial(torch.optim.RAdam, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.1, t0=2),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}
SCHEDULES = {
    "none": None,
    "cosine": lambda each: transformers.get_cosine_schedule_with_warmup(each, 2, 6),
    "exponential": lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.7),
    "one cycle": lambda each: torch.optim.lr_scheduler.OneCycleLR(  # of momentum, too
        each,
        0.5,
        total_steps=8,
        cycle_momentum="betas" in each.defaults or bool(each.defaults.get("momentum")),
    ),
}


def start():
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, generator=generator), "w": torch.randn(4, 3, generator=generator)
    }  # fmt: skip


def gradient(params, step):
    return {name: leaf * (step % 3 - 0.5) + 0.1 * step for name, leaf in params.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_parameters_are_those_of_torchs_own_loop(name, schedule):
    make, scheduled = OPTIMIZERS[name], SCHEDULES[schedule]
    leaves = {each: torch.nn.Parameter(leaf.clone()) for each, leaf in start().items()}
    optimizer = make(list(leaves.values()))
    scheduler = scheduled and scheduled(optimizer)
    tx = optim.from_torch(make, scheduled)
    params, states = start(), [tx.init(start())]
    for step in range(7):
        before = [optimizer.param_groups[0]["lr"], optim.current_learning_rate(states[-1])]
        found = gradient({each: leaf.detach() for each, leaf in leaves.items()}, step)
        for each, leaf in leaves.items():
            leaf.grad = found[each]
        optimizer.step()
        updates, state = tx.update(gradient(params, step), states[-1], params)
        params = optim.apply_updates(params, updates)
        rate = optim.current_learning_rate(state)
        assert float(rate) == pytest.approx(before[0])
        assert step or float(before[1]) == pytest.approx(before[0])
        if scheduler:
            scheduler.step()
        for each, leaf in leaves.items():
            bound = 3e-6 * (step + 1) * leaf.abs().max().clamp(min=1)
            assert (params[each] - leaf).abs().max() <= bound
        # Nothing that was given has changed, and the state keeps its structure.
        again, same = tx.update(gradient(params, step), states[-1], params)
        assert funcrl.tree.check_same_shapes("test", "a", same, "b", states[0]) is None
        states.append(state)
        del again
    assert [int(state.rate.num_updates) for state in states] == list(range(8))


def test_a_state_goes_on_from_where_it_was_kept():
    tx = optim.from_torch(OPTIMIZERS["nadam"], SCHEDULES["cosine"])
    params, state = start(), tx.init(start())
    kept = []
    for step in range(5):
        kept.append((params, state))
        updates, state = tx.update(gradient(params, step), state, params)
        params = optim.apply_updates(params, updates)
    # From a fresh transformation, with the third state.
    other = optim.from_torch(OPTIMIZERS["nadam"], SCHEDULES["cosine"])
    mine, now = kept[2]
    for step in range(2, 5):
        updates, now = other.update(gradient(mine, step), now, mine)
        mine = optim.apply_updates(mine, updates)
    assert all(torch.equal(mine[name], leaf) for name, leaf in params.items())


def test_what_is_no_such_optimizer_is_refused():
    for make, error, message in (
        (lambda params: 3, TypeError, "make to return a torch.optim.Optimizer .* got int"),
        (torch.optim.LBFGS, ValueError, "needs no closure, .* got LBFGS"),
    ):
        with pytest.raises(error, match=f"^from_torch expects .*{message}"):
            optim.from_torch(make).init(start())
    with pytest.raises(TypeError, match="^from_torch expects make to be a function"):
        optim.from_torch(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))

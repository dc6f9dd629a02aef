"""PPO with a critic: generalised advantages, the error of values, and whole steps."""

from functools import partial

import pytest
import torch
from cases import random_case, tiny_model

import funcrl

MODEL = tiny_model()
PARAMS = {
    **funcrl.init_params(MODEL, seed=0, dtype=torch.float64),
    "critic.weight": torch.linspace(-0.4, 0.5, 16, dtype=torch.float64),
    "critic.bias": torch.tensor(0.1, dtype=torch.float64),
}
MODEL_FN = funcrl.logprob_fn(MODEL, chunk=5, critic=True)


def rollout_of(seed, rows=6, length=9):
    """Completions with tokens of an environment between those of the policy."""
    case = random_case(seed, prompts=rows // 2, samples=2, length=length)
    generator = torch.Generator().manual_seed(seed)
    mask = case.rollout.mask & (torch.rand(rows, length, generator=generator) < 0.8)
    return case.rollout._replace(
        tokens=torch.randint(0, 11, (rows, length), generator=generator),
        rewards=torch.randn(rows, generator=generator, dtype=torch.float64),
        mask=mask,
    )


def literal_gae(rewards, mask, values, gamma, lam):
    """Advantages by the recursion of the paper, over the sampled tokens of each row."""
    advantages = torch.zeros_like(values)
    for i in range(len(mask)):
        places = mask[i].nonzero()[:, 0].tolist()
        own = lam(len(places)) if callable(lam) else lam
        later = 0.0
        for number, t in reversed(list(enumerate(places))):
            last = number == len(places) - 1
            following = 0.0 if last else values[i, places[number + 1]]
            reward = rewards[i] if last else 0.0
            later = reward + gamma * following - values[i, t] + gamma * own * later
            advantages[i, t] = later
    return advantages


def whitened(advantages, mask):
    found = [advantages[i, t] for i, t in mask.nonzero().tolist()]
    mean = sum(found) / len(found)
    variance = sum((each - mean) ** 2 for each in found) / (len(found) - 1)
    return torch.where(mask, (advantages - mean) / (variance + 1e-8) ** 0.5, 0.0)


LAYOUTS = {
    "padded": lambda batch: batch,
    "packed": partial(funcrl.packing.pack_batch, length=18),
    "prefixes": partial(funcrl.packing.pack_batch_groups, length=18),
}
GAE = [
    ({"lam": 0.95}, 1.0, 0.95, None),
    ({"gamma": 0.9, "lam": 0.5}, 0.9, 0.5, None),
    ({"lam": 0.0}, 1.0, 0.0, None),
    ({"gamma": 0.99, "lam": 0.8, "returns_lam": 1.0}, 0.99, 0.8, 1.0),
    ({"adaptive": 0.5}, 1.0, lambda n: 1 - 1 / max(0.5 * n, 1), None),
]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize(("options", "gamma", "lam", "returns_lam"), GAE)
def test_advantages_are_those_of_the_recursion(options, gamma, lam, returns_lam, whiten):
    rollout = rollout_of(1)
    batch = funcrl.collate(rollout, funcrl.ppo())
    scores = funcrl.score(MODEL_FN, PARAMS, batch)
    assert scores.values.abs().max() > 0.1
    values = torch.where(batch.mask, scores.values, 0.0)
    found = funcrl.gae(**options, whiten=whiten)(scores, batch)
    wanted = literal_gae(rollout.rewards, batch.mask, values, gamma, lam)
    targets = wanted
    if returns_lam is not None:
        targets = literal_gae(rollout.rewards, batch.mask, values, gamma, returns_lam)
    assert (found.returns - targets - values).abs().max() <= 1e-12
    wanted = whitened(wanted, batch.mask) if whiten else wanted
    assert (found.advantages - wanted).abs().max() <= 1e-12
    assert torch.equal(found.old_values, values)


@pytest.mark.parametrize("layout", ["packed", "prefixes"])
def test_advantages_of_packed_rows_are_those_of_the_samples(layout):
    batch = funcrl.collate(rollout_of(2), funcrl.ppo())
    prepare = funcrl.gae(gamma=0.97, lam=0.9, adaptive=1.5)
    alone = prepare(funcrl.score(MODEL_FN, PARAMS, batch), batch)
    rows = LAYOUTS[layout](batch)
    packed = prepare(funcrl.score(MODEL_FN, PARAMS, rows), rows)
    for name in ("advantages", "returns", "old_values"):
        mine, theirs = (getattr(each, name)[each.mask].sort().values for each in (packed, alone))
        assert (mine - theirs).abs().max() <= 1e-12


def literal_ppo(batch, params, old_values, advantages, returns):
    """The loss of PPO token by token, of the network's own logits and last layer."""
    inner = {name: leaf for name, leaf in params.items() if not name.startswith("critic.")}
    apply = funcrl.functional(MODEL)
    loss, count = torch.zeros((), dtype=torch.float64), batch.mask.sum()
    for i in range(len(batch.mask)):
        hidden, head = apply(
            inner, batch.tokens[i], batch.positions[i], head=lambda x, weight: (x, weight)
        )
        logprobs = (hidden @ head.T).log_softmax(-1)
        for t in batch.mask[i].nonzero()[:, 0].tolist():
            ratio = (logprobs[t - 1, batch.tokens[i, t]] - batch.behavior_logprobs[i, t]).exp()
            objective = torch.minimum(
                ratio * advantages[i, t], ratio.clamp(0.8, 1.2) * advantages[i, t]
            )
            value = hidden[t - 1] @ params["critic.weight"] + params["critic.bias"]
            old = old_values[i, t]
            near = old + (value - old).clamp(-0.05, 0.05)
            error = torch.maximum((value - returns[i, t]) ** 2, (near - returns[i, t]) ** 2) / 2
            loss = loss + (0.3 * error - objective) / count
    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("microbatch", [1, 2, None])
def test_a_step_is_the_literal_one(layout, microbatch):
    """Two updates of one rollout: the values of the first bound those of the second."""
    rollout, algorithm = rollout_of(3), funcrl.ppo(value=0.3, value_clip=0.05)
    batch = funcrl.collate(rollout, algorithm)
    prepare = funcrl.gae(lam=0.9)
    scores = funcrl.score(MODEL_FN, PARAMS, batch)
    values = torch.where(batch.mask, scores.values, 0.0)
    raw = literal_gae(rollout.rewards, batch.mask, values, 1.0, 0.9)
    advantages, returns = whitened(raw, batch.mask), raw + values
    rows = LAYOUTS[layout](prepare(scores, batch))
    step = funcrl.grpo_step(
        MODEL_FN, algorithm=algorithm, microbatch=microbatch, optimizer=funcrl.optim.sgd(0.5)
    )
    state = step.init(PARAMS)
    for _ in range(2):
        params = {name: leaf.clone().requires_grad_() for name, leaf in state.params.items()}
        loss = literal_ppo(batch, params, values, advantages, returns)
        grads = torch.autograd.grad(loss, list(params.values()))
        new, metrics = step(state, rows)
        assert abs(metrics.means["loss"] - loss) <= 1e-12
        parts = metrics.means["loss/policy"] + metrics.means["loss/value"]
        assert abs(parts - loss) <= 1e-12
        for name, grad in zip(params, grads, strict=True):
            moved = (state.params[name] - new.params[name]) / 0.5
            assert (moved - grad).abs().max() <= 1e-12, name
        assert grads[-1].abs().max() > 1e-3
        state = new


def test_a_critic_learns_what_a_completion_earns():
    rollout, algorithm = rollout_of(4), funcrl.ppo(value=1.0, value_clip=float("inf"))
    params = funcrl.models.with_critic(funcrl.init_params(MODEL, seed=0), 16)
    step = funcrl.grpo_step(
        MODEL_FN, algorithm=algorithm, prepare=funcrl.gae(lam=1.0),
        optimizer=funcrl.optim.adamw(3e-3),
    )  # fmt: skip
    state, losses = step.init(params), []
    rollout = rollout._replace(behavior_logprobs=rollout.behavior_logprobs.float())
    batch = funcrl.collate(rollout, algorithm)
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(metrics.means["loss/value"].item())
    assert losses[-1] < 0.3 * losses[0]


def test_what_a_critic_lacks_is_named():
    batch = funcrl.collate(rollout_of(3), funcrl.ppo())
    step = partial(funcrl.grpo_step, algorithm=funcrl.ppo())
    with pytest.raises(ValueError, match="returns and old_values"):
        step(MODEL_FN)(step(MODEL_FN).init(PARAMS), batch)
    plain = funcrl.logprob_fn(MODEL, chunk=5)
    inner = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match="gae expects scores with values"):
        funcrl.gae()(funcrl.score(plain, inner, batch), batch)
    with pytest.raises(ValueError, match=r"expects the parameters of a critic"):
        funcrl.score(MODEL_FN, inner, batch)
    with pytest.raises(ValueError, match="chunk= and a network of native operations"):
        funcrl.logprob_fn(MODEL, critic=True)
    with pytest.raises(ValueError, match="chunk= and a network of native operations"):
        funcrl.logprob_fn(tiny_model(numerics="exact"), chunk=5, critic=True)
    prepared = funcrl.gae()(funcrl.score(MODEL_FN, PARAMS, batch), batch)
    other = funcrl.grpo_step(MODEL_FN, algorithm=funcrl.grpo())
    with pytest.raises(ValueError, match="an algorithm with a value_cost"):
        other(other.init(PARAMS), prepared)

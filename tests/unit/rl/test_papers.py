"""Every row of the index of papers in docs/algorithms.md is a loop written from its paper."""

import math
import re
from pathlib import Path

import oracles
import pytest
import torch
from cases import cell_model, random_case, table_model

import funcrl
from funcrl.rl.mixing import mixing_parts

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
ROWS = [
    row
    for row in re.findall(r"^\| .*? \| `(funcrl\..*?)` \| ?(.*?) ?\|$", PAGE, re.MULTILINE)
    if "prepare=" not in row[1] and "funcrl.recenter" not in row[1]  # below, and in test_step.py
]


@pytest.fixture(scope="module")
def page():
    """Return the names that the blocks of the page define."""
    names = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), names)
    return names


def maxrl(x, i):
    return oracles.centered(x.rewards, x.group, i) / group_mean(x, i)


def group_mean(x, i):
    return oracles.mean([x.rewards[j] for j in oracles.members(x.group, i)])


def gpg(x, i):
    def teaches(j):
        own = [x.rewards[k] for k in oracles.members(x.group, j)]
        return any(reward != own[0] for reward in own)

    count = len(x.rewards)
    return oracles.centered(x.rewards, x.group, i) * count / sum(map(teaches, range(count)))


def whitened(x, i):
    centered = [oracles.centered(x.rewards, x.group, j) for j in range(len(x.rewards))]
    center = oracles.mean(centered)
    deviation = (sum((a - center) ** 2 for a in centered) / (len(centered) - 1)) ** 0.5
    return (centered[i] - center) / (deviation + 1e-6)


def opo(x, i):
    own = oracles.members(x.group, i)
    lengths = [len(x.rows[j]) for j in own]
    rewards = [x.rewards[j] for j in own]
    return x.rewards[i] - sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)


def score_function(x, advantage, by_tokens=False):
    objective = x.zero()
    for i in x.sequences:
        objective = objective + advantage(x, i) * sum(x.logprobs[i, t] for t in x.rows[i])
    return -objective / (x.num_tokens if by_tokens else len(x.sequences))


def gmpo(x):
    objective = x.zero()
    for i in x.sequences:
        advantage = oracles.standardized(x.rewards, x.group, i)
        product = torch.ones((), dtype=torch.float64)
        for t in x.rows[i]:
            ratio = x.ratio(i, t)
            if advantage > 0 and ratio > math.exp(0.4):
                ratio = math.exp(0.4)
            if advantage < 0 and ratio < math.exp(-0.4):
                ratio = math.exp(-0.4)
            product = product * ratio
        objective = objective + product ** (1 / len(x.rows[i])) * advantage
    return -objective / len(x.sequences)


def dppo(x, divergence, threshold):
    objective = x.zero()
    for i in x.sequences:
        advantage = oracles.standardized(x.rewards, x.group, i)
        for t in x.rows[i]:
            policy, behavior = (each[i, t].exp().item() for each in (x.logprobs, x.behavior))
            outwards = (policy - behavior) * advantage > 0
            if not (outwards and divergence(policy, behavior) > threshold):
                objective = objective + x.ratio(i, t) * advantage
    return -objective / x.num_tokens


def kl_of_coins(policy, behavior):
    sides = ((behavior, policy), (1 - behavior, 1 - policy))
    return sum(mu * math.log(mu / pi) for mu, pi in sides)


def vespo(x):
    objective = x.zero()
    for i in x.sequences:
        advantage = oracles.standardized(x.rewards, x.group, i)
        weight = 1.0
        for t in x.rows[i]:
            weight = weight * x.ratio(i, t).item()
        k, scale = (2, 3) if advantage >= 0 else (3, 2)
        gate = math.exp(scale) * weight**k * math.exp(-scale * weight)
        objective = objective + gate * advantage * sum(x.logprobs[i, t] for t in x.rows[i])
    return -objective / x.num_tokens


def luspo(x):
    objective = x.zero()
    for i in x.sequences:
        advantage = oracles.standardized(x.rewards, x.group, i)
        product = torch.ones((), dtype=torch.float64)
        for t in x.rows[i]:
            product = product * x.ratio(i, t)
        ratio = product ** (1 / len(x.rows[i]))
        term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        objective = objective + len(x.rows[i]) * term
    return -objective / len(x.sequences)


def dro(x, beta):
    objective = x.zero()
    for i in x.sequences:
        for t in x.rows[i]:
            moved = x.logprobs[i, t] - x.behavior[i, t]
            own = oracles.left_out(x.rewards, x.group, i) * x.logprobs[i, t]
            objective = objective + own - beta / 2 * moved**2
    return -objective / len(x.sequences)


def icepop(x):
    objective = x.zero()
    for i in x.sequences:
        advantage = oracles.standardized(x.rewards, x.group, i)
        for t in x.rows[i]:
            kept = x.ratio(i, t).item() if 0.5 <= x.ratio(i, t) <= 5.0 else 0.0
            on_policy = torch.exp(x.logprobs[i, t] - x.logprobs[i, t].detach())
            objective = objective + kept * on_policy * advantage / len(x.rows[i])
    return -objective / len(x.sequences)


def distillation(x):
    """The mean of log pi - log teacher, whose gradient is that times the one of log pi."""
    loss = x.zero()
    for i in x.sequences:
        for t in x.rows[i]:
            gap, ratio = (x.logprobs[i, t] - x.ref[i, t]).detach(), x.ratio(i, t).detach()
            moving = x.logprobs[i, t] - x.logprobs[i, t].detach()
            loss = loss + ratio * (gap + gap * moving)
    return loss / x.num_tokens


def by_batch(rewards, group, i):
    center = oracles.mean(list(rewards))
    deviation = (sum((r - center) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return (rewards[i] - center) / (deviation + 1e-6)


GREEDY = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)


# An expression of the index (with the words behind it, if one expression stands for several).
PAPERS = {
    "funcrl.grpo(kl=0.04)": lambda x: oracles.grpo(x, kl=0.04),
    "funcrl.grpo(dual_clip=3.0)": lambda x: oracles.dual_clip(x, 3.0),
    'funcrl.grpo(kl=0.04, kl_estimator="k3+")': lambda x: oracles.grpo_with_kl_gradient(
        x, 0.04, oracles.k3
    ),
    "funcrl.dr_grpo(length=512)": oracles.dr_grpo,
    "funcrl.dapo()": oracles.dapo,
    "funcrl.gspo()": oracles.gspo,
    "funcrl.cispo()": oracles.cispo,
    "funcrl.sapo()": oracles.sapo,
    "funcrl.rloo()": oracles.rloo,
    "funcrl.reinforce()": oracles.reinforce,
    "funcrl.grpo(correction=funcrl.ratios.truncated(2.0))": lambda x: oracles.corrected(
        x, "token", "truncated", 2.0
    ),
    "funcrl.grpo(correction=funcrl.ratios.masked(3.0))": lambda x: oracles.corrected(
        x, "sequence", "masked", 3.0
    ),
    'funcrl.grpo(correction=funcrl.ratios.masked(5.0, 0.5, level="token"))': icepop,
    "funcrl.reinforce(advantage=funcrl.advantages.by_group(maxrl))": lambda x: score_function(
        x, maxrl
    ),
    "funcrl.reinforce(advantage=gpg, weight=funcrl.aggregation.token_mean)": lambda x: (
        score_function(x, gpg, by_tokens=True)
    ),
    'funcrl.grpo(scale_rewards=whitened, kl_estimator="k2")': lambda x: oracles.grpo(
        x, advantage=lambda rewards, group, i: whitened(x, i)
    ),
    'funcrl.grpo(scale_rewards=by_batch, kl_estimator="k2")': lambda x: oracles.grpo(
        x, advantage=by_batch
    ),
    "funcrl.grpo()._replace(surrogate=geometric_mean)": gmpo,
    "funcrl.dapo()._replace(surrogate=dppo(binary_tv, 0.2))": lambda x: dppo(
        x, lambda pi, mu: abs(pi - mu), 0.2
    ),
    "funcrl.dapo()._replace(surrogate=dppo(binary_kl, 0.05))": lambda x: dppo(x, kl_of_coins, 0.05),
    'funcrl.grpo(level="sequence", weight=by_sequence)': luspo,
    "funcrl.dapo()._replace(ratio=whole_completion, surrogate=vespo())": vespo,
    "funcrl.rloo()._replace(surrogate=dro(0.05))": lambda x: dro(x, 0.05),
    "funcrl.grpo(scale_rewards=by_batch)": lambda x: oracles.grpo(x, advantage=by_batch),
    "funcrl.reinforce() of `opo(rollout)`": lambda x: score_function(x, opo),
    "funcrl.reinforce() of `remax(rollout, greedy)`": lambda x: score_function(
        x, lambda x, i: x.rewards[i] - GREEDY[x.group[i]]
    ),
    "funcrl.sft()": lambda x: score_function(x, lambda x, i: 1.0, by_tokens=True),
    "funcrl.distill()": distillation,
}


@pytest.mark.parametrize("equal_rewards", [False, True])  # in one of the groups
@pytest.mark.parametrize(("expression", "note"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_index_equals_its_paper(page, expression, note, equal_rewards):
    algorithm = eval(expression, page)
    case = random_case(3, spread=1.2)
    case.params["logprobs"].clamp_(max=-0.01)  # a probability of 1 has no binary KL
    if equal_rewards:
        case.rollout.rewards[case.rollout.group == 1] = 0.5
    rollout, name = case.rollout, expression
    if note.startswith("of `opo"):
        rollout, name = page["opo"](rollout), f"{expression} {note}"
    elif note.startswith("of `remax"):
        rollout, name = page["remax"](rollout, GREEDY), f"{expression} {note}"
    else:
        assert not note.startswith("of "), f"what is done with the rollout: {note}"
    x = oracles.Inputs(case)
    expected = PAPERS[name](x)
    (slope,) = torch.autograd.grad(expected, x.logprobs)
    batch = funcrl.collate(rollout, algorithm, case.ref_logprobs, case.ref_logprobs)
    found, loss = torch.func.grad_and_value(
        lambda params: torch.vmap(
            lambda sample: funcrl.policy_loss(algorithm, table_model(params, sample), sample)[0]
        )(batch).sum()
    )(case.params)
    bound = 1e-12 * max(1.0, slope.abs().sum().item())
    assert abs(loss - expected) <= bound
    assert (found["logprobs"] - slope).abs().max() <= bound
    assert slope.abs().max() > 0


def test_a_policy_that_teaches_itself_reads_a_longer_prompt(page):
    """A token's log-probability under the teacher is a number of its longer context alone."""

    def model_fn(params, sample):
        context = (sample.tokens * params["w"][sample.positions]).cumsum(0)
        logprobs = -(1 + context.roll(1).cos() + sample.tokens * 0.1)
        return funcrl.TokenScores(logprobs, logprobs)

    params = {"w": torch.rand(20, dtype=torch.float64)}
    case = random_case(6, prompts=2, samples=2)
    rollout = funcrl.Rollout(*(leaf[:3] for leaf in case.rollout))  # all of them have a completion
    shown = [[5, 7, 1], [9, 2], [3, 3, 3, 3]]
    batch = page["self_taught"](rollout, model_fn, params, shown)
    assert batch.token_weights == ()
    for row, prompt in enumerate(shown):
        places = rollout.mask[row].nonzero()[:, 0].tolist()
        before = list(prompt)
        for t in places:
            w = params["w"][: len(before)]
            context = (torch.tensor(before) * w).sum()
            expected = -(1 + context.cos() + rollout.tokens[row, t] * 0.1)
            assert abs(batch.teacher_logprobs[row, t] - expected) <= 1e-12
            before.append(int(rollout.tokens[row, t]))


def test_gdpo_standardizes_each_reward_in_its_group(page):
    case = random_case(5)
    second = 1 - case.rollout.rewards.square()
    rewards, weights = {"a": case.rollout.rewards, "b": second}, {"a": 1.0, "b": 0.5}
    total = page["gdpo"](rewards, weights, case.rollout.group)
    for i in range(len(total)):
        parts = [oracles.standardized(rewards[k], case.rollout.group, i) for k in ("a", "b")]
        assert abs(total[i] - (parts[0] + 0.5 * parts[1])) <= 1e-12


@pytest.mark.parametrize("expression", [expression for expression, _ in ROWS])
def test_packed_rows_are_for_every_algorithm(page, expression):
    algorithm = eval(expression, page)
    assert mixing_parts(algorithm) == ""
    case = random_case(3, spread=1.2)
    case.params["logprobs"].clamp_(max=-0.01)
    cells = torch.arange(case.rollout.tokens.numel()).view_as(case.rollout.tokens)
    batch = funcrl.collate(
        case.rollout._replace(tokens=cells), algorithm, case.ref_logprobs, case.ref_logprobs
    )

    def found(rows):
        def loss(params, sample):
            return funcrl.policy_loss(algorithm, cell_model(params, sample), sample)[0]

        return torch.func.grad_and_value(
            lambda params: torch.vmap(lambda sample: loss(params, sample))(rows).sum()
        )(case.params)

    (grads, alone), (packed_grads, packed) = map(
        found, (batch, funcrl.packing.pack_batch(batch, 24))
    )
    assert abs(alone - packed) <= 1e-12 * max(1, abs(alone))
    gap = (grads["logprobs"] - packed_grads["logprobs"]).abs().max()
    assert gap <= 1e-12 * max(1, grads["logprobs"].abs().max())


def test_the_index_has_every_algorithm_of_this_file():
    listed = {expression for expression, _ in ROWS}
    assert {name.partition(" of `")[0] for name in PAPERS} == listed


def with_covariances(x):
    """Each sampled token with its covariance, that of the largest first."""
    cells = [(i, t) for i in x.sequences for t in x.rows[i]]
    own = {i: oracles.standardized(x.rewards, x.group, i) for i in x.sequences}
    mean = oracles.mean([x.logprobs[cell].detach() for cell in cells])
    mean_advantage = oracles.mean([own[i] for i, _ in cells])
    found = [
        ((x.logprobs[i, t].detach() - mean) * (own[i] - mean_advantage), (i, t)) for i, t in cells
    ]
    return sorted(found, key=lambda each: -each[0]), own


def kl_cov(x, fraction):
    found, own = with_covariances(x)
    chosen = {cell for _, cell in found[: math.ceil(fraction * len(found))]}
    objective = x.zero()
    for _, (i, t) in found:
        objective = objective + x.ratio(i, t) * own[i]
        if (i, t) in chosen:
            objective = objective - (x.logprobs[i, t] - x.behavior[i, t]).abs()
    return -objective / len(found)


def clip_cov(x, low, high):
    """With a fraction of 1 all between the bounds are chosen."""
    found, own = with_covariances(x)
    kept = [cell for value, cell in found if not low <= value <= high]
    assert 0 < len(kept) < len(found)
    return -sum(x.ratio(i, t) * own[i] for i, t in kept) / len(found)


@pytest.mark.parametrize(
    ("expression", "prepare", "paper"),
    [
        ("funcrl.dapo(kl=1.0, kl_estimator=distance)._replace(surrogate=unclipped)",
         "kl_cov(0.2)", lambda x: kl_cov(x, 0.2)),
        ("funcrl.dapo()._replace(surrogate=unclipped)",
         "clip_cov(1.0, 0.05, 0.5)", lambda x: clip_cov(x, 0.05, 0.5)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("microbatch", [None, 1, 2])
def test_tokens_are_chosen_from_the_whole_batch(page, expression, prepare, paper, microbatch):
    assert f"| `{expression}` | with `grpo_step(prepare={prepare.partition('(')[0]}(" in PAGE
    case = random_case(3, spread=1.2)
    x = oracles.Inputs(case)
    expected = paper(x)
    (slope,) = torch.autograd.grad(expected, x.logprobs)
    algorithm = eval(expression, page)
    step = funcrl.grpo_step(
        table_model, algorithm=algorithm, prepare=eval(prepare, page), microbatch=microbatch,
        optimizer=funcrl.optim.sgd(1.0),
    )  # fmt: skip
    batch = funcrl.collate(case.rollout, algorithm, case.rollout.behavior_logprobs)
    state = step.init(case.params)
    new, metrics = step(state, batch)
    assert abs(metrics.means["loss"] - expected) <= 1e-12
    moved = state.params["logprobs"] - new.params["logprobs"]
    assert (moved - slope).abs().max() <= 1e-12


def test_clip_cov_takes_as_many_tokens_as_it_is_told(page):
    case = random_case(3)
    batch = funcrl.collate(case.rollout, funcrl.dapo())
    scores = funcrl.TokenScores(case.params["logprobs"], case.params["entropy"])
    changed = []
    for fraction in (0.0, 0.1, 1.0):
        clipped = page["clip_cov"](fraction, -9.0, 9.0)(scores, batch)
        changed.append(int((clipped.advantages != batch.advantages).sum()))
    learning = int((batch.advantages != 0).sum())
    assert changed[0] == 0 < changed[1] <= math.ceil(0.1 * int(batch.mask.sum()))
    assert changed[2] == learning

"""Random compositions of a step's parts beside plain loops, and of a generator's pushes.

Each case is made from a number, so a failure names it. What cannot be composed must be refused.
"""

import math
import random
from typing import NamedTuple

import numpy
import pytest
import torch
from cases import equal, tiny_model
from torch import Tensor

import funcrl
from funcrl import optim
from funcrl.core.types import Surrogate

V, PROMPTS, SAMPLES, LONGEST = 11, 2, 3, 9
_BLOCK = 15
LAYOUTS = ("rows", "samples", "prefixes")


class Parts(NamedTuple):
    """The parts of a case, by the words that say which."""

    network: str
    layout: str
    prepare: float | None  # the fraction of `top_entropy`
    kl: float
    optimizer: str
    surrogate: str
    microbatch: int | None
    shifted: bool  # whether the samples of a group begin at other positions


def parts_of(draw):
    return Parts(
        network=draw.choice(["transformer", "transformer", "own", "aware", "lstm", "gru"]),
        layout=draw.choice(LAYOUTS),
        prepare=draw.choice([None, 0.2, 0.5]),
        kl=draw.choice([0.0, 0.1]),
        optimizer=draw.choice(["sgd", "sgd", "own", "in place"]),
        surrogate=draw.choice(["grpo", "grpo", "random"]),
        microbatch=draw.choice([None, 1, 2]),
        shifted=draw.random() < 0.3,
    )


def rollout_of(draw):
    """Groups of equal prompts; the samples of one have the same first tokens for a while."""
    rows, masks, groups = [], [], []
    for group in range(PROMPTS):
        prompt = [draw.randrange(V) for _ in range(draw.randint(1, 4))]
        start = [draw.randrange(V) for _ in range(2)]
        for _ in range(SAMPLES):
            own = start + [draw.randrange(V) for _ in range(draw.randint(0, 3))]
            rows.append(prompt + own)
            masks.append([False] * len(prompt) + [True] * len(own))
            groups.append(group)
    mask = funcrl.batching.pad_rows(masks, torch.bool)
    values = [[-draw.uniform(1, 3) for _ in row] for row in mask]
    for row in range(len(rows)):  # a generator that gave no number, at the end more often
        length = len(rows[row])
        for place in [length - 1, draw.randrange(length)]:
            if mask[row, place] and draw.random() < 0.15:
                values[row][place] = math.nan
    return funcrl.Rollout(
        tokens=funcrl.batching.pad_rows(rows, torch.int64),
        mask=mask,
        behavior_logprobs=torch.tensor(values, dtype=torch.float64),
        rewards=torch.tensor([draw.choice([0.0, 0.5, 1.0]) for _ in rows], dtype=torch.float64),
        group=torch.tensor(groups),
        policy_version=torch.zeros(len(rows), dtype=torch.int64),
    )


def network_of(name, seed):
    """Return a model function and its parameters."""
    if name in ("lstm", "gru"):
        shape = funcrl.models.RecurrentConfig(vocab_size=V, width=5, num_layers=1, cell=name)
        model = funcrl.models.Recurrent(shape)
    else:
        model = tiny_model(V, num_layers=1)
    params = {k: 2 * v.double() for k, v in funcrl.init_params(model, seed=seed).items()}
    model_fn = funcrl.logprob_fn(model)
    if name == "own":  # of tokens and positions alone
        apply = funcrl.functional(model)
        model_fn = lambda p, s: funcrl.token_scores(  # noqa: E731
            apply(p, s.tokens, s.positions), s.tokens
        )
    if name == "aware":  # one's own, around funcrl's
        inner = model_fn
        model_fn = lambda p, s: inner(p, s._replace(positions=s.positions + 0))  # noqa: E731
    return model_fn, params


def in_place(grads, state, params):
    for name, grad in grads.items():
        state[name].mul_(0.5).add_(grad)
    return {name: -0.1 * leaf for name, leaf in state.items()}, state


def pure(grads, state, params):
    state = {name: 0.5 * state[name] + grad for name, grad in grads.items()}
    return {name: -0.1 * leaf for name, leaf in state.items()}, state


def zeros(params):
    return {name: torch.zeros_like(leaf) for name, leaf in params.items()}


OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "own": funcrl.types.GradientTransformation(zeros, pure),
    "in place": funcrl.types.GradientTransformation(zeros, in_place),
}


def by_chance(logprobs, ratio, advantages):
    """The plain objective; a number that somebody's debugging draws, and that drops some calls."""
    random.random(), numpy.random.random()
    return Surrogate(ratio * advantages)


def sometimes(logprobs, ratio, advantages):
    return Surrogate(ratio * advantages * (random.random() < 0.5))


def plain_scores(model_fn, params, batch, row):
    sample = funcrl.types.Sample(batch.tokens[row], batch.positions[row])
    return model_fn(params, sample)


def kept_by_entropy(batch, entropies, fraction):
    """Keep the tokens of highest entropy: those with the same context are one number."""
    rows, places = batch.mask.nonzero(as_tuple=True)
    by_context = {}
    for row, t in zip(rows.tolist(), places.tolist(), strict=True):
        context = (*batch.tokens[row, :t].tolist(), *batch.positions[row, :t].tolist())
        by_context.setdefault(context, []).append((row, t))
    values = sorted(
        (float(entropies[each[0]]) for each in by_context.values() for _ in each), reverse=True
    )
    count = math.ceil(len(values) * fraction * (1 - 1e-12))
    least = values[count - 1] if count else math.inf
    keep = torch.zeros_like(batch.mask)
    for each in by_context.values():
        if float(entropies[each[0]]) >= least:
            for row, t in each:
                keep[row, t] = True
    return keep


def plain_step(parts, model_fn, algorithm, params, state, batch):
    """The update by one loop over the samples, without vmap, packing or micro-batches."""
    if parts.prepare is not None:
        with torch.no_grad():
            entropy = torch.stack(
                [
                    plain_scores(model_fn, params, batch, row).entropy
                    for row in range(len(batch.mask))
                ]
            )
        keep = kept_by_entropy(batch, entropy, parts.prepare)
        batch = batch._replace(advantages=batch.advantages * keep)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    loss = 0.0
    for row in range(len(batch.mask)):
        sample = funcrl.Batch(*(each if isinstance(each, tuple) else each[row] for each in batch))
        scores = plain_scores(model_fn, leaves, batch, row)
        loss = loss + funcrl.policy_loss(algorithm, scores, sample)[0]
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    if not all(torch.isfinite(grad).all() for grad in grads.values()):
        return params, state
    if parts.optimizer == "sgd":
        return {name: params[name] - 0.1 * grads[name] for name in params}, state
    updates, state = pure(grads, state, params)
    return {name: params[name] + updates[name] for name in params}, state


def laid(layout, batch):
    if layout == "rows":
        return batch
    pack = {"samples": "pack_batch", "prefixes": "pack_batch_groups"}[layout]
    return getattr(funcrl.packing, pack)(batch, 2 * LONGEST)


def why_refused(parts):
    """Return the words of the error that a composition must be refused with, None if it runs."""
    packed = parts.layout != "rows"
    if parts.network == "own" and packed:
        return "segment_ids"
    if parts.network in ("lstm", "gru") and parts.layout == "prefixes":
        return "does not fork"
    if parts.optimizer == "in place":
        return "writes into nothing"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_a_step_is_the_plain_loop(block):
    for seed in range(block * _BLOCK, (block + 1) * _BLOCK):
        draw = random.Random(seed)
        parts, rollout = parts_of(draw), rollout_of(draw)
        algorithm = funcrl.grpo(kl=parts.kl)
        if parts.surrogate == "random":
            algorithm = algorithm._replace(surrogate=by_chance)
        ref = rollout.behavior_logprobs.nan_to_num(-2.0) - 0.1 if parts.kl else ()
        batch = funcrl.collate(rollout, algorithm, ref)
        if parts.shifted:
            shift = torch.arange(len(batch.mask))[:, None] % 2
            batch = batch._replace(positions=batch.positions + 3 * shift)
        model_fn, params = network_of(parts.network, seed)
        prepare = None if parts.prepare is None else funcrl.top_entropy(parts.prepare)
        random.seed(seed)
        numpy.random.seed(seed)
        before = random.getstate(), numpy.random.get_state()[1].tolist()
        step = funcrl.grpo_step(
            model_fn, algorithm=algorithm, optimizer=OPTIMIZERS[parts.optimizer],
            microbatch=parts.microbatch, prepare=prepare,
        )  # fmt: skip
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before, (seed, parts)
        state, packed = step.init(params), laid(parts.layout, batch)
        reason = why_refused(parts)
        if reason is not None:
            with pytest.raises(ValueError, match=reason):
                step(state, packed)
            continue
        mine, moments = params, zeros(params)
        for number in range(4):
            # The second update is skipped, and changes nothing after it.
            scale = math.inf if number == 1 else 1.0
            one = packed._replace(advantages=packed.advantages * scale)
            state, metrics = step(state, one)
            given = batch._replace(advantages=batch.advantages * scale)
            mine, moments = plain_step(parts, model_fn, algorithm, mine, moments, given)
            for name, leaf in mine.items():
                found = state.params[name]
                assert torch.allclose(found, leaf, rtol=1e-9, atol=1e-11), (seed, parts, number)
        sampled = rollout.mask & ~rollout.behavior_logprobs.isfinite()
        assert metrics.sums["num_nonfinite_logprobs"] == sampled.sum(), (seed, parts)
        assert metrics.sums["num_tokens"] == (rollout.mask & ~sampled).sum(), (seed, parts)


def test_a_random_surrogate_is_not_said_to_mix():
    algorithm = funcrl.grpo()._replace(surrogate=sometimes)
    assert not any(funcrl.rl.mixing.mixing_parts(algorithm) for _ in range(40))


def sampler_of(kind, dtype):
    shape = funcrl.models.RecurrentConfig(vocab_size=V, width=8, num_layers=1)
    model = tiny_model(V) if kind == "transformer" else funcrl.models.Recurrent(shape)
    return model, funcrl.generators.Sampler(model, dtype=dtype)


@pytest.mark.parametrize("kind", ["transformer", "recurrent"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_a_sampler_draws_from_parameters_that_were_written_into(kind, dtype, inference):
    """Every parameter is read again, those too that torch counts no writes to."""
    sampling = funcrl.generators.Sampling(num_samples=2, max_tokens=6)
    model, sampler = sampler_of(kind, dtype)
    with torch.inference_mode(inference):
        params = {k: 3 * v for k, v in funcrl.init_params(model, seed=0).items()}
        other = {k: 3 * v for k, v in funcrl.init_params(model, seed=5).items()}
        sampler.push(params)
        first = sampler.generate([[1, 2, 3]], sampling, seed=0)
        prompt = [1, 2, 3, *first.tokens[0, :3].tolist()]  # which a recurrent one has read
        for name, leaf in params.items():
            leaf.copy_(other[name])
        again = sampler.generate([prompt], sampling, seed=0)
        _, fresh = sampler_of(kind, dtype)
        fresh.push(other)
        assert equal(again[:4], fresh.generate([prompt], sampling, seed=0)[:4])


def grads_of(recompute, scan, params, x, state):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    outputs, _ = scan(x, leaves, state, backend="op", recompute=recompute)
    return torch.autograd.grad(outputs.square().sum(), list(leaves.values()))


@pytest.mark.slow
def test_what_is_recomputed_has_the_bits_of_what_is_kept():
    """Of few sequences and odd widths, whose states begin anywhere in memory."""
    for seed in range(24):
        draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        cell, width = draw.choice(["lstm", "gru"]), draw.choice([5, 16, 17, 31])
        layers, length = draw.choice([1, 2]), draw.choice([8, 130])
        rows, stateful = draw.choice([1, 1, 3]), draw.random() < 0.5
        net = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(4, width, num_layers=layers)
        params = {
            name: torch.randn(leaf.shape, generator=numbers) / width**0.5
            for name, leaf in net.named_parameters()
        }
        x = torch.randn(rows, length, 4, generator=numbers)
        h, c = (torch.randn(rows, layers, width, generator=numbers) for _ in range(2))
        state: Tensor | tuple[Tensor, Tensor] | None = None
        if stateful:
            state = (h, c) if cell == "lstm" else h
        scan = funcrl.ops.lstm_scan if cell == "lstm" else funcrl.ops.gru_scan
        kept, *others = (
            grads_of(each, scan, params, x, state) for each in ("none", "chunk", "full")
        )
        for other in others:
            assert all(map(torch.equal, kept, other)), (seed, cell, width, layers, length, rows)


def reads_by_name(params, sample):
    return sample.segment_ids


READS = {
    "by name": (reads_by_name, True),
    "by place": (lambda params, sample: sample[6], True),
    "of a copy": (lambda params, sample: sample._replace(tokens=sample.tokens).segment_ids, True),
    "of a tree": (lambda params, sample: funcrl.tree.map(torch.clone, sample).segment_ids, True),
    "under vmap": (lambda params, sample: torch.vmap(lambda s: s.segment_ids)(sample), True),
    "others under vmap": (lambda params, sample: torch.vmap(lambda s: s.tokens)(sample), False),
    "others by place": (lambda params, sample: sample[:2][0], False),
    "others of a copy": (lambda params, sample: sample._replace(positions=0).tokens, False),
    "all": (lambda params, sample: sample._asdict()["tokens"], False),
}  # fmt: skip


@pytest.mark.parametrize("way", READS)
def test_which_model_functions_read_where_samples_begin(way):
    read, does = READS[way]

    def model_fn(params, sample):
        numbers = params["w"] * (sample.tokens + 0 * read(params, sample))
        return funcrl.TokenScores(-numbers, numbers)

    rollout = rollout_of(random.Random(3))
    packed = funcrl.pack(rollout, funcrl.grpo(), 2 * LONGEST)
    params = {"w": torch.ones((), dtype=torch.float64)}
    if does:
        funcrl.score(model_fn, params, packed)
        return
    with pytest.raises(ValueError, match=r"score expects .* does not read sample\.segment_ids"):
        funcrl.score(model_fn, params, packed)
    step = funcrl.grpo_step(model_fn)
    with pytest.raises(ValueError, match="grpo_step expects .* does not read"):
        funcrl.trace(step.update, step.init(params), packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_policy_completions_are_masked_in_every_layout(layout):
    rollout = rollout_of(random.Random(5))
    batch = funcrl.collate(rollout, funcrl.grpo())
    # What a policy says of a token, so that rows and packed rows have the same.
    policy = 0.5 * torch.randn(100, generator=torch.Generator().manual_seed(0)).double() - 2.0
    masks, seen = funcrl.off_policy_mask(0.05), set()
    expected = {}
    for row in range(len(batch.mask)):
        places = batch.mask[row].nonzero().flatten().tolist()
        gaps = [float(batch.behavior_logprobs[row, t] - policy[batch.tokens[row, t]])
                for t in places]  # fmt: skip
        advantage = float(batch.advantages[row, places[0]]) if places else 0.0
        drops = advantage < 0 and sum(gaps) / len(gaps) > 0.05
        seen.add((advantage >= 0, drops))
        for t in places:
            key = (*batch.tokens[row, : t + 1].tolist(), float(batch.behavior_logprobs[row, t]))
            expected[key] = 0.0 if drops else advantage
    assert seen >= {(True, False), (False, True), (False, False)}
    rows = laid(layout, batch)
    scores = funcrl.TokenScores(policy[rows.tokens], torch.zeros(rows.mask.shape))
    found = masks(scores, rows)
    assert torch.equal(found.token_weights, rows.token_weights)
    ours = sorted(found.advantages[rows.mask].tolist())
    assert ours == pytest.approx(sorted(expected.values()), abs=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_one_context_tie_however_their_entropies_are_rounded(layout):
    # Two prompts with one ending: what follows them has two contexts, which do not tie.
    tokens = torch.tensor([[20 + own // 6, 2, 3, own] for own in range(12)])
    mask = torch.tensor([[False, False, False, True]] * 12)
    ones = torch.ones(12, 4)
    batch = funcrl.Batch(tokens, torch.arange(4).repeat(12, 1), mask, -ones, ones, ones)
    packed = laid(layout, batch)
    noise = torch.randn(packed.mask.shape, generator=torch.Generator().manual_seed(0))
    entropy = torch.where(packed.tokens < 6, 2, 1) + 1e-6 * noise
    scores = funcrl.TokenScores(packed.behavior_logprobs, entropy)
    kept = funcrl.top_entropy(0.2)(scores, packed).advantages != 0
    assert sorted(packed.tokens[kept & packed.mask].tolist()) == [*range(6)]

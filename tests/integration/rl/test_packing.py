"""Packed rows and shared prompts: a step on them is the step on a row for each sample."""

import pytest
import torch
from cases import equal, tiny_model

import funcrl
from funcrl import CompileConfig, ops, optim, tree

V = 11


def grouped(seed, prompts=3, longest=6, completion=5, turns=1):
    """A rollout of groups of several sizes, of ragged prompts and completions.

    One prompt is a single token, one sample has no sampled token, one group has a single sample.
    """
    draws = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draws))

    rows = []
    for group in range(prompts):
        prompt = torch.randint(V, (1 if group == 1 else number(2, longest + 1),), generator=draws)
        for sample in range(1 if group == 2 else number(2, 5)):
            mask = [False] * len(prompt)
            empty = group == 0 and sample == 1
            for _ in range(turns):
                mask += [not empty] * number(1, completion + 1) + [False] * number(0, 3)
            own = torch.randint(V, (len(mask) - len(prompt),), generator=draws)
            rows.append((group, torch.cat([prompt, own]).tolist(), mask))
    pad, count = funcrl.batching.pad_rows, len(rows)
    mask = pad([row[2] for row in rows], torch.bool)
    behavior = -2 - torch.rand(mask.shape, generator=draws, dtype=torch.float64)
    return funcrl.Rollout(
        tokens=pad([row[1] for row in rows], torch.int64),
        mask=mask,
        behavior_logprobs=behavior,
        rewards=torch.rand(count, generator=draws, dtype=torch.float64),
        group=torch.tensor([row[0] for row in rows]),
        policy_version=torch.zeros(count, dtype=torch.int64),
    )


def samples_of(packed):
    """Each sample's tokens, positions and mask, put together from its prefix and its segment."""
    found = []
    prefixes = packed.prefix_ids
    for row in range(len(packed.tokens)):
        ids = packed.segment_ids[row]
        shared = set(prefixes[row].tolist()) if not isinstance(prefixes, tuple) else set()
        for segment in range(int(ids.max()) + 1):
            if segment in shared:
                continue
            own = (ids == segment).nonzero().squeeze(1)
            if not isinstance(prefixes, tuple) and prefixes[row, own[0]] >= 0:
                own = torch.cat([(ids == prefixes[row, own[0]]).nonzero().squeeze(1), own])
            parts = (packed.tokens, packed.positions, packed.mask, packed.advantages)
            found.append(tuple(tuple(part[row, own].tolist()) for part in parts))
    return sorted(found)


@pytest.mark.parametrize("pack", [funcrl.pack, funcrl.pack_groups])
@pytest.mark.parametrize("turns", [1, 3])
def test_each_sample_is_there_once_with_its_positions(pack, turns):
    for seed in range(12):
        rollout = grouped(seed, prompts=3 + seed % 4, turns=turns)
        batch = funcrl.collate(rollout, funcrl.grpo())
        ends = (torch.arange(1, rollout.mask.shape[1] + 1) * rollout.mask).amax(1).tolist()
        expected = sorted(
            (tuple(row[:end].tolist() for row in rows))
            for *rows, end in zip(
                batch.tokens, batch.positions, batch.mask, batch.advantages, ends, strict=True
            )
            if end
        )
        expected = [tuple(map(tuple, sample)) for sample in expected]
        for length in (max(ends), max(ends) + 7, 60):
            packed = pack(rollout, funcrl.grpo(), length)
            assert packed.tokens.shape[1] == length
            assert samples_of(packed) == expected
            assert not packed.token_weights[~packed.mask].any()
            total = packed.token_weights.sum()
            assert abs(total - batch.token_weights.sum()) <= 1e-15


def test_a_prompt_is_laid_once():
    rollout = grouped(0)
    packed = funcrl.pack_groups(rollout, funcrl.grpo(), 200)
    alone = funcrl.pack(rollout, funcrl.grpo(), 200)
    saved = 0
    for group in range(3):
        live = (rollout.group == group) & rollout.mask.any(1)
        prompt = int(rollout.mask[live].to(torch.int64).argmax(1)[0])
        saved += (int(live.sum()) - 1) * (prompt - 1)
    assert saved > 0
    assert (alone.segment_ids >= 0).sum() - (packed.segment_ids >= 0).sum() == saved
    assert isinstance(alone.prefix_ids, tuple)


def test_a_group_too_long_for_a_row_is_divided_and_fills_rows():
    """8 samples of 4 + 4 tokens: 3 + 8 x 5 = 43 shared. Rows of 20 hold 3 + 3 x 5 = 18."""
    mask = torch.tensor([[False] * 4 + [True] * 4]).expand(8, 8).contiguous()
    rollout = funcrl.Rollout(
        tokens=torch.arange(8).expand(8, 8).contiguous(), mask=mask,
        behavior_logprobs=torch.zeros(8, 8), rewards=torch.arange(8.0),
        group=torch.zeros(8).long(), policy_version=torch.zeros(8).long(),
    )  # fmt: skip
    packed = funcrl.pack_groups(rollout, funcrl.grpo(), 20)
    filled = (packed.segment_ids >= 0).sum(1).tolist()
    assert filled == [18, 18, 13]
    assert [int(row.max()) for row in packed.segment_ids] == [3, 3, 2]


def test_groups_are_divided_where_that_saves_rows():
    """Groups of 4 samples of 3 + 3 tokens: 2 + 4 x 4 = 18. Rows of 28 hold one, or 28 in all."""
    mask = torch.tensor([[False] * 3 + [True] * 3]).expand(12, 6).contiguous()
    group = torch.arange(3).repeat_interleave(4)
    rollout = funcrl.Rollout(
        tokens=torch.cat([group[:, None].expand(12, 3), torch.arange(36).view(12, 3)], dim=1),
        mask=mask, behavior_logprobs=torch.zeros(12, 6), rewards=torch.arange(12.0) ** 2,
        group=group, policy_version=torch.zeros(12).long(),
    )  # fmt: skip
    packed = funcrl.pack_groups(rollout, funcrl.grpo(), 28)
    assert (packed.segment_ids >= 0).sum(1).tolist() == [28, 28]
    assert samples_of(packed) == samples_of(funcrl.pack(rollout, funcrl.grpo(), 28))
    wide = funcrl.pack_groups(rollout, funcrl.grpo(), 54)  # no group of these needs to be divided
    assert (wide.segment_ids >= 0).sum(1).tolist() == [54]


def test_a_group_is_divided_beside_samples_that_are_alone():
    """Two of 4 + 1 tokens, a pair of 2 + 1: 5, 5 and 1 + 2 + 2. Rows of 9 hold one, or 5 + 3."""
    lengths, prompts = torch.tensor([[5], [5], [3], [3]]), torch.tensor([[4], [4], [2], [2]])
    places, group = torch.arange(5)[None], torch.tensor([0, 1, 2, 2])
    rollout = funcrl.Rollout(
        tokens=places + 10 * group[:, None], mask=(places >= prompts) & (places < lengths),
        behavior_logprobs=torch.zeros(4, 5), rewards=torch.arange(4.0),
        group=group, policy_version=torch.zeros(4).long(),
    )  # fmt: skip
    packed = funcrl.pack_groups(rollout, funcrl.grpo(), 9)
    assert (packed.segment_ids >= 0).sum(1).tolist() == [8, 8]


def test_rows_of_padding_fill_up_to_a_multiple():
    rollout = grouped(1)
    for pack in (funcrl.pack, funcrl.pack_groups):
        plain = pack(rollout, funcrl.grpo(), 30)
        filled = pack(rollout, funcrl.grpo(), 30, row_multiple=7)
        rows = len(plain.tokens)
        assert len(filled.tokens) % 7 == 0
        assert equal(tree.map(lambda leaf, rows=rows: leaf[:rows], filled), plain)
        assert (filled.segment_ids[rows:] == -1).all()
        assert not filled.mask[rows:].any()


def test_a_batch_is_packed_as_its_rollout_is():
    rollout, algorithm = grouped(4), funcrl.dapo()
    batch = funcrl.collate(rollout, algorithm)
    of_batch = funcrl.packing.pack_batch, funcrl.packing.pack_batch_groups
    for pack, other in zip((funcrl.pack, funcrl.pack_groups), of_batch, strict=True):
        assert equal(other(batch, 30, 2), pack(rollout, algorithm, 30, (), 2))
        with pytest.raises(ValueError, match=f"{other.__name__} expects samples of at most 3"):
            other(batch, 3)


def test_samples_whose_prompts_differ_share_nothing():
    rollout = grouped(4)
    tokens = rollout.tokens.clone()
    tokens[:, 0] = torch.arange(len(tokens))
    other = rollout._replace(tokens=tokens)
    packed = funcrl.pack_groups(other, funcrl.grpo(), 30)
    assert (packed.prefix_ids == -1).all()
    assert equal(packed._replace(prefix_ids=()), funcrl.pack(other, funcrl.grpo(), 30))


@pytest.mark.parametrize("pack", [funcrl.pack, funcrl.pack_groups])
def test_a_sample_longer_than_a_row_is_refused(pack):
    rollout = grouped(1)
    with pytest.raises(ValueError, match=f"{pack.__name__} expects samples of at most 4 tokens"):
        pack(rollout, funcrl.grpo(), 4)


WAYS = {
    "pack": (funcrl.pack, None),
    "pack, flash": (funcrl.pack, ops.attend_flash_segments),
    "groups": (funcrl.pack_groups, None),
    "groups, flash": (funcrl.pack_groups, ops.attend_flash_segments),
}


def stepped(step, state, batch, count=3):
    """The states and the reports of a few steps in a row."""
    found = []
    for _ in range(count):
        state, metrics = step(state, batch)
        found.append((tree.map(torch.clone, state), funcrl.metrics.to_floats(metrics)))
    return found


def compare(found, expected, bound=1e-12):
    for (state, numbers), (wanted, others) in zip(found, expected, strict=True):
        for name, leaf in wanted.params.items():
            assert (state.params[name] - leaf).abs().max() <= bound, name
        assert numbers.pop("num_recompilations", 0) == 0
        assert numbers.keys() == others.keys()
        for name in numbers.keys() - {"padding_frac"}:
            assert abs(numbers[name] - others[name]) <= bound, name


def steps_of(algorithm, way, **options):
    """The step for rows of samples, and the step for packed rows, of one tiny model."""
    # With eps 1e-8 an entry whose gradient is as small moves by 1e6 times that gradient's rounding.
    optimizer = optim.adamw(optim.schedules.linear(1e-2, 1e-3, 3), eps=1e-4)
    made = [
        funcrl.grpo_step(
            funcrl.logprob_fn(tiny_model(V), attend_segments=attend),
            algorithm=algorithm,
            optimizer=optimizer,
            **options,
        )
        for attend in (None, WAYS[way][1])
    ]
    params = funcrl.init_params(tiny_model(V), seed=0, dtype=torch.float64)
    # Larger weights, so that attention is not a mere average.
    params = tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, params)
    return made[0], made[1], made[0].init(params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
def test_steps_in_a_row_are_those_on_samples(way, name):
    algorithm = getattr(funcrl, name)(kl=0.1, correction=funcrl.ratios.truncated(1.5))
    for seed in range(3):
        plain, step, state = steps_of(algorithm, way)
        rollout = grouped(seed, turns=1 + seed % 2)
        draws = torch.Generator().manual_seed(seed)
        ref = -2 - torch.rand(rollout.mask.shape, generator=draws, dtype=torch.float64)
        batch = funcrl.collate(rollout, algorithm, ref)
        packed = WAYS[way][0](rollout, algorithm, 30, ref, row_multiple=2)
        compare(stepped(step, state, packed), stepped(plain, state, batch))


@pytest.mark.parametrize("way", ["groups", "groups, flash"])
@pytest.mark.parametrize("kind", ["microbatch", "prepare", "donated", "compiled"])
def test_steps_that_are_composed(way, kind):
    options = {
        "microbatch": {"microbatch": 2},
        "prepare": {"prepare": funcrl.top_entropy(0.5)},
    }.get(kind, {})
    plain, step, state = steps_of(funcrl.grpo(), way, **options)
    rollout = grouped(5, prompts=4)
    packed = funcrl.pack_groups(rollout, funcrl.grpo(), 30, row_multiple=2)
    expected = stepped(plain, state, funcrl.collate(rollout, funcrl.grpo()))
    if kind in ("donated", "compiled"):
        step, state = funcrl.donate(step), tree.map(torch.clone, state)
    if kind == "compiled":
        config = CompileConfig(backend="aot_eager", remat="selective")
        step = funcrl.compile_step(step, state, packed, config)
    compare(stepped(step, state, packed), expected)


def test_one_program_serves_batches_of_one_shape():
    _, step, state = steps_of(funcrl.grpo(), "groups, flash")
    batches = [
        funcrl.pack_groups(grouped(seed), funcrl.grpo(), 40, row_multiple=3) for seed in range(3)
    ]
    assert len({batch.tokens.shape for batch in batches}) == 1
    graph = funcrl.trace(step.update, state, batches[0])
    for batch in batches:
        mine, theirs = graph(state, batch), step(state, batch)
        for a, b in zip(tree.leaves(mine), tree.leaves(theirs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [funcrl.pack, funcrl.pack_groups])
def test_exact_scores_are_the_bits_of_samples_by_themselves(pack, dtype):
    model = tiny_model(V, numerics="exact")
    params = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model, dtype=dtype)
    rollout = grouped(3, prompts=4, longest=70, completion=40)
    packed = pack(rollout, funcrl.grpo(), 250)
    scores = funcrl.score(model_fn, params, packed)
    batch = funcrl.collate(rollout, funcrl.grpo())
    alone = funcrl.score(model_fn, params, batch)
    by_sample = {
        tuple(tokens[mask].tolist()): logprobs[mask]
        for tokens, mask, logprobs in zip(batch.tokens, batch.mask, alone.logprobs, strict=True)
    }
    found = 0
    for row in range(len(packed.tokens)):
        for segment in range(int(packed.segment_ids[row].max()) + 1):
            own = packed.mask[row] & (packed.segment_ids[row] == segment)
            if own.any():
                expected = by_sample[tuple(packed.tokens[row, own].tolist())]
                assert torch.equal(scores.logprobs[row, own], expected)
                found += 1
    assert found == int(rollout.mask.any(1).sum())


def by_length(mask, dtype=torch.float32):
    """A weight rule of one's own, that counts every row which it is given."""
    return (mask * torch.arange(1, mask.shape[1] + 1, dtype=dtype)) / len(mask)


@pytest.mark.parametrize("rule", [by_length, None])
def test_shares_of_rows_have_the_weights_of_their_samples_alone(rule):
    """A shared prefix is no sample: no rule sees it."""
    algorithm = funcrl.grpo(weight=rule) if rule else funcrl.grpo()
    rollout = grouped(2, prompts=6)
    packed = funcrl.pack_groups(rollout, algorithm, 24)
    whole = funcrl.pack(rollout, algorithm, 24)
    for part in funcrl.minibatches(packed, algorithm, 3, seed=0):
        samples = samples_of(part)
        unshared = [each for each in samples_of(whole) if each in samples]
        assert unshared == samples
        masks = funcrl.batching.pad_rows([mask for _, _, mask, _ in samples], torch.bool)
        weights = algorithm.weight(masks, dtype=torch.float64)[masks]
        found = part.token_weights[part.mask]
        assert torch.allclose(found.sort().values, weights.sort().values, atol=1e-15)


def test_per_sample_gradients_of_shared_prompts_are_refused():
    _, _, state = steps_of(funcrl.grpo(), "groups")
    model_fn = funcrl.logprob_fn(tiny_model(V))
    step = funcrl.grpo_step(model_fn, per_sample=funcrl.clip_per_sample(1.0))
    packed = funcrl.pack_groups(grouped(0), funcrl.grpo(), 60)
    with pytest.raises(TypeError, match="grpo_step.per_sample=.* one sample a row"):
        step(step.init(state.params), packed)
    flash_fn = funcrl.logprob_fn(tiny_model(V), attend=ops.attend_flash)
    with pytest.raises(ValueError, match="logprob_fn expects attend_segments= beside attend="):
        funcrl.score(flash_fn, state.params, packed)

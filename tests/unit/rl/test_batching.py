"""Batches: mini-batches, padding, and packed rows, whose samples weigh as in rows of their own."""

import pytest
import torch
from cases import cell_model, equal, random_case, tiny_batch

import funcrl
from funcrl import optim, tree


def by_position(mask, dtype=torch.float32):
    """A rule of a user's own: later tokens weigh more, and every row given counts."""
    places = torch.arange(1, mask.shape[1] + 1, dtype=dtype)
    return mask * places / len(mask)


def by_position_of_lists(samples):
    return [[(t + 1) / len(samples) * kept for t, kept in enumerate(row)] for row in samples]


def sequence_mean_of_lists(samples):
    count = sum(any(row) for row in samples)
    return [[kept / max(sum(row), 1) / count for kept in row] for row in samples]


def token_mean_of_lists(samples):
    count = sum(sum(row) for row in samples)
    return [[kept / count for kept in row] for row in samples]


def constant_of_lists(samples):
    count = sum(any(row) for row in samples)
    return [[kept / (7 * count) for kept in row] for row in samples]


RULES = {
    "grpo": (funcrl.grpo(), sequence_mean_of_lists),
    "dapo": (funcrl.dapo(), token_mean_of_lists),
    "dr_grpo": (funcrl.dr_grpo(length=7), constant_of_lists),
    "by position": (funcrl.grpo(weight=by_position), by_position_of_lists),
}


def packed_case(seed, algorithm):
    """Many samples a row, some of whose tokens have no finite number of the generator."""
    case = random_case(seed, prompts=5)
    behavior = case.rollout.behavior_logprobs.clone()
    behavior.view(-1)[seed::13] = torch.nan
    cells = torch.arange(behavior.numel()).view_as(behavior)  # each token is its own number
    rollout = case.rollout._replace(behavior_logprobs=behavior, tokens=cells)
    return case, rollout, funcrl.pack(rollout, algorithm, length=19)


def samples_of(part):
    """The share's samples as lists: (row, place in the row) of each token, and their masks."""
    samples = {}
    for row, ids in enumerate(part.segment_ids.tolist()):
        for at, segment in enumerate(ids):
            if segment >= 0:
                samples.setdefault((row, segment), []).append(at)
    places = [[(row, at) for at in found] for (row, _), found in samples.items()]
    return places, [[bool(part.mask[place]) for place in sample] for sample in places]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", RULES)
def test_shares_of_packed_rows_have_the_weights_of_their_samples(name, count):
    algorithm, of_lists = RULES[name]
    for seed in range(4):
        _, _, packed = packed_case(seed, algorithm)
        parts = funcrl.minibatches(packed, algorithm, count, seed)
        shared = torch.cat([part.tokens for part in parts])
        assert torch.equal(shared.sort(dim=0).values, packed.tokens.sort(dim=0).values)
        for part in parts:
            places, masks = samples_of(part)
            assert len(masks) > len(part.tokens)
            wanted = torch.zeros_like(part.token_weights)
            for sample, weights in zip(places, of_lists(masks), strict=True):
                for place, weight in zip(sample, weights, strict=True):
                    wanted[place] = weight
            assert (part.token_weights - wanted).abs().max() <= 1e-15
            assert part.token_weights.dtype == torch.float64


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "rloo"])
def test_a_step_on_a_share_is_that_on_its_samples_one_a_row(name):
    algorithm = getattr(funcrl, name)()
    case, rollout, packed = packed_case(1, algorithm)
    unpacked = funcrl.collate(rollout, algorithm)
    step = funcrl.grpo_step(cell_model, algorithm=algorithm, optimizer=optim.sgd(1.0))
    state = step.init(case.params)
    for part in funcrl.minibatches(packed, algorithm, 3, seed=0):
        filled = part.tokens[part.segment_ids >= 0]
        rows = (filled // unpacked.tokens.shape[1]).unique()
        alone = tree.map(lambda leaf, rows=rows: leaf[rows], unpacked)
        weights = algorithm.weight(alone.mask, dtype=torch.float64)
        expected, metrics = step(state, alone._replace(token_weights=weights))
        got, packed_metrics = step(state, part)
        assert abs(packed_metrics.means["loss"] - metrics.means["loss"]) <= 1e-15
        for key, leaf in got.params.items():
            assert (leaf - expected.params[key]).abs().max() <= 1e-15
        assert not torch.equal(got.params["logprobs"], case.params["logprobs"])


def test_rows_of_padding_have_no_weights():
    algorithm = funcrl.grpo()
    _, _, packed = packed_case(0, algorithm)
    blank = packed._replace(
        segment_ids=torch.full_like(packed.segment_ids, -1),
        mask=torch.zeros_like(packed.mask),
    )
    for part in funcrl.minibatches(blank, algorithm, 2, seed=0):
        assert torch.equal(part.token_weights, torch.zeros_like(part.token_weights))


def test_minibatches_share_out_the_rows():
    batch = tiny_batch(rows=6)
    parts = funcrl.minibatches(batch, funcrl.grpo(), 3, seed=1)
    assert [len(part.tokens) for part in parts] == [2, 2, 2]
    rows = {tuple(row) for part in parts for row in part.advantages.tolist()}
    assert rows == {tuple(row) for row in batch.advantages.tolist()}
    for part in parts:
        weights = funcrl.aggregation.sequence_mean(part.mask, dtype=part.token_weights.dtype)
        assert torch.equal(part.token_weights, weights)


def test_rows_are_padded_to_a_multiple():
    rollout = random_case(length=7).rollout
    padded = funcrl.batching.pad_length(rollout, 5)
    assert padded.tokens.shape[1] == 10
    assert not padded.mask[:, 7:].any()
    assert equal(funcrl.batching.pad_length(rollout, 7), rollout)
    for field in ("tokens", "mask", "behavior_logprobs"):
        assert torch.equal(getattr(padded, field)[:, :7], getattr(rollout, field))
    weights = funcrl.collate(padded, funcrl.grpo()).token_weights
    assert torch.equal(weights[:, :7], funcrl.collate(rollout, funcrl.grpo()).token_weights)
    with pytest.raises(ValueError, match="pad_length expects multiple"):
        funcrl.batching.pad_length(rollout, 0)

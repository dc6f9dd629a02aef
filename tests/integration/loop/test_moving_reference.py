"""A KL penalty whose reference moves towards the policy: where to, when, and after a resume."""

from dataclasses import replace

import pytest
import torch
from cases import equal
from peer_trl import import_trl
from test_streams_of_runs import goes_on_to_the_same_bits
from test_train import Copy, small

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
)
from funcrl.loop.build import empty_state
from funcrl.loop.reference import moved_reference
from funcrl.run.checkpoint import restore_newest


def moving(folder, every, mixup=0.6, **options):
    """A run of five steps, each with an update."""
    options.setdefault("optimizer", OptimizerConfig(learning_rate=3e-3, warmup=0))
    return small(folder, **{
        "algorithm": AlgorithmConfig(kl=0.5, reference_every=every, reference_mixup=mixup),
        "steps": 5, "checkpoint": CheckpointConfig(every=1, keep_last=10),
        "evaluation": EvaluationConfig(every=0), "drop_zero_variance": False, **options,
    })  # fmt: skip


def kept(folder, config, step):
    """The policy of a checkpoint, and the reference that is beside it, if any."""
    like = empty_state(funcrl.build(config))
    found = restore_newest(folder / "checkpoints", like, like.params, step)
    return found.state.params, found.beside


@pytest.mark.slow
def test_every_few_steps_it_moves_as_trl_s_does(tmp_path):
    config = moving(tmp_path / "run", every=2)
    funcrl.train(config, task=Copy())
    like = empty_state(funcrl.build(config)).params
    expected, _ = funcrl.restore(tmp_path / "run" / "reference", like=like)
    moves = 0
    for step in range(6):
        policy, beside = kept(tmp_path / "run", config, step)
        if step and step % 2 == 0:
            expected = {name: 0.4 * expected[name] + 0.6 * policy[name] for name in policy}
            moves += 1
        assert len(beside) == bool(moves)
        for found in beside:
            for name, leaf in found.items():
                assert torch.equal(leaf, expected[name].float())
    assert moves == 2


def test_one_move_is_trl_s():
    import_trl()
    from trl.trainer.callbacks import SyncRefModelCallback

    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    for leaf in (*policy.parameters(), *reference.parameters()):
        leaf.data.normal_(generator=generator)
    trees = [{n: leaf.detach().clone() for n, leaf in each.named_parameters()}
             for each in (reference, policy)]  # fmt: skip
    config = moving(None, every=1, mixup=0.25)
    found = moved_reference(config, *trees)
    SyncRefModelCallback._sync_target_model(policy, reference, 0.25)
    for name, leaf in reference.named_parameters():
        torch.testing.assert_close(found[name], leaf.detach(), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [None, CompileConfig(backend="eager", fuse="none")])
def test_a_reference_that_is_the_policy_of_the_step_before_penalises_nothing(compiled):
    """Of each step but the first, whose reference is that of the run."""
    plain = moving(None, every=None, compile=compiled)
    stays = [row["kl"] for row in funcrl.train(plain, task=Copy()).history[1:]]
    assert stays[0] == 0
    assert min(stays[1:]) > 1e-6
    moves = replace(plain, algorithm=replace(plain.algorithm, reference_every=1, reference_mixup=1))
    assert [row["kl"] for row in funcrl.train(moves, task=Copy()).history[1:]] == [0] * 5
    half = replace(plain, algorithm=replace(plain.algorithm, reference_every=1))
    found = [row["kl"] for row in funcrl.train(half, task=Copy()).history[1:]]
    assert all(0 < one < other for one, other in zip(found[1:], stays[1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {},
    {"max_staleness": 1, "checkpoint": CheckpointConfig(every=3)},
    {"compile": CompileConfig(backend="eager", fuse="none")},
    {"algorithm": AlgorithmConfig(name="ppo", kl=0.5, reference_every=1)},
    {"lora": LoraConfig(rank=2),
     "algorithm": AlgorithmConfig(kl=0.5, reference_every=2, reference_mixup=1.0)},
], ids=["plain", "stale", "compiled", "critic", "adapters"])  # fmt: skip
def test_a_run_goes_on_with_the_reference_that_it_had(tmp_path, options):
    config = moving(tmp_path / "whole", every=2, **options)
    straight = goes_on_to_the_same_bits(config, task=Copy())
    fixed = replace(config.algorithm, reference_every=None, reference_mixup=0.6)
    other = funcrl.train(replace(config, algorithm=fixed, run_dir=tmp_path / "fixed"), task=Copy())
    assert not equal(other.state.params, straight.state.params)


@pytest.mark.slow
def test_a_fork_begins_with_the_reference_that_its_parent_had(tmp_path):
    whole = moving(tmp_path / "whole", every=2)
    straight = funcrl.train(whole, task=Copy())
    stops = iter([False, False, True])
    parent = replace(whole, run_dir=tmp_path / "parent")
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(parent, task=Copy(), stop=lambda: next(stops))
    forked = funcrl.train(
        replace(whole, run_dir=tmp_path / "fork"), task=Copy(), fork=tmp_path / "parent"
    )
    assert equal(forked.state, straight.state)
    # And a run whose reference moved once can go on with one that stays, or with none.
    for kl, every in ((0.5, None), (0.0, None)):
        algorithm = AlgorithmConfig(kl=kl, reference_every=every)
        config = replace(whole, run_dir=tmp_path / f"kl {kl}", algorithm=algorithm)
        row = funcrl.train(config, task=Copy(), fork=tmp_path / "parent").history[4]
        assert ("kl" in row) == (kl > 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": AlgorithmConfig(kl=0.0, reference_every=2)}, "--algorithm.kl above 0"),
        ({"lora": LoraConfig(rank=2)}, "--algorithm.reference-mixup 1 with adapters"),
    ],
)
def test_a_reference_that_cannot_move_is_refused_before_the_folder_is_made(
    tmp_path, options, words
):
    with pytest.raises(ValueError, match=words):
        funcrl.train(moving(tmp_path / "run", every=2, **options))
    assert not [*tmp_path.iterdir()]


def test_how_far_it_moves_is_asked_only_of_one_that_moves():
    with pytest.raises(ValueError, match="--algorithm.reference-every with --algorithm.reference-"):
        AlgorithmConfig(reference_mixup=0.5)

"""Runs whose trainer packs its rows: the update of the plain run, resumed and compiled."""

import dataclasses

import pytest
import torch
from cases import equal

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    EvalConfig,
    EvaluationConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.pack import score_in_rows, to_rows

PACKINGS = ["samples", "prefixes"]


def small(run_dir, **options):
    return TrainConfig(**{
        "run_dir": run_dir, "steps": 1, "num_prompts": 4, "num_generations": 4,
        "sampling": Sampling(max_tokens=5), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=0), "checkpoint": CheckpointConfig(every=1),
        "num_minibatches": 2, "algorithm": AlgorithmConfig(kl=0.1), **options,
    })  # fmt: skip


@pytest.mark.parametrize("attend", ["native", "flash"])
def test_a_packed_run_has_the_numbers_of_the_plain_one(tmp_path, attend):
    """Mini-batches are those of the plain run: they are packed after they were drawn.

    In float32: the mathematics is compared in float64 in tests/integration/rl/test_packing.py.
    """
    plain = funcrl.train(small(tmp_path / "plain")).history[1]
    shares = [plain["padding_frac"]]
    for packing in PACKINGS:
        config = small(tmp_path / packing, packing=packing, attend=attend, pack_length=48)
        row = funcrl.train(config).history[1]
        assert row.keys() == plain.keys()
        shares.append(row["padding_frac"])
        for name in plain.keys() - {"padding_frac"}:
            if "time" not in name:
                assert row[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
    assert shares[0] > 0
    assert shares[0] != shares[1]


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_run_is_resumed_and_compiled_to_the_same_bits(tmp_path, packing):
    options = {"packing": packing, "attend": "flash", "pack_length": 64, "pack_rows": 2}
    whole = funcrl.train(small(tmp_path / "whole", steps=2, **options))
    funcrl.train(small(tmp_path / "run", **options))
    resumed = funcrl.train(small(tmp_path / "run", steps=2, **options), resume=True)
    assert equal(resumed.state, whole.state)
    config = CompileConfig(backend="aot_eager", fuse="none")
    compiled = funcrl.train(small(tmp_path / "compiled", steps=2, compile=config, **options))
    assert equal(compiled.state, whole.state)
    assert [row["num_recompilations"] for row in compiled.history[1:]] == [0, 0]
    # Plain rows are another way to compute the same, so that a run may change to them.
    plain = small(tmp_path / "run", steps=3)
    assert len(funcrl.train(plain, resume=True).history) == 4


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["exact", "critic"])
def test_what_is_scored_in_packed_rows_is_what_padded_rows_score(tmp_path, packing, kind):
    """Samples of two turns, one without a sampled token, in micro-batches of packed rows."""
    shape = dataclasses.replace(
        funcrl.models.shape("micro", 20), numerics="exact" if kind == "exact" else "native"
    )
    model = funcrl.models.Transformer(shape)
    params = funcrl.init_params(model, seed=0)
    if kind == "critic":
        params = funcrl.tree.cast(funcrl.models.with_critic(params, shape.width), torch.float64)
        draws = torch.Generator().manual_seed(0)
        params["critic.weight"] = torch.randn(shape.width, generator=draws, dtype=torch.float64)
    model_fn = funcrl.logprob_fn(model, chunk=5, critic=kind == "critic")
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (12, 11), generator=draws)
    tokens[:, :3] = torch.tensor([[1, 2, 3], [4, 5, 6]]).repeat_interleave(6, dim=0)
    places = torch.arange(11)
    mask = (places >= 3) & (places < torch.randint(4, 12, (12, 1), generator=draws)) & (places != 6)
    mask[4] = False
    padded, packed = (
        score_in_rows(small(tmp_path, microbatch=2, **each), model_fn, params, tokens, mask)
        for each in ({}, {"packing": packing, "pack_length": 25})
    )
    for name in ("logprobs", "entropy") if kind == "exact" else ("logprobs", "entropy", "values"):
        wanted, found = (getattr(each, name) for each in (padded, packed))
        assert found.dtype == wanted.dtype
        if kind == "exact":
            assert torch.equal(found[mask], wanted[mask])
        else:
            assert (found - wanted)[mask].abs().max() < 1e-13
        assert wanted[mask].abs().min() > 0


def test_rows_are_as_long_as_was_said_or_four_times_the_longest_sample(tmp_path):
    mask = (torch.arange(6) >= 2).expand(5, 6)
    nothing = torch.zeros(5, 6)
    tokens = torch.ones(5, 6, dtype=torch.int64)
    batch = funcrl.Batch(tokens, torch.arange(6).repeat(5, 1), mask, nothing, nothing, nothing)
    config = small(tmp_path)
    assert to_rows(config, batch) is batch

    def shape(**options):
        rows = to_rows(dataclasses.replace(config, **options), batch)
        assert isinstance(rows.prefix_ids, tuple) == (options["packing"] == "samples")
        return list(rows.tokens.shape)

    assert shape(packing="samples") == [2, 24]
    assert shape(packing="prefixes") == [2, 24]  # 1 + 4 x 5 tokens, and 6
    assert shape(packing="prefixes", pack_length=26) == [1, 26]
    assert shape(packing="samples", pack_length=12, pack_rows=2) == [4, 12]
    short = {"packing": "samples", "sampling": Sampling(max_tokens=4), "pack_length": 5}
    with pytest.warns(UserWarning, match="^A sample is longer than --pack-length 5"):
        assert (shape(**short), shape(**short, length_multiple=8)) == ([5, 6], [5, 8])


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_goes_on_where_a_sample_is_longer_than_a_packed_row(tmp_path, packing):
    rows = [{"prompt": "1" * count, "answer": "2"} for count in (9, 1, 1, 1)]
    task = funcrl.tasks.from_rows(rows, held_out=0.0)

    def numbers(name, **options):
        config = small(tmp_path / name, num_prompts=1, steps=4, num_minibatches=1, **options)
        trained = funcrl.train(config, task=task)
        return [row["loss"] for row in trained.history[1:]], trained.state.params

    wanted, params = numbers("plain")
    with pytest.warns(UserWarning, match="longer than --pack-length 8"):
        found, packed = numbers("packed", packing=packing, pack_length=8)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert all((leaf - params[name]).abs().max() < 1e-5 for name, leaf in packed.items())


def test_a_network_that_takes_no_attention_cannot_be_packed(tmp_path):
    code = tmp_path / "own.py"
    code.write_text(
        "import torch\n\ndef net(vocab_size):\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(vocab_size, 8),"
        " torch.nn.Linear(8, vocab_size))\n"
    )
    with pytest.raises(ValueError, match="--packing none for a network .* got prefixes for Seq"):
        funcrl.build(small(tmp_path / "run", model=f"{code}:net", packing="prefixes"))


def test_an_algorithm_that_mixes_the_samples_of_a_row_cannot_be_packed(tmp_path):
    code = tmp_path / "own.py"
    code.write_text(
        "import funcrl\n\ndef whole_row(logprobs, ratio, advantages):\n"
        "    return funcrl.types.Surrogate(ratio.mean() * advantages)\n\n"
        "mine = funcrl.grpo()._replace(surrogate=whole_row)\n"
    )
    named = AlgorithmConfig(name=f"{code}:mine", kl=0, entropy=0)
    words = "^train expects --packing none .* surrogate=whole_row depends .* got {}."
    for packing in PACKINGS:
        config = small(tmp_path / "run", algorithm=named, packing=packing)
        with pytest.raises(ValueError, match=words.format(packing)):
            funcrl.train(config)
    plain = small(tmp_path / "run", algorithm=named, num_minibatches=1, num_prompts=1)
    assert not (tmp_path / "run").exists()
    # A step of one's own says itself what it takes, and a run of it is evaluated.
    packed = small(tmp_path / "own", packing="samples", algorithm=named)
    apart = dataclasses.replace(packed, algorithm=AlgorithmConfig(kl=0, entropy=0))
    own_step = funcrl.build(apart).step
    assert len(funcrl.train(packed, step=own_step).history) == 2
    evaluated = EvalConfig(run=tmp_path / "own", num_prompts=2)
    assert funcrl.evaluate(evaluated, note=lambda line: None).num_prompts == 2
    assert len(funcrl.train(plain).history) == 2

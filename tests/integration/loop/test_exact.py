"""Runs with exact numerics: generator and trainer agree at every step, or the run stops."""

import pytest
import torch

import funcrl
from funcrl.config import EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.loop.update import _check_agreement
from funcrl.models import SHAPES

DIFFERENCE = "sampling/sampling_logp_difference/max"


def small(run_dir, **options):
    return TrainConfig(**{
        "run_dir": run_dir, "numerics": "exact", "steps": 2, "num_prompts": 2,
        "num_generations": 4, "sampling": Sampling(max_tokens=4),
        "warm_start": WarmStartConfig(steps=0), "evaluation": EvaluationConfig(every=0), **options,
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_no_token_differs_in_fifty_steps(tmp_path, dtype):
    """Every step pushes what the step before it has trained."""
    trained = funcrl.train(small(tmp_path / "run", steps=50, dtype=dtype))
    assert [row[DIFFERENCE] for row in trained.history[1:]] == [0.0] * 50
    assert sum(row["num_tokens"] for row in trained.history[1:]) > 1000
    first, last = trained.history[1], trained.history[-1]
    assert first["grad_norm"] > 0
    assert first["entropy"] != last["entropy"]  # it did train


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(max_tokens=4, temperature=0.7)},
        {"sampling": Sampling(max_tokens=4, top_k=5, min_p=0.01)},  # scored anew by the trainer
        {"microbatch": 2, "length_multiple": 16, "slots": 4, "num_iterations": 2},
        {"lora": funcrl.config.LoraConfig(rank=4)},
        {"task": "calculator", "sampling": Sampling(max_tokens=16)},  # several turns
        {"packing": "samples", "pack_length": 40, "pack_rows": 2},
        {"packing": "prefixes", "microbatch": 1, "num_minibatches": 2},
    ],
    ids=["temperature", "truncated", "layouts", "lora", "turns", "packed", "prefixes"],
)
def test_it_holds_for_every_way_to_draw_and_train(tmp_path, options):
    """A run that finds a difference before a step's first update stops with an error."""
    trained = funcrl.train(small(tmp_path / "run", **options))
    assert len(trained.history) == 3


def test_a_difference_stops_the_run():
    zero, some = torch.tensor(0.0), torch.tensor(1e-6)
    report = funcrl.Metrics(sums={}, means={}, maxes={DIFFERENCE: zero}, last={})
    _check_agreement(report, 3)
    with pytest.raises(RuntimeError, match=r"got a difference of 1e-06 in step 3; funcrl parity"):
        _check_agreement(report._replace(maxes={DIFFERENCE: some}), 3)


def test_who_is_expected_to_agree(tmp_path):
    parts = funcrl.build(small(tmp_path / "run"))
    assert parts.agrees
    assert parts.model.config.numerics == "exact"
    assert not parts._replace(generator=parts.generator).agrees
    assert not funcrl.build(small(tmp_path / "run", numerics="native")).agrees


def test_what_cannot_be_exact_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--attend native with --numerics exact"):
        small(tmp_path, attend="flash")
    code = tmp_path / "own.py"
    code.write_text(
        "import torch\n\ndef net(vocab_size):\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(vocab_size, 8),"
        " torch.nn.Linear(8, vocab_size))\n"
    )
    with pytest.raises(ValueError, match="--numerics native for a network whose operations"):
        funcrl.build(small(tmp_path / "run", model=f"{code}:net"))


def test_weights_keep_no_numerics(tmp_path):
    """What a run of exact numerics has trained is a model like any other."""
    assert {shape.numerics for shape in SHAPES.values()} == {"native"}
    trained = funcrl.train(small(tmp_path / "run"))
    funcrl.export(tmp_path / "run", tmp_path / "folder")
    model, params = funcrl.load_params(tmp_path / "folder")
    assert model.config.numerics == "native"
    assert all(torch.equal(params[name], leaf) for name, leaf in trained.state.params.items())

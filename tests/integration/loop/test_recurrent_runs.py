"""Runs of `--model lstm` and `gru`: what they train, and what only a `Transformer` has."""

import pytest
import torch
from cases import equal, run_command
from test_train import assert_kills_end_in_the_same_bits

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    CompileConfig,
    EvaluationConfig,
    LoraConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.sources import Source, network_of


def small(run_dir, **options):
    return TrainConfig(**{
        "run_dir": run_dir, "model": "lstm", "steps": 3, "threads": 1, "num_prompts": 4,
        "num_generations": 4, "sampling": Sampling(max_tokens=4),
        "warm_start": WarmStartConfig(steps=4, num_prompts=8),
        "evaluation": EvaluationConfig(every=3, num_prompts=5),
        **options,
    })  # fmt: skip


def test_packed_rows_train_what_samples_do(tmp_path):
    """And the run is loaded again, evaluated, and started from."""
    plain = funcrl.train(small(tmp_path / "plain"))
    packed = funcrl.train(small(tmp_path / "packed", packing="samples", logprob_chunk=3))
    for name, leaf in plain.state.params.items():
        # AdamW divides by the root of the gradient's square: rounding of 1e-7 may grow that much.
        assert (packed.state.params[name] - leaf).abs().max() < 1e-4
    model, params, task = funcrl.load_run(tmp_path / "plain")
    assert isinstance(model, funcrl.models.Recurrent)
    assert equal(params, plain.state.params)
    assert task.name == "sum_digits"
    found = funcrl.evaluate(funcrl.config.EvalConfig(run=tmp_path / "plain", num_prompts=10))
    assert found.num_prompts == 10
    more = funcrl.train(small(tmp_path / "more", model=str(tmp_path / "plain"), steps=1))
    assert more.state.params.keys() == params.keys()


def test_a_compiled_run_of_exact_operators_has_the_same_bits(tmp_path):
    plain = funcrl.train(small(tmp_path / "plain", model="gru"))
    config = CompileConfig(fuse="none")
    compiled = funcrl.train(small(tmp_path / "compiled", model="gru", compile=config))
    assert equal(compiled.state, plain.state)


@pytest.mark.slow
def test_kills_of_a_recurrent_run_end_in_the_same_bits(tmp_path):
    assert_kills_end_in_the_same_bits(tmp_path, kills=1, model="lstm")


def test_what_only_a_transformer_has_is_refused_by_name(tmp_path):
    for wrong, words in (
        ({"packing": "prefixes"}, "--packing none or samples for a network that carries a state"),
        ({"generator": "vllm"}, "--generator sampler for a network that is no Transformer"),
        ({"attend": "flash"}, "--attend native"),
        ({"compile": CompileConfig(remat="full")}, "--compile.remat none"),
    ):
        with pytest.raises(ValueError, match=f"^train expects {words}.*Recurrent"):
            funcrl.build(small(tmp_path / "run", **wrong))
    with pytest.raises(ValueError, match="^train expects --lora.targets .*such as embed.weight, "):
        funcrl.build(small(tmp_path / "run", lora=LoraConfig(rank=2)))
    on_gpu = small(tmp_path / "run", numerics="exact", device="cuda")
    with pytest.raises(ValueError, match="^train expects --device cpu with --numerics exact.*Recu"):
        network_of("train", on_gpu, Source(), vocab_size=11)
    model = funcrl.build(small(tmp_path / "run")).model
    params = funcrl.init_params(model, seed=0)
    with pytest.raises(TypeError, match="^save_params expects .*Transformer, got Recurrent"):
        funcrl.save_params(tmp_path / "model", model, params)


def test_a_teacher_without_layers_goes_with_a_step_that_computes_layers_again(tmp_path):
    network = funcrl.build(small(tmp_path / "teacher")).model
    taught = small(
        tmp_path / "run", model="micro", warm_start=WarmStartConfig(steps=0),
        compile=CompileConfig(backend="eager", remat="full"),
        algorithm=AlgorithmConfig(name="distill", divergence="sampled"),
    )  # fmt: skip
    teacher = funcrl.Teacher(network, funcrl.init_params(network, seed=0))
    assert len(funcrl.train(taught, teacher=teacher).history) == 4


def test_the_commands_know_the_shapes(tmp_path, capsys):
    assert " lstm " in run_command(["models"], capsys).out
    dry = ["train", "--model", "gru", "--dry-run", "--run-dir", str(tmp_path / "run")]
    count = sum(leaf.numel() for leaf in funcrl.build(TrainConfig(model="gru")).model.parameters())
    assert f"num_parameters: {count}" in run_command(dry, capsys).out
    funcrl.train(small(tmp_path / "run", steps=1))
    with pytest.raises(ValueError, match="^export expects a Transformer.*got Recurrent"):
        funcrl.export(tmp_path / "run", tmp_path / "out")
    exact = run_command(["parity", "lstm", "--numerics", "exact", "--num-prompts", 1], capsys)
    assert "bitwise identical: yes" in exact.out


def test_bfloat16_draws_and_trains(tmp_path):
    """The parameters stay float32, and sampler and trainer differ by the rounding of bfloat16."""
    trained = funcrl.train(small(tmp_path / "run", dtype="bfloat16"))
    assert {leaf.dtype for leaf in trained.state.params.values()} == {torch.float32}
    difference = "sampling/sampling_logp_difference/max"
    assert max(row[difference] for row in trained.history[1:]) < 2**-4

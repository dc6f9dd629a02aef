"""The options that are chosen for a device: those of commands tuned by hand, never one given."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
import yaml
from cases import tiny_tokenizer

import funcrl
from funcrl.cli import main
from funcrl.cli.device import say_of_idle_gpu, say_of_idle_gpus
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.loop.from_config import longest_prompt

GB = 10**9
QWEN = funcrl.models.shape("qwen3-0.6b", vocab_size=151_936)
FAST = CompileConfig(backend="inductor", remat="selective")


def config(**options):
    return TrainConfig(**{
        "device": "cuda", "num_prompts": 16, "num_generations": 8, "microbatch": 8, "slots": 256,
        "sampling": Sampling(max_tokens=256), "checkpoint": CheckpointConfig(every=0),
        "algorithm": AlgorithmConfig(name="dapo", kl=0.0),
        "warm_start": WarmStartConfig(steps=0), **options,
    })  # fmt: skip


def test_on_an_h200_they_are_those_of_the_command_tuned_by_hand():
    """docs/recipes.md: the fast step of Qwen3-0.6B's shape, which 80 GB were measured for."""
    chosen = funcrl.choose_options(config(), [], QWEN, 128, 141 * GB)
    assert chosen.line == (
        "--dtype bfloat16 --attend flash --packing prefixes --pack-length 2240 --pack-rows 16 "
        "--compile.backend inductor --compile.remat selective --slots 128 --microbatch 16 "
        "--logprob-chunk all"
    )
    assert 0.95 < chosen.estimate.peak / (80.1 * GB) < 1.05


@pytest.mark.parametrize("gigabytes", [24, 40, 80, 141])
def test_they_fit_the_gpu(gigabytes):
    chosen = funcrl.choose_options(config(), [], QWEN, 128, gigabytes * GB)
    assert chosen.estimate.peak <= 0.92 * gigabytes * GB
    found = funcrl.memory.estimate_memory(chosen.config, QWEN, 128)
    assert found == chosen.estimate
    # No larger micro-batch of as many logits would.
    larger = replace(chosen.config, microbatch=2 * chosen.config.microbatch)
    if chosen.config.microbatch < chosen.config.pack_rows:
        assert funcrl.memory.estimate_memory(larger, QWEN, 128).peak > 0.92 * gigabytes * GB


def test_what_does_not_fit_is_said():
    chosen = funcrl.choose_options(config(), [], QWEN, 128, 4 * GB)
    for rows, remat in product((1, 2, 4, 8, 16), ("selective", "full")):
        other = replace(chosen.config, microbatch=rows, compile=replace(FAST, remat=remat))
        assert chosen.estimate.peak <= funcrl.memory.estimate_memory(other, QWEN, 128).peak
    assert "of 4 GB estimated, which does not fit. By the est" in chosen.reasons["microbatch"]


def test_everything_is_computed_again_where_products_do_not_fit():
    """Exact sums of small micro-batches wait for each other, and take more than a large one."""
    exact = config(numerics="exact")
    chosen = funcrl.choose_options(exact, [], QWEN, 128, 24 * GB)
    assert chosen.config.compile.remat == "full"
    assert chosen.estimate.peak <= 0.92 * 24 * GB
    for rows in (1, 2, 4, 8, 16):
        kept = replace(chosen.config, microbatch=rows, compile=FAST)
        assert funcrl.memory.estimate_memory(kept, QWEN, 128).peak > 0.92 * 24 * GB
    given = replace(exact, compile=FAST)
    assert funcrl.choose_options(given, ["compile"], QWEN, 128, 24 * GB).config.compile == FAST


GIVEN = {
    "dtype": "float32", "attend": "native", "packing": "none", "pack_length": 512, "pack_rows": 2,
    "compile": None, "slots": 7, "microbatch": 3, "logprob_chunk": 99,
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_stays(name):
    own = config(**{"packing": "samples"} if "pack_" in name else {}, **{name: GIVEN[name]})
    given = [name, *(["packing"] if "pack_" in name else [])]
    chosen = funcrl.choose_options(own, given, QWEN, 128, 141 * GB)
    assert getattr(chosen.config, name) == GIVEN[name]
    assert name not in chosen.reasons
    assert chosen.reasons


SHAPES = ["qwen3-0.6b", "gemma3-270m", "qwen3.5-0.8b"]
ALGORITHMS = ["grpo", "gspo", "reinforce", "ppo", "sft"]
OTHERS = [
    {}, {"numerics": "exact"}, {"lora": LoraConfig(rank=8)}, {"num_prompts": 1},
    {"optimizer": OptimizerConfig(clip_per_sample=1.0)},
]  # fmt: skip


@pytest.mark.parametrize(("shape", "name"), [*product(SHAPES, ALGORITHMS)])
def test_every_choice_is_a_configuration_that_can_be(shape, name):
    """TrainConfig and the parts of a run refuse what contradicts; nothing here does."""
    network = funcrl.models.shape(shape, vocab_size=13)
    for options in OTHERS:
        if name in ("ppo", "sft") and options.keys() & {"numerics", "lora"}:
            continue
        own = config(**{**options, "algorithm": AlgorithmConfig(name=name, kl=0.0, entropy=0.0)})
        for memory, turns in ((24, 1), (141, 3)):
            chosen = funcrl.choose_options(own, [], network, 9, memory * GB, turns)
            packs = chosen.config.packing
            if options.get("optimizer") or name == "ppo" or turns > 1:
                assert packs == "none"
            elif shape == "qwen3.5-0.8b" or name == "sft":
                assert packs == "samples"
            else:
                assert packs == "prefixes"


@pytest.mark.slow
def test_a_run_with_what_was_chosen_trains(tmp_path):
    """On a CPU, which has each of these options too; Inductor's kernels would take a minute."""
    shape = funcrl.models.shape("micro", vocab_size=13)
    own = TrainConfig(
        device="cuda", run_dir=tmp_path / "run", steps=2, num_prompts=4, num_generations=4,
        sampling=Sampling(max_tokens=4), warm_start=WarmStartConfig(steps=0),
    )  # fmt: skip
    chosen = funcrl.choose_options(own, [], shape, 6, 80 * GB).config
    assert (chosen.packing, chosen.compile) == ("prefixes", FAST)
    traced = replace(chosen.compile, backend="eager")
    trained = funcrl.train(replace(chosen, device="cpu", compile=traced))
    assert all(torch.isfinite(leaf).all() for leaf in trained.state.params.values())
    assert len(trained.history) == 3


LINE = ["train", "--model", "qwen3-0.6b", "--device", "cuda", "--gpu-memory", "80", "--dry-run"]


def plan(capsys, *more):
    main([*LINE, *more])
    out, err = capsys.readouterr()
    return yaml.safe_load(out), err


def test_a_dry_run_says_what_was_chosen_and_why(capsys):
    found, err = plan(capsys, "--attend", "native", "--microbatch", "2")
    assert found["dtype"] == "bfloat16"
    assert (found["attend"], found["microbatch"], found["packing"]) == ("native", 2, "none")
    assert found["compile"]["backend"] == "inductor"
    assert not found["chosen"].keys() & {"attend", "microbatch", "packing"}
    assert found["chosen"]["dtype"].startswith("a GPU multiplies")
    (line,) = [line for line in err.splitlines() if line.startswith("Chosen for")]
    assert line.startswith("Chosen for a GPU of 80 GB: --dtype bfloat16 --compile.backend")


def test_nothing_is_chosen_where_nobody_asks(capsys, tmp_path):
    for more in (["--no-choose"], ["--model", "micro"], ["--device", "cpu", "--compile"]):
        line = [part for part in LINE if part not in ("--model", "qwen3-0.6b")]
        line += [] if "--model" in more else ["--model", "qwen3-0.6b"]
        line = [part for part in line if part not in ("--device", "cuda") or "--device" not in more]
        main([*line, *more])
        out, err = capsys.readouterr()
        assert "chosen" not in yaml.safe_load(out)
        assert "Chosen" not in err
    file = tmp_path / "config.yaml"
    file.write_text("device: cuda\nmodel: qwen3-0.6b\n")
    main(["train", "--config", str(file), "--gpu-memory", "80", "--dry-run"])
    assert "Chosen" not in capsys.readouterr().err


def test_a_model_of_transformers_gets_what_its_memory_allows(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("funcrl.cli.device._FEWEST_PARAMETERS", 1)
    tokenizer = tiny_tokenizer()
    size = {"vocab_size": tokenizer.vocab_size, "n_embd": 16, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).save_pretrained(tmp_path)
    tokenizer._tokenizer.save_pretrained(tmp_path)
    line = ["train", "--model", str(tmp_path), "--task", "sum_digits", *LINE[-3:]]
    main([*line, "--device", "cuda"])
    out, err = capsys.readouterr()
    found = yaml.safe_load(out)
    assert (found["dtype"], found["slots"], found["microbatch"]) == ("bfloat16", 128, 128)
    assert "Chosen for a GPU of 80 GB: --dtype bfloat16 --slots 128 --microbatch 128\n" in err
    main([*line, "--device", "cuda", "--dtype", "float32", "--slots", "8"])
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["chosen"].keys() == {"microbatch"}
    main([*line, "--microbatch", "None"])
    out, err = capsys.readouterr()
    assert (yaml.safe_load(out)["dtype"], "Chosen" in err) == ("float32", False)


LSTM = replace(funcrl.models.RECURRENT_SHAPES["lstm"], vocab_size=151_936)


@pytest.mark.parametrize(
    ("teacher", "divergence", "packing"),
    [
        (QWEN, "reverse", "prefixes"),
        (funcrl.models.Recurrent(LSTM), "reverse", "samples"),
        (funcrl.models.Recurrent(LSTM), "sampled", "samples"),
        (None, "forward", "none"),  # one's own, whose network is not known yet
        (None, "sampled", "prefixes"),  # and which may score tokens alone
    ],
)
def test_rows_are_packed_as_the_teacher_can_read_them(teacher, divergence, packing):
    algorithm = AlgorithmConfig(name="distill", divergence=divergence, kl=0.0)
    taught = config(teacher="mine.py:Teacher", algorithm=algorithm)
    chosen = funcrl.choose_options(taught, [], QWEN, 128, 141 * GB, teacher=teacher)
    assert chosen.config.packing == packing


def test_a_gpu_must_have_a_size():
    with pytest.raises(ValueError, match="^choose_options expects gpu_bytes for device cuda"):
        funcrl.choose_options(config(), [], QWEN, 8)


MICRO = funcrl.models.shape("micro", vocab_size=13)
HYBRID = funcrl.models.shape("micro-hybrid", vocab_size=13)
FLAT = AlgorithmConfig(kl=0.0, entropy=0.0)
SFT = {"algorithm": replace(FLAT, name="sft"), "warm_start": WarmStartConfig(steps=0)}


@pytest.mark.parametrize(
    ("options", "given", "shape", "turns", "packing"),
    [
        ({}, [], MICRO, 1, "prefixes"),
        ({"numerics": "exact"}, ["numerics"], MICRO, 1, "prefixes"),
        ({"algorithm": replace(FLAT, name="gspo")}, [], MICRO, 1, "prefixes"),
        ({}, ["packing"], MICRO, 1, "none"),
        ({"packing": "samples"}, ["packing"], MICRO, 1, "samples"),
        ({}, [], MICRO, 2, "none"),
        ({"microbatch": 4}, ["microbatch"], MICRO, 1, "none"),
        ({"compile": CompileConfig()}, ["compile"], MICRO, 1, "none"),
        ({"algorithm": replace(FLAT, name="ppo")}, [], MICRO, 1, "none"),
        (SFT, [], MICRO, 1, "none"),
        ({"optimizer": OptimizerConfig(clip_per_sample=1.0)}, [], MICRO, 1, "none"),
        ({"sampling": Sampling(max_tokens=200)}, [], MICRO, 1, "none"),
        ({}, [], HYBRID, 1, "none"),
    ],
)  # fmt: skip
def test_on_a_cpu_packing_alone_is_chosen(options, given, shape, turns, packing):
    own = TrainConfig(**options)
    chosen = funcrl.choose_options(own, given, shape, 6, num_turns=turns)
    assert chosen.config == replace(own, packing=packing)
    assert set(chosen.reasons) == ({"packing"} if packing == "prefixes" else set())


def test_a_run_on_a_cpu_begins_with_what_was_chosen_and_goes_on_with_it(capsys, tmp_path):
    line = ["train", "--num-prompts", "2", "--warm-start.steps", "0", "--evaluation.every", "0"]
    main([*line, "--run-dir", str(tmp_path / "run"), "--steps", "1"])
    assert "Chosen for a CPU: --packing prefixes\n" in capsys.readouterr().err
    main(["train", "--resume", str(tmp_path / "run"), "--steps", "2"])
    assert "Chosen" not in capsys.readouterr().err
    main([*line, "--run-dir", str(tmp_path / "same"), "--steps", "2", "--packing", "prefixes"])
    main([*line, "--run-dir", str(tmp_path / "plain"), "--steps", "2", "--no-choose"])
    assert "Chosen" not in capsys.readouterr().err
    configs = {each: yaml.safe_load((tmp_path / each / "config.yaml").read_text())["packing"]
               for each in ("run", "same", "plain")}  # fmt: skip
    assert configs == {"run": "prefixes", "same": "prefixes", "plain": "none"}
    resumed, whole = (funcrl.load_run(tmp_path / each).params for each in ("run", "same"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("count", "options", "says"),
    [
        (4, {}, True),
        (1, {}, False),
        (4, {"device": "cpu"}, False),
        (4, {"generator": "vllm", "vllm": VLLMConfig(form="server")}, False),
    ],
)
def test_gpus_that_a_run_leaves_alone_are_named(count, options, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    say_of_idle_gpus(config(**options))
    line = f"One of {count} GPUs is used; torchrun --nproc-per-node {count} -m funcrl train"
    assert (line in capsys.readouterr().err) == says


@pytest.mark.parametrize(
    ("line", "model", "has_gpu", "says"),
    [
        ("", "weights", True, True),
        ("", "weights", False, False),
        ("--device cpu", "weights", True, False),
        ("", "micro", True, False),
    ],
)
def test_a_gpu_beside_a_model_on_the_cpu_is_named(line, model, has_gpu, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    say_of_idle_gpu(line.split(), "cpu", model)
    assert ("--device cuda --dtype bfloat16 uses it." in capsys.readouterr().err) == says


def test_rows_are_as_long_as_the_answers_that_are_trained_on():
    rows = [{"prompt": "1" * count, "answer": "2" * 30} for count in (4, 9, 4)]
    task = funcrl.tasks.from_rows(rows, held_out=0.0)
    options = {"num_prompts": 3, "warm_start": WarmStartConfig(steps=0)}
    options["sampling"] = Sampling(max_tokens=10)
    assert longest_prompt(TrainConfig(**options), task) == 9
    assert longest_prompt(TrainConfig(**options, max_prompt_length=8), task) == 4
    assert longest_prompt(TrainConfig(**options, max_prompt_length=3), task) == 3
    algorithm = AlgorithmConfig(name="sft")  # 9 + 30 tokens, and one that ends them
    assert longest_prompt(TrainConfig(**options, algorithm=algorithm), task) == 40 - 10
    longer = replace(TrainConfig(**options, algorithm=algorithm), sampling=Sampling(max_tokens=99))
    assert longest_prompt(longer, task) == 9


@pytest.mark.parametrize("command", ["train", "eval", "generate", "chat", "serve"])
def test_each_command_names_it(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):  # after the line: there are no weights
        main([command, "--model", str(tmp_path)])
    assert "--device cuda --dtype bfloat16 uses it." in capsys.readouterr().err

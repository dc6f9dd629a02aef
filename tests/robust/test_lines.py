"""Lines that a command does not take: one or two lines of ours that say what was meant."""

import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from cases import run_command as run

import funcrl
from funcrl.cli.options import (
    CompileSwitch,
    StartConfig,
    options_of,
    parse,
    with_compile_options,
)
from funcrl.cli.train import read_line
from funcrl.config import TrainConfig
from funcrl.config.names import _KNOWN_AS, _SAME_AS, understood

MALFORMED = """
train --num-train-epochs 3
train --optimizer
train --optimizer 3 4
train --optimizer.nope 3
train --algorithm
train --algorithm nope
train --algorithm.name
train --algorithm.nam grpo
train --sampling 3
train --sampling.nope
train --vllm 3
train --vllm.compile 3
train --vllm.compile.fuse none
train --vllm.compile.backend
train --lora
train --compile.cudagraph maybe
train --compile on
train --no-compile --compile.backend eager
train --steps
train --steps x
train --steps 0
train --steps -1
train --steps 1 2
train --steps=
train --steps --seed 3
train --seed 1.5
train --microbatch 0
train --device tpu
train --device=
train --generator magic
train --generators vllm
train --optimizer.learning-rate fast
train --optimizer.learning-rate nan
train --sampling.top-p 2
train --sampling.temperature -3
train --sampling.min-tokens 5 --sampling.max-tokens 3
train --sampling.stop-tokens a b
train --sampling.stop-tokens 1 -1
train --checkpoint.every -1
train --reward-weights a
train --reward-weights a b
train --log.trackers nothing
train --num-generations 1
train --max-staleness 1 --algorithm.clip 0.2 0.28
train --dry-run=yes
train --nope
train --
train -x
train ---
train extra
train steps=3
train --__tyro-dummy-inner__.options.steps 3
train --resume
train --config
train --run-dir
train --task
train --model
eval --foo 3
eval extra
eval --run
eval --ks
eval --ks 0
eval --ks x
eval --ks 5
eval --num-samples many
eval --temperature
eval --run a --model b
parity --limit x
parity --vllm.form
parity --vllm.form magic
parity --json 3
export
export --run a
export --out b
export --run
export a b
export --nope a
report
report --out
report a b --nope
models extra
models --all
dance
trian
Train
--nope
-x
--steps 3
""".strip().splitlines()


def test_every_malformed_line_ends_in_a_line_or_two_of_ours(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in ["", *MALFORMED]:
        # A list may be left empty, which is right: these begin a run or a measurement.
        if line == "eval --ks":
            continue
        code, out, err = run(shlex.split(line), capsys)
        assert code in (1, 2), line
        assert out == "", line
        assert err.startswith("funcrl: "), (line, err)
        assert len(err.splitlines()) <= 2, (line, err)
        for leak in ("tyro", "__", "Traceback", "╭", "NoneType"):
            assert leak not in err or leak in line, (line, err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train --kl 0", "--algorithm.kl?"),
        ("train --n 4", "--num-generations?"),
        ("train --stpes 4", "did you mean --steps "),
        ("train --rank 4", "--lora.rank?"),
        ("train --vllm_mode server", "--vllm.form?"),
        ("train --num_generations_eval 4", "--evaluation.num-prompts?"),
        ("train --optimiser.learning-rate 4", "--optimizer.learning-rate or"),
        ("train --sampling.max-token 4", "--sampling.max-tokens"),
        ("train --device cdua", "did you mean cuda?"),
        ("train --algorithm drgrpo", "dr_grpo"),
        ("eval --n 4", "--num-samples?"),
        ("trian", "funcrl train?"),
        ("--steps 3", "funcrl expects a command first, got '--steps'."),
        ("train --zzz 1", "funcrl train --help-all lists them."),
        ("train --adam_beta2 0.95", "did you mean --optimizer.betas?"),
        ("train --fp16 --n 4 --zzz=1 --fp16", "--dtype? Nor --n (--num-generations?), --zzz.\n"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(capsys, line, meant):
    code, _, err = run(line.split(), capsys)
    assert code == 2
    assert meant in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train --optimizer.name lion", "train expects --optimizer to be one of adamw, sgd, muon"),
        ("train --algorithm.kl -1", "train expects --algorithm.kl to be a finite number of at"),
        ("train --kl_coef -1", "train expects --algorithm.kl to be a finite number of at least 0"),
        ("train --sampling.temperature -1", "train expects --sampling.temperature to be 0, or"),
        ("train --vllm.context-length -3", "train expects --vllm.context-length to be a 64-bit"),
        ("train --optimizer.betas 0.9 1", "train expects --optimizer.betas to be a number from 0"),
        ("train --steps -1", "train expects --steps to be a 64-bit integer above 0, got -1."),
    ],
)
def test_a_refused_value_names_its_option(capsys, line, expected):
    code, _, err = run(line.split(), capsys)
    assert code == 2
    assert f"funcrl: {expected}" in err


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("--lr 3e-4", {"optimizer.learning_rate": 3e-4}),
        ("--learning_rate=3e-4 --beta 0.5", {"optimizer.learning_rate": 3e-4, "algorithm.kl": 0.5}),
        ("--max-completion-length 5 --temperature 0.5",
         {"sampling.max_tokens": 5, "sampling.temperature": 0.5}),
        ("--batch-size 6 --group-size 3", {"num_prompts": 6, "num_generations": 3}),
        ("--max-steps 7 --save-steps 3", {"steps": 7, "checkpoint.every": 3}),
        ("--loss_type dapo --lr-scheduler-type constant",
         {"algorithm.name": "dapo", "optimizer.schedule": "constant"}),
        ("--max-grad-norm 0.5 --weight_decay 0.25",
         {"optimizer.max_grad_norm": 0.5, "optimizer.weight_decay": 0.25}),
        ("--use-peft", {"lora.rank": 16}),
        ("--lora-r 4 --use_peft", {"lora.rank": 4}),
        ("--use-peft --load_in_4bit", {"lora.rank": 16, "lora.base_dtype": "nf4"}),
        ("--lora-r 4 --load-in-8bit", {"lora.rank": 4, "lora.base_dtype": "int8"}),
        ("--optim adamw_8bit --lr 3e-4",
         {"optimizer.moments": "8bit", "optimizer.learning_rate": 3e-4}),
        ("--lora-r=4 --use_peft true --bf16=True", {"lora.rank": 4, "dtype": "bfloat16"}),
        ("--use_vllm --report_to wandb tensorboard",
         {"generator": "vllm", "log.trackers": ["wandb", "tensorboard"]}),
        ("--reward_funcs accuracy_reward pkg.rewards.mine pkg.rewards:own --lr 3e-4",
         {"reward": ["trl.rewards:accuracy_reward", "pkg.rewards:mine", "pkg.rewards:own"]}),
        ("--top_entropy_quantile 0.2 --off-policy-mask-threshold=0.05",
         {"algorithm.top_entropy": 0.2, "algorithm.off_policy_mask": 0.05}),
        ("--ref_model_sync_steps 64 --sync_ref_model --ref-model-mixup-alpha 0.5",
         {"algorithm.reference_every": 64, "algorithm.reference_mixup": 0.5}),
        ("--output_dir=-odd", {"run_dir": "-odd"}),
        ("--sync-ref-model", {"algorithm.reference_every": 512}),
        ("--optim=adamw_torch_fused", {"optimizer.name": "adamw", "optimizer.moments": "float32"}),
        ("--beta 0.5 --algorithm.kl 0.25", {"algorithm.kl": 0.25}),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_understood_and_said(capsys, line, own):
    code, out, err = run(["train", "--dry-run", *line.split()], capsys)
    assert code == 0, err
    found = yaml.safe_load(out.partition("\n\n")[0])
    for name, value in own.items():
        group, _, field = name.rpartition(".")
        assert (found[group] if group else found)[field] == value
    (said,) = [each for each in err.splitlines() if " is --" in each]
    theirs = [word.partition("=")[0] for word in line.split() if word.startswith("--")]
    assert all(f"{word} is --" in said for word in theirs if word != "--algorithm.kl")


def test_the_line_of_trl_grpo_in_the_docs_is_one_of_funcrl_train():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    block = page.partition("    funcrl train --model_name_or_path")[2].partition("\n\n")[0]
    words = f"--model_name_or_path{block}".replace("\\\n", " ").split()
    options = [option.name for each in (with_compile_options(TrainConfig()), StartConfig())
               for option in options_of(each)]  # fmt: skip
    line, others = understood(words, options)
    assert len(others) == 19  # all but two, which are called the same
    _, config = read_line(line)
    assert config.model == "Qwen/Qwen3-0.6B"
    assert config.task == "trl-lib/DeepMath-103K"
    assert config.reward == ("trl.rewards:accuracy_reward", "trl.rewards:think_format_reward")
    assert (config.lora.rank, config.lora.alpha, config.dtype) == (16, 32, "bfloat16")
    assert (config.num_generations, config.sampling.max_tokens, config.seed) == (8, 512, 42)
    assert (config.algorithm.name, config.algorithm.kl) == ("dapo", 0.0)
    assert (config.checkpoint.every, config.evaluation.every) == (100, 50)
    assert config.log.trackers == ("wandb",)


def test_a_run_needs_no_option_before_it(capsys, tmp_path):
    for command in ("eval", "export"):
        missing = tmp_path / "no-run"
        line = [command, str(missing), *(["--out", str(tmp_path / "x")] * (command == "export"))]
        assert run(line, capsys) == run([command, "--run", *line[1:]], capsys)
        assert str(missing) in run(line, capsys)[2]


def test_what_peers_call_an_option_leads_to_one_that_there_is():
    every = {option.name for each in (TrainConfig(), StartConfig(), CompileSwitch())
             for option in options_of(each)}  # fmt: skip
    of_train = {name for name, meant in _KNOWN_AS.items() if every & {*meant}}
    assert len(of_train) > len(_KNOWN_AS) - 3
    assert all(every & {*meant} for meant in _SAME_AS.values())
    assert not every & (_KNOWN_AS.keys() | _SAME_AS.keys())
    assert not _KNOWN_AS.keys() & _SAME_AS.keys()


@pytest.mark.parametrize(
    ("reward", "meant"),
    [
        ("accuracy_reward", "trl.rewards:accuracy_reward"),
        ("trl.rewards.accuracy_reward", "trl.rewards:accuracy_reward"),
        ("ORG/NAME", "--reward-model ORG/NAME"),
        ("my.py", ""),
        ("folder/my.py", ""),
    ],
)
def test_a_reward_s_name_is_refused_by_a_dry_run_too(capsys, reward, meant):
    code, _, err = run(["train", "--dry-run", "--reward", reward], capsys)
    assert code == 1
    assert f"module:Name, got {reward!r}{meant and f'; did you mean {meant}?'}" in err
    assert ("did you mean" in err) == bool(meant)


@pytest.mark.parametrize("given", [["--algorithm", "dapo"], ["--algorithm=dapo"]])
def test_a_group_that_is_given_a_value_is_given_its_name(given):
    (options,) = parse("train", given, with_compile_options(TrainConfig()))
    assert options.algorithm.name == "dapo"


def test_a_line_is_read_in_its_types_and_the_last_value_counts():
    line = ["--steps", "3", "--num_prompts=4", "--sampling.stop-tokens", "1", "2",
            "--sampling.stop", "--reward-weights", "a", "1", "b", "-2", "--mask-truncated",
            "--vllm.no-sleep", "--microbatch", "None", "--run-dir", "x",
            "--steps", "5"]  # fmt: skip
    (read,) = parse("train", line, with_compile_options(TrainConfig()))
    assert (read.steps, read.num_prompts, read.run_dir) == (5, 4, Path("x"))
    assert (read.sampling.stop_tokens, read.sampling.stop) == ((1, 2), ())
    assert (read.reward_weights, read.mask_truncated) == ({"a": 1.0, "b": -2.0}, True)
    assert (read.vllm.sleep, read.microbatch) == (False, None)


def test_the_version_is_the_packages(capsys):
    code, out, _ = run(["--version"], capsys)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert (code, out) == (0, f"funcrl {project['version']}\n")
    assert funcrl.__version__ == project["version"]


@pytest.mark.parametrize("command", [
    "", "train", "eval", "report", "export", "models", "parity",
])  # fmt: skip
def test_every_help_fits_the_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("-h", "--help", "--help-all"):
        code, out, _ = run([*command.split(), flag], capsys)
        assert code == 0
        assert out.startswith(f"usage: funcrl {command}")
        longest = max(map(len, [text for text in out.splitlines() if "   adds digits" not in text]))
        assert longest <= 95

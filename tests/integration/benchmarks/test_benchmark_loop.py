"""The benchmark of the loop, for real at a tiny shape: its table, its workloads, its refusals."""

import importlib.util
import json
import re
from functools import partial

import pytest
import torch
from cases import run_command

import funcrl
from benchmarks.command_line import main
from benchmarks.loop import LoopBenchConfig, bench_loop
from benchmarks.table import Row, compare, format_columns
from benchmarks.variants import changed
from benchmarks.workloads import WORKLOADS, RandomPrompts, as_train_config
from funcrl.config import CompileConfig, TrainConfig

run = partial(run_command, main=main)


TINY = [
    "--model", "micro", "--vocab-size", "512", "--num-prompts", "2", "--num-generations", "4",
    "--prompt-tokens", "8", "--max-tokens", "6", "--train.threads", "1",
]  # fmt: skip
PARTS = ["generate", "reward", "train", "push"]


@pytest.mark.slow
def test_a_workload_has_a_column_for_each_variant(tmp_path, capsys):
    file = tmp_path / "rows.json"
    code, out, err = run(
        ["loop", "--workload", "grpo-128x256", *TINY, "--steps", "3",
         "--variants", "eager", "traced+sampler", "--json", file], capsys)  # fmt: skip
    assert code == 0, err
    assert "| eager | traced+sampler |" in out
    assert "micro, vocabulary 512, 2 prompts x 4 samples, 8 + 6 tokens, bfloat16, cpu" in out
    rows = json.loads(file.read_text())
    for variant in ("eager", "traced+sampler"):
        own = {row["what"]: row for row in rows if row["variant"] == variant}
        first, last = own["start to end of step 1"], own["start to end of step 5"]
        assert list(own) == [first["what"], last["what"], "step", *PARTS]
        step = own["step"]
        assert sum(own[part]["median_s"] for part in PARTS) < 2 * step["median_s"]
        # Of the four steps after the first, three are measured.
        assert last["median_s"] > first["median_s"] > 1  # seconds: a process that imports torch
        assert step["tokens_per_s"] == pytest.approx(2 * 4 * 6 / step["median_s"])
        assert step["peak_bytes"] > 50e6
        assert step["torch"] == torch.__version__


@pytest.mark.slow
def test_a_run_of_ones_own_has_one_column(capsys):
    code, out, err = run(["loop", "--steps", "2", "--train.num-prompts", "2"], capsys)
    assert code == 0, err
    assert "micro, 2 x 8 samples, float32, cpu" in out
    for line in ("start to end of step 1, ms", "start to end of step 4, ms", "step, tokens/s"):
        assert f"| {line} |" in out
    for part in PARTS:
        assert f"| {part}, ms |" in out


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_completion_of_a_workload_has_the_same_length(tmp_path, name):
    sizes = WORKLOADS[name]._replace(
        model="micro", vocab_size=20, num_prompts=2, prompt_tokens=5, max_tokens=50
    )
    config = as_train_config(sizes, TrainConfig(run_dir=tmp_path / "run", steps=2, threads=1))
    history = funcrl.train(config, task=RandomPrompts(sizes)).history[1:]
    # 800 tokens a step of a vocabulary of 20: a token that ends a completion would be drawn.
    assert [row["completions/min_length"] for row in history] == [50, 50]
    assert [row["num_tokens"] for row in history] == [800, 800]
    assert all(row["frac_reward_zero_std"] == 0 for row in history)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_the_prompts_of_a_workload_are_of_one_length_and_all_different():
    task = RandomPrompts(WORKLOADS["grpo-128x256"])
    prompts = [*task.prompts(7, 0, 3), *task.prompts(7, 3, 2)]
    encoded = [tuple(task.tokenizer.encode(prompt.text)) for prompt in prompts]
    assert [len(tokens) for tokens in encoded] == [128] * 5
    assert len(set(encoded)) == 5
    assert all(0 <= token < 151_936 for tokens in encoded for token in tokens)
    assert task.prompts(7, 0, 5) == prompts
    assert task.reward(prompts[0], task.tokenizer.decode([75_968, 3])) == {"first_token": 0.5}


def test_variants_change_the_configuration_from_left_to_right():
    given = TrainConfig(compile=CompileConfig(fuse="none"))
    assert changed("given", given) == given
    assert changed("eager", given).compile is None
    both = changed("compiled+unified", given)
    assert (both.compile.backend, both.compile.remat) == ("inductor", "selective")
    assert (both.generator, both.vllm.form) == ("vllm", "unified")
    assert changed("native+sampler", given).generator == "sampler"
    assert changed("compiled+eager", given).compile is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--variants", "fast"], "expects --variants of given, eager, .*got 'fast'"),
        (["--variants", "eager+fast"], "joined by .*got 'eager.fast'"),
        (["--workload", "seed", *TINY, "--variants", "eager", "graphs"],
         "expects --train.device cuda for the variant 'graphs', which replays a CUDA graph, got"),
        (["--num-prompts", "3"], "expects --workload with --num-prompts, got none"),
        (["--workload", "seed", "--train.num-prompts", "3"],
         "expects no --train.num-prompts with --workload, which says it"),
        (["--workload", "seed", "--train.compile"], "expects no --train.compile with --workload"),
        (["--workload", "seed", "--model", "huge"], "shape expects --model.*'huge'"),
        (["--workload", "tree"], "invalid choice .tree"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name_before_anything_runs(line, message, capsys):
    code, out, err = run(["loop", *line], capsys)
    assert code in (1, 2)
    assert out == ""
    assert re.search(message, re.sub(r"[\s│]+", " ", err)), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    config = LoopBenchConfig(train=TrainConfig(device="cuda"))
    with pytest.raises(ValueError, match="expects a GPU for --train.device cuda, got none"):
        bench_loop(config)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="needs to lack vLLM")
def test_vllm_that_is_not_installed_is_refused():
    config = LoopBenchConfig(variants=("eager", "eager+native"))
    with pytest.raises(ValueError, match=r"vLLM to be installed for the variant 'eager\+native'"):
        bench_loop(config)


@pytest.mark.slow
def test_an_error_of_a_run_is_the_benchmarks(capsys):
    code, out, err = run(
        ["loop", "--train.task", "nobody", "--variants", "given"], capsys)  # fmt: skip
    assert (code, out) == (1, "")
    assert "nobody" in err
    assert "Traceback" not in err


def row(what, variant, median_s, spread_s=0.0, peak=None, **numbers):
    machine = {"torch": "2", **({"vllm": "1"} if variant == "b" else {})}
    return Row(what, "shape", variant, median_s, spread_s, peak, machine, numbers)


def test_columns_have_a_line_for_each_number_that_a_variant_has():
    rows = [
        row("start", "a", 2.0), row("step", "a", 0.5, 0.01, 4_000_000, tokens_per_s=1000.0),
        row("start", "b", 1.0), row("step", "b", 0.25, 0.02), row("wait", "b", 0.125),
    ]  # fmt: skip
    assert format_columns(compare(rows)).splitlines() == [
        "torch 2, vllm 1", "", "shape", "",
        "|  | a | b |",
        "|---|---|---|",
        "| start, ms | 2000.0 | 1000.0 |",
        "| step, ms | 500.0 (10.0) | 250.0 (20.0) |",
        "| step, peak MB | 4.0 |  |",
        "| step, tokens/s | 1,000 |  |",
        "| wait, ms |  | 125.0 |",
    ]  # fmt: skip
    assert format_columns([]) == ""

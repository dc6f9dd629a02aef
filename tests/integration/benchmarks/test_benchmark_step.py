"""The benchmark and the command line: every row is there and the counts are exact."""

import json
from functools import partial

import pytest
import torch
from cases import run_command

import funcrl
from benchmarks import step, table
from benchmarks.baseline import with_weights
from benchmarks.command_line import BENCHMARKS, Benchmark, main
from benchmarks.generate import GenerateBenchConfig, _peer
from benchmarks.inputs import StepBenchConfig, make_case
from benchmarks.loop import LoopBenchConfig
from benchmarks.measure import peak_bytes
from benchmarks.table import Row, format_rows
from benchmarks.vllm import VLLMBenchConfig
from funcrl import CompileConfig

run = partial(run_command, main=main)


@pytest.mark.slow
def test_bench_step_prints_and_writes_every_row(tmp_path, capsys):
    path = tmp_path / "rows.json"
    main(
        ["step", "--num-layers", "1", "--width", "16", "--vocab-size", "11", "--rows", "4",
         "--length", "8", "--chunk", "2", "--repeats", "2", "--json", str(path)]
    )  # fmt: skip
    written = json.loads(path.read_text())
    variants = [(row["what"], row["variant"]) for row in written]
    assert variants == [
        ("gradient", "torch.autograd, batched"),
        ("gradient", "func: gradient of the batch"),
        ("gradient", "func: per-sample, 2 at a time"),
        ("gradient", "func: per-sample, all at once"),
        ("update", "torch.optim.AdamW, in place"),
        ("update", "optim.adamw, pure"),
        ("update", "optim.skip_nonfinite(adamw), pure"),
        ("step", "torch.autograd and torch.optim"),
        ("step", "grpo_step"),
    ]
    printed = capsys.readouterr().out
    for row in written:
        assert row["median_s"] > 0
        assert row["torch"] == torch.__version__
        assert f"| {row['what']} | {row['variant']} |" in printed


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [64, 4096])
def test_the_gradient_needs_no_more_memory_than_an_ordinary_one(vocab_size):
    """Bytes are counted, not timed, so the benchmark's claim is a test: within 1.1."""
    config = StepBenchConfig(width=32, vocab_size=vocab_size, rows=8, length=32)
    variants = step._gradient_variants(make_case(config, 2))
    peaks = {name: peak_bytes(fn) for name, fn in variants.items()}
    ordinary = peaks["torch.autograd, batched"]
    assert peaks["func: gradient of the batch"] <= 1.1 * ordinary
    assert peaks["func: per-sample, 4 at a time"] < ordinary


@pytest.mark.slow
def test_peak_bytes_is_exact():
    def two_then_three():
        first = torch.zeros(1000)  # 4,000 bytes
        second = first + 1  # 8,000 alive
        del first
        return second + 1  # 8,000 alive again

    assert peak_bytes(two_then_three) == pytest.approx(8000, abs=256)


def test_the_benchmark_compares_equal_things():
    config = StepBenchConfig(width=16, vocab_size=11, rows=4, length=8)
    case = make_case(config, 2)
    functions = list(step._gradient_variants(case).values())
    names = [name for name, _ in with_weights(case.model, case.params).named_parameters()]
    ordinary = dict(zip(names, functions[0](), strict=True))
    for other in functions[1:]:
        for name, leaf in other().grads.items():
            assert (leaf - ordinary[name]).abs().max() <= 1e-5 * ordinary[name].abs().max(), name


def row(variant, median_s, peak=None, **numbers):
    return Row("what", "shape", variant, median_s, 0.001, peak, {"torch": "2"}, numbers)


def test_a_table_has_the_columns_that_its_rows_have_values_of():
    compared = table.compare([row("a", 0.5, 4_000_000), row("b", 0.25, 2_000_000, trace_s=1.0)])
    assert [(each.time_ratio, each.peak_ratio) for each in compared] == [(1.0, 1.0), (0.5, 0.5)]
    assert format_rows(compared).splitlines() == [
        "torch 2", "", "shape", "",
        "| what | variant | ms | spread | x | peak MB | x | trace s |",
        "|---|---|---|---|---|---|---|---|",
        "| what | a | 500.0 | 1.0 | 1.00 | 4.0 | 1.00 |  |",
        "| what | b | 250.0 | 1.0 | 0.50 | 2.0 | 0.50 | 1.0 |",
    ]  # fmt: skip
    assert "peak" not in format_rows(table.compare([row("a", 0.5)]))
    assert format_rows([]) == ""


def test_every_benchmarks_rows_have_the_same_keys(tmp_path):
    table.write_rows(tmp_path / "rows.json", [row("a", 0.5, tokens_per_s=3.0)])
    (written,) = json.loads((tmp_path / "rows.json").read_text())
    assert written == {
        "what": "what", "shape": "shape", "variant": "a", "median_s": 0.5, "spread_s": 0.001,
        "peak_bytes": None, "time_ratio": 1.0, "peak_ratio": None, "tokens_per_s": 3.0,
        "torch": "2",
    }  # fmt: skip


def test_a_model_that_no_shape_has_is_refused_before_anything_runs():
    for refuse in (
        lambda: GenerateBenchConfig(shapes=("huge",)),
        lambda: VLLMBenchConfig(model="huge"),
    ):
        with pytest.raises(ValueError, match="shape expects --model.*'huge'"):
            refuse()


def test_help_is_readable(capsys):
    code, out, _ = run(["step", "--help"], capsys)
    assert code == 0
    assert "samples in the batch" in out


def test_unknown_benchmarks_fail(capsys):
    code, _, err = run(["dance"], capsys)
    assert code == 2
    assert "dance" in err


@pytest.mark.slow
def test_bench_generate_compares_equal_models(tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, out, err = run(
        ["generate", "--shapes", "micro", "--batches", "1", "8", "--dtypes", "float32",
         "--max-tokens", "3", "--repeats", "1", "--json", path], capsys)  # fmt: skip
    assert code == 0, err
    assert (out.count("| float32, batch 1 |"), out.count("| float32, batch 8 |")) == (2, 3)
    assert out.count("| tokens/s | floor tokens/s |") == 1
    rows = json.loads(path.read_text())
    assert len(rows) == 5
    assert all(row["peak_bytes"] > 0 and row["transformers"] for row in rows)
    assert all(row["tokens_per_s"] > 0 and row["floor_tokens_per_s"] > 0 for row in rows)
    shape = funcrl.models.TransformerConfig(vocab_size=50, width=32, num_layers=2, qk_norm=False)
    model = funcrl.models.Transformer(shape)
    params = funcrl.init_params(model, seed=0)
    tokens = torch.randint(0, 50, (9,), generator=funcrl.rng.generator(0))
    with torch.no_grad():
        theirs = _peer(shape, params)(tokens[None]).logits[0]
    mine = funcrl.functional(model)(params, tokens, torch.arange(9))
    assert (mine - theirs).abs().max() <= 1e-5


@pytest.mark.slow
def test_bench_generate_without_transformers_keeps_the_norms(capsys):
    code, out, err = run(
        ["generate", "--shapes", "micro", "--batches", "1", "8", "--dtypes", "bfloat16",
         "--max-tokens", "3", "--repeats", "1", "--variants", "sampler", "call-by-call", "groups"],
        capsys)  # fmt: skip
    assert code == 0, err
    assert "transformers" not in out
    assert (out.count("| bfloat16, batch 1 |"), out.count("| bfloat16, batch 8 |")) == (2, 3)
    assert out.count("| Sampler, call by call |") == 2


@pytest.mark.parametrize(
    ("args", "compiled"),
    [
        ([], None),
        (["--train.compile"], CompileConfig()),
        (["--train.compile.fuse", "none"], CompileConfig(fuse="none")),
        (["--train.no-compile"], None),
    ],
)
def test_bench_loop_compiles_as_train_does(capsys, monkeypatch, args, compiled):
    configs = []
    keep = Benchmark(LoopBenchConfig, lambda config: configs.append(config) or [], str)
    monkeypatch.setitem(BENCHMARKS, "loop", keep)
    code, _, err = run(["loop", *args], capsys)
    assert code == 0, err
    assert configs[0].train.compile == compiled

"""The benchmarks: each command runs at a tiny shape, and compares things that are equal."""

import json
from functools import partial

import pytest
import torch
from cases import relative, run_command

import funcrl
from benchmarks import step, table
from benchmarks.baseline import ordinary_loss, with_weights
from benchmarks.command_line import BENCHMARKS, Benchmark, main
from benchmarks.generate import _peer
from benchmarks.inputs import StepBenchConfig, make_case
from benchmarks.loop import LoopBenchConfig
from benchmarks.measure import peak_bytes
from benchmarks.recurrent import bench_recurrent
from benchmarks.rows import RowsBenchConfig, bench_rows, gradient, network_and_rows
from benchmarks.scans import PARTS, RecurrentBenchConfig
from benchmarks.scans import make_case as make_scan
from benchmarks.step import bench_step
from benchmarks.table import Row, format_columns, format_rows
from benchmarks.variants import changed
from benchmarks.workloads import WORKLOADS, RandomPrompts, as_train_config
from funcrl import CompileConfig
from funcrl.config import TrainConfig
from funcrl.models.networks import row_by_row

run = partial(run_command, main=main)
SMALL = {"num_layers": (2,), "width": 16, "vocab_size": 11, "rows": 4, "length": 8, "repeats": 1}


@pytest.mark.slow
def test_step_prints_and_writes_every_row(tmp_path, capsys):
    path = tmp_path / "rows.json"
    main(
        ["step", "--num-layers", "1", "--width", "16", "--vocab-size", "11", "--rows", "4",
         "--length", "8", "--chunk", "2", "--repeats", "1", "--json", str(path)]
    )  # fmt: skip
    written = json.loads(path.read_text())
    assert [(row["what"], row["variant"]) for row in written] == [
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
@pytest.mark.parametrize("vocab_size", [4096])
def test_the_gradient_needs_no_more_memory_than_an_ordinary_one(vocab_size):
    """Bytes are counted, not timed, so the benchmark's claim is a test: within 1.1."""
    config = StepBenchConfig(width=32, vocab_size=vocab_size, rows=8, length=32)
    variants = step._gradient_variants(make_case(config, 2))
    peaks = {name: peak_bytes(fn) for name, fn in variants.items()}
    ordinary = peaks["torch.autograd, batched"]
    assert peaks["func: gradient of the batch"] <= 1.1 * ordinary
    assert peaks["func: per-sample, 4 at a time"] < ordinary


@pytest.mark.parametrize("chunk", [None, 5])
def test_step_compares_equal_gradients(chunk):
    case = make_case(StepBenchConfig(**SMALL, logprob_chunk=chunk), 2)
    module = with_weights(case.model, case.params)
    names = [name for name, _ in module.named_parameters()]
    functions = list(step._gradient_variants(case).values())
    ordinary = dict(zip(names, functions[0](), strict=True))
    found = [other().grads for other in functions[1:]]
    for checkpointed in (False, True):
        loss = ordinary_loss(module, case.batch, None, chunk, checkpointed)
        grads = torch.autograd.grad(loss, module.parameters())
        found.append(dict(zip(names, grads, strict=True)))
    for other in found:
        for name, leaf in other.items():
            assert (leaf - ordinary[name]).abs().max() <= 1e-5 * ordinary[name].abs().max(), name


@pytest.mark.slow
def test_compiled_rows_have_start_up_and_a_prediction_that_holds(tmp_path):
    config = StepBenchConfig(
        **SMALL | {"rows": 8, "length": 32}, parts=("compiled-gradient",),
        remats=("none", "full", "budget"), variants=("batch",), json=tmp_path / "rows.json",
    )  # fmt: skip
    rows = bench_step(config)
    assert [row.variant for row in rows] == [
        "torch.autograd, each block checkpointed",
        *(f"batch, remat {name}" for name in config.remats),
        "torch.autograd, batched",
    ]
    for row in rows[1:4]:
        assert row.numbers["trace_s"] > 0
        assert row.numbers["first_call_s"] > 0
        assert row.numbers["predicted_bytes"] == pytest.approx(row.peak_bytes, rel=0.1), row.variant
    none, full, budget = (row.peak_bytes for row in rows[1:4])
    assert full < budget < none
    assert "| trace s | first call s | predicted MB |" in format_rows(rows)


@pytest.mark.slow
def test_profile_files_say_what_was_measured(tmp_path):
    config = StepBenchConfig(
        **SMALL, parts=(), compile=CompileConfig(remat="full"), variants=("clipped",),
        profile=tmp_path / "profile",
    )  # fmt: skip
    assert bench_step(config) == []
    assert json.loads((config.profile / "2-layers.trace.json").read_text())["traceEvents"]
    page = (config.profile / "2-layers.table.md").read_text()
    assert page.startswith("# clipped step, 2 layers, width 16")
    for phase in ("forward", "recomputed", "backward", "optimizer"):
        assert f" {phase} |" in page
    for layer in ("embed", "blocks.0", "blocks.1", "norm", "unembed", "optimizer"):
        assert f"\n| {layer} | " in page
    assert (config.profile / "2-layers.memory.png").stat().st_size > 1000


@pytest.mark.slow
def test_layouts_of_the_same_samples():
    shape = SMALL | {"num_layers": (1,), "length": 16, "group": 4, "prompt": 6, "rows": 8}
    config = StepBenchConfig(**shape, parts=("packed-step",), padding=0.3, pack_length=49)
    plain, packed, shared = bench_step(config)  # a group is 5 + 4 x 11 tokens
    tokens = 8 * 16 - round(0.3 * 8 * 16)
    for row, fewer in ((plain, 0), (packed, 0), (shared, 2 * 3 * 5)):
        computed = row.numbers["computed_tokens"]
        # Completions end after whole tokens, each at most half of one from where it should.
        assert computed * (1 - row.numbers["padding"]) == pytest.approx(tokens - fewer, abs=4.01)


@pytest.mark.slow
def test_generate_compares_equal_models(tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, out, err = run(
        ["generate", "--shapes", "micro", "--batches", "1", "8", "--dtypes", "float32",
         "--max-tokens", "3", "--repeats", "1", "--json", path], capsys)  # fmt: skip
    assert code == 0, err
    assert out.count("| tokens/s | floor tokens/s |") == 1
    rows = json.loads(path.read_text())
    assert len(rows) == 5
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 for row in rows)
    shape = funcrl.models.TransformerConfig(vocab_size=50, width=32, num_layers=2, qk_norm=False)
    model = funcrl.models.Transformer(shape)
    params = funcrl.init_params(model, seed=0)
    tokens = torch.randint(0, 50, (9,), generator=funcrl.rng.generator(0))
    with torch.no_grad():
        theirs = _peer(shape, params)(tokens[None]).logits[0]
    mine = funcrl.functional(model)(params, tokens, torch.arange(9))
    assert (mine - theirs).abs().max() <= 1e-5


@pytest.mark.slow
def test_loop_has_a_column_for_each_variant(tmp_path, capsys):
    file = tmp_path / "rows.json"
    code, out, err = run(
        ["loop", "--workload", "grpo-128x256", "--model", "micro", "--vocab-size", "512",
         "--num-prompts", "2", "--num-generations", "4", "--prompt-tokens", "8", "--max-tokens",
         "6", "--train.threads", "1", "--steps", "3", "--variants", "eager", "traced+sampler",
         "--json", file], capsys)  # fmt: skip
    assert code == 0, err
    assert "| eager | traced+sampler |" in out
    rows = json.loads(file.read_text())
    for variant in ("eager", "traced+sampler"):
        own = {row["what"]: row for row in rows if row["variant"] == variant}
        first, last = own["start to end of step 1"], own["start to end of step 5"]
        assert list(own)[2:] == ["step", "generate", "reward", "train", "push"]
        # Of the four steps after the first, three are measured.
        assert last["median_s"] > first["median_s"] > 1  # seconds: a process that imports torch
        step = own["step"]
        assert step["tokens_per_s"] == pytest.approx(2 * 4 * 6 / step["median_s"])
        assert step["peak_bytes"] > 50e6


def test_each_completion_of_a_workload_has_the_same_length(tmp_path):
    sizes = WORKLOADS["grpo-128x256"]._replace(
        model="micro", vocab_size=20, num_prompts=2, prompt_tokens=5, max_tokens=50
    )
    config = as_train_config(sizes, TrainConfig(run_dir=tmp_path / "run", steps=2, threads=1))
    history = funcrl.train(config, task=RandomPrompts(sizes)).history[1:]
    # 800 tokens a step of a vocabulary of 20: a token that ends a completion would be drawn.
    assert [row["completions/min_length"] for row in history] == [50, 50]
    assert [row["num_tokens"] for row in history] == [800, 800]


def test_variants_change_the_configuration_from_left_to_right():
    given = TrainConfig(compile=CompileConfig(fuse="none"))
    assert changed("given", given) == given
    assert changed("eager", given).compile is None
    both = changed("compiled+unified", given)
    assert (both.compile.backend, both.compile.remat) == ("inductor", "selective")
    assert (both.generator, both.vllm.form) == ("vllm", "unified")
    assert changed("compiled+eager", given).compile is None


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], None),
        (["--train.compile"], CompileConfig()),
        (["--train.compile.fuse", "none"], CompileConfig(fuse="none")),
        (["--train.no-compile"], None),
    ],
)
def test_loop_compiles_as_train_does(capsys, monkeypatch, args, expected):
    configs = []
    keep = Benchmark(LoopBenchConfig, lambda config: configs.append(config) or [], str)
    monkeypatch.setitem(BENCHMARKS, "loop", keep)
    code, _, err = run(["loop", *args], capsys)
    assert code == 0, err
    assert configs[0].train.compile == expected


@pytest.mark.slow
def test_recurrent_has_a_row_for_each_variant_or_refuses_it_by_name(tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, out, err = run(
        ["recurrent", "--cells", "gru", "--batch", "2", "--steps", "3", "--width", "8",
         "--repeats", "1", "--backends", "torch", "op", "cudnn", "--recomputes", "none", "full",
         "--json", path], capsys)  # fmt: skip
    assert code == 0, err
    written = json.loads(path.read_text())
    assert [(each["what"], each["variant"]) for each in written if "refused" not in each] == [
        ("forward", "torch.nn.GRU"),
        ("forward", "op"),
        ("gradient", "torch.nn.GRU"),
        ("gradient", "op, recompute none"),
        ("gradient", "op, recompute full"),
    ]
    refused = {each["variant"]: each["refused"] for each in written if "refused" in each}
    assert list(refused) == ["cudnn", "cudnn, recompute none", "cudnn, recompute full"]
    for variant, reason in refused.items():
        assert reason.startswith(f"gru_scan with backend='{variant.split(',')[0]}' expects ")
        assert reason in out


def test_rows_compares_equal_things_and_one_row_takes_less_memory():
    config = RowsBenchConfig(width=32, num_layers=2, rows=3, length=24, repeats=1)
    logits, params, rows = network_and_rows(config)
    both = [gradient(way, params, rows) for way in (logits, row_by_row(logits))]
    assert relative(*both) <= 1e-5
    whole, one = bench_rows(config)
    assert (whole.variant, one.variant) == ("all rows at once", "row by row")
    assert one.peak_bytes < whole.peak_bytes


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_compares_equal_things(cell):
    config = RecurrentBenchConfig(
        batch=3, steps=(4,), width=8, repeats=1, dtype="float64", layers=2,
        backends=("torch", "loop", "op"),
    )  # fmt: skip
    case = make_scan(config, cell, 4)
    for part, compute in PARTS.items():
        found = {
            way.name: compute(way, case.inputs)
            for way in case.ways(part)
            if way.name not in ("loop, recompute chunk", "loop, recompute full")
        }
        expected = found.pop(f"torch.nn.{cell.upper()}")
        for name, values in found.items():
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "huge"}, "shape expects --model"),
        ({"model": "micro", "width": 64}, "step expects --model or --num-layers and --width"),
        ({"remats": ("full",)}, "benchmarks step expects.*--parts.*--remats"),
        ({"compile": CompileConfig(remat="full")}, r"step expects.*--parts.*--compile\."),
        ({"repeats": 0}, "benchmarks step expects --repeats"),
        ({"group": 3, "rows": 4}, "--group to divide --rows 4"),
        ({"padding": 0.8}, "0.8"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StepBenchConfig(**options)


def test_unknown_benchmarks_fail(capsys):
    code, _, err = run(["dance"], capsys)
    assert (code, "dance" in err) == (2, True)


def row(what, variant, median_s, spread_s=0.001, peak=None, **numbers):
    return Row(what, "shape", variant, median_s, spread_s, peak, {"torch": "2"}, numbers)


def test_tables_have_the_lines_and_columns_that_there_are_values_for():
    compared = table.compare([
        row("step", "a", 0.5, peak=4_000_000), row("step", "b", 0.25, peak=2_000_000, trace_s=1.0),
    ])  # fmt: skip
    assert format_rows(compared).splitlines() == [
        "torch 2", "", "shape", "",
        "| what | variant | ms | spread | x | peak MB | x | trace s |",
        "|---|---|---|---|---|---|---|---|",
        "| step | a | 500.0 | 1.0 | 1.00 | 4.0 | 1.00 |  |",
        "| step | b | 250.0 | 1.0 | 0.50 | 2.0 | 0.50 | 1.0 |",
    ]  # fmt: skip
    assert "| step, ms | 500.0 (1.0) | 250.0 (1.0) |" in format_columns(compared)
    assert format_rows([]) == format_columns([]) == ""


@pytest.mark.gpu
def test_a_cuda_graph_is_measured_with_the_memory_that_it_holds():
    config = StepBenchConfig(
        **SMALL, device="cuda", parts=("compiled-gradient", "compiled-step"),
        compile=CompileConfig(cudagraph="full"), variants=("batch", "donated"),
    )  # fmt: skip
    rows = [row for row in bench_step(config) if "trace_s" in row.numbers]
    assert len(rows) == 3
    for row in rows:
        assert row.peak_bytes >= row.numbers["predicted_bytes"] * 0.9


@pytest.mark.gpu
def test_on_a_gpu_graphs_hold_less_when_they_recompute():
    config = RecurrentBenchConfig(
        cells=("lstm",), backends=("triton",), parts=("gradient",), batch=512, steps=(128,),
        width=64, repeats=1, device="cuda", cudagraph="full",
    )  # fmt: skip
    found = bench_recurrent(config)
    peaks = {each.variant: each.peak_bytes for each in found if isinstance(each, Row)}
    assert peaks["triton, recompute full"] < 0.6 * peaks["triton, recompute none"]

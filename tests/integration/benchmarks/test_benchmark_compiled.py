"""Compiled rows of the benchmark and the profile: what is written says what was measured."""

import json
import re
from functools import lru_cache

import pytest
import torch
from matplotlib import image
from PIL import Image

from benchmarks import compiled, nodes, profiling
from benchmarks.baseline import ordinary_loss, with_weights
from benchmarks.inputs import StepBenchConfig, depths, make_case
from benchmarks.step import bench_step
from benchmarks.table import format_rows
from funcrl import CompileConfig, tree
from funcrl.graph import predict_peak, step_graph
from funcrl.graph.nodes import origin_of

SMALL = {"num_layers": (2,), "width": 16, "vocab_size": 11, "rows": 4, "length": 8, "repeats": 1}


def graph_of(case, variant="batch", **options):
    step = compiled.whole_step(case, variant)
    state = step.init(case.params)
    return step_graph(step, state, case.batch, CompileConfig(**options)), state


@lru_cache
def small_graph(variant="batch"):
    """A small case, the graph of its whole step, and its first state."""
    case = make_case(StepBenchConfig(**SMALL), 2)
    return case, *graph_of(case, variant)


@pytest.mark.slow
def test_compiled_rows_have_start_up_and_a_prediction_that_holds(tmp_path):
    shape = SMALL | {"rows": 8, "length": 32}
    config = StepBenchConfig(
        **shape, parts=("compiled-gradient",), remats=("none", "full", "budget"),
        variants=("batch",), json=tmp_path / "rows.json",
    )  # fmt: skip
    whole = StepBenchConfig(
        **shape, parts=("compiled-step",), remats=("full",), variants=("batch", "donated")
    )
    rows = [*bench_step(config), *bench_step(whole)]
    gradients = [
        "torch.autograd, each block checkpointed",
        *(f"batch, remat {name}" for name in config.remats),
        "torch.autograd, batched",
    ]
    steps = [f"{variant}, remat full" for variant in whole.variants]
    assert [row.variant for row in rows] == [*gradients, *steps, "grpo_step, eager"]
    for row in rows:
        if "remat" in row.variant:
            assert row.numbers["trace_s"] > 0
            assert row.numbers["first_call_s"] > 0
            predicted = row.numbers["predicted_bytes"]
            assert predicted == pytest.approx(row.peak_bytes, rel=0.1), row.variant
    peaks = {row.variant: row.peak_bytes for row in rows[:5]}
    none, full, budget = (peaks[f"batch, remat {name}"] for name in config.remats)
    assert full < budget < none
    assert peaks[gradients[0]] < peaks[gradients[-1]]
    assert rows[0].time_ratio == rows[5].time_ratio == 1.0
    printed = format_rows(rows)
    assert "| trace s | first call s | predicted MB |" in printed
    widths = {line.count("|") for line in printed.splitlines() if line.startswith("|")}
    assert widths == {11}
    written = json.loads(config.json.read_text())[1]
    assert written["predicted_bytes"] == rows[1].numbers["predicted_bytes"]


@pytest.mark.slow
def test_fused_per_sample_gradients_are_the_batchs_by_count():
    """Without a clock: as many products and as many bytes; clipping adds products of weights."""
    counts, peaks = {}, {}
    for variant in ("batch", "per-sample", "clipped"):
        _, graph, _ = small_graph(variant)
        kinds = nodes.find_kinds(graph)
        counts[variant] = list(kinds.values()).count("matmul")
        peaks[variant] = predict_peak(graph)
    assert counts["batch"] == counts["per-sample"]
    assert peaks["per-sample"] <= 1.05 * peaks["batch"]
    num_products = 2 * 7 + 1  # q k v o gate up down of two layers, and the output
    assert counts["batch"] < counts["clipped"] <= counts["batch"] + 2 * num_products


@pytest.mark.parametrize("chunk", [None, 5])
def test_ordinary_losses_are_the_same_gradient(chunk):
    case = make_case(StepBenchConfig(**SMALL, logprob_chunk=chunk), 2)
    module = with_weights(case.model, case.params)
    names = [name for name, _ in module.named_parameters()]
    state = compiled.gradient_step(case, "per-sample").init(case.params)
    found = compiled.gradient_step(case, "batch")(state, case.batch)[0].params
    for checkpointed in (False, True):
        loss = ordinary_loss(module, case.batch, None, chunk, checkpointed)
        for name, leaf in zip(names, torch.autograd.grad(loss, module.parameters()), strict=True):
            assert (leaf - found[name]).abs().max() <= 1e-5 * found[name].abs().max(), name


@pytest.mark.slow
def test_bfloat16_is_computed_in_on_both_sides():
    case = make_case(StepBenchConfig(**SMALL, dtype="bfloat16", logprob_chunk=5), 2)
    module = with_weights(case.model, case.params)
    losses = [ordinary_loss(module, case.batch, case.dtype, 5, again) for again in (False, True)]
    assert torch.equal(*losses)
    graph, _ = graph_of(case)
    kinds = nodes.find_kinds(graph)
    products = {node.meta["val"].dtype for node in kinds if kinds[node] == "matmul"}
    assert torch.bfloat16 in products
    assert "float32 parameters, computed in bfloat16" in case.shape
    assert {leaf.dtype for leaf in tree.leaves(case.params)} == {torch.float32}


def test_a_model_by_name_is_its_shape():
    config = StepBenchConfig(model="micro", vocab_size=13)
    assert depths(config) == (2,)
    assert make_case(config, 2).model.config.width == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "huge"}, "shape expects --model"),
        ({"model": "micro", "width": 64}, "step expects --model or --num-layers and --width"),
        ({"remats": ("full",)}, "benchmarks step expects.*--parts.*--remats"),
        ({"compile": CompileConfig(remat="full")}, r"step expects.*--parts.*--compile\."),
        ({"parts": ("compiled-step",), "variants": ()}, "benchmarks step expects.*--variants"),
        ({"repeats": 0}, "benchmarks step expects --repeats"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StepBenchConfig(**options)


@pytest.mark.slow
def test_profile_files_say_what_was_measured(tmp_path):
    config = StepBenchConfig(
        **SMALL, parts=(), compile=CompileConfig(remat="full"), variants=("clipped",),
        profile=tmp_path / "profile",
    )  # fmt: skip
    assert bench_step(config) == []
    case = make_case(config, 2)
    graph, _ = graph_of(case, "clipped", remat="full")
    trace = json.loads((config.profile / "2-layers.trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::bmm"} <= names

    table = (config.profile / "2-layers.table.md").read_text()
    assert table.startswith("# clipped step, 2 layers, width 16")
    for phase in ("forward", "recomputed", "backward", "optimizer"):
        assert f" {phase} |" in table
    for layer in ("embed", "blocks.0", "blocks.1", "norm", "unembed", "optimizer"):
        assert f"\n| {layer} | " in table
    assert "\n| blocks.1 | matmul | " in table
    num_nodes = len([node for node in graph.graph.nodes if node.op == "call_function"])
    totals = re.findall(r"^\| all \|.*", table, re.M)
    assert len(totals) == 3
    assert all(f"| {num_nodes} |" in line and line.endswith("| 100.0 |") for line in totals)

    picture = config.profile / "2-layers.memory.png"
    assert Image.open(picture).text["Comment"] == f"peak_bytes {predict_peak(graph)}"
    pixels = image.imread(picture)
    assert pixels.std() > 0.05


@pytest.mark.slow
def test_the_pictures_peak_is_the_predicted_one(tmp_path):
    _, graph, _ = small_graph()
    (axes,) = profiling.draw_memory(graph, tmp_path / "memory.png").axes
    drawn = axes.lines[0].get_ydata()
    assert max(drawn) == predict_peak(graph) / 1e6
    assert len(drawn) == len(graph.graph.nodes)
    assert axes.get_legend_handles_labels()[1] == [
        "forward", "backward", "optimizer", "inputs",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_products_kind_layer_and_time_are_found():
    case, graph, state = small_graph()
    kinds = nodes.find_kinds(graph)
    q = next(node for node in kinds if origin_of(node).module == "blocks.1.attention.q"
             and kinds[node] == "matmul")  # fmt: skip
    assert nodes.layer_of(q) == "blocks.1"
    assert nodes.phase_of(q) == "forward"
    assert {kinds[n] for n in kinds if n.target is torch.ops.aten.embedding.default} == {"index"}
    assert {kinds[n] for n in kinds if n.target is torch.ops.aten.t.default} == {"view"}
    times = nodes.time_nodes(graph, (state, case.batch), 1, "cpu")
    assert all(each.seconds > 0 for each in times)
    assert {"blocks.0", "blocks.1", "embed", "optimizer"} <= {each.layer for each in times}


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


@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_layouts_of_the_same_samples(padding):
    shape = SMALL | {"num_layers": (1,), "length": 16, "group": 4, "prompt": 6, "rows": 8}
    config = StepBenchConfig(**shape, parts=("packed-step",), padding=padding, pack_length=49)
    plain, packed, shared = bench_step(config)  # a group is 5 + 4 x 11 tokens
    tokens = 8 * 16 - round(padding * 8 * 16)
    for row, fewer in ((plain, 0), (packed, 0), (shared, 2 * 3 * 5)):
        computed = row.numbers["computed_tokens"]
        # Completions end after whole tokens, each at most half of one from where it should.
        assert computed * (1 - row.numbers["padding"]) == pytest.approx(tokens - fewer, abs=4.01)
    assert plain.variant == "none, 8 x 16"
    assert [row.variant[-4:] for row in (packed, shared)] == ["x 49"] * 2
    batch = make_case(config, 1).batch
    assert torch.equal(batch.tokens[0, :6], batch.tokens[3, :6])
    assert not torch.equal(batch.tokens[0, :6], batch.tokens[4, :6])


@pytest.mark.parametrize(
    ("options", "words"), [({"group": 3}, "--group to divide --rows 4"), ({"padding": 0.8}, "0.8")]
)
def test_layouts_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=f"benchmarks step expects .*{words}"):
        StepBenchConfig(**SMALL, **options)

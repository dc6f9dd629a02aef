"""The benchmark of recurrent scans: each variant is a row or refused, and all compute the same."""

import json
from functools import partial

import pytest
import torch
from cases import run_command

from benchmarks.command_line import main
from benchmarks.recurrent import Refused, bench_recurrent, format_recurrent
from benchmarks.scans import PARTS, RecurrentBenchConfig, make_case
from benchmarks.table import Row

run = partial(run_command, main=main)


SMALL = {"batch": 3, "steps": (4,), "width": 8, "repeats": 1, "dtype": "float64"}


def names(found, kind):
    return [(each.what, each.variant) for each in found if isinstance(each, kind)]


def test_every_variant_is_a_row_or_refused_by_name(tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, out, err = run(
        ["recurrent", "--cells", "gru", "--batch", "2", "--steps", "3", "5", "--width",
         "8", "--repeats", "1", "--backends", "torch", "loop", "op", "cudnn", "--recomputes",
         "none", "full", "--json", path], capsys)  # fmt: skip
    assert code == 0, err
    written = json.loads(path.read_text())
    rows = [each for each in written if "refused" not in each]
    assert [(each["what"], each["variant"]) for each in rows] == 2 * [
        ("forward", "torch.nn.GRU"),
        ("forward", "loop"),
        ("forward", "op"),
        ("gradient", "torch.nn.GRU"),
        ("gradient", "loop, recompute none"),
        ("gradient", "op, recompute none"),
        ("gradient", "op, recompute full"),
    ]
    assert {each["shape"] for each in rows} == {
        f"gru, 2 sequences of {steps} steps, width 8, 1 layer, float32, cpu" for steps in (3, 5)
    }
    assert all(each["median_s"] > 0 and each["peak_bytes"] > 0 for each in rows)
    refused = {each["variant"]: each["refused"] for each in written if "refused" in each}
    assert list(refused) == ["cudnn", "loop, recompute full", "cudnn, recompute none",
                             "cudnn, recompute full"]  # fmt: skip
    for variant, reason in refused.items():
        assert reason.startswith(f"gru_scan with backend='{variant.split(',')[0]}' expects ")
        assert reason in out
    assert out.count("| gradient | op, recompute full |") == 2
    assert "(cudnn; cudnn, recompute none)" in out


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_benchmark_compares_equal_things(cell):
    config = RecurrentBenchConfig(**SMALL, layers=2, backends=("torch", "loop", "op"))
    case = make_case(config, cell, 4)
    for part, compute in PARTS.items():
        found = {}
        for way in case.ways(part):
            if way.name not in ("loop, recompute chunk", "loop, recompute full"):
                found[way.name] = compute(way, case.inputs)
        expected = found.pop(f"torch.nn.{cell.upper()}")
        assert len(found) == {"forward": 2, "gradient": 4}[part]
        for name, values in found.items():
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_resets_are_given_to_scans_and_refused_by_torchs_modules():
    config = RecurrentBenchConfig(
        **SMALL, cells=("lstm",), backends=("torch", "loop", "op"), resets=0.5, parts=("forward",)
    )
    found = bench_recurrent(config)
    assert names(found, Row) == [("forward", "loop"), ("forward", "op")]
    assert names(found, Refused) == [("forward", "torch.nn.LSTM")]
    assert "torch.nn.LSTM expects no resets, got " in format_recurrent(found)
    assert "a new episode at 50% of the steps" in found[0].shape
    case = make_case(config, "lstm", 4)
    _, loop, _ = case.ways("forward")
    with_resets, without = (loop.outputs(case.inputs.x, r) for r in (case.inputs.resets, None))
    changed = (with_resets != without).any(dim=-1)
    assert torch.equal(changed, case.inputs.resets.cumsum(dim=1) > case.inputs.resets[:, :1])


def test_recomputing_needs_less_memory():
    config = RecurrentBenchConfig(
        cells=("lstm",), backends=("op",), parts=("gradient",), batch=4096, steps=(128,), width=2,
        repeats=1, recomputes=("none", "full"),
    )  # fmt: skip
    none, full = bench_recurrent(config)
    # Of [N, T, H] numbers: outputs and gradient of x, and with none five for each besides.
    assert full.peak_bytes < 0.5 * none.peak_bytes
    assert full.peak_ratio == pytest.approx(full.peak_bytes / none.peak_bytes)


def test_torchs_own_precision_is_left_as_it_was():
    libraries = torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = [each.fp32_precision for each in libraries]
    found = bench_recurrent(
        RecurrentBenchConfig(**SMALL, cells=("gru",), backends=("torch", "op"), precision="tf32")
    )
    assert [each.fp32_precision for each in libraries] == before
    assert len(names(found, Row)) == 2 + 4
    assert found[0].shape.endswith(", tf32")


def test_a_cuda_graph_needs_a_gpu():
    with pytest.raises(
        ValueError, match="benchmarks recurrent expects --device cuda with --cudagraph"
    ):
        RecurrentBenchConfig(cudagraph="full")


@pytest.mark.gpu
def test_on_a_gpu_graphs_hold_less_when_they_recompute():
    config = RecurrentBenchConfig(
        cells=("lstm",), backends=("triton", "cudnn"), parts=("gradient",), batch=512, steps=(128,),
        width=64, repeats=1, device="cuda", cudagraph="full",
    )  # fmt: skip
    found = bench_recurrent(config)
    peaks = {each.variant: each.peak_bytes for each in found if isinstance(each, Row)}
    assert peaks["triton, recompute full"] < 0.6 * peaks["triton, recompute none"]
    assert ("gradient", "cudnn, recompute full") in names(found, Refused)

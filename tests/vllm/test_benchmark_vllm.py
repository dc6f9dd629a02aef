"""The benchmark of vLLM, for real: a row for plain vLLM and one for each form."""

import json

import pytest
from engines import needs_vllm

from benchmarks.table import format_rows
from benchmarks.vllm import VLLMBenchConfig, bench_vllm

pytestmark = needs_vllm


def test_bench_vllm_compares_a_form_with_plain_vllm(tmp_path, monkeypatch):
    # A process less to start for plain vLLM.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    file = tmp_path / "rows.json"
    config = VLLMBenchConfig(
        model="tiny", sequences=2, prompt_tokens=24, max_tokens=4, modes=("eager",),
        dtype="float32", forms=("unified",), device="cpu", repeats=2, json=file,
    )  # fmt: skip
    plain, own = bench_vllm(config)
    assert [(row.what, row.variant) for row in (plain, own)] == [
        ("eager", "plain vLLM"), ("eager", "unified"),
    ]  # fmt: skip
    assert plain.shape == own.shape
    assert plain.time_ratio == 1.0
    for row in (plain, own):
        assert row.median_s > 0
        assert row.numbers["tokens_per_s"] == pytest.approx(2 * 4 / row.median_s)
        assert row.numbers["start_s"] > 0
        assert row.machine["vllm"]
    assert own.numbers["push_ms"] > 0
    assert own.numbers["push_gb_per_s"] > 0
    assert "push_ms" not in plain.numbers
    assert [row["variant"] for row in json.loads(file.read_text())] == ["plain vLLM", "unified"]
    printed = format_rows([plain, own])
    assert "| tokens/s | start s | push ms | push GB/s |" in printed

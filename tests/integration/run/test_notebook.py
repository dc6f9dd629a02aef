"""A run in a notebook: one output that is drawn again, and a page of the run's own."""

import html
import io
import sys
from pathlib import Path

import pytest
from pages import without_own_scripts

import funcrl
from funcrl import runs
from funcrl.config import (
    CompileConfig,
    EvalConfig,
    EvaluationConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.export import Trained
from funcrl.run import report
from funcrl.run.runs import Completion
from funcrl.run.views import NotebookView, PlainView, in_notebook, view_for

OPTIONS = {
    "steps": 2, "num_prompts": 2, "num_generations": 2, "warm_start": WarmStartConfig(steps=0),
    "evaluation": EvaluationConfig(num_prompts=2), "sampling": Sampling(max_tokens=2),
}  # fmt: skip


@pytest.mark.slow
def test_a_kernel_shows_a_run_as_it_goes_on_and_its_page_afterwards(tmp_path):
    import nbclient
    import nbformat

    config = (
        f"TrainConfig(run_dir={str(tmp_path / 'run')!r}, steps=2, num_prompts=2, num_generations=2,"
        "warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(num_prompts=2))"
    )
    cells = [
        "import funcrl\nfrom funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig\n"
        f"trained = funcrl.train({config}, view='live')",
        "trained",
    ]
    made = nbformat.v4
    book = made.new_notebook(cells=[made.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbclient.NotebookClient(book, timeout=120).execute()
    live, page = (cell.outputs for cell in book.cells)
    shown = [each["data"]["text/html"] for each in live if each.output_type == "display_data"]
    assert len(shown) == 1  # one output, drawn again
    assert "step 2 of 2" in shown[0]
    assert "<polyline" in shown[0]
    assert page[0]["data"]["text/plain"].startswith("Trained(2 steps in ")
    assert page[0]["data"]["text/html"].startswith("<iframe sandbox=")


def test_outside_a_notebook_the_stream_decides(monkeypatch):
    assert not in_notebook()
    assert isinstance(view_for(io.StringIO()), PlainView)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(view_for(sys.stdout), PlainView)


def test_the_live_view_draws_at_its_pace_and_escapes_what_it_shows():
    drawn = []

    class Drawn(NotebookView):
        def _draw(self, content):
            drawn.append(content)

    view = Drawn(every=1000.0)
    view.start("<b>task", 100, 0)
    for step in range(1, 101):
        completion = Completion(step, "<script>", "</code><img>\x1b", "", 0.5, {}, "stop", 0)
        view.step(
            {"step": step, "reward": step / 100, "kl": None, "eval/accuracy": 0.5}, completion
        )
    view.close()
    assert [each.split("<br>")[1][:8] for each in drawn[1:]] == ["step 1 o", "step 100"]
    for each in drawn:
        assert "&lt;b&gt;task" in each
        assert not [part for part in ("<script", "<img", "\x1b") if part in each]
    # The reward rises from 0.01 to 1 over the whole width.
    assert '596,8.0" fill="none" stroke="#d9812b"' in drawn[-1]


@pytest.mark.slow
def test_a_run_is_a_few_lines_and_a_frame_of_its_own(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward": 0.5, "eval/accuracy": 0.75}]
    seen = {"step": 1, "prompt": "1=", "completion": "</iframe><script>", "answer": "1",
            "reward": 1.0, "rewards": {"r": 1.0}, "finish_reason": "stop"}  # fmt: skip
    runs.append_lines(tmp_path / runs.METRICS, rows)
    runs.append_lines(tmp_path / runs.COMPLETIONS, [seen])
    trained = Trained("a state", runs.read_history(tmp_path), tmp_path)
    assert repr(trained) == (
        f"Trained(1 steps in {tmp_path})\n  held-out accuracy 0.25 -> 0.75\n  reward 0.5 -> 0.5\n"
        "  state: a state"
    )
    frame = trained._repr_html_()
    assert frame.count("<") == 2  # the frame's own
    page = html.unescape(frame.split('srcdoc="')[1])
    assert "<svg" in page
    assert "<script" not in without_own_scripts(page)
    assert not (tmp_path / "plots").exists()


@pytest.mark.slow
def test_paths_may_be_strings(tmp_path):
    run = str(tmp_path / "run")
    trained = funcrl.train(TrainConfig(run_dir=run, **OPTIONS))
    assert trained.run_dir == Path(run)
    assert len(runs.read_history(run)) == 3
    assert runs.read_lines(f"{run}/{runs.METRICS}")[0]["step"] == 0
    assert runs.read_facts(run)["task"] == "sum_digits"
    assert funcrl.config.read_config(TrainConfig, f"{run}/{runs.CONFIG}").steps == 2
    assert report.write_report(run) == Path(run) / "report.html"
    exported = funcrl.export(run, str(tmp_path / "model"))
    assert funcrl.load_params(str(exported))[0].config.width == 64
    assert funcrl.evaluate(EvalConfig(run=run, num_prompts=2, out=f"{run}/out")).num_prompts == 2
    assert funcrl.restore(f"{run}/checkpoints/2", trained.state)[1]["step"] == 2


@pytest.mark.parametrize(("options", "message"), [
    ({"optimizer": 3}, "--optimizer to be an OptimizerConfig, got 3; funcrl.config.Opt"),
    ({"algorithm": "dapo"}, "--algorithm .* got 'dapo'; funcrl.config.AlgorithmConfig"),
    ({"sampling": {"max_tokens": 3}}, r"--sampling to be a Sampling, got dict\."),
    ({"lora": OptimizerConfig()}, r"--lora to be a LoraConfig, got OptimizerConfig\."),
    ({"optimizer": OptimizerConfig}, "--optimizer .*, got the class OptimizerConfig"),
    ({"compile": {}}, "--compile to be a CompileConfig or None, got {}"),
    ({"run_dir": 3}, "--run-dir to be a Path or None, got 3"),
])  # fmt: skip
def test_an_option_of_another_kind_is_named(options, message):
    with pytest.raises(TypeError, match=f"^train expects {message}"):
        TrainConfig(**options)


def test_a_string_in_place_of_a_path_becomes_one():
    assert TrainConfig(run_dir="runs/a").run_dir == Path("runs/a")
    assert CompileConfig(backend="inductor", cache_dir="c").cache_dir == Path("c")

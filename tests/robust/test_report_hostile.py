"""Folders of runs that a stranger sent: a page, or one error that names the file and the line."""

import json
import os

import pytest
from bounded import bounded
from pages import without_own_scripts

import funcrl
from funcrl import config
from funcrl.loop.build import empty_state, trained_like
from funcrl.loop.evaluate import evaluate
from funcrl.loop.export import export
from funcrl.loop.sources import trained_params
from funcrl.run import report

ROWS = [{"step": step, "reward": step / 4, "step_time": 0.5} for step in range(4)]
SEEN = {"step": 1, "prompt": "1+2=", "completion": "3", "answer": "3", "reward": 1.0,
        "rewards": {"correct": 1.0}, "finish_reason": "stop", "policy_version": 0}  # fmt: skip
DEEP = "[" * 100_000
LONG = "1" + "0" * 400


def lines(*rows):
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows)


def write_run(folder):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(lines(*ROWS))
    (folder / "completions.jsonl").write_text(lines(SEEN))
    (folder / "config.yaml").write_text("task: sum_digits\nmodel: micro\n")
    (folder / "environment.json").write_text('{"torch": "2.13.0"}')
    return folder


def metrics(*rows):
    return {"metrics.jsonl": lines(*ROWS, *rows)}


def seen(**changes):
    return {"completions.jsonl": lines(SEEN, SEEN | changes)}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
METRICS, COMPLETIONS = "in line 5 of .*metrics.jsonl", "in line 2 of .*completions.jsonl"
YAML, FACTS = "config.yaml", "environment.json"
# What is in the files, and what the error says.
REFUSED = {
    "metrics that are no JSON": (metrics("hello"), METRICS),
    "metrics of NUL": (metrics("\0" * 1000), METRICS),
    "metrics that are not UTF-8": ({"metrics.jsonl": lines(*ROWS).encode() + b"\xff\xfe\n"},
                                   METRICS),
    "metrics in UTF-16": ({"metrics.jsonl": lines(*ROWS).encode("utf-16")}, "line 1 of"),
    "rows that are lists": (metrics([1]), METRICS),
    "rows that are numbers": (metrics("3"), METRICS),
    "deep rows": (metrics(DEEP), METRICS),
    "deep rows that end": (metrics({"step": 4, "x": json.loads("[" * 90 + "]" * 90)}), METRICS),
    "no step": (metrics({"reward": 1.0}), METRICS),
    "a step of text": (metrics({"step": "4"}), METRICS),
    "a step of NaN": (metrics('{"step": NaN}'), METRICS),
    "a step below 0": (metrics({"step": -1}), METRICS),
    "a step of 18 digits": (metrics({"step": 10**18}), METRICS),
    "a step of 400 digits": (metrics(f'{{"step": {LONG}}}'), METRICS),
    "a step that is true": (metrics({"step": True}), METRICS),
    "a reward of text": (metrics({"step": 4, "reward": "1"}), METRICS),
    "a reward of 1e308": (metrics({"step": 4, "reward": 1e308}), METRICS),
    "a reward of 400 digits": (metrics(f'{{"step": 4, "reward": {LONG}}}'), METRICS),
    "a reward of 10,000 digits": (metrics('{"step": 4, "reward": ' + "1" * 10_000 + "}"), METRICS),
    "a reward that is an object": (metrics({"step": 4, "reward": {"a": 1}}), METRICS),
    "10,000 metrics": (metrics({f"m{n}": n for n in range(10_000)} | {"step": 4}), METRICS),
    "a line of 20 MB": (metrics({"step": 4, "x": "y" * 20_000_000}), METRICS),
    "completions that are no JSON": ({"completions.jsonl": lines(SEEN, "{")}, COMPLETIONS),
    "completions that are lists": ({"completions.jsonl": lines(SEEN, [])}, COMPLETIONS),
    "completions of nothing": ({"completions.jsonl": lines(SEEN, {})}, COMPLETIONS),
    **{f"{name} of a number": (seen(**{name: 5}), COMPLETIONS)
       for name in ("prompt", "completion", "answer", "finish_reason")},
    "a completion's reward of text": (seen(reward="x"), COMPLETIONS),
    "a completion's step of text": (seen(step="x"), COMPLETIONS),
    "an advantage of text": (seen(advantage="x"), COMPLETIONS),
    "rewards that are a list": (seen(rewards=[1]), COMPLETIONS),
    "logged columns that are a list": (seen(extra=[1]), COMPLETIONS),
    "a named reward of text": (seen(rewards={"a": "x"}), COMPLETIONS),
    "100 named rewards": (seen(rewards={f"r{n}": 0 for n in range(100)}), COMPLETIONS),
    "tokens of numbers": (seen(tokens=[1], logprobs=[0], trainer_logprobs=[0]), COMPLETIONS),
    "tokens without numbers": (seen(tokens=["a"]), COMPLETIONS),
    "tokens of fewer numbers": (seen(tokens=["a", "b"], logprobs=[0], trainer_logprobs=[0]),
                                COMPLETIONS),
    "a million tokens": (seen(tokens=["a"] * 1_000_000), COMPLETIONS),
    "an alias bomb": ({YAML: BOMB}, YAML),
    "a bomb of merges": ({YAML: MERGES}, YAML),
    "a bomb of a long text": ({YAML: "a: &a " + "x" * 20_000 + "\nb: [" + "*a," * 9000 + "]"},
                              YAML),
    "a bomb of names": ({YAML: "? " + "x" * 10_000 + "\n: {" + "".join(
        f"a{n}: 1, " for n in range(4000)) + "}"}, YAML),
    "YAML that holds itself": ({YAML: "a: &a [*a]"}, YAML),
    "deep YAML": ({YAML: DEEP}, YAML),
    "YAML of Python": ({YAML: "a: !!python/object/apply:os.system ['true']"}, YAML),
    "YAML that is a list": ({YAML: "- a\n- b\n"}, YAML),
    "YAML that is a text": ({YAML: "hello"}, YAML),
    "YAML that is not UTF-8": ({YAML: b"\xff\xfe\xfa"}, YAML),
    "YAML with control characters": ({YAML: "a: \x07"}, YAML),
    "YAML with a list as a name": ({YAML: "{[a]: 1}"}, YAML),
    "YAML with a day that is none": ({YAML: "a: 2001-13-45"}, YAML),
    "YAML with 50,000 digits": ({YAML: "a: " + "1" * 50_000}, YAML),
    "YAML with 50,000 digits in base 16": ({YAML: "a: 0x" + "f" * 50_000}, YAML),
    "YAML with 30,000 digits in base 60": ({YAML: "a: 1" + ":1" * 30_000}, YAML),
    "YAML of 1 MB": ({YAML: "a: 1\n" * 200_000}, YAML),
    "two documents": ({YAML: "a: 1\n---\na: 2\n"}, YAML),
    "facts that are a list": ({FACTS: "[]"}, FACTS),
    "facts that are no JSON": ({FACTS: "{"}, FACTS),
    "facts that are no texts": ({FACTS: '{"task": 5}'}, FACTS),
    "deep facts": ({FACTS: '{"task": ' + "[" * 90 + "]" * 90 + "}"}, FACTS),
    "facts of 400 digits": ({FACTS: f'{{"task": {LONG}}}'}, FACTS),
    "facts that are not UTF-8": ({FACTS: b"\xff"}, FACTS),
    "facts of 2 MB": ({FACTS: json.dumps({"torch": "x" * 2_000_000})}, FACTS),
}  # fmt: skip


def spoilt(folder, files):
    write_run(folder)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(raw)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED)
def test_a_report_of_what_is_no_run_is_one_error(tmp_path, row):
    files, message = REFUSED[row]
    run = spoilt(tmp_path / "run", files)
    with bounded(5.0), pytest.raises(ValueError, match=f"^report expects .*{message}") as caught:
        report.write_report(run)
    assert len(str(caught.value)) < 1000
    assert not (run / "report.html").exists()


NAMES = [r"$\frac{1$", "$x$", "a\x1b[2J\x07", "<script>alert(1)</script>", "", "_hidden",
         "x" * 5000, "a\nb", "\u202egnp", "\ud800", "%s{0}", "\\"]  # fmt: skip
ACCEPTED = {
    "odd names of rewards": metrics({"step": 4} | {f"rewards/{n}/mean": 0.5 for n in NAMES}),
    "60 rewards": metrics({"step": 4} | {f"rewards/r{n}/mean": n for n in range(60)}),
    "odd names of metrics": metrics({"step": 4} | dict.fromkeys(NAMES, 0.5)),
    "NaN everywhere": metrics('{"step": 4, "reward": NaN, "step_time": Infinity, "kl": -Infinity}'),
    "nothing but NaN": {"metrics.jsonl": lines('{"step": 4, "reward": NaN}')},
    "large numbers": metrics({"step": 4, "reward": 1e100, "step_time": 1e100, "num_tokens": 1e100,
                              "time/generate": -1e100, "grad_norm": 1e-320}),
    "no time": {"metrics.jsonl": lines({"step": 1, "step_time": 0.0, "time/generate": 0.0})},
    "nothing right": {"metrics.jsonl": lines(*({"step": n, "eval/accuracy": 0} for n in (1, 2)))},
    "the last step 2^53": metrics({"step": 2**53, "reward": 1.0}),
    "steps in any order": metrics({"step": 1}, {"step": 0, "reward": 0.0}),
    "no rows": {"metrics.jsonl": ""},
    "a torn row": {"metrics.jsonl": lines(*ROWS) + '{"st'},
    "20,000 rows": {"metrics.jsonl": lines(*({"step": n, "reward": n % 7} for n in range(20_000)))},
    "a long completion": seen(completion="x\x00\x1b[2J\u202e" * 200_000),
    "HTML in a completion": seen(completion="</pre><img src=x onerror=alert(1)>", answer="&amp;",
                                 finish_reason="<b>"),
    "100 logged columns, one of them deep": seen(
        extra={f"<script>alert({n})": [[{"a": 1}] * 9] * n for n in range(100)},
    ),
    "HTML in tokens and rewards": seen(
        rewards={"</script><script>alert(1)": 1.0}, advantage=float("nan"), logprobs=[None, 1e99],
        tokens=["</span><img src=x onerror=alert(1)>", "\x1b"], trainer_logprobs=[-1.0, -1e99]),
    "20,000 completions": {"completions.jsonl": lines(
        *(SEEN | {"step": n, "completion": "<&>" * 300} for n in range(20_000)))},
    "HTML in the rest": {YAML: "task: '<script>alert(1)'\n'<b>': '<script>'\n",
                         FACTS: '{"<script>": "<script>alert(1)"}'},
    "a completion without a reward": seen(reward=None),
    "aliases": {YAML: "a: &a {x: 1}\nb: {<<: *a, y: [2001-01-01, !!binary aGk=, !!set {a}]}\n"},
    "no configuration": {YAML: "", FACTS: "{}"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("default:Glyph")
@pytest.mark.parametrize("row", ACCEPTED)
def test_a_report_of_an_odd_run_is_a_page(tmp_path, row):
    run = spoilt(tmp_path / "run", ACCEPTED[row])
    with bounded(20.0):
        text = report.write_report(run).read_text()
    assert "<script" not in without_own_scripts(text)
    assert "<img" not in text
    assert len(text) < 2_000_000
    assert all(char.isprintable() or char == "\n" for char in text)
    drawn = "60" if row == "60 rewards" else ""
    assert (f"40 of the {drawn} rewards" in text) == bool(drawn)


@pytest.mark.slow
def test_two_odd_runs_are_compared(tmp_path):
    odd = spoilt(tmp_path / "_run $x", ACCEPTED["odd names of rewards"] | ACCEPTED["aliases"])
    with bounded(20.0):
        text = report.write_comparison([odd, write_run(tmp_path / "b")], tmp_path / "both")
    assert "datetime.date(2001, 1, 1)" in text.read_text()


KINDS = {"a pipe": os.mkfifo, "a folder": os.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl", YAML, FACTS])
def test_what_is_no_file_is_named(tmp_path, name, kind):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    KINDS[kind](run / name)
    with bounded(5.0), pytest.raises(OSError, match=f"^report expects a file at .*{name}"):
        report.write_report(run)


def test_a_report_stays_in_its_folder(tmp_path):
    run, outside = write_run(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    (run / "plots").symlink_to(outside)
    with pytest.raises(OSError, match="^report expects .*plots"):
        report.write_report(run)
    (run / "plots").unlink()
    (run / "plots").mkdir()
    for link in (run / "plots" / "learning_curve.png", run / "report.html"):
        link.symlink_to(outside / "target")
    (outside / "target").write_text("mine")
    page = report.write_report(run)
    assert (outside / "target").read_text() == "mine"
    assert [each.name for each in outside.iterdir()] == ["target"]
    assert not page.is_symlink()
    assert not (run / "plots" / "learning_curve.png").is_symlink()


def test_a_draft_is_not_written_through_a_link(tmp_path):
    path, other = tmp_path / "page", tmp_path / "other"
    other.write_text("mine")
    path.with_name(f".page.{os.getpid()}").symlink_to(other)
    funcrl.core.files.write_whole(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "mine")


@pytest.mark.parametrize("name", ["report.html", "plots/learning_curve.png", "plots"])
def test_what_cannot_be_written_is_named(tmp_path, name):
    run = write_run(tmp_path / "run")
    if name == "plots":
        (run / name).write_text("a file")
    else:
        (run / name).mkdir(parents=True)
    with pytest.raises(OSError, match=f"^report expects .*{name}"):
        report.write_report(run)


# --- the other readers of a run's folder ------------------------------------------------------

CONFIGS = {name: files for name, (files, _) in REFUSED.items() if YAML in files}
READERS = {
    "train": lambda run: funcrl.train(config.read_config(config.TrainConfig, run / YAML),
                                      resume=True),
    "evaluate": lambda run: evaluate(config.EvalConfig(run=run, num_prompts=2)),
    "export": lambda run: export(run, run.parent / "model"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", CONFIGS)
@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_that_is_none_is_refused_by_all(tmp_path, reader, row):
    run = spoilt(tmp_path / "run", CONFIGS[row])
    with bounded(5.0), pytest.raises(ValueError, match=r"^train expects .*config.yaml"):
        READERS[reader](run)


FACTS_THAT_ARE_NONE = {name: files for name, (files, _) in REFUSED.items() if FACTS in files}


@pytest.mark.parametrize("row", FACTS_THAT_ARE_NONE)
@pytest.mark.parametrize("reader", ["evaluate", "export"])
def test_facts_that_are_none_are_refused_by_all(tmp_path, reader, row):
    run = spoilt(tmp_path / "run", FACTS_THAT_ARE_NONE[row])
    with bounded(5.0), pytest.raises(ValueError, match=rf"^{reader} expects .*environment.json"):
        READERS[reader](run)


OPTIONS = ["vllm: {logprobs: " + "x" * 5000 + "}", "steps: [" + "x," * 9000 + "]",
           "steps: " + "x" * 50_000, "threads: {a: 1}", "sampling: 5", "sampling: {stop: 5}",
           "reward_weights: []", "run_dir: [1]", "lora: {targets: {a: 1}}", "generator: [x]",
           "x" * 90 + ": 1", "1: 2", "null: 3", "{a: 1}: 2", "seed: 0x" + "f" * 90]  # fmt: skip


@pytest.mark.parametrize("text", OPTIONS, ids=range(len(OPTIONS)))
def test_an_option_of_another_kind_is_one_short_error(tmp_path, text):
    (tmp_path / YAML).write_text(text)
    with bounded(5.0), pytest.raises(ValueError, match=r"^train .*config.yaml") as caught:
        config.read_config(config.TrainConfig, tmp_path / YAML)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_for_a_pipe(tmp_path, reader, kind):
    for name in (YAML, FACTS):
        run = write_run(tmp_path / name)
        (run / name).unlink()
        KINDS[kind](run / name)
        with bounded(5.0), pytest.raises((OSError, ValueError), match=r"^(train|evaluate|export) "):
            READERS[reader](run)


def test_lines_are_not_kept_through_a_link(tmp_path):
    (tmp_path / "completions.jsonl").symlink_to(tmp_path / "elsewhere")
    funcrl.runs.keep_until(tmp_path / "completions.jsonl", 3)
    funcrl.runs.append_lines(tmp_path / "completions.jsonl", [SEEN])
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("row", [{"reward": 1}, {"step": "1"}, {"step": None}])
def test_lines_to_keep_have_a_step(tmp_path, row):
    path = tmp_path / "completions.jsonl"
    path.write_text(lines(SEEN, row))
    with pytest.raises(ValueError, match=r"^train expects step .* in line 2 of .*completions"):
        funcrl.runs.keep_until(path, 3)
    assert path.read_text() == lines(SEEN, row)


@pytest.mark.parametrize("extra", [{}, {"step": "1"}, {"step": -1}])
def test_a_checkpoint_of_no_run_is_refused_by_name(tmp_path, extra):
    options = config.TrainConfig()
    parts = funcrl.build(options)
    funcrl.save(tmp_path / "checkpoints" / "1", empty_state(parts), extra)
    with pytest.raises(ValueError, match=r"^restore expects .*checkpoints"):
        trained_params(tmp_path, trained_like(parts))


@pytest.mark.slow
@pytest.mark.parametrize("row", [None, [], "", {}, {"step": 2}, {"step": "1"}, "[" * 10_000])
def test_a_run_is_not_resumed_without_its_metrics(tmp_path, row):
    options = config.TrainConfig(run_dir=tmp_path / "run", algorithm=config.AlgorithmConfig(kl=0.0))
    parts = funcrl.build(options)
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("algorithm: {kl: 0.0}")
    extra = {} if row is None else {"row": row}
    funcrl.save(run / "checkpoints" / "1", empty_state(parts), extra)
    with pytest.raises(ValueError, match=r"^train expects .*checkpoints"):
        funcrl.train(options, resume=True)
    assert (run / "metrics.jsonl").read_text() == lines(*ROWS)


@pytest.mark.parametrize("make", [lambda lock, other: lock.symlink_to(other),
                                  lambda lock, other: lock.mkdir()])  # fmt: skip
def test_a_lock_is_a_file_of_the_run(tmp_path, make):
    run = write_run(tmp_path / "run")
    make(run / ".lock", tmp_path / "other")
    with pytest.raises(OSError, match=r"train expects .*\.lock"):
        funcrl.train(config.TrainConfig(run_dir=run), resume=True)
    assert not (tmp_path / "other").exists()

"""Code that a file names: a stranger's runs only with --trust, one's own without a question."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from cases import run_command

import funcrl
from funcrl import cli, runs
from funcrl.config import CompileConfig, EvalConfig, TrainConfig, read_config
from funcrl.core.process import python_command
from funcrl.run import trust
from funcrl.run.trust import TrustError, cache_code, named_code

SMALL = [
    "--steps", "1", "--num-prompts", "2", "--num-generations", "2", "--warm-start.steps", "0",
    "--evaluation.every", "0", "--sampling.max-tokens", "2",
]  # fmt: skip
EVIL = """
import pathlib
pathlib.Path({marker!r}).touch()
from funcrl.tasks import SumDigits
class S(SumDigits):
    name = "evil"
"""


def run(capsys, *args):
    return run_command(args, capsys)


def make_run(folder, task="evil.py"):
    """A run whose task writes a marker when its code runs; from another account, so to say."""
    folder.mkdir()
    found = SimpleNamespace(run=folder / "run", file=folder / task, marker=folder / "marker")
    found.file.write_text(EVIL.format(marker=str(found.marker)))
    cli.main(["train", "--task", f"{found.file}:S", "--run-dir", str(found.run), *SMALL])
    assert found.marker.exists()
    found.marker.unlink()
    return found


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("account")
        patch.setattr(trust, "default_store", lambda: place)
        return make_run(tmp_path_factory.mktemp("theirs") / "x")


@pytest.fixture
def stranger(shipped):
    """A whole run, with the right hash in its environment.json, of which this account has none."""
    shipped.marker.unlink(missing_ok=True)
    assert json.loads((shipped.run / runs.ENVIRONMENT).read_text())["task_sha256"]
    return shipped


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        "train --resume {run} --steps 2",
        "train --config {run}/config.yaml --run-dir {new}",
        "eval --run {run}",
    ],
)
def test_a_strangers_code_is_not_run(stranger, tmp_path, capsys, args):
    ended = run(capsys, *args.format(run=stranger.run, new=tmp_path / "new").split())
    assert ended.code == 1
    assert "--trust" in ended.err
    assert str(stranger.file) in ended.err
    assert "Traceback" not in ended.err
    assert not stranger.marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        "export --run {run} --out {new}",
        "report {run}",
        "train --dry-run --resume {run}",
        "train --dry-run --config {run}/config.yaml",
        "train --dry-run --task {file}:S",
    ],
)
def test_what_needs_no_task_runs_none(stranger, tmp_path, capsys, args):
    names = {"run": stranger.run, "file": stranger.file, "new": tmp_path / "new"}
    ended = run(capsys, *args.format(**names).split())
    assert ended.code == 0, ended.err
    assert not stranger.marker.exists()
    if "--resume" in args:
        parts = funcrl.build(TrainConfig())  # the same vocabulary
        known = yaml.safe_load(ended.out)
        assert known["num_parameters"] == sum(p.numel() for p in parts.model.parameters())
        assert "not loaded" in known["memory"]["prompts"]
    elif "--dry-run" in args:
        assert "--trust" in yaml.safe_load(ended.out)["memory"]


def test_python_asks_too(stranger, tmp_path):
    config = read_config(TrainConfig, stranger.run / runs.CONFIG)
    with pytest.raises(TrustError, match="trust=True"):
        funcrl.train(config, resume=True)
    with pytest.raises(TrustError, match="trust=True"):
        funcrl.evaluate(EvalConfig(run=stranger.run))
    _, params = funcrl.load_params(funcrl.export(stranger.run, tmp_path / "model"))
    state, _ = funcrl.restore(
        stranger.run / runs.CHECKPOINTS, funcrl.loop.build.empty_state(funcrl.build(
            TrainConfig(steps=config.steps, warm_start=config.warm_start))),
    )  # fmt: skip
    assert all(torch.equal(params[name], leaf) for name, leaf in state.params.items())
    assert not stranger.marker.exists()


def test_a_module_in_the_working_directory_is_code_as_well(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "evil_package").mkdir()
    marker = tmp_path / "marker"
    for name in ("evil_package/__init__.py", "evil_package/inner.py"):
        (tmp_path / name).write_text(EVIL.format(marker=str(marker)))
    (tmp_path / "c.yaml").write_text("task: evil_package.inner:S\n")
    found = named_code(TrainConfig(task="evil_package.inner:S"))[0].path
    assert found == tmp_path / "evil_package" / "inner.py"
    ended = run(capsys, "train", "--config", "c.yaml", *SMALL)
    assert (ended.code, marker.exists()) == (1, False)
    assert str(found) in ended.err
    # What Python was built with is no exception: `os:abort` would be called.
    (tmp_path / "c.yaml").write_text("task: posix:abort\n")
    assert run(capsys, "train", "--config", "c.yaml", *SMALL).code == 1


@pytest.mark.slow
def test_ones_own_run_goes_on_without_a_question_until_the_file_changes(tmp_path, capsys):
    own = make_run(tmp_path / "own")
    resume = ["train", "--resume", own.run, "--steps"]
    ended = run(capsys, *resume, "2")
    assert ended.code == 0, ended.err
    assert f"Runs {own.file} (SHA-256 " in ended.err
    ended = run(capsys, "eval", "--run", own.run, "--num-prompts", "2")
    assert ended.code == 0, ended.err
    assert f"Runs {own.file} (SHA-256 " in ended.err
    own.file.write_text(own.file.read_text() + "\n# another reward\n")
    for args in ([*resume, "3"], ["eval", "--run", own.run]):
        own.marker.unlink(missing_ok=True)
        ended = run(capsys, *args)
        assert ended.code == 1
        assert "not the file that the run began with" in ended.err
        assert not own.marker.exists()
    ended = run(capsys, *resume, "3", "--trust")
    assert ended.code == 0, ended.err
    assert run(capsys, *resume, "4").code == 0  # it is the recorded one now
    own.file.write_text(own.file.read_text() + "\n# and another\n")
    ended = run(capsys, *resume, "5", "--task", f"{own.file}:S")  # said by the user
    assert ended.code == 0, ended.err
    assert "Runs" not in ended.err
    assert runs.read_lines(own.run / runs.METRICS)[-1]["step"] == 5


@pytest.mark.slow
def test_another_name_in_ones_own_file_is_asked_about(tmp_path, capsys):
    own = make_run(tmp_path / "own")
    config = tmp_path / "theirs.yaml"
    config.write_text(f"task: {own.file}:S\n")
    assert run(capsys, "train", "--config", config, "--run-dir", tmp_path / "a", *SMALL).code == 0
    config.write_text(f"task: {own.file}:pathlib.Path\n")
    ended = run(capsys, "train", "--config", config, "--run-dir", tmp_path / "b", *SMALL)
    assert ended.code == 1
    assert "this account has not run it" in ended.err


@pytest.mark.slow
def test_a_folder_of_an_older_version_is_told(tmp_path, capsys):
    old = make_run(tmp_path / "old")
    path = old.run / runs.ENVIRONMENT
    facts = json.loads(path.read_text())
    for name in ("task_sha256", "vocab_size", "max_turns"):
        del facts[name]
    path.write_text(json.dumps(facts))
    ended = run(capsys, "train", "--resume", old.run, "--steps", "2")
    assert ended.code == 1
    assert "does not say which file the run began with" in ended.err
    ended = run(capsys, "export", "--run", old.run, "--out", tmp_path / "model")
    assert ended.code == 1
    assert "expects vocab_size" in ended.err
    assert not old.marker.exists()
    assert funcrl.export(old.run, tmp_path / "model", task=funcrl.tasks.SumDigits()).exists()
    path.write_text(json.dumps({**facts, "vocab_size": "9" * 5000}))
    ended = run(capsys, "export", "--run", old.run, "--out", tmp_path / "more")
    assert ended.code == 1
    assert "'vocab_size'" in ended.err


def test_an_account_that_can_write_nothing_trains_and_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(trust, "default_store", lambda: tmp_path / "file" / "below")
    own = tmp_path / "own.py"
    own.write_text(EVIL.format(marker=str(tmp_path / "marker")))
    ended = run(capsys, "train", "--task", f"{own}:S", "--run-dir", tmp_path / "run", *SMALL)
    assert ended.code == 0, ended.err
    assert "--resume will ask for --trust" in ended.out


def test_compiled_programs_of_a_stranger_are_asked_about(tmp_path, capsys):
    cache = tmp_path / "cache"
    assert cache_code(cache) is None
    mine = TrainConfig(compile=CompileConfig(backend="inductor", cache_dir=cache))
    trust.remember(mine)
    assert cache_code(cache) is None  # it is empty
    (cache / "program.bin").write_bytes(b"pickle")
    assert trust.is_remembered(cache_code(cache))
    os.rename(cache, tmp_path / "gone")
    cache.mkdir()
    (cache / "program.bin").write_bytes(b"another pickle")
    assert not trust.is_remembered(cache_code(cache))
    config = tmp_path / "c.yaml"
    config.write_text(f"compile: {{backend: inductor, cache_dir: {cache}}}\n")
    ended = run(capsys, "train", "--config", config, "--run-dir", tmp_path / "run", *SMALL)
    assert ended.code == 1
    assert "--compile.cache-dir" in ended.err
    assert not (tmp_path / "run").exists()


def test_what_runs_is_what_was_hashed_and_not_what_python_kept_of_it(tmp_path):
    path, marker = tmp_path / "mine.py", tmp_path / "marker"
    path.write_text(EVIL.format(marker=str(marker)))
    os.utime(path, (1, 1))
    import importlib.util
    import py_compile

    py_compile.compile(str(path), importlib.util.cache_from_source(str(path)))
    text = path.read_text()
    path.write_text(text.replace("touch()", "exists"))  # as long, and as old
    path.write_text(path.read_text().ljust(len(text)))
    os.utime(path, (1, 1))
    funcrl.tasks.load(f"{path}:S")
    assert not marker.exists()


@pytest.mark.slow
def test_a_run_does_not_write_where_a_link_leads(tmp_path, capsys):
    own = make_run(tmp_path / "own")
    for name in (runs.COMPLETIONS, ".lock"):
        (own.run / name).unlink()
        (own.run / name).symlink_to(tmp_path / "elsewhere")
    ended = run(capsys, "train", "--resume", own.run, "--steps", "2")
    assert ended.code == 1
    assert ".lock" in ended.err
    assert "Traceback" not in ended.err
    (own.run / ".lock").unlink()
    assert run(capsys, "train", "--resume", own.run, "--steps", "2").code == 0
    assert not (own.run / runs.COMPLETIONS).is_symlink()  # a file of the run took its place
    assert not (tmp_path / "elsewhere").exists()


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    described = {"tokenizer_class": "S", "auto_map": {"AutoTokenizer": ["evil.S", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        funcrl.tasks.load_tokenizer(tmp_path)
    assert not marker.exists()


NET = """
import pathlib
pathlib.Path({marker!r}).touch()
import torch
class Net(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens):
        return self.table(tokens)
"""


@pytest.fixture(scope="module")
def with_network(tmp_path_factory):
    """A stranger's run of a network of the stranger's own, which this account has not run."""
    folder = tmp_path_factory.mktemp("network")
    found = SimpleNamespace(run=folder / "run", marker=folder / "marker", file=folder / "net.py")
    found.file.write_text(NET.format(marker=str(found.marker)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "default_store", lambda: folder / "account")
        model = f"{found.file}:Net"
        cli.main(["train", "--model", model, "--run-dir", str(found.run), *SMALL])
    found.marker.unlink()
    return found


def test_parts_that_were_trusted_are_made_anew_without_a_question(with_network):
    config = TrainConfig(model=str(with_network.run))
    with pytest.raises(TrustError, match="trust=True"):
        funcrl.build(config)
    parts = funcrl.build(config, trust=True)
    other = parts._replace(task=funcrl.tasks.SumDigits())
    assert other.model is not parts.model
    assert type(other.model).__name__ == "Net"
    with_network.marker.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        "train --model {run} --run-dir {new}",
        "train --model {run} --dry-run",
        "train --config {file} --run-dir {new}",
        "train --config {file} --dry-run",
        "train --resume {mine} --steps 3",
        "train --resume {mine} --fork {new} --steps 3",
        "eval --model {run}",
        "export --run {run} --out {new}",
        "eval --run {mine}",
    ],
)
def test_no_network_that_a_run_names_is_run_however_deep(
    with_network, tmp_path, capsys, monkeypatch, args
):
    """The run in `--model`, in a file's `model`, and in that of the run that goes on."""
    file, mine = tmp_path / "c.yaml", tmp_path / "mine"
    file.write_text(f"model: {with_network.run}\n")
    if "{mine}" in args:
        with monkeypatch.context() as patch:
            patch.setattr(trust, "default_store", lambda: tmp_path / "trusting")
            line = ["train", "--trust", "--model", with_network.run, "--run-dir", mine, *SMALL]
            assert run(capsys, *line).code == 0
        with_network.marker.unlink()
    names = {"run": with_network.run, "file": file, "mine": mine, "new": tmp_path / "new"}
    ended = run(capsys, *args.format(**names).split())
    assert ended.code == 1
    assert f"--trust (trust=True in Python) to run {with_network.file}" in ended.err
    assert not with_network.marker.exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_what_the_line_names_itself_runs_beside_a_stranger_s_run(with_network, tmp_path, capsys):
    ended = run(capsys, "train", "--trust", "--model", with_network.run, "--run-dir",
                tmp_path / "mine", *SMALL)  # fmt: skip
    assert ended.code == 0, ended.err
    assert with_network.marker.exists()
    with_network.marker.unlink()


@pytest.mark.parametrize("name", ["pip", "json", "numpy", "torch", "csv", "vllm"])
def test_a_program_that_is_started_imports_nothing_from_the_working_directory(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nraise ImportError\n")
    imports = "import pip, json, csv"
    inner = f"subprocess.run([sys.executable, '-c', {imports!r}], check=True)"
    code = f"{imports}, subprocess, sys; {inner}"
    for arguments in (("-m", "pip", "--version"), ("-c", code)):
        subprocess.run(python_command(*arguments), check=True, capture_output=True)
    assert not marker.exists()


def test_python_is_started_by_one_function_alone():
    package = Path(funcrl.__file__).parent
    named = {path for path in package.rglob("*.py") if "sys.executable" in path.read_text()}
    others = {path.relative_to(package).parts[:2] for path in named}
    # A server's error names it in words.
    assert others <= {("core", "process.py"), ("generators", "vllm")}

"""A hub on this machine: what a download says, what is there offline, what an export uploads."""

import os
import subprocess
import sys

import hub
import pytest
import transformers
from cases import tiny_pretrained

import funcrl
from funcrl.config import (
    EvaluationConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.weights import push_to_hub


@pytest.fixture
def place(tmp_path):
    """A folder, the models of a hub, and the environment of programs that use it."""
    folder, _ = tiny_pretrained(tmp_path / "model")
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    files["consolidated.safetensors"] = b"the same weights in the maker's own layout"
    models = {"org/tiny": files}
    with hub.serving(models) as address:
        yield tmp_path, models, {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}


def run(place, *args, **environment):
    command = [sys.executable, "-m", "funcrl", *map(str, args)]
    return subprocess.run(
        command, env={**os.environ, **place[2], **environment}, cwd=place[0], capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_a_download_says_what_and_where_once(place):
    asked = ["generate", "--model", "org/tiny", "--max-tokens", "3", "hi"]
    first = run(place, *asked)
    assert first.returncode == 0, first.stderr
    files = place[1]["org/tiny"].items()
    size = sum(len(content) for name, content in files if "consolidated" not in name)
    said = f"Downloading org/tiny: {size / 1e3:.1f} kB in {len(files) - 1} files, to "
    assert first.stderr.startswith(said)
    assert " files: 100%" in first.stderr
    again = run(place, *asked)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", first.stdout)
    offline = run(place, *asked, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stderr, offline.stdout) == (0, "", first.stdout)
    assert not list((place[0] / "hf").rglob("consolidated*"))
    other = run(place, "generate", "--model", "org/other", "hi", HF_HUB_OFFLINE="1")
    assert other.returncode == 1
    assert "the model's folder is a --model too" in other.stderr
    assert "'org/other'" in run(place, "generate", "--model", "org/other", "hi").stderr


def test_python_takes_the_names_of_a_hub(place, monkeypatch):
    lines = (
        "import funcrl; model, params = funcrl.load_params('org/tiny'); "
        "tokenizer = funcrl.tasks.load_tokenizer('org/tiny'); "
        "print(len(params), tokenizer.vocab_size)"
    )
    found = subprocess.run(
        [sys.executable, "-c", lines], env={**os.environ, **place[2]}, cwd=place[0], text=True,
        capture_output=True, check=True,
    ).stdout.split()  # fmt: skip
    _, params = funcrl.load_params(place[0] / "model")
    tokenizer = funcrl.tasks.load_tokenizer(place[0] / "model")
    assert found == [str(len(params)), str(tokenizer.vocab_size)]
    (place[0] / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(place[0])  # where a folder of that name comes first
    with pytest.raises(FileNotFoundError, match="load_params expects one model in org/tiny"):
        funcrl.load_params("org/tiny")


def test_an_export_is_uploaded_with_a_card(place):
    folder = place[0] / "run"
    funcrl.train(
        TrainConfig(
            model=str(place[0] / "model"), task="countdown", run_dir=folder, steps=1, num_prompts=2,
            num_generations=2, sampling=Sampling(max_tokens=3), warm_start=WarmStartConfig(steps=0),
            evaluation=EvaluationConfig(num_prompts=2), optimizer=OptimizerConfig(warmup=0),
        )
    )  # fmt: skip
    line = ["export", folder, "--push-to-hub", "me/mine", "--private"]
    refused = run(place, *line, HF_TOKEN="hf_wrong")
    assert refused.returncode == 1
    assert "an account that may write 'me/mine'" in refused.stderr
    assert "me/mine" not in place[1]
    ended = run(place, *line, HF_TOKEN="hf_good")
    assert (ended.returncode, ended.stdout) == (0, f"{place[2]['HF_ENDPOINT']}/me/mine\n"), (
        ended.stderr
    )
    assert "README.md" in place[1]["me/mine"]
    card = place[1]["me/mine"]["README.md"].decode()
    assert "by grpo on `countdown`, 1 steps of 2 prompts x 2 completions." in card
    assert "Held-out accuracy: " in card
    assert str(place[0]) not in card
    # What was uploaded is the model of the run.
    uploaded = place[0] / "uploaded"
    uploaded.mkdir()
    for name, content in place[1]["me/mine"].items():
        (uploaded / name).write_bytes(content)
    params = funcrl.load_params(uploaded)[1]
    trained = funcrl.load_run(folder)
    assert all(params[name].equal(leaf) for name, leaf in trained.params.items())
    assert transformers.AutoTokenizer.from_pretrained(uploaded)
    kept = run(place, *line, "--out", "kept", HF_TOKEN="hf_good")
    assert kept.stdout == f"kept\n{place[2]['HF_ENDPOINT']}/me/mine\n"
    assert (place[0] / "kept" / "model.safetensors").exists()


def test_names_and_folders_that_are_none_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    for name in ("model", "a/b/c", "/b", "a/"):
        with pytest.raises(ValueError, match="^push_to_hub expects the name of a model, ORG/NAME"):
            push_to_hub(tmp_path / "x", name)
    with pytest.raises(FileNotFoundError, match="^push_to_hub expects the folder of a model"):
        push_to_hub(tmp_path / "y", "a/b")

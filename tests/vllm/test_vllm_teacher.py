"""`vllm serve` as a teacher, for real: it scores as the trainer does, and a run learns from it."""

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from cases import TEMPLATES, tiny_tokenizer
from engines import DEVICE, bound_of, largest, make, needs_vllm, scored

import funcrl
from funcrl.cli.train import read_line

pytestmark = needs_vllm


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(address, process, log, seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model in a folder with its tokenizer, and `vllm serve` with it."""
    folder = tmp_path_factory.mktemp("served") / "model"
    tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
    tokenizer._tokenizer.save_pretrained(folder)
    shape = replace(make("qwen3")[0].config, vocab_size=tokenizer.vocab_size)
    model = funcrl.models.Transformer(shape)
    drawn = funcrl.init_params(model, seed=0, device=DEVICE)
    params = {name: leaf * 5 if leaf.ndim == 2 else leaf for name, leaf in drawn.items()}
    funcrl.save_params(folder, model, params)
    log, port = folder.parent / "log.txt", free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",  # what `vllm serve` runs
        "--model", str(folder), "--port", str(port),
        "--host", "127.0.0.1", "--max-model-len", "256", "--enforce-eager", "--dtype", "float32",
        "--kv-cache-memory-bytes", str(1 << 26), "--served-model-name", "taught-by",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address, folder, model, params
    finally:
        process.terminate()
        process.wait(60)


def test_vllm_scores_what_the_trainer_does(teacher):
    address, folder, model, params = teacher
    served = funcrl.ServedTeacher(address, "taught-by")
    rows = [[1, 2, 3], [4] * 40, [5, 6], list(range(7, 30))]
    found, wanted = served.score(rows), scored(model, params, rows)
    assert largest(found, wanted) < bound_of(model, params, rows)
    text = "What is 2 plus 3?"
    assert served.tokenize(text) == funcrl.tasks.load_tokenizer(folder).encode_answer(text)
    other = funcrl.ServedTeacher(address, "another")
    with pytest.raises(ConnectionError, match="404 .*another"):
        other.score([[1, 2]])
    with pytest.raises(ConnectionError, match="400 .* after 1 of 4"):  # longer than it reads
        served.score([[1] * 300])


def test_a_run_learns_from_vllm(teacher, tmp_path):
    """As much as from the same weights in this process, up to rounding."""
    address, folder, model, _ = teacher
    own = tmp_path / "teacher.py"
    own.write_text(f"import funcrl\n\nvllm = funcrl.ServedTeacher({address!r}, 'taught-by')\n")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "2 plus 3", "answer": "5"}\n' * 8)
    policy = tmp_path / "policy"
    tiny_tokenizer(TEMPLATES["chatml"])._tokenizer.save_pretrained(policy)
    funcrl.save_params(policy, model, funcrl.init_params(model, seed=3))
    line = (
        f"--model {policy} --task {data} --algorithm distill --algorithm.divergence sampled "
        f"--steps 3 --num-prompts 2 --num-generations 4 --sampling.max-tokens 12 "
        f"--evaluation.every 0 --device {DEVICE} --optimizer.learning-rate 1e-3"
    ).split()
    rows = {}
    for name in (f"{own}:vllm", str(folder)):
        run = tmp_path / re.sub(r"\W", "_", name[-8:])
        rows[name] = funcrl.train(read_line([*line, "--teacher", name, "--run-dir", str(run)])[1])
    there, here = ([row["loss/teacher"] for row in each.history[1:]] for each in rows.values())
    assert len(there) == 3
    assert max(abs(a - b) for a, b in zip(there, here, strict=True)) < 1e-3 * max(here)

"""Rewards of a sequence classifier, and of a judge behind an address."""

import asyncio
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
import transformers
from cases import TEMPLATES, run_command, tiny_pretrained, tiny_tokenizer

import funcrl
from funcrl.config import EvalConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.tasks import Prompt, ask_judge, from_rows, reward_model


def classifier(folder, template=None, num_labels=1):
    """A small model of transformers with a head of labels, and its tokenizer, in a folder."""
    tokenizer = tiny_tokenizer(template)
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, num_labels=num_labels,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(shape).eval()
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.mul_(20 if leaf.ndim == 2 else 1)
    model.save_pretrained(folder)
    tokenizer._tokenizer.save_pretrained(folder)
    return model, tokenizer


def alone(model, tokenizer, text):
    tokens = tokenizer.encode_answer(text)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, 0].item()


@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_score_is_that_of_the_text_alone(tmp_path, template):
    model, tokenizer = classifier(tmp_path, template and TEMPLATES[template])
    score = reward_model(tmp_path, batch_size=3)
    pairs = [("2+2=", "4"), ("Why?", "Because it is so."), ("a", "bcd"), ("x", "")]
    if template is None:
        texts = [prompt + completion for prompt, completion in pairs]
    else:
        texts = [
            "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in
                    (("user", prompt), ("assistant", completion)))
            for prompt, completion in pairs
        ]  # fmt: skip
    wanted = [alone(model, tokenizer, text) for text in texts]
    found = score(*zip(*pairs, strict=True))
    assert found == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.01
    messages = [[{"role": "user", "content": prompt}] for prompt, _ in pairs]
    answers = [[{"role": "assistant", "content": text}] for _, text in pairs]
    assert score(messages, answers) == pytest.approx(wanted, abs=1e-5)


def test_it_is_a_reward_of_a_run_and_of_its_evaluation(tmp_path, capsys):
    model, tokenizer = classifier(tmp_path / "scorer")
    line = ["train", "--reward-model", tmp_path / "scorer", "--run-dir", tmp_path / "run",
            "--steps", "1", "--num-prompts", "2", "--num-generations", "2",
            "--warm-start.steps", "1", "--evaluation.num-prompts", "2",
            "--sampling.max-tokens", "3"]  # fmt: skip
    ended = run_command(line, capsys)
    assert ended.code == 0, ended.err
    rows = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        wanted = alone(model, tokenizer, row["prompt"] + row["completion"])
        assert row["rewards"]["reward_model"] == pytest.approx(wanted, abs=1e-5)
        assert row["reward"] == pytest.approx(sum(row["rewards"].values()), abs=1e-5)
    result = funcrl.evaluate(EvalConfig(run=tmp_path / "run", num_prompts=3), note=print)
    assert set(result.rewards) == {"correct", "reward_model"}
    # It is the only reward of a file without answers, and no accuracy.
    config = TrainConfig(
        run_dir=tmp_path / "other", steps=1, num_prompts=2, num_generations=2, held_out=0.5,
        reward_model=str(tmp_path / "scorer"), warm_start=WarmStartConfig(steps=0),
        sampling=Sampling(max_tokens=3), evaluation=EvaluationConfig(num_prompts=2),
    )  # fmt: skip
    history = funcrl.train(config, task=[{"prompt": text} for text in "abcdef"]).history
    assert "eval/rewards/reward_model/mean" in history[-1]


def test_models_that_score_nothing_are_refused(tmp_path):
    classifier(tmp_path / "two", num_labels=2)
    with pytest.raises(ValueError, match="^reward_model expects a trained head .* got 2 labels"):
        reward_model(tmp_path / "two")
    tiny_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="^reward_model expects a trained head of one label"):
        reward_model(tmp_path / "causal")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="^reward_model expects a sequence classifier"):
        reward_model(tmp_path / "none")


@contextmanager
def judging(answers):
    """A service that answers with these in turn, a number being a status; gives what was asked."""
    asked, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            answer = left.pop(0) if left else "5"
            status = answer if isinstance(answer, int) else 200
            content = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


PROMPT = Prompt("2+2= {completion}", "4")


def test_a_judge_is_asked_once_and_its_number_is_the_reward(tmp_path):
    cache = tmp_path / "answers.jsonl"
    with judging(["Fine. 7/10", "It deserves 12", "-3", "The score: 2.5."]) as (address, asked):
        options = {"key": "secret", "cache": cache, "options": {"max_tokens": 5}}
        judge = ask_judge(address, "m", "{prompt} | {completion} | {answer}", **options)
        found = [asyncio.run(judge(PROMPT, text)) for text in ("a", "b", "c", "{answer}", "a")]
        assert found == [0.7, 1.0, 0.0, 0.25, 0.7]
        path, key, body = asked[0]
        assert (path, key) == ("/v1/chat/completions", "Bearer secret")
        assert body == {"model": "m", "temperature": 0.0, "max_tokens": 5, "messages": [
            {"role": "user", "content": "2+2= {completion} | a | 4"}]}  # fmt: skip
        assert asked[3][2]["messages"][0]["content"] == "2+2= {completion} | {answer} | 4"
        assert len(asked) == 4
        with cache.open("a") as file:
            file.write('{"request": "cut')  # as a run that was killed leaves it
        again = ask_judge(address, "m", "{prompt} | {completion} | {answer}", **options)
        assert asyncio.run(again(PROMPT, "a")) == 0.7
        assert len(asked) == 4


def test_a_busy_service_is_asked_again_and_one_that_refuses_is_not(monkeypatch):
    monkeypatch.setattr("funcrl.core.http._FIRST_WAIT", 0.01)
    with judging([503, 429, "4"]) as (address, asked):
        judge = ask_judge(address, "m", "{completion}", best=5.0)
        assert asyncio.run(judge(PROMPT, "a")) == 0.8
        assert len(asked) == 3
    for answer, error, message in (
        (401, ConnectionError, "^ask_judge .* got 401 .* after 1 of 4 attempts"),
        ("no idea", ValueError, "^ask_judge expects an answer with a number"),
    ):
        with judging([answer]) as (address, _), pytest.raises(error, match=message):
            asyncio.run(ask_judge(address, "m", "{completion}")(PROMPT, "a"))
    judge = ask_judge(address, "m", "{completion}", attempts=2)  # nobody is there any more
    with pytest.raises(ConnectionError, match="after 2 of 2 attempts"):
        asyncio.run(judge(PROMPT, "a"))


def test_a_judge_is_a_reward_of_rows_side_by_side():
    with judging(["1", "2", "3", "4"]) as (address, asked):
        judge = ask_judge(address, "m", "{completion}")
        task = from_rows([{"prompt": "a"}, {"prompt": "b"}], {"kind": judge}, held_out=0.0)
        prompts = task.prompts(0, 0, 2) * 2
        graded = funcrl.rollouts.grade(task, prompts, ["w", "x", "y", "z"])
        assert sorted(graded.total.tolist()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert len(asked) == 4

"""`funcrl chat`: answers are what a generator draws behind the conversation so far."""

import io
import sys

import pytest
from cases import TEMPLATES, run_command, tiny_pretrained

import funcrl
from funcrl.config import ChatConfig, Sampling
from funcrl.core import rng
from funcrl.serve.chat import chat
from funcrl.tasks.contracts import all_ends


@pytest.fixture(params=[None, "chatml"])
def folder(request, tmp_path):
    folder = tmp_path / "model"
    tiny_pretrained(folder, request.param and TEMPLATES[request.param])
    model, params = funcrl.load_params(folder)
    params["embed.weight"] *= 10
    funcrl.save_params(folder, model, params)
    return folder


def answers(folder, messages, seed, **options):
    """The texts of a conversation, each drawn behind the tokens of all before."""
    model, params = funcrl.load_params(folder)
    tokenizer = funcrl.tasks.load_tokenizer(folder)
    sampler = funcrl.generators.Sampler(model)
    sampler.push(params)
    sampling = Sampling(stop_tokens=tuple(all_ends(tokenizer)), **options)
    tokens, texts = [], []
    for number, message in enumerate(messages):
        tokens = tokens + (tokenizer.encode_reply if tokens else tokenizer.encode)(message)
        samples = sampler.generate([tokens], sampling, rng.fold_in(seed, number))
        drawn = samples.tokens[0][samples.mask[0]].tolist()
        texts.append(tokenizer.decode(drawn))
        ended = samples.finish_reasons[0] == "stop"
        tokens = [*tokens, *(drawn[:-1] if ended else drawn), tokenizer.end]
    return texts


def test_answers_are_drawn_behind_the_conversation(folder, capsys, monkeypatch):
    lines = "Hello\n\nAnd then?\nSo.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = run_command(
        ["chat", folder, "--max-tokens", "12", "--seed", "4", "--temperature", "0.7"], capsys
    )
    assert (code, err) == (0, "")
    wanted = answers(folder, ["Hello", "And then?", "So."], 4, max_tokens=12, temperature=0.7)
    printed = [funcrl.core.printing.printable(text) for text in wanted]
    assert out == "".join(f"{text}\n" for text in printed)


def test_pieces_appear_before_the_answer_is_whole_and_a_new_conversation_forgets(folder):
    pieces = []
    config = ChatConfig(model=str(folder), max_tokens=12, temperature=0.0)
    chat(config, ["Hello", "/new", "Hello", "Hello"], pieces.append, print)
    first, second = answers(folder, ["Hello", "Hello"], 0, max_tokens=12, temperature=0.0)
    assert "".join(pieces) == f"{first}\n{first}\n{second}\n"
    assert len(pieces) > 20


def test_an_interrupt_leaves_the_conversation_as_it_was(folder):
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    config = ChatConfig(model=str(folder), max_tokens=12, temperature=0.0)
    chat(config, ["Hello", "Hello"], write, print)
    assert "[interrupted]" in pieces
    (text,) = answers(folder, ["Hello"], 0, max_tokens=12, temperature=0.0)
    assert "".join(pieces).endswith(f"\n{text}\n")


def test_a_conversation_longer_than_the_context_says_so(folder):
    pieces = []
    config = ChatConfig(model=str(folder), max_tokens=4)
    chat(config, ["x" * 5000, "Hello"], pieces.append, print)
    assert "/new begins" in pieces[0]
    assert "".join(pieces).count("\n") == 2


def test_a_run_is_talked_to(tmp_path):
    from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig

    funcrl.train(
        TrainConfig(
            task="sum_digits:2", run_dir=tmp_path / "run", steps=1, num_prompts=2,
            num_generations=2, warm_start=WarmStartConfig(steps=1),
            evaluation=EvaluationConfig(every=0),
        )
    )  # fmt: skip
    pieces = []
    config = ChatConfig(model=str(tmp_path / "run"), max_tokens=3)
    chat(config, ["1+2=", "3 + 4 =", "3+4="], pieces.append, print)
    assert pieces.count("\n") == 3
    assert sum("expects characters of" in piece for piece in pieces) == 1


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ([], 1, "chat expects --model, the folder of a run or weights, got none."),
        (["micro"], 1, "got 'micro', which has learned nothing."),
        (["--model", "micro", "--temperature", "-1"], 2, "temperature"),
    ],
)
def test_what_cannot_be_talked_to_is_named(line, status, message, capsys):
    code, out, err = run_command(["chat", *line], capsys)
    assert (code, out) == (status, "")
    assert message in err

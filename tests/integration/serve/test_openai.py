"""The openai package draws from a served model: its generator's texts, whole and streamed."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from cases import TEMPLATES, tiny_pretrained, tiny_tokenizer

import funcrl
from funcrl.config import Sampling, ServeConfig
from funcrl.generators.embedded.engine import EmbeddedGenerator
from funcrl.loop.episodes import read_turns
from funcrl.serve.openai import ClientsGone
from funcrl.serve.serve import serving
from funcrl.serve.text import GrowingText, encode_messages
from funcrl.tasks.contracts import all_ends

KEY = "of-these-tests"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", params=[None, "chatml"])
def served(request, tmp_path_factory):
    """The address of a server, its client, and the model's folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    template = request.param and TEMPLATES[request.param]
    tiny_pretrained(folder, template)
    model, params = funcrl.load_params(folder)
    params["embed.weight"] *= 10  # so that texts differ, and some end
    funcrl.save_params(folder, model, params)
    config = ServeConfig(model=str(folder), port=0, key=KEY, folder=folder.parent / "served")
    with serving(config, lambda line: None) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        yield address, client, folder
        client.close()


def drawn(folder, tokens, seed, **options):
    """The turns that the generator draws for a prompt."""
    model, params = funcrl.load_params(folder)
    tokenizer = funcrl.tasks.load_tokenizer(folder)
    sampler = funcrl.generators.Sampler(model, decode=tokenizer.decode)
    sampler.push(params)
    sampling = Sampling(**options, stop_tokens=tuple(all_ends(tokenizer)))
    samples = sampler.generate([tokens], sampling, seed)
    return list(read_turns(samples, tokenizer, sampling))


def test_a_completion_is_what_the_generator_draws(served):
    _, client, folder = served
    tokens = list(funcrl.tasks.load_tokenizer(folder).inner.encode("hi"))
    for prompt in ("hi", tokens):
        found = client.completions.create(
            model=str(folder), prompt=prompt, max_tokens=30, n=3, seed=7, temperature=0.8,
            top_p=0.9, stop=["a", "zz"], logprobs=0, extra_body={"top_k": 50},
        )  # fmt: skip
        turns = drawn(
            folder, tokens, 7, num_samples=3, max_tokens=30, temperature=0.8, top_p=0.9, top_k=50,
            stop=("a", "zz"),
        )  # fmt: skip
        assert [each.text for each in found.choices] == [turn.text for turn in turns]
        assert [each.finish_reason for each in found.choices] == [t.finish_reason for t in turns]
        assert found.choices[0].logprobs.token_logprobs == turns[0].policy_logprobs
        assert found.usage.completion_tokens == sum(len(turn.tokens) for turn in turns)
        assert found.usage.prompt_tokens == len(tokens)


def test_a_chat_is_drawn_behind_the_template(served):
    _, client, folder = served
    tokenizer = funcrl.tasks.load_tokenizer(folder)
    longer = [*MESSAGES, {"role": "assistant", "content": "Oh"}, {"role": "user", "content": "So"}]
    for messages in (MESSAGES, longer):
        found = client.chat.completions.create(
            model=str(folder), messages=messages, max_completion_tokens=9, seed=3, logprobs=True
        )
        (turn,) = drawn(folder, encode_messages(tokenizer, messages), 3, max_tokens=9)
        (choice,) = found.choices
        assert choice.message.content == turn.text
        assert [each.logprob for each in choice.logprobs.content] == turn.policy_logprobs
    if tokenizer.has_template:
        assert encode_messages(tokenizer, MESSAGES) == tokenizer.encode("Hello")
    else:
        text = [*tokenizer.encode("Hello"), *tokenizer.encode_answer("Oh"), tokenizer.end]
        assert encode_messages(tokenizer, longer) == [*text, *tokenizer.encode_answer("So")]


@pytest.mark.parametrize("stop", [None, ["a", "zz", "E"]])
def test_a_stream_is_the_same_text_in_parts(served, stop):
    _, client, folder = served
    asked = {"model": str(folder), "prompt": ["hi", "ho"], "max_tokens": 40, "seed": 5, "n": 2,
             "stop": stop}  # fmt: skip
    whole = client.completions.create(**asked)
    texts, reasons, usage = ["", "", "", ""], {}, None
    events = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [each.text for each in whole.choices]
    assert reasons == {each.index: each.finish_reason for each in whole.choices}
    assert usage == whole.usage
    chat = {"model": str(folder), "messages": MESSAGES, "max_tokens": 9, "seed": 3}
    (choice,) = client.chat.completions.create(**chat).choices
    parts = [event.choices[0] for event in client.chat.completions.create(**chat, stream=True)]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].finish_reason == choice.finish_reason


def test_many_clients_at_once_get_their_own(served):
    _, client, folder = served

    def ask(seed):
        given = {"model": str(folder), "prompt": f"number {seed}", "max_tokens": 12}
        if seed % 3 == 0:  # those without a seed are drawn together
            return len(client.completions.create(**given).choices)
        if seed % 3 == 1:
            events = client.completions.create(**given, seed=seed, stream=True)
            return "".join(each.choices[0].text for each in events)
        return client.completions.create(**given, seed=seed).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(24)))
    tokenizer = funcrl.tasks.load_tokenizer(folder)
    for seed, text in enumerate(found):
        prompt = list(tokenizer.inner.encode(f"number {seed}"))
        (turn,) = drawn(folder, prompt, seed, max_tokens=12)
        assert text == (1 if seed % 3 == 0 else turn.text)


def test_clients_that_break_off_and_send_nonsense_leave_the_server_alone(served, capsys):
    import http.client
    import socket

    address, client, folder = served
    host = address.removeprefix("http://")
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": str(folder), "prompt": "x", "max_tokens": 500, "stream": True}

    def break_off(number):
        connection = http.client.HTTPConnection(host)
        asked = body if number % 2 else body | {"max_tokens": 1}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        response.read(10) if number % 2 else response.read()  # within an answer, or after it
        gone = b"\1\0\0\0\0\0\0\0"  # a reset, not a farewell
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone)
        connection.sock.close()

    def nonsense(number):
        connection = http.client.HTTPConnection(host)
        connection.request("POST", "/v1/chat/completions", b'{"model": [' + b"x" * number, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    with ThreadPoolExecutor(12) as pool:
        gone = [pool.submit(break_off, number) for number in range(12)]
        said = [pool.submit(nonsense, number) for number in range(12)]
        assert {each.result() for each in said} == {400}
        assert [each.result() for each in gone] == [None] * 12
    found = client.completions.create(model=str(folder), prompt="hi", max_tokens=2, seed=0)
    assert found.usage.completion_tokens <= 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out


def test_a_client_that_goes_does_not_hold_the_others(served, monkeypatch):
    _, client, folder = served
    model, ends = str(folder), []
    whole = EmbeddedGenerator.generate

    def generate(*args):
        try:
            samples = whole(*args)
        except ClientsGone as error:
            ends.append(type(error))
            raise
        ends.append(samples)
        return samples

    monkeypatch.setattr(EmbeddedGenerator, "generate", generate)
    events = client.completions.create(
        model=model, prompt="x", max_tokens=10_000, temperature=0.0, stream=True
    )
    next(iter(events))
    events.close()
    assert client.completions.create(model=model, prompt="hi", max_tokens=2, seed=0).choices
    assert ends[0] is ClientsGone
    assert len(ends) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "another"}, "expected the model"),
        ({"logit_bias": {"3": 1}}, "expected no logit_bias"),
        ({"max_tokenz": 3}, "got 'max_tokenz'"),
        ({"prompt": []}, "expected prompt"),
        ({"prompt": [[1, 5000]]}, "got the token 5000"),
        ({"prompt": [3.5]}, "text or tokens"),
        ({"prompt": "\ud800"}, "a text that the tokenizer reads"),
        ({"temperature": -1}, "temperature"),
        ({"seed": "x"}, "an integer"),
        ({"logprobs": 5}, "of the drawn tokens alone"),
        ({"logprobs": 1, "stream": True}, "of no stream"),
        ({"n": 0}, "num_samples"),
        ({"stream": True, "stream_options": True}, "include_usage"),
    ],
)
def test_what_cannot_be_asked_is_said(served, changes, message):
    address, _, folder = served
    body = {"model": str(folder), "prompt": "hi", "max_tokens": 2, **changes}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {KEY}"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code in (400, 404)
    assert message in error["message"]


def test_messages_that_cannot_be_read_are_said(served):
    _, client, folder = served
    wrong = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user"}],
    ]
    for messages in wrong:
        with pytest.raises(openai.BadRequestError, match="contents of text"):
            client.chat.completions.create(model=str(folder), messages=messages)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    asked = {"model": str(folder), "seed": 1, "max_tokens": 3}
    first, second = (
        client.chat.completions.create(messages=each, **asked) for each in (parts, MESSAGES)
    )
    assert first.choices == second.choices
    other = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        other.models.list()
    assert [each.id for each in client.models.list()] == [str(folder)]


def test_a_model_without_a_template_knows_user_and_assistant_alone():
    tokenizer = tiny_tokenizer()
    for roles in (["system", "user"], ["user", "user"], ["assistant"], ["user", "assistant"], []):
        messages = [{"role": role, "content": "x"} for role in roles]
        with pytest.raises(ValueError, match="expected messages of user and assistant in turn"):
            encode_messages(tokenizer, messages)


@pytest.mark.parametrize("stop", [(), ("é",), ("ab", "b€"), ("zzzz",)])
def test_a_growing_text_is_whole_characters_and_ends_before_a_stop_string(stop):
    """Tokens are bytes, so that characters of two to four are cut everywhere."""
    tokenizer = tiny_tokenizer()
    text = "xaéz€abb€ 𝄞zzz zz\u00e9"
    tokens = tokenizer.encode_answer(text)
    found = [text.find(each) for each in stop if each in text]
    wanted = text[: min(found)] if found else text
    sampling = Sampling(max_tokens=99, stop=stop, stop_tokens=(tokenizer.end,))
    if found:
        ends = [text.find(each) + len(each) for each in stop if each in text]
        tokens = tokenizer.encode_answer(text[: min(ends)])
        wanted = text[: min(ends)]
        wanted = wanted[: min(wanted.find(each) for each in stop if each in wanted)]
    else:
        tokens = [*tokens, tokenizer.end]
    growing, parts = GrowingText(tokenizer, sampling), []
    for token in tokens:
        parts.append(growing.add(token))
        assert wanted.startswith("".join(parts))
        assert "\ufffd" not in parts[-1]
    assert "".join(parts) + growing.end() == wanted
    assert not stop or sum(map(len, parts)) >= len(wanted) - max(map(len, stop)) - 4


def test_a_model_of_another_kind_is_heard_too(tmp_path):
    """Recurrent, of transformers, and any network: tokens are heard as they are drawn."""
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(shape).eval()
    recurrent = funcrl.models.Recurrent(funcrl.models.RecurrentConfig(vocab_size=11, width=8))
    generators = funcrl.generators
    for made, model in (
        (generators.HuggingFace, llama), (generators.Recompute, llama),
        (generators.Sampler, recurrent),
    ):  # fmt: skip
        generator = made(model, slots=4)
        params = dict(model.named_parameters()) if model is llama else None
        generator.push(params or funcrl.init_params(model, seed=0))
        heard = {}
        samples = generator.generate(
            [[1, 2], [3]], Sampling(3, max_tokens=5, stop_tokens=(4,)), 0,
            lambda row, token, heard=heard: heard.setdefault(row, []).append(token),
        )  # fmt: skip
        rows = zip(samples.tokens, samples.mask, strict=True)
        assert [heard[row] for row in range(6)] == [row[kept].tolist() for row, kept in rows]


@pytest.fixture
def interruptible():
    """What a script runs in its background ignores Ctrl-C, and so does all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_command_serves_until_it_is_interrupted(tmp_path):
    tiny_pretrained(tmp_path / "model")
    process = subprocess.Popen(
        [sys.executable, "-m", "funcrl", "serve", "model", "--port", "0"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stderr.readline()
        address, key = re.fullmatch(
            r"model at (http://127\.0\.0\.1:\d+), key (\S+)\n", line
        ).groups()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
        found = client.completions.create(model="model", prompt="hi", max_tokens=3, seed=0)
        assert found.usage.prompt_tokens > 0
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
        client.close()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, rest) == (130, "")

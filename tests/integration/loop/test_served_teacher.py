"""Teachers that score tokens alone: a generator, and a server, which may end and come back."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from cases import equal, run_command
from test_streams_of_runs import distilling, goes_on_to_the_same_bits
from test_train import small, untimed

import funcrl
from funcrl.config import AlgorithmConfig, EvalConfig, Sampling, ServeConfig, WarmStartConfig
from funcrl.models import Transformer
from funcrl.run.trust import TrustError
from funcrl.serve.serve import serving

KEY = "of-these-tests"
SAMPLED = {"divergence": "sampled", "numerics": "exact"}


@pytest.fixture(scope="module")
def exact_teacher(tmp_path_factory):
    """A run that has learned something, and computes the same bits wherever it scores."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    learned = WarmStartConfig(steps=30, accuracy=1.0, every=30)
    funcrl.train(small(folder, steps=1, warm_start=learned, seed=4, numerics="exact"))
    return folder


@contextmanager
def serving_run(run, port=0):
    config = ServeConfig(model=str(run), port=port, key=KEY, folder=run.parent / "served")
    with serving(config, lambda line: None) as address:
        yield address


def served(address, run, **options):
    return funcrl.ServedTeacher(address, str(run), key=KEY, **options)


@pytest.mark.parametrize("packing", ["none", "prefixes"])
def test_a_served_teacher_and_a_generator_teach_what_the_network_itself_does(
    tmp_path, exact_teacher, packing
):
    config = partial(distilling, packing=packing, **SAMPLED)
    here = funcrl.train(config(tmp_path / "here", exact_teacher))
    other = config(tmp_path / "other", exact_teacher)
    with serving_run(exact_teacher) as address:
        there = funcrl.train(
            replace(other, teacher=None), teacher=served(f"{address}/v1/", exact_teacher)
        )
    assert equal(there.state, here.state)
    assert untimed(there.history) == untimed(here.history)
    assert here.history[1]["loss/teacher"] != 0
    model, params, _ = funcrl.load_run(exact_teacher)
    generator = funcrl.generators.Sampler(model)
    generator.push(params)
    drawn = replace(other, teacher=None, run_dir=tmp_path / "generator")
    assert equal(funcrl.train(drawn, teacher=generator).state, here.state)


def test_a_file_names_a_server_which_evaluation_needs_no_more(
    tmp_path, exact_teacher, capsys, store
):
    own = tmp_path / "teacher.py"
    with serving_run(exact_teacher) as address:
        port = int(address.rpartition(":")[2])
        own.write_text(
            f"import funcrl\n\n\ndef served():\n"
            f"    return funcrl.ServedTeacher({address!r}, {str(exact_teacher)!r}, key={KEY!r})\n"
        )
        whole = distilling(tmp_path / "whole", f"{own}:served", **SAMPLED)
        goes_on_to_the_same_bits(whole)
    run = whole.run_dir
    assert "teacher_sha256" in json.loads((run / "environment.json").read_text())
    found = funcrl.evaluate(EvalConfig(run=run))
    store_of_another = [each.unlink() for each in store.iterdir()]  # another account
    assert store_of_another
    assert funcrl.evaluate(EvalConfig(run=run)) == found
    assert funcrl.load_run(run).task.name == "sum_digits"
    with pytest.raises(TrustError, match=re.escape(f"--teacher {own}:served")):
        funcrl.train(replace(whole, steps=6), resume=True)
    dry = run_command(["train", "--teacher", f"{own}:served", "--dry-run"], capsys)
    assert dry.code == 0
    assert "teacher: 0.0 MB" in dry.out
    asked = ["train", "--teacher", f"{own}:served", "--algorithm", "distill", "--run-dir",
             tmp_path / "none", "--algorithm.divergence"]  # fmt: skip
    refused = run_command([*asked, "reverse"], capsys)
    assert refused.code == 1
    assert "--algorithm.divergence sampled" in refused.err
    gone = run_command([*asked, "sampled"], capsys)
    assert gone.code != 0
    assert f"127.0.0.1:{port}" in gone.err
    assert "after 4 of 4 attempts" in gone.err
    assert not (tmp_path / "none").exists()


def test_a_run_whose_server_ends_goes_on_when_it_is_back(tmp_path, exact_teacher):
    whole = distilling(tmp_path / "whole", exact_teacher, **SAMPLED)
    straight = funcrl.train(whole)
    other = replace(whole, run_dir=tmp_path / "other", teacher=None)
    with serving_run(exact_teacher) as address:
        asked = served(address, exact_teacher, attempts=1)
        ends = _Ending(asked, after=3)
        with pytest.raises(ConnectionError, match="ServedTeacher expects an answer"):
            funcrl.train(other, teacher=ends)
        resumed = funcrl.train(other, resume=True, teacher=asked)
    assert equal(resumed.state, straight.state)
    assert untimed(resumed.history) == untimed(straight.history)


class _Ending(funcrl.ServedTeacher):
    """A teacher whose server is gone after some rollouts."""

    def __init__(self, teacher, after):
        super().__init__(teacher.address, teacher.model, key=KEY, attempts=1)
        self._left = after

    def score(self, prompts):
        self._left -= 1
        if self._left < 0:
            self.address = "http://127.0.0.1:9"  # where nobody listens
        return super().score(prompts)


def test_a_teacher_of_other_tokens_is_refused(tmp_path, exact_teacher):
    class Shifted(funcrl.ServedTeacher):
        def tokenize(self, text):
            return [token + 1 for token in super().tokenize(text)]

    with serving_run(exact_teacher) as address:
        teacher = Shifted(address, str(exact_teacher), key=KEY)
        config = distilling(tmp_path / "run", exact_teacher, **SAMPLED)
        with pytest.raises(ValueError, match="to have the tokenizer of what it teaches"):
            funcrl.train(replace(config, teacher=None), teacher=teacher)
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_scores_too_little_is_named(tmp_path, exact_teacher):
    class Short:
        def score(self, prompts):
            return [[0.0] * (len(prompt) - 2) for prompt in prompts]

    config = distilling(tmp_path / "run", exact_teacher, **SAMPLED)
    with pytest.raises(
        ValueError, match=r"score\(prompts\) of the teacher .*Short.* of each token"
    ):
        funcrl.train(replace(config, teacher=None), teacher=Short())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "forward"}, "--algorithm.divergence sampled .* got forward for Sampler"),
        ({"sampling": Sampling(temperature=0.5, max_tokens=3)}, "temperature 1 .* got 0.5"),
        ({"sampling": Sampling(top_k=5, max_tokens=3), "behavior": "sampling"}, "got 1.0 and samp"),
    ],
)
def test_what_a_scoring_teacher_cannot_teach_is_refused(options, message):
    divergence = options.pop("divergence", "sampled")
    algorithm = AlgorithmConfig(name="distill", divergence=divergence)
    config = small("unused", algorithm=algorithm, **options)
    model = Transformer(funcrl.models.shape("micro", 19))
    with pytest.raises(ValueError, match=message):
        funcrl.build(config, teacher=funcrl.generators.Sampler(model))
    with pytest.raises(TypeError, match="an object that scores tokens by score"):
        funcrl.build(config, teacher=model)


def test_a_served_teacher_says_what_it_did_not_get(exact_teacher):
    with pytest.raises(ValueError, match="begins with http:// or https://, got 'localhost'"):
        funcrl.ServedTeacher("localhost", "m")
    with serving_run(exact_teacher) as address:
        with pytest.raises(ConnectionError, match="401 .* after 1 of 4 attempts"):
            funcrl.ServedTeacher(address, str(exact_teacher)).score([[1, 2]])
        teacher = served(address, exact_teacher)
        assert teacher.score([]) == []
        (one,), two = teacher.score([[1, 2], [1, 2, 3]])
        assert two[0] == one
        with pytest.raises(ConnectionError, match="400 .* tokens below"):
            teacher.score([[1, 2], [999]])
        for value in (1, "0"):
            fields = {"prompt": [1, 2], "prompt_logprobs": value}
            with pytest.raises(ConnectionError, match="expected prompt_logprobs 0"):
                teacher._ask("/v1/completions", fields)
        with pytest.raises(ConnectionError, match="expected a prompt of text"):
            teacher.tokenize.__wrapped__(teacher, 3)
        teacher._ask = lambda path, fields: {"choices": [{"text": "hi"}]}
        with pytest.raises(ConnectionError, match=r"prompt_logprobs of 2 tokens .* got .*text.*hi"):
            teacher.score([[1, 2]])
        nothing = {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": float("-inf")}}]}]}
        teacher._ask = lambda path, fields: nothing
        with pytest.raises(FloatingPointError, match="finite log-probabilities .* got -inf"):
            teacher.score([[1, 2]])

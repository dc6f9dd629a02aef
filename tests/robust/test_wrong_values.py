"""Values of the wrong kind where a run, a generator or packing takes them: errors in words."""

from dataclasses import replace

import pytest
import torch
from cases import run_command, tiny_model

import funcrl
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.generators import Recompute, Sampler, Sampling

SMALL = TrainConfig(
    steps=1, num_prompts=2, num_generations=2, warm_start=WarmStartConfig(steps=0),
    evaluation=EvaluationConfig(every=0),
)  # fmt: skip


class Dataset:
    """As a data set looks: rows by number."""

    column_names = ("prompt",)

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return {"prompt": "a"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 3}, "model to be a Module, got 3; funcrl.load_params"),
        ({"model": "llama"}, "model to be a Module, got 'llama'; funcrl.load_params"),
        ({"params": 3}, "params to be a dict of tensors, got 3; funcrl.init_params"),
        ({"model_fn": 3}, "model_fn to be a function"),
        ({"step": 3}, "step to be a Step"),
        ({"prepare": 3}, "prepare to be a function or None"),
        ({"optimizer": "adamw"}, r"a GradientTransformation, got 'adamw'; funcrl.optim.adamw\("),
        ({"algorithm": "dapo"}, r"an Algorithm, got 'dapo'; funcrl.grpo\(\) and funcrl.dapo\(\)"),
        ({"algorithm": funcrl.dapo}, r"got the function dapo; funcrl.grpo\(\) and funcrl.dapo"),
        ({"generator": object()}, "funcrl.generators.Generator, got object without push"),
        ({"generator": None}, "funcrl.generators.Generator, got NoneType without push"),
        ({"task": Dataset()}, "--reward, or an answer in every row"),
        ({"task": [{"prompt": "1"}]}, "--reward, or an answer in every row"),
        ({"task": [1]}, r"each row to be a mapping .* got 1 as rows\[0\]"),
        ({"task": {"prompt": ["1"]}}, "got dict; funcrl.tasks.from_rows"),
        ({"task": "gsm8k"}, "got 'gsm8k'; .*funcrl.tasks.load"),
        ({"reward": (len,)}, r"got 'reward'; .*from_rows\(rows, reward"),
        ({"tokenizer": object()}, "got 'tokenizer'; .*load_tokenizer"),
    ],
)
def test_a_part_of_the_wrong_kind(tmp_path, given, words):
    with pytest.raises((TypeError, ValueError), match=f"train expects .*{words}"):
        funcrl.train(replace(SMALL, run_dir=tmp_path / "run"), **given)
    assert not (tmp_path / "run").exists()


def test_a_module_in_place_of_parameters_is_named():
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
    step, sampler = funcrl.grpo_step(funcrl.logprob_fn(model)), funcrl.generators.Sampler(model)
    for use, words in (
        (step.init, "params to be a dict of tensors, got Transformer; funcrl.init_params"),
        (sampler.push, "parameters of Transformer by name, got Transformer; funcrl.init_params"),
    ):
        with pytest.raises(TypeError, match=words):
            use(model)
    with pytest.raises(TypeError, match=" on meta; funcrl.init_params"):
        step.init(dict(model.named_parameters()))


def test_a_replaced_part_of_the_wrong_kind():
    with pytest.raises(ValueError, match=r"Parts\._replace expects generator .*NoneType"):
        funcrl.build(SMALL)._replace(generator=None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": (len,)}, "--reward to name functions as file.py:name, got 'len' itself"),
        ({"tokenizer": object()}, "--tokenizer to name a folder or weights, got object"),
        ({"run_dir": ""}, "--run-dir to be a path, got ''"),
    ],
)
def test_an_option_of_the_wrong_kind(fields, words):
    with pytest.raises((TypeError, ValueError), match=f"train expects {words}"):
        TrainConfig(**fields)


def test_an_empty_folder_is_not_the_working_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_command(["train", "--run-dir", "", "--steps", 1], capsys)
    assert (ended.code, "expects --run-dir to be a path, got ''" in ended.err) == (2, True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_run_is_loaded_onto_no_gpu_that_is_not_there(tmp_path):
    run = funcrl.train(replace(SMALL, run_dir=tmp_path / "run")).run_dir
    with pytest.raises(ValueError, match="load_run expects device cpu where torch sees no GPU"):
        funcrl.load_run(run, device="cuda")


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda sample: None, "NoneType"),
        (lambda sample: "text", "str"),
        (lambda sample: torch.zeros(3), r"torch\.float32 of shape \[3\]"),
        (lambda sample: torch.zeros(2, 2, 2), r"torch\.float32 of shape \[2, 2, 2\]"),
        (
            lambda sample: torch.zeros(len(sample.tokens) + 1, 5),
            r"torch\.float32 of shape \[3, 5\]",
        ),
        (lambda sample: torch.zeros(len(sample.tokens), 5).long(), r"torch\.int64"),
    ],
)
def test_what_is_no_logits(returned, got):
    generator = Recompute(lambda params, sample: returned(sample))
    generator.push({"w": torch.zeros(1)})
    with pytest.raises(TypeError, match=f"Recompute expects logits, .* got {got}"):
        generator.generate([[1, 2]], Sampling(max_tokens=2), seed=0)
    with pytest.raises(TypeError, match="Recompute expects logits"):
        generator.score([[1, 2]])


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["text"], "got a text, which tokenizer.encode turns into tokens, as prompt 0"),
        ("text", "got a text"),
        ([[1], [1.0, 2.5]], r"integers, got 1\.0 in prompt 1"),
        ([None], "got NoneType, as prompt 0"),
        ([1, 2], "got int, as prompt 0"),
    ],
)
def test_what_is_no_prompt(prompts, words):
    model = tiny_model(num_layers=1)
    sampler = Sampler(model)
    sampler.push(funcrl.init_params(model, seed=0))
    with pytest.raises(TypeError, match=f"generate expects .*{words}"):
        sampler.generate(prompts, Sampling(max_tokens=2), seed=0)


@pytest.mark.parametrize("sizes", [{"length": 10**9}, {"length": 9, "row_multiple": 10**9}])
def test_rows_that_no_memory_holds(sizes):
    rollout = funcrl.Rollout(
        tokens=torch.tensor([[5, 6, 7]]), mask=torch.tensor([[False, True, True]]),
        behavior_logprobs=torch.zeros(1, 3), rewards=torch.ones(1),
        group=torch.zeros(1).long(), policy_version=torch.zeros(1).long(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="pack expects packed rows of at most 268,435,456 tokens"):
        funcrl.pack(rollout, funcrl.grpo(), **sizes)


def test_an_own_algorithm_is_not_refused_for_what_nobody_gave(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import funcrl\n\ndef f():\n    return funcrl.grpo()\n")
    name = f"{tmp_path / 'mine.py'}:f"
    line = [
        "train", "--algorithm.name", name, "--steps", 1, "--num-prompts", 2, "--num-generations",
        2, "--warm-start.steps", 0, "--evaluation.every", 0, "--run-dir", tmp_path / "run",
    ]  # fmt: skip
    assert run_command(line, capsys).code == 0
    ended = run_command([*line[:-1], tmp_path / "other", "--algorithm.kl", 0.3], capsys)
    assert ended.code == 1
    assert "expects --algorithm.kl 0" in ended.err

"""A stranger's afternoon: own parts train with all that a run has, in Python and by name."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import mine
import pytest
import torch
import transformers
from cases import equal, run_command, tiny_pretrained, tiny_tokenizer
from torch import nn

import funcrl
from funcrl.config import (
    PRETRAINED,
    AlgorithmConfig,
    CheckpointConfig,
    EvalConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.core.types import Sample
from funcrl.generators import HuggingFace, Recompute, Sampler
from funcrl.loop.from_config import plain_model_fn
from funcrl.run import runs

# torch has no rule to batch nn.GRUCell: it runs one sample after the other, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

FILE = Path(mine.__file__)
SMALL = TrainConfig(
    steps=3, num_prompts=2, num_generations=3, warm_start=WarmStartConfig(steps=4, num_prompts=4),
    evaluation=EvaluationConfig(every=2, num_prompts=3), checkpoint=CheckpointConfig(every=1),
)  # fmt: skip
# fmt: off
LINE = ["--steps", 3, "--num-prompts", 2, "--num-generations", 3, "--warm-start.steps", 4,
        "--warm-start.num-prompts", 4, "--evaluation.every", 2, "--evaluation.num-prompts", 3,
        "--checkpoint.every", 1]
# fmt: on
VOCABULARY = funcrl.tasks.SumDigits().tokenizer.vocab_size
# What the stranger replaces: the parts in Python, and the same on the command line.
CASES = {
    "GRU": (lambda: {"model": mine.Policy(VOCABULARY)}, "--model {file}:Policy"),
    "Llama": (lambda: {"model": mine.llama(VOCABULARY).eval()}, "--model {file}:llama"),
    "GPT-2": (lambda: {"model": mine.gpt2(VOCABULARY).eval()}, "--model {file}:gpt2"),
    "MaxRL": (
        lambda: {"algorithm": mine.maxrl(kl=0.1), "optimizer": mine.signed(1e-3)},
        "--algorithm.name {file}:maxrl --optimizer.name {file}:signed --generator {file}:slowly",
    ),
}
GENERATORS = {"GRU": Recompute, "Llama": HuggingFace, "GPT-2": HuggingFace, "MaxRL": Sampler}


def rows_of(folder):
    """The metrics of a run, without its times."""
    kept = [dict(row) for row in runs.read_history(folder)]
    return [{k: v for k, v in row.items() if "time" not in k} for row in kept]


def check_whole(folder, steps=3):
    """A run has evaluations and completions."""
    rows = runs.read_history(folder)
    assert [row["step"] for row in rows] == [*range(steps + 1)]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert {row["step"] for row in runs.read_lines(folder / runs.COMPLETIONS)} == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_own_parts_in_python(tmp_path, name):
    torch.manual_seed(0)
    made = CASES[name][0]()
    config = replace(SMALL, run_dir=tmp_path / "whole")
    parts = funcrl.build(config)._replace(**made)
    assert type(parts.generator) is GENERATORS[name]
    whole = funcrl.train(config, parts=parts)
    check_whole(config.run_dir)
    before = {n: leaf.detach().clone() for n, leaf in parts.model.named_parameters()} \
        if name != "MaxRL" else {}  # fmt: skip

    stopped = replace(config, run_dir=tmp_path / "stopped")
    calls = []
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(stopped, parts=parts, stop=lambda: calls.append(1) or _steps(stopped) == 2)
    with pytest.raises(ValueError, match=f"train expects parts=, with {' and '.join(made)}"):
        funcrl.train(stopped, resume=True)
    resumed = funcrl.train(stopped, parts=parts, resume=True)
    assert equal(resumed.state, whole.state)
    assert rows_of(stopped.run_dir) == rows_of(config.run_dir)
    assert all(torch.equal(leaf, before[n]) for n, leaf in parts.model.named_parameters() if before)

    asked = EvalConfig(run=stopped.run_dir, num_prompts=3)
    found = funcrl.evaluate(asked, parts=parts)
    # A mean of three, in float64 here and in float32 in a run's metrics.
    assert found.accuracy == pytest.approx(resumed.history[-1]["eval/accuracy"], rel=2**-23)
    if "model" in made:
        with pytest.raises(ValueError, match="evaluate expects parts=, with model"):
            funcrl.evaluate(asked)
    else:  # the network is the configuration's
        assert funcrl.evaluate(asked).accuracy == found.accuracy


def _steps(config):
    return len(runs.read_lines(config.run_dir / runs.METRICS)) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_own_parts_by_name(tmp_path, capsys, name):
    run = tmp_path / "run"
    own = CASES[name][1].format(file=FILE).split()
    ended = run_command(["train", "--run-dir", run, *LINE, *own], capsys)
    assert ended.code == 0, ended.err
    check_whole(run)
    rows = rows_of(run)
    params = funcrl.load_run(run, note=print).params

    shutil.rmtree(run / "checkpoints" / "3")  # as if the machine had stopped before the last step
    ended = run_command(["train", "--resume", run], capsys)
    assert ended.code == 0, ended.err
    assert (run / "checkpoints" / "3").exists()
    assert rows_of(run) == rows
    assert equal(funcrl.load_run(run, note=print).params, params)

    ended = run_command(["eval", "--run", run, "--num-prompts", "3"], capsys)
    assert ended.code == 0, ended.err
    assert "accuracy" in ended.out
    assert run_command(["report", run], capsys).code == 0
    assert "Completions" in (run / "report.html").read_text()


def test_a_replaced_part_takes_what_depends_on_it_along():
    parts = funcrl.build(SMALL)
    assert parts._replace(task=parts.task)[:-1] == parts[:-1]
    sharper = parts._replace(algorithm=funcrl.dapo())
    assert sharper.step is not parts.step
    assert sharper.generator is parts.generator
    assert sharper.model_fn is parts.model_fn
    # A part that was replaced stays, and in any order.
    step = funcrl.grpo_step(parts.model_fn)
    assert parts._replace(step=step)._replace(algorithm=funcrl.dapo()).step is step
    model = mine.Policy(VOCABULARY)
    other = sharper._replace(model=model)
    assert type(other.generator) is Recompute
    assert other.algorithm is sharper.algorithm
    assert {*other.replaced} == {"algorithm", "model"}
    assert copy.copy(parts) == parts
    for reward, task in ((3, funcrl.tasks.SumDigits()), (5, funcrl.tasks.SumDigits(5))):
        again = parts._replace(task=task)
        assert again.model.config.vocab_size == task.tokenizer.vocab_size, reward
        assert again.task.name == task.name
    with pytest.raises(TypeError, match=r"Parts\._replace expects task, model, .*'modle'"):
        parts._replace(modle=model)


def test_the_algorithm_says_whether_a_reference_is_kept(tmp_path):
    config = replace(SMALL, steps=1, warm_start=WarmStartConfig(steps=0),
                     algorithm=AlgorithmConfig(kl=0.0))  # fmt: skip
    parts = funcrl.build(config, algorithm=funcrl.grpo(kl=0.5))
    assert parts.kl == 0.5
    history = funcrl.train(replace(config, run_dir=tmp_path), parts=parts).history
    assert "kl" in history[1]


def test_parts_of_another_configuration_are_refused(tmp_path):
    parts = funcrl.build(SMALL)
    config = replace(SMALL, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="train expects parts .* another seed"):
        funcrl.train(replace(config, seed=1), parts=parts)
    with pytest.raises(ValueError, match="train expects task= or parts="):
        funcrl.train(config, parts=parts, task=funcrl.tasks.SumDigits())
    for options, given, words in (
        ({"compile": funcrl.CompileConfig()}, {"step": parts.step}, "--no-compile"),
        ({"lora": funcrl.config.LoraConfig(rank=2)}, {"model_fn": parts.model_fn}, "--lora.rank 0"),
        ({"attend": "flash"}, {"model": mine.Policy(VOCABULARY)}, "--attend native"),
    ):
        with pytest.raises(ValueError, match=f"train expects {words}"):
            funcrl.build(replace(SMALL, **options), **given)
    assert not config.run_dir.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": AlgorithmConfig(name=f"{FILE}:maxrl")}, None),
        ({"algorithm": AlgorithmConfig(name=f"{FILE}:signed", kl=0.3)}, "algorithm.kl 0 for .*:s"),
        ({"algorithm": AlgorithmConfig(name=f"{FILE}:signed")}, "name .* needs learning_rate"),
        ({"algorithm": AlgorithmConfig(name=f"{FILE}:nothing")}, ":nothing to name an object"),
        ({"optimizer": OptimizerConfig(name=f"{FILE}:signed")}, None),
        ({"optimizer": OptimizerConfig(name=f"{FILE}:signed", weight_decay=0.1)}, "weight-decay 0"),
        ({"optimizer": OptimizerConfig(name=f"{FILE}:signed", betas=(0, 0.9))}, "no --opt.*betas"),
        ({"optimizer": OptimizerConfig(name=f"{FILE}:VOCABULARY")}, "to name an object"),
        ({"optimizer": OptimizerConfig(name=f"{FILE}:llama")}, "name .* needs vocab_size"),
        ({"model": f"{FILE}:signed"}, "--model .* needs learning_rate"),
        ({"model": f"{FILE}:Policy", "generator": "vllm"}, "--generator sampler"),
        ({"generator": f"{FILE}:Policy"}, "--generator .* needs vocab_size"),
    ],
)  # fmt: skip
def test_names_of_own_code_are_checked(options, words):
    config = replace(SMALL, **options)
    if words is None:
        assert funcrl.build(config).replaced == frozenset()
        return
    with pytest.raises(ValueError, match=words):
        funcrl.build(config)


def test_options_that_a_function_lacks_or_needs_are_named(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import funcrl\n"
        "def bare(kl, entropy):\n    return funcrl.grpo(kl=kl, entropy=entropy)\n"
        "def bounded(clip, kl, entropy):\n"
        "    return funcrl.grpo(clip=clip, kl=kl, entropy=entropy)\n"
        "def other(loss, kl, entropy):\n    return funcrl.grpo()\n"
    )

    def algorithm(name, **options):
        options = AlgorithmConfig(name=f"{file}:{name}", **options)
        return funcrl.build(replace(SMALL, algorithm=options)).algorithm

    assert algorithm("bounded", clip=(0.1, 0.3)).surrogate.high == 0.3
    for name, options, words in (
        ("bare", {"clip": (0.1, 0.3)}, r"expects no --algorithm\.clip for .*:bare, which takes no"),
        ("bare", {"scale_rewards": "batch"}, r"expects no --algorithm\.scale-rewards for"),
        ("bounded", {}, r"expects --algorithm\.clip for .*:bounded, which needs clip, got none"),
        ("other", {}, r"correction, clip, scale_rewards, got one that needs loss"),
    ):
        with pytest.raises(ValueError, match=words):
            algorithm(name, **options)


@pytest.mark.parametrize("kind", [AlgorithmConfig, OptimizerConfig])
def test_other_names_are_refused_with_those_that_are_known(kind):
    with pytest.raises(ValueError, match=r"name to be one of .*your own as file\.py:name, got 'x'"):
        kind(name="x")


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_named_optimizers_follow_the_schedule(name):
    options = OptimizerConfig(name=name, learning_rate=0.5, warmup=4, schedule="constant")
    parts = funcrl.build(replace(SMALL, optimizer=options))
    params = {n: torch.ones(leaf.shape) for n, leaf in parts.model.named_parameters()}
    state = parts.optimizer.init(params)
    for updates in (1, 2, 3):
        grads = funcrl.tree.map(torch.ones_like, params)
        _, state = parts.optimizer.update(grads, state, params)
        rate = float(funcrl.optim.current_learning_rate(state))
        assert rate == pytest.approx(0.1 * updates)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [LoraConfig.targets, ("embed",), (".mlp.", "embed")])
def test_muon_trains_adapters_which_may_all_be_matrices_of_layers(tmp_path, targets):
    """Or none of them."""
    lora = LoraConfig(rank=2, targets=targets)
    config = replace(SMALL, run_dir=tmp_path, lora=lora, optimizer=OptimizerConfig(name="muon"))
    trained = funcrl.train(config)
    assert all(leaf.abs().max() > 0 for leaf in trained.state.params.values())


@pytest.mark.slow
def test_a_run_is_a_model(tmp_path):
    config = replace(SMALL, run_dir=tmp_path / "first")
    first = funcrl.train(config)
    model, params, task = funcrl.load_run(config.run_dir)
    assert equal(params, first.state.params)
    assert (type(model).__name__, task.name) == ("Transformer", "sum_digits")
    options = funcrl.loop.sources.defaults(str(config.run_dir))
    assert (options.warm_start.steps, options.model) == (0, str(config.run_dir))
    second = replace(config, model=str(config.run_dir), run_dir=tmp_path / "second",
                     warm_start=options.warm_start)  # fmt: skip
    parts = funcrl.build(second)
    assert equal(funcrl.loop.build.first_params(parts), params)
    funcrl.train(second)
    third = EvalConfig(model=str(second.run_dir), num_prompts=3)
    assert (
        funcrl.evaluate(third).accuracy
        == funcrl.evaluate(EvalConfig(run=second.run_dir, num_prompts=3)).accuracy
    )


def test_a_tokenizer_is_named_beside_a_network_of_one_s_own(tmp_path):
    tiny_pretrained(tmp_path / "chat")
    config = replace(SMALL, model=f"{FILE}:llama", tokenizer=str(tmp_path / "chat"))
    parts = funcrl.build(config)
    assert parts.task.tokenizer.encode("a") == tiny_tokenizer().encode("a")
    assert parts.model.config.vocab_size == parts.task.tokenizer.vocab_size
    with pytest.raises(ValueError, match="train expects --tokenizer to be"):
        funcrl.build(replace(config, tokenizer=str(tmp_path / "none")))


@pytest.mark.slow
def test_what_a_network_of_one_s_own_learned_is_exported_or_loaded(tmp_path):
    config = replace(SMALL, steps=1, warm_start=WarmStartConfig(steps=0))
    for name in ("llama", "Policy"):
        funcrl.train(replace(config, run_dir=tmp_path / name, model=f"{FILE}:{name}"))
    model, params, _ = funcrl.load_run(tmp_path / "llama", note=print)
    out = funcrl.export(tmp_path / "llama", tmp_path / "model")
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(saved) is type(model)
    assert all(torch.equal(leaf, params[name]) for name, leaf in saved.named_parameters())
    with pytest.raises(ValueError, match=r"export expects a Transformer.*Policy.*load_run\("):
        funcrl.export(tmp_path / "Policy", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_adapters_stand_on_is_what_the_run_was_given(tmp_path):
    config = replace(SMALL, run_dir=tmp_path / "run", steps=1, lora=LoraConfig(rank=2),
                     warm_start=WarmStartConfig(steps=0))  # fmt: skip
    parts = funcrl.build(config)
    own = funcrl.init_params(parts.model, seed=99)
    parts = parts._replace(params=own)
    trained = funcrl.train(config, parts=parts)
    merged = parts.policy(trained.state.params)
    assert equal(funcrl.load_run(config.run_dir, parts=parts).params, merged)
    for use in (funcrl.load_run, lambda run: funcrl.export(run, tmp_path / "model"),
                lambda run: funcrl.evaluate(EvalConfig(run=run))):  # fmt: skip
        with pytest.raises(ValueError, match=r"expects parts=, with params"):
            use(config.run_dir)
    with pytest.raises(ValueError, match=r"--lora.rank 0 with --model .*run, a run"):
        funcrl.build(replace(config, model=str(config.run_dir)))


def test_a_run_is_a_model_for_its_own_tokenizer_alone(tmp_path):
    config = replace(SMALL, run_dir=tmp_path / "run", steps=1, warm_start=WarmStartConfig(steps=0))
    funcrl.train(config)
    again = replace(config, model=str(config.run_dir), run_dir=tmp_path / "next")
    for alphabet in ("ab", "0123456789=-"):  # fewer tokens, and as many others
        task = funcrl.tasks.with_rewards(funcrl.tasks.SumDigits(), {"one": lambda p, c: 1.0})
        other = funcrl.tasks.adapt.changed(task, tokenizer=funcrl.tasks.CharTokenizer(alphabet))
        with pytest.raises(ValueError, match="train expects a task with the tokenizer"):
            funcrl.train(again, task=other)
    assert not again.run_dir.exists()
    assert funcrl.build(again).model.config.width == 64


class _Wrong(torch.nn.Module):
    def __init__(self, rows, columns, pair=False):
        super().__init__()
        self.table = torch.nn.Embedding(rows, columns)
        self.pair = pair

    def forward(self, tokens):
        found = self.table(tokens)
        return (found, found) if self.pair else found


@pytest.mark.parametrize(
    "model", [_Wrong(VOCABULARY, 4), _Wrong(4, VOCABULARY), _Wrong(VOCABULARY, VOCABULARY, True)]
)
def test_a_network_that_gives_no_logits_is_refused(model):
    words = rf"train expects --model micro to give logits \[T, at least {VOCABULARY}\]"
    with pytest.raises(ValueError, match=words):
        funcrl.build(SMALL, model=model)


def test_a_model_is_not_trained_without_the_weights_that_are_named(tmp_path):
    tiny_pretrained(tmp_path)
    config = replace(SMALL, model=str(tmp_path), run_dir=tmp_path / "run")
    parts = funcrl.build(config)
    with pytest.raises(ValueError, match="train expects params beside a model.*a Transformer"):
        funcrl.train(config, model=parts.model)
    with pytest.raises(ValueError, match="train expects params beside a model.*a Transformer"):
        funcrl.train(config, model=parts.model, params=parts.params)
    with pytest.raises(ValueError, match="Parts._replace expects params beside a model"):
        parts._replace(model=parts.model)
    model, params = funcrl.load_params(tmp_path)
    given = parts._replace(model=model, params=params)
    assert equal(given.step.init(given.params).params, params)
    own = mine.llama(VOCABULARY).eval()  # which starts from the values that it has
    assert funcrl.build(config, funcrl.tasks.SumDigits(), model=own).model is own


def test_weights_with_the_defaults_of_a_new_model_are_warned_of(tmp_path, recwarn):
    tiny_pretrained(tmp_path / "model")
    steps = {"steps": 1, "num_prompts": 2, "num_generations": 2, "evaluation": SMALL.evaluation}
    options = {"model": str(tmp_path / "model"), "warm_start": WarmStartConfig(steps=0), **steps}
    with pytest.warns(UserWarning, match=r"a learning rate of 0\.002; .*PRETRAINED") as found:
        funcrl.train(TrainConfig(tmp_path / "new", **options))
    assert found[0].filename == __file__
    funcrl.train(TrainConfig(tmp_path / "new", **options), resume=True)
    slower = OptimizerConfig(learning_rate=1e-5)
    funcrl.train(TrainConfig(tmp_path / "slower", **options, optimizer=slower))
    funcrl.train(TrainConfig(tmp_path / "own", **options), optimizer=funcrl.optim.sgd(1e-5))
    funcrl.train(replace(PRETRAINED, run_dir=tmp_path / "weights", **options))
    assert not recwarn.list


class _SeesAll(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens):
        rows = self.table(tokens)
        return rows + rows.mean(0)  # of the tokens that come later, too


def test_a_network_that_sees_later_tokens_is_refused():
    with pytest.raises(ValueError, match="train expects --model micro to be causal.*_SeesAll"):
        funcrl.build(SMALL, model=_SeesAll())


def test_weights_that_a_file_draws_are_of_the_seed(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        f"policy = torch.nn.Sequential(torch.nn.Embedding({VOCABULARY}, {VOCABULARY}))\n"
    )
    config = replace(SMALL, model=f"{tmp_path / 'net.py'}:policy")
    first, same, other = (
        funcrl.loop.build.first_params(funcrl.build(each))
        for each in (config, config, replace(config, seed=1))
    )
    assert equal(first, same)
    assert not equal(first, other)


@pytest.mark.slow
def test_a_network_that_asks_for_the_tokenizer_is_loaded_with_its_task(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def make(tokenizer):\n"
        "    size = tokenizer.vocab_size\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(size, size))\n"
    )
    config = replace(SMALL, run_dir=tmp_path / "run", steps=1, model=f"{tmp_path / 'net.py'}:make",
                     warm_start=WarmStartConfig(steps=0))  # fmt: skip
    trained = funcrl.train(config)
    assert equal(funcrl.load_run(config.run_dir, note=print).params, trained.state.params)
    with pytest.raises(ValueError, match="export expects --model .* without a tokenizer"):
        funcrl.export(config.run_dir, tmp_path / "out")
    again = replace(config, model=str(config.run_dir), run_dir=tmp_path / "next")
    assert equal(funcrl.loop.build.first_params(funcrl.build(again)), trained.state.params)


class Headed(nn.Module):
    """A network whose forward takes `head`, as that of `Transformer` does."""

    heads: ClassVar = []

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens, head=None):
        self.heads.append(head)
        x = self.embed(tokens).cumsum(0)
        return self.out(x) if head is None else head(x, self.out.weight)


def test_logits_of_an_own_network_that_takes_head_come_in_chunks():
    torch.manual_seed(0)
    model = Headed().double()
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    sample = Sample(torch.arange(7), torch.arange(7))
    whole = funcrl.logprob_fn(model)(params, sample)
    assert Headed.heads == [None]
    found = plain_model_fn("train", replace(SMALL, logprob_chunk=3), model)(params, sample)
    assert Headed.heads[1] is not None
    assert (found.logprobs - whole.logprobs).abs().max() <= 1e-12
    assert (found.entropy - whole.entropy).abs().max() <= 1e-12

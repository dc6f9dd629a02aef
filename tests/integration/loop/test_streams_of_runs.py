"""Runs that learn from given answers and from a teacher: resumed, packed, evaluated, refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from cases import TEMPLATES, equal, run_command, tiny_pretrained
from test_train import small, untimed
from torch.nn.functional import cross_entropy

import funcrl
from funcrl.cli.train import read_line
from funcrl.config import (
    AlgorithmConfig,
    CompileConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    TrainConfig,
    WarmStartConfig,
    read_config,
)
from funcrl.loop.build import first_params
from funcrl.loop.rollouts.grade import RewardError
from funcrl.loop.supervised import answers_of
from funcrl.tasks import SumDigits, from_rows

SFT = AlgorithmConfig(name="sft")


def distilling(folder, teacher, **options):
    divergence = options.pop("divergence", "reverse")
    algorithm = AlgorithmConfig(name="distill", divergence=divergence)
    return small(folder, algorithm=algorithm, teacher=str(teacher), **options)


def goes_on_to_the_same_bits(whole, **given):
    """Compare a run with one that is stopped after two steps and goes on; return the first."""
    straight = funcrl.train(whole, **given)
    half = replace(whole, run_dir=whole.run_dir.with_name("half"))
    stops = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(half, stop=lambda: next(stops), **given)
    resumed = funcrl.train(half, resume=True, **given)
    assert equal(resumed.state, straight.state)
    assert untimed(resumed.history) == untimed(straight.history)
    return straight


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run that has learned something."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    config = small(
        folder, steps=1, warm_start=WarmStartConfig(steps=30, accuracy=1.0, every=30), seed=4
    )
    funcrl.train(config)
    return folder


@pytest.fixture(scope="module")
def recurrent_teacher(tmp_path_factory):
    """A run of a network that carries a state."""
    folder = tmp_path_factory.mktemp("recurrent") / "run"
    funcrl.train(small(folder, steps=1, model="lstm"))
    return folder


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_supervised_run_trains_on_the_answers(tmp_path):
    config = small(tmp_path / "run", algorithm=SFT, steps=6, num_prompts=8)
    parts = funcrl.build(config)
    params = first_params(parts)
    trained = funcrl.train(config)
    first = trained.history[1]
    prompts = parts.task.prompts(funcrl.rng.fold_in(0, 1), 0, 8)
    texts = [f"{prompt.text}{prompt.answer}" for prompt in prompts]
    apply, losses = funcrl.models.logits_fn(parts.model), []
    for text, prompt in zip(texts, prompts, strict=True):
        tokens = torch.tensor([*parts.task.tokenizer.encode(text), 0])  # and the end
        logits = apply(params, funcrl.Sample(tokens, torch.arange(len(tokens))))
        start = len(prompt.text)
        losses.append(cross_entropy(logits[start - 1 : -1], tokens[start:], reduction="none"))
    assert first["num_tokens"] == sum(map(len, losses))
    assert abs(first["loss"] - torch.cat(losses).mean()) < 1e-5
    assert not {name for name in first if name.startswith(("reward", "sampling/", "completions/"))}
    held_out = [row["eval/loss"] for row in trained.history if "eval/loss" in row]
    assert len(held_out) == 4
    assert held_out[0] > held_out[1] > held_out[2] > held_out[3]
    seen = lines(tmp_path / "run", "completions.jsonl")  # of the evaluations
    assert {row["step"] for row in seen} == {2, 4, 6}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "samples", "num_minibatches": 2, "lora": LoraConfig(rank=2), "pack_length": 24},
        {"numerics": "exact"},
        {"compile": CompileConfig(backend="eager"), "length_multiple": 16, "num_iterations": 2},
    ],
    ids=["plain", "packed, adapters", "exact", "compiled"],
)
def test_a_supervised_run_goes_on_to_the_same_bits(tmp_path, options):
    whole = small(tmp_path / "whole", algorithm=SFT, num_prompts=4, **options)
    goes_on_to_the_same_bits(whole)


@pytest.mark.parametrize(
    ("divergence", "options"),
    [
        ("reverse", {}),
        ("forward", {"packing": "prefixes", "lora": LoraConfig(rank=2)}),
        ("sampled", {"numerics": "exact", "packing": "samples"}),
        ("reverse", {"compile": CompileConfig(backend="eager"), "length_multiple": 16}),
    ],
    ids=["plain", "packed, adapters", "sampled, exact", "compiled"],
)
def test_a_taught_run_goes_on_to_the_same_bits(tmp_path, teacher, divergence, options):
    whole = distilling(tmp_path / "whole", teacher, divergence=divergence, **options)
    goes_on_to_the_same_bits(whole)
    facts = json.loads((tmp_path / "whole" / "environment.json").read_text())
    assert facts["teacher_step"] == "1"


@pytest.mark.parametrize("divergence", ["reverse", "forward", "sampled"])
def test_the_first_loss_is_the_divergence_from_the_teacher(tmp_path, teacher, divergence):
    config = distilling(tmp_path / "run", teacher, divergence=divergence, steps=1)
    parts = funcrl.build(config)
    params = first_params(parts)
    found = funcrl.train(config).history[1]
    parts.generator.push(params)
    prompts = parts.task.prompts(funcrl.rng.fold_in(0, 1), 0, 3)
    seed = funcrl.rng.fold_in(0, 2, 1)
    completed = funcrl.rollouts.complete(parts.task, parts.generator, prompts, parts.sampling, seed)
    rollout = funcrl.rollouts.to_rollout(completed, torch.zeros(12))
    apply, total = funcrl.models.logits_fn(parts.model), 0.0
    for tokens, mask in zip(rollout.tokens, rollout.mask, strict=True):
        sample = funcrl.Sample(tokens, torch.arange(len(tokens)))
        own, other = (
            apply(each, sample).double().log_softmax(-1)[:-1]
            for each in (params, parts.teacher.params)
        )
        gap = (own - other).gather(1, tokens[1:, None])[:, 0]
        whole = {
            "reverse": (own.exp() * (own - other)).sum(-1),
            "forward": (other.exp() * (other - own)).sum(-1),
            "sampled": gap,
        }[divergence]
        total += whole[mask[1:]].sum().item()
    assert abs(found["loss/teacher"] - total / rollout.mask.sum()) < 1e-5
    assert found["loss/teacher"] == found["loss"]


def test_a_policy_comes_close_to_its_teacher(tmp_path, teacher):
    config = distilling(
        tmp_path / "run", teacher, steps=40, num_prompts=8,
        evaluation=EvaluationConfig(every=0), log=LogConfig(completions_every=40),
    )  # fmt: skip
    rows = funcrl.train(config).history
    assert rows[-1]["loss/teacher"] < 0.5 * rows[1]["loss/teacher"]


def test_a_teacher_beside_rewards_teaches_groups_without_a_difference(tmp_path, teacher):
    """Almost no completion is right, so that most groups have equal rewards."""
    config = small(
        tmp_path / "run", teacher=str(teacher), steps=2, drop_zero_variance=True,
        algorithm=AlgorithmConfig(name="grpo", teacher=0.5, kl=0.0),
    )  # fmt: skip
    rows = funcrl.train(config).history[1:]
    for row in rows:
        assert abs(row["loss"] - row["loss/policy"] - row["loss/teacher"]) < 1e-6
        assert row["loss/teacher"] > 0
        assert row["num_tokens"] >= 12  # of all completions


@pytest.mark.parametrize("share", [2, 1])  # one reward in two fails, or each
def test_a_teacher_needs_no_reward(tmp_path, teacher, share):
    class Failing(SumDigits):
        calls = 0

        def reward(self, prompt, completion):
            Failing.calls += 1
            if Failing.calls > 5 and Failing.calls % share == 0:  # not in the evaluation before
                raise ValueError("no reward")
            return {"correct": 0.0}

    config = distilling(
        tmp_path / "run", teacher, steps=1, on_reward_error="skip", mask_truncated=share == 2
    )
    if share == 1:
        with pytest.raises(RewardError, match="at least one reward"):
            funcrl.train(config, task=Failing())
        return
    row = funcrl.train(config, task=Failing()).history[1]
    assert row["num_reward_errors"] == 6
    assert row["reward"] == 0
    assert row["loss/teacher"] > 0
    seen = lines(tmp_path / "run", "completions.jsonl")
    assert seen
    assert not [each for each in seen if "advantage" in each]


@pytest.mark.parametrize("divergence", ["reverse", "sampled"])
def test_a_teacher_that_carries_a_state_computes_in_its_own_way(
    tmp_path, recurrent_teacher, divergence
):
    rows = {}
    for attend, packing in (("native", "none"), ("flash", "none"), ("flash", "samples")):
        run = distilling(
            tmp_path / f"{attend}-{packing}", recurrent_teacher, divergence=divergence, steps=1,
            attend=attend, packing=packing,
        )  # fmt: skip
        rows[attend, packing] = funcrl.train(run).history[1]["loss/teacher"]
    wanted = rows.pop(("native", "none"))
    assert wanted != 0
    assert rows == {key: pytest.approx(wanted, rel=1e-4) for key in rows}
    shared = distilling(
        tmp_path / "shared", recurrent_teacher, divergence=divergence, packing="prefixes"
    )
    with pytest.raises(ValueError, match="--packing none or samples .* prefixes for Recurrent"):
        funcrl.train(shared)
    assert not shared.run_dir.exists()


def test_the_command_line_packs_for_the_teacher_too(tmp_path, teacher, recurrent_teacher, capsys):
    for number, (other, packing) in enumerate(((teacher, "prefixes"), (recurrent_teacher, "none"))):
        run = tmp_path / str(number)
        options = ["--num-prompts", "2", "--warm-start.steps", "0", "--evaluation.every", "0"]
        line = ["train", "--run-dir", run, "--steps", "1", "--teacher", other, *options]
        ended = run_command(line, capsys)
        assert ended.code == 0, ended.err
        assert read_config(TrainConfig, run / "config.yaml").packing == packing


def test_answers_may_be_learned_with_a_teacher(tmp_path, teacher):
    config = small(tmp_path / "run", algorithm=SFT, teacher=str(teacher), steps=2)
    row = funcrl.train(config).history[1]
    assert min(row["loss/cross_entropy"], row["loss/teacher"]) > 0


def test_a_taught_run_does_without_its_teacher_afterwards(tmp_path, teacher):
    folder = tmp_path / "gone"
    shutil.copytree(teacher, folder)
    config = distilling(tmp_path / "run", folder, steps=2)
    funcrl.train(config)
    shutil.rmtree(folder)
    found = funcrl.evaluate(funcrl.config.EvalConfig(run=tmp_path / "run", num_prompts=3))
    assert found.num_prompts == 3
    assert "embed.weight" in funcrl.load_run(tmp_path / "run").params
    with pytest.raises(ValueError, match="--teacher"):
        funcrl.train(replace(config, steps=3), resume=True)


def test_a_teacher_in_python_is_any_network(tmp_path):
    config = small(tmp_path / "run", algorithm=AlgorithmConfig(name="distill"), steps=1)
    wide = funcrl.models.Transformer(funcrl.models.shape("tiny", vocab_size=13))
    taught = funcrl.Teacher(wide, funcrl.init_params(wide, seed=3), "forward")
    row = funcrl.train(config, teacher=taught).history[1]
    assert row["loss/teacher"] > 0
    half = AlgorithmConfig(name="grpo", teacher=0.5, kl=0.0, entropy=0.0)
    beside = small(tmp_path / "beside", algorithm=half, steps=1)
    both = funcrl.train(beside, teacher=taught).history[1]
    assert abs(both["loss/teacher"] - 0.5 * row["loss/teacher"]) < 1e-6


def test_a_teacher_is_counted_in_the_memory(teacher):
    shape = funcrl.models.shape("micro", vocab_size=13)
    config = TrainConfig(teacher=str(teacher))
    alone = funcrl.memory.estimate_memory(config, shape, 8)
    taught = funcrl.memory.estimate_memory(config, shape, 8, teacher=shape)
    assert (alone.teacher, taught.teacher) == (0, 4 * funcrl.memory.num_params(shape))
    assert taught.state - alone.state == taught.teacher
    gradient = 4 * 13 * 64  # of the matrix that makes the policy's
    assert taught.logits - gradient == 2 * (alone.logits - gradient)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": AlgorithmConfig(name="distill")}, "train expects --teacher MODEL"),
        (
            {"algorithm": AlgorithmConfig(divergence="forward")},
            "--teacher MODEL with --algorithm.teacher and --algorithm.divergence",
        ),
        (
            {"teacher": "micro"},
            "expects --teacher to be pretrained weights, the folder of a run, or",
        ),
        ({"teacher": "./no-such"}, "train expects --teacher to be one of"),
        ({"teacher": "RUN", "numerics": "exact"}, "--algorithm.divergence sampled with --numerics"),
        ({"teacher": "RUN", "task": "calculator"}, "tokenizer that --teacher"),
        ({"algorithm": SFT, "max_staleness": 1}, "--max-staleness 0 with sft"),
        ({"algorithm": SFT, "warm_start": WarmStartConfig()}, "--warm-start.steps 0 with sft"),
        ({"algorithm": SFT, "num_minibatches": 2}, "to divide num_prompts = 3, got 2"),
        (
            {"algorithm": replace(SFT, divergence="sampled"), "teacher": "RUN"},
            "reverse or forward with sft",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_named(tmp_path, teacher, options, message):
    if options.get("teacher") == "RUN":
        options = {**options, "teacher": str(teacher)}
    with pytest.raises(ValueError, match=message):
        funcrl.train(small(tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_rows_without_answers_for_supervised_training_are_named(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": [n]} for n in range(4)]
    task = from_rows(rows, {"none": lambda completion: 0.0}, held_out=0.0)
    with pytest.raises(
        ValueError, match=r"^sft expects prompts with answers, got none for '\d\?' f"
    ):
        funcrl.train(small(tmp_path / "run", algorithm=SFT), task=task)


PPO = AlgorithmConfig(name="ppo", lam=0.9, value=0.5)


class Graded(SumDigits):
    """Almost every completion earns something of its own."""

    def reward(self, prompt, completion):
        return {"correct": (sum(map(ord, completion)) % 7) / 7}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "prefixes", "num_minibatches": 2, "num_iterations": 2, "num_generations": 2},
        {"compile": CompileConfig(backend="eager"), "length_multiple": 16},
        {"model": "lstm", "max_staleness": 1, "num_generations": 1},
    ],
    ids=["plain", "packed, four updates", "compiled", "recurrent, ahead"],
)
def test_a_run_with_a_critic_goes_on_to_the_same_bits(tmp_path, options):
    whole = small(tmp_path / "whole", algorithm=PPO, **options)
    straight = goes_on_to_the_same_bits(whole, task=Graded())
    assert straight.state.params["critic.weight"].abs().max() > 0
    assert all(row["loss/value"] >= 0 for row in straight.history[1:])


def test_the_first_step_with_a_critic_is_the_literal_one(tmp_path):
    """It expects nothing at first: each token's advantage is the reward, discounted, whitened."""
    algorithm = replace(PPO, gamma=0.5, lam=1.0, kl=0.0, entropy=0.0)
    config = small(tmp_path / "run", algorithm=algorithm, steps=1, num_prompts=6)
    parts = funcrl.build(config, task=Graded())
    params = first_params(parts)
    row = funcrl.train(config, task=Graded()).history[1]
    parts.generator.push(parts.policy(params))
    prompts = parts.task.prompts(funcrl.rng.fold_in(0, 1), 0, 6)
    seed = funcrl.rng.fold_in(0, 2, 1)
    completed = funcrl.rollouts.complete(parts.task, parts.generator, prompts, parts.sampling, seed)
    graded = funcrl.rollouts.grade(parts.task, completed.prompts, completed.outcomes)
    mask = completed.samples.mask
    count = mask.sum(dim=1)
    earned, total = [], 0.0
    for reward, length in zip(graded.total.tolist(), count.tolist(), strict=True):
        earned += [reward * 0.5 ** (length - 1 - place) for place in range(length)]
    total = sum(each**2 / 2 for each in earned) / len(earned)
    assert sum(earned) > 0
    assert abs(row["loss/value"] - 0.5 * total) < 1e-6
    # Of whitened advantages the sum is 0, and so is the first policy loss.
    assert abs(row["loss/policy"]) < 1e-5


@pytest.mark.parametrize("divergence", ["reverse", "sampled"])
def test_a_critic_and_a_teacher_may_be_side_by_side(tmp_path, teacher, divergence):
    algorithm = replace(PPO, divergence=divergence)
    config = small(tmp_path / "run", algorithm=algorithm, teacher=str(teacher), steps=1)
    row = funcrl.train(config, task=Graded()).history[1]
    parts = [row[f"loss/{name}"] for name in ("policy", "value", "teacher")]
    assert min(parts[1:]) > 0
    assert abs(sum(parts) - row["loss"]) < 1e-6


def test_what_a_run_with_a_critic_leaves_is_the_policy_alone(tmp_path):
    config = small(tmp_path / "run", algorithm=PPO, steps=2)
    trained = funcrl.train(config)
    names = {*trained.state.params} - {"critic.weight", "critic.bias"}
    assert {*funcrl.load_run(tmp_path / "run").params} == names
    found = funcrl.evaluate(funcrl.config.EvalConfig(run=tmp_path / "run", num_prompts=5))
    assert found.accuracy == trained.history[-1]["eval/accuracy"]
    out = funcrl.export(tmp_path / "run", tmp_path / "out")
    assert funcrl.load_params(out)[1].keys() >= {"embed.weight"}
    after = small(tmp_path / "after", model=str(tmp_path / "run"), steps=1)
    assert "critic.weight" not in funcrl.train(after).state.params
    taught = distilling(tmp_path / "taught", tmp_path / "run", steps=1)
    assert funcrl.train(taught).history[1]["loss/teacher"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": LoraConfig(rank=2)}, "--lora.rank 0 and --numerics native with ppo"),
        ({"numerics": "exact"}, "--lora.rank 0 and --numerics native with ppo"),
        ({"drop_zero_variance": True}, "--no-drop-zero-variance with ppo"),
    ],
)
def test_what_a_critic_cannot_do_is_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        small(tmp_path / "run", algorithm=PPO, **options)


@pytest.mark.parametrize("args", [["--algorithm", "sft"], ["--algorithm.name=sft", "--seed", "1"]])
def test_the_command_line_has_no_warm_start_before_supervised_training(args):
    assert read_line(args)[1].warm_start.steps == 0
    assert read_line([*args, "--warm-start.accuracy", "0.5"])[1].warm_start.steps == 0
    with pytest.raises(ValueError, match="--warm-start.steps 0 with sft"):
        read_line([*args, "--warm-start.steps", "5"])


@pytest.mark.parametrize(
    "option", [{"value": 1.0}, {"value_clip": 0.1}, {"gamma": 0.9}, {"lam": 1.0}, {"whiten": False}]
)
def test_options_of_a_critic_are_refused_without_one(option):
    name = next(iter(option)).replace("_", "-")
    with pytest.raises(ValueError, match=f"expects --algorithm ppo, .* --algorithm.{name}"):
        AlgorithmConfig(name="grpo", **option)
    AlgorithmConfig(name="ppo", **option)


@pytest.mark.parametrize("name", ["ppo", "reinforce", "distill", "sft"])
def test_the_command_line_keeps_equal_rewards_where_they_teach(tmp_path, name):
    folder, _ = tiny_pretrained(tmp_path / "model")
    line = ["--model", str(folder), "--task", "gsm8k", "--algorithm", name, "--teacher", "x"]
    assert read_line(line)[1].drop_zero_variance is False
    assert read_line([*line[:5], "dapo"])[1].drop_zero_variance is True
    if name in ("ppo", "reinforce"):
        with pytest.raises(ValueError, match=f"--no-drop-zero-variance with {name}"):
            read_line([*line, "--drop-zero-variance"])


@pytest.mark.parametrize("name", ["sft", "distill"])
@pytest.mark.parametrize(
    "option",
    [
        {"clip": (0.2, 0.2)}, {"scale_rewards": "none"}, {"max_importance": 2.0},
        {"top_entropy": 0.5}, {"off_policy_mask": 0.1},
        {"reference_every": 2},
    ],
)  # fmt: skip
def test_options_of_a_policy_gradient_are_refused_without_one(name, option):
    with pytest.raises(ValueError, match=f"train expects no --algorithm.* with {name}"):
        AlgorithmConfig(name=name, **option)


def test_a_teacher_needs_an_algorithm_that_learns_from_it(tmp_path, teacher):
    config = small(tmp_path / "run", teacher=str(teacher))
    with pytest.raises(ValueError, match="train expects an algorithm with a teacher_weight"):
        funcrl.train(config, algorithm=funcrl.grpo())


def test_conversations_are_learned_as_a_chat_template_writes_them(tmp_path):
    folder, _ = tiny_pretrained(tmp_path / "model", TEMPLATES["chatml"])
    talks = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"<{n}>"}]
        for n in range(8)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    config = small(
        tmp_path / "run", algorithm=SFT, model=str(folder), task=str(file), steps=2, held_out=0.25
    )
    parts = funcrl.build(config)
    prompts = parts.task.prompts(funcrl.rng.fold_in(0, 1), 0, 3)
    rollout = answers_of(parts.task, prompts, "cpu")
    for tokens, mask, prompt in zip(rollout.tokens, rollout.mask, prompts, strict=True):
        assert prompt.text.endswith("<|im_start|>assistant\n")
        assert parts.task.tokenizer.decode(tokens[mask].tolist()) == prompt.answer
        assert prompt.answer.strip("<>") + "?" in prompt.text
        last = tokens[mask][-1:].tolist()
        assert last == [parts.task.tokenizer.end]
    row = funcrl.train(config).history[1]
    assert row["num_tokens"] == rollout.mask.sum()


def test_answers_are_tokens_of_the_answer_alone():
    task = funcrl.tasks.from_rows(
        [{"prompt": "ab", "answer": "c"}, {"prompt": "d", "answer": "ef"}]
    )
    rollout = answers_of(task, task.prompts(0, 0, 2), "cpu")
    sampled = {
        tuple(tokens[mask].tolist())
        for tokens, mask in zip(rollout.tokens, rollout.mask, strict=True)
    }
    assert sampled <= {(99, 256), (101, 102, 256)}

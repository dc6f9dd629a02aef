"""The loop: it learns, it resumes to the bit, and it says what is wrong."""

import dataclasses
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import killer
import pytest
import torch
from cases import equal

import funcrl
from funcrl import optim, runs
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.config.sections import ALGORITHMS
from funcrl.generators import Sampler
from funcrl.loop.build import empty_state
from funcrl.loop.rollouts.grade import RewardError
from funcrl.run.record import Record
from funcrl.run.views import SilentView
from funcrl.tasks import Prompt, SumDigits


def small(run_dir, **options):
    """A run of a second."""
    return TrainConfig(**{
        "run_dir": run_dir, "steps": 4, "num_prompts": 3, "num_generations": 4,
        "sampling": Sampling(max_tokens=3), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=2, num_prompts=5),
        "checkpoint": CheckpointConfig(every=2), **options,
    })  # fmt: skip


def untimed(rows):
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


class Copy(SumDigits):
    """Answer with the digit that was asked: a few steps are enough."""

    name = "copy"

    def prompts(self, seed, start, count):
        digits = [funcrl.rng.fold_in(seed, start + index) % 10 for index in range(count)]
        return [Prompt(f"{digit}=", str(digit)) for digit in digits]

    def eval_prompts(self, count):
        return [Prompt(f"{digit}=", str(digit)) for digit in range(10)]


@pytest.mark.slow
def test_a_policy_from_nothing_learns_to_copy(tmp_path):
    config = small(
        tmp_path / "run", steps=60, num_prompts=16, num_generations=8,
        warm_start=WarmStartConfig(steps=60, accuracy=0.3, every=1),
        optimizer=OptimizerConfig(learning_rate=3e-3), evaluation=EvaluationConfig(every=60),
        checkpoint=CheckpointConfig(every=60),
    )  # fmt: skip
    rows = funcrl.train(config, task=Copy()).history
    assert 0.3 <= rows[0]["eval/accuracy"] <= 0.8
    assert rows[-1]["eval/accuracy"] >= 0.9
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "prefixes"])
def test_what_is_left_out_by_option_is_what_the_functions_leave_out(packing):
    """In several updates of a rollout, in which the policy moves away from what drew it."""
    options = {"num_iterations": 2, "num_minibatches": 2, "packing": packing}
    plain = small(None, **options, optimizer=OptimizerConfig(learning_rate=1e-2, warmup=0))

    def params_of(prepare=None, **changes):
        config = replace(plain, algorithm=replace(plain.algorithm, **changes))
        given = {} if prepare is None else {"prepare": prepare}
        return funcrl.train(config, task=Copy(), **given).state.params

    def both(scores, batch):
        return funcrl.top_entropy(0.5)(scores, funcrl.off_policy_mask(0.02)(scores, batch))

    found = params_of(top_entropy=0.5, off_policy_mask=0.02)
    assert equal(found, params_of(both))
    for other in ({}, {"top_entropy": 0.5}, {"off_policy_mask": 0.02}):
        assert not equal(found, params_of(**other))


@pytest.mark.slow
def test_the_folder_holds_the_run(tmp_path):
    config = small(tmp_path / "run")
    trained = funcrl.train(config, command=["funcrl", "train"])
    folder = tmp_path / "run"
    rows = runs.read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4]
    wanted = {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "rewards/correct/mean",
        "rewards/correct/std", "frac_reward_zero_std", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "num_tokens", "step_time", "time/generate", "time/train", "time/push", "entropy",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/mean",
    }  # fmt: skip
    learned = funcrl.train(small(tmp_path / "all", drop_zero_variance=False)).history
    assert wanted <= set(learned[1])
    assert "time/startup" in rows[0]
    restored, extra = funcrl.restore(folder / "checkpoints", like=trained.state)
    assert equal(restored, trained.state)
    assert extra["step"] == 4
    assert json.loads((folder / "environment.json").read_text())["command"] == "funcrl train"
    completions = runs.read_lines(folder / "completions.jsonl")
    assert {row["step"] for row in completions} == {1, 2, 3, 4}
    assert completions[0]["answer"] == str(sum(int(d) for d in completions[0]["prompt"][0:5:2]))


@pytest.mark.slow
def test_the_rollout_is_on_policy(tmp_path):
    """The sampler's log-probabilities are the trainer's, step after step and push after push."""
    config = small(tmp_path / "run", steps=6, drop_zero_variance=False,
                   algorithm=AlgorithmConfig(entropy=0.1))  # fmt: skip
    for row in funcrl.train(config).history[1:]:
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5
        assert row["entropy"] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path):
    first, second, other = (
        funcrl.train(small(tmp_path / str(n), seed=seed)) for n, seed in enumerate((1, 1, 2))
    )
    assert equal(first.state, second.state)
    assert untimed(first.history) == untimed(second.history)
    assert not equal(first.state.params, other.state.params)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, stop):
    """Also between two checkpoints, with mini-batches, a reference policy and another length."""
    options = {"steps": 6, "num_minibatches": 2, "num_iterations": 2,
               "algorithm": AlgorithmConfig(kl=0.1, entropy=0.05),
               "optimizer": OptimizerConfig(schedule="constant")}  # fmt: skip
    whole = funcrl.train(small(tmp_path / "whole", **options))
    funcrl.train(small(tmp_path / "part", **{**options, "steps": stop}))
    resumed = funcrl.train(small(tmp_path / "part", **options), resume=True)
    assert equal(resumed.state, whole.state)
    lines = runs.read_lines(tmp_path / "part" / "metrics.jsonl")
    assert [row["step"] for row in lines] == list(range(7))
    skip = {stop}  # the last step of a run is evaluated
    assert [r for r in untimed(lines) if r["step"] not in skip] == [
        r for r in untimed(whole.history) if r["step"] not in skip
    ]


def assert_kills_end_in_the_same_bits(tmp_path, kills, max_staleness=0, model="micro"):
    """Kill the run of `killer` so often, and compare it with one that nothing stops."""
    run = subprocess.run(
        [sys.executable, Path(killer.__file__), tmp_path / "killed", str(kills),
         str(max_staleness), model],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert f"killed {kills}" in run.stdout
    threads = torch.get_num_threads()
    # It is not taken up again: it saves once.
    config = killer.config(tmp_path / "whole", max_staleness, model)
    saves = dataclasses.replace(config.checkpoint, every=config.steps)
    whole = funcrl.train(dataclasses.replace(config, checkpoint=saves))
    torch.set_num_threads(threads)
    state, _ = funcrl.restore(tmp_path / "killed" / "checkpoints", like=whole.state)
    assert equal(state, whole.state)
    for name in ("metrics.jsonl", "completions.jsonl"):
        killed, kept = (runs.read_lines(tmp_path / run / name) for run in ("killed", "whole"))
        assert untimed(killed) == untimed(kept)


@pytest.mark.slow
def test_kills_end_in_the_same_bits(tmp_path):
    """SIGKILL at random moments, in saves and in the warm start too."""
    assert_kills_end_in_the_same_bits(tmp_path, kills=3)


@pytest.mark.slow
def test_an_interrupt_saves_the_last_whole_step(tmp_path):
    class Interrupting(SumDigits):
        asked = 0

        def prompts(self, seed, start, count):
            if start == 3 * count:
                raise KeyboardInterrupt
            return super().prompts(seed, start, count)

    notes = []
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(small(tmp_path / "run", steps=6, checkpoint=CheckpointConfig(every=50)),
                     task=Interrupting(), view=Notes(notes))  # fmt: skip
    assert f"Saved step 3 in {tmp_path / 'run' / 'checkpoints'}" in notes[-1]
    assert f"--resume {tmp_path / 'run'}" in notes[-1]
    with pytest.raises(ValueError, match="train expects task="):
        funcrl.train(small(tmp_path / "run", steps=6), resume=True)
    resumed = funcrl.train(small(tmp_path / "run", steps=6), task=SumDigits(), resume=True)
    assert equal(resumed.state, funcrl.train(small(tmp_path / "whole", steps=6)).state)


def test_a_run_without_checkpoints_writes_none_and_says_so(tmp_path):
    class Failing(SumDigits):
        def prompts(self, seed, start, count):
            if start == 3 * count:
                raise OSError("no more prompts")
            return super().prompts(seed, start, count)

    none = {"checkpoint": CheckpointConfig(every=0)}
    trained = funcrl.train(small(tmp_path / "whole", **none))
    assert equal(trained.state, funcrl.train(small(tmp_path / "kept")).state)
    with pytest.raises(OSError, match="no more prompts") as failure:
        funcrl.train(small(tmp_path / "failed", **none), task=Failing())
    (note,) = failure.value.__notes__
    assert note == f"{tmp_path / 'failed'} keeps no checkpoints (--checkpoint.every 0)."
    for name in ("whole", "failed"):
        assert not list((tmp_path / name / "checkpoints").iterdir())
    assert len(list((tmp_path / "kept" / "checkpoints").iterdir())) == 3
    with pytest.raises(ValueError, match="expects a whole checkpoint"):
        funcrl.restore(tmp_path / "whole" / "checkpoints", like=trained.state)


def test_a_fork_without_checkpoints_leaves_none(tmp_path):
    kept = funcrl.train(small(tmp_path / "old")).state
    without = small(tmp_path / "new", steps=6, checkpoint=CheckpointConfig(every=0))
    forked = funcrl.train(without, fork=tmp_path / "old")
    assert (kept.step.item(), forked.state.step.item()) == (4, 6)
    assert not list((tmp_path / "new" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_finishes_its_step(tmp_path):
    asked = []

    def stop():
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(KeyboardInterrupt):
        funcrl.train(small(tmp_path / "run"), stop=stop)
    lines = runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in lines] == [0, 1, 2]
    resumed = funcrl.train(small(tmp_path / "run"), resume=True)
    assert equal(resumed.state, funcrl.train(small(tmp_path / "whole")).state)


@pytest.mark.slow
def test_a_warm_start_says_what_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr("funcrl.loop.warm_start._NOTE_EVERY", -1.0)
    notes = []
    warm_start = WarmStartConfig(steps=2, every=1)
    funcrl.train(small(tmp_path / "run", steps=1, warm_start=warm_start), view=Notes(notes))
    assert notes[0].startswith("Warm start: at most 2 supervised steps, until 0.30 of")
    assert notes[1] == "Warm start: accuracy 0.00 so far."
    assert notes[4].endswith("after 2 supervised steps, where 0.30 was wanted; rewards may stay 0.")
    assert len(notes) == 5


@pytest.mark.slow
def test_answers_that_are_cut_off_are_noted(tmp_path):
    notes = []
    config = small(tmp_path / "run", steps=1, warm_start=WarmStartConfig(steps=1, accuracy=0.0))
    funcrl.train(dataclasses.replace(config, sampling=Sampling(max_tokens=1)), view=Notes(notes))
    assert notes[1].endswith(
        "more than 1 tokens and are cut off; --sampling.max-tokens 3 has room for the longest."
    )


class Notes(SilentView):
    """A view that keeps what is said."""

    def __init__(self, notes):
        self.note = notes.append


@pytest.mark.slow
def test_a_broken_newest_checkpoint_is_named_and_the_one_before_used(tmp_path):
    funcrl.train(small(tmp_path / "run"))
    for file in (tmp_path / "run" / "checkpoints" / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    notes = []
    resumed = funcrl.train(small(tmp_path / "run"), resume=True, view=Notes(notes))
    assert str(tmp_path / "run" / "checkpoints" / "4") in notes[0]
    assert "after step 2" in notes[1]
    assert equal(resumed.state, funcrl.train(small(tmp_path / "whole")).state)


@pytest.mark.slow
def test_a_run_goes_on_without_lines_that_somebody_deleted_and_says_so(tmp_path):
    lines, notes = tmp_path / "run" / "metrics.jsonl", []
    funcrl.train(small(tmp_path / "run"))
    whole = runs.read_lines(lines)
    with lines.open("rb+") as file:
        file.truncate(len(file.readline()) + 10)
    funcrl.train(small(tmp_path / "run", steps=5), resume=True, view=Notes(notes))
    ended = f"{lines} ended at step 0, before the checkpoint of step 4"
    assert any(ended in note for note in notes)
    again = runs.read_lines(lines)
    assert [row["step"] for row in again] == [0, 4, 5]
    assert again[:2] == [whole[0], whole[4]]


class Faulty(SumDigits):
    """Whose reward fails for some completions."""

    name = "faulty"

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def reward(self, prompt, completion):
        if completion[:1] in ("1", "5", "+", "="):
            if self.fault == "raises":
                raise RuntimeError("no judge")
            return {"correct": float(self.fault), "short": 1.0}
        return {"correct": 0.0, "short": float(len(completion) < 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "reward of 'faulty' raised RuntimeError"),
        ("nan", "reward 'correct' of 'faulty' is nan"),
        ("inf", "reward 'correct' of 'faulty' is inf"),
    ],
)
def test_a_failing_reward_stops_the_run_or_is_left_out_and_counted(tmp_path, fault, message):
    evaluation = EvaluationConfig(every=0)
    with pytest.raises(RewardError, match=f"{message}.*--on-reward-error"):
        funcrl.train(small(tmp_path / "stop", evaluation=evaluation), task=Faulty(fault))
    config = small(tmp_path / "skip", evaluation=evaluation, on_reward_error="skip", num_prompts=8)
    notes = []
    rows = funcrl.train(config, task=Faulty(fault), view=Notes(notes)).history[1:]
    assert all(0 < row["num_reward_errors"] < 32 for row in rows)
    assert any(message in note for note in notes)


@pytest.mark.slow
def test_several_rewards_are_weighted_and_logged_each(tmp_path):
    class Two(SumDigits):
        reward_weights = {"correct": 1.0, "short": 0.5}  # noqa: RUF012 (as a user writes it)

        def reward(self, prompt, completion):
            return {"correct": 0.25, "short": float(len(completion) < 2)}

    rows = funcrl.train(small(tmp_path / "own"), task=Two()).history[1:]
    for row in rows:
        assert row["rewards/correct/mean"] == 0.25
        expected = 0.25 + 0.5 * row["rewards/short/mean"]
        assert abs(row["reward"] - expected) <= 1e-6
    weights = {"correct": 0.0, "short": 1.0}
    rows = funcrl.train(small(tmp_path / "given", reward_weights=weights), task=Two()).history[1:]
    assert all(abs(row["reward"] - row["rewards/short/mean"]) <= 1e-6 for row in rows)
    with pytest.raises(ValueError, match="grade expects weights.*'x'"):
        funcrl.train(small(tmp_path / "bad", reward_weights={"x": 1.0}), task=Two())


@pytest.mark.slow
def test_a_task_without_prompts_and_a_prompt_too_long_are_refused(tmp_path):
    class Empty(SumDigits):
        name = "empty"

        def prompts(self, seed, start, count):
            return []

    class Long(SumDigits):
        def prompts(self, seed, start, count):
            return [Prompt("1+" * 2100 + "1=", "3")] * count

    with pytest.raises(ValueError, match="train expects.*--num-prompts.*'empty'"):
        funcrl.train(small(tmp_path / "a"), task=Empty())
    with pytest.raises(ValueError, match="generate expects.*context_length"):
        funcrl.train(small(tmp_path / "b"), task=Long())


def test_a_warm_start_needs_answers(tmp_path):
    class Unanswered(SumDigits):
        def prompts(self, seed, start, count):
            return [Prompt("1+1+1=")] * count

    config = small(tmp_path / "run", warm_start=WarmStartConfig(steps=2))
    with pytest.raises(ValueError, match=r"warm_start expects.*answers.*--warm-start\.steps"):
        funcrl.train(config, task=Unanswered())


@pytest.mark.slow
def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    funcrl.train(small(tmp_path / "run"))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(
        FileExistsError, match=f"train expects.*--run-dir.*--resume {tmp_path / 'run'}"
    ):
        funcrl.train(small(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="train expects --resume"):
        funcrl.train(small(tmp_path / "other"), resume=True)


@pytest.mark.slow
def test_everything_that_can_be_chosen_runs(tmp_path):
    names = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce"]
    for name in names:
        config = small(tmp_path / name, steps=1, microbatch=5, dtype="bfloat16",
                       algorithm=AlgorithmConfig(name=name, max_importance=2.0),
                       optimizer=OptimizerConfig(schedule="cosine", warmup=2),
                       mask_truncated=True, drop_zero_variance=False)  # fmt: skip
        assert torch.tensor(funcrl.train(config).history[-1]["loss"]).isfinite()


def test_bounds_and_scale_are_those_that_are_configured():
    options = AlgorithmConfig("dapo", clip=(0.2, 0.3), scale_rewards="batch")
    algorithm = funcrl.build(TrainConfig(algorithm=options)).algorithm
    ratio, advantages = torch.tensor([0.5, 1.5]), torch.tensor([-1.0, 1.0])
    objective = algorithm.surrogate(ratio.log(), ratio, advantages).objective
    assert torch.allclose(objective, torch.tensor([-0.8, 1.3]))
    rewards, group = torch.tensor([0.0, 2.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    by_batch = funcrl.advantages.standardize_by_batch(rewards, group)
    assert algorithm.advantage(rewards, group).equal(by_batch)
    with pytest.raises(ValueError, match=r"clip to be two numbers.*at most 1, got \(2.0, 0.1\)"):
        AlgorithmConfig(clip=(2.0, 0.1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"generator": "vllm"}, "--generator vllm"),
        ({"generator": "vllm", "numerics": "exact", "vllm": VLLMConfig(form="native")}, "vllm"),
        ({"max_staleness": 1}, "--max-staleness 1"),
        ({"algorithm": AlgorithmConfig(max_importance=3.0)}, "--algorithm.max-importance 3.0"),
    ],
)
def test_bounds_are_refused_where_importance_weights_take_their_place(options, named):
    plain = TrainConfig(**options)
    algorithm = dataclasses.replace(plain.algorithm, clip=(0.2, 0.28))
    words = rf"expects no --algorithm\.clip with .*{named}, .*, got \(0.2, 0.28\)"
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(plain, algorithm=algorithm)
    own = dataclasses.replace(algorithm, name="mine.py:bounded")  # its own affair
    assert dataclasses.replace(plain, algorithm=own).importance_cap == plain.importance_cap


def test_bounds_are_taken_with_a_vllm_that_computes_as_the_trainer_does():
    options = AlgorithmConfig(clip=(0.2, 0.28))
    exact = TrainConfig(generator="vllm", numerics="exact", algorithm=options)
    assert exact.importance_cap is None


@pytest.mark.parametrize(("option", "value"), [("clip", (0.1, 0.1)), ("scale_rewards", "none")])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_option_that_an_algorithm_has_not_is_refused(name, option, value):
    if option in inspect.signature(getattr(funcrl, name)).parameters:
        assert getattr(AlgorithmConfig(name, **{option: value}), option) == value
    else:
        with pytest.raises(ValueError, match=f"no --algorithm.{option.replace('_', '-')}.*{name}"):
            AlgorithmConfig(name, **{option: value})


def test_a_warm_start_is_supervised_learning():
    """Its gradient is that of the mean negative log-probability of the answers' tokens."""
    task = SumDigits()
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    model_fn = funcrl.logprob_fn(model)
    options = WarmStartConfig(steps=1, num_prompts=5, learning_rate=1e-2)
    warmed, numbers = funcrl.warm_start(model_fn, params, task, options, 3, lambda params: 0.0)
    assert numbers["warm_start/steps"] == 1

    def loss(params):
        total, count = 0.0, 0
        for prompt in task.prompts(3, 0, 5):
            asked = task.tokenizer.encode(prompt.text)
            tokens = torch.tensor([*asked, *task.tokenizer.encode(prompt.answer), 0])
            scores = model_fn(params, funcrl.Sample(tokens, torch.arange(len(tokens))))
            total = total - scores.logprobs[len(asked) :].sum()
            count += len(tokens) - len(asked)
        return total / count

    optimizer = funcrl.optim.adamw(1e-2, weight_decay=0.0)
    updates, _ = optimizer.update(torch.func.grad(loss)(params), optimizer.init(params), params)
    for name, leaf in funcrl.optim.apply_updates(params, updates).items():
        assert (leaf - warmed[name]).abs().max() <= 1e-8, name  # Adam divides by small numbers
    done, numbers = funcrl.warm_start(model_fn, params, task, options, 3, lambda params: 0.5)
    assert numbers["warm_start/steps"] == 0
    assert equal(done, params)


def test_bad_options_are_refused_before_anything_is_made(tmp_path):
    for options, option in [
        ({"steps": 0}, "--steps"),
        ({"num_generations": 1}, "--num-generations"),
        ({"num_minibatches": 5}, "--num-minibatches"),
        ({"microbatch": 0}, "--microbatch"),
        ({"seed": -1}, "--seed"),
    ]:
        with pytest.raises(ValueError, match=f"train expects.*{option}"):
            small(tmp_path / "run", **options)
    assert dataclasses.is_dataclass(TrainConfig)
    with pytest.raises(ValueError, match="train expects --model.*'huge'"):
        funcrl.train(small(tmp_path / "run", model="huge"))
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_a_run_on_the_gpu_resumes(tmp_path):
    whole = funcrl.train(small(tmp_path / "whole", device="cuda", steps=6))
    funcrl.train(small(tmp_path / "part", device="cuda", steps=6))
    resumed = funcrl.train(small(tmp_path / "part", device="cuda", steps=6), resume=True)
    assert resumed.history[-1]["step"] == whole.history[-1]["step"] == 6
    assert whole.state.params["norm.weight"].is_cuda
    assert resumed.state.params["norm.weight"].is_cuda


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 5}, {"top_p": 0.7, "temperature": 0.7}, {"min_p": 0.3}, {"min_tokens": 2}],
)
def test_truncated_sampling_starts_at_a_ratio_of_one(tmp_path, sampling):
    """The behaviour is that of the distribution which is trained, not of the one cut short."""
    config = small(
        tmp_path / "run", steps=2, sampling=Sampling(max_tokens=3, **sampling),
        optimizer=OptimizerConfig(learning_rate=1e-6),
    )  # fmt: skip
    for row in funcrl.train(config).history[1:]:
        assert row["clip_ratio/region_mean"] == 0
        assert abs(row["sampling/importance_sampling_ratio/mean"] - 1) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"packing": "prefixes"}])
def test_behavior_sampling_trains_the_distribution_that_was_drawn_from(tmp_path, options):
    """The generator's numbers are the trainer's own before the first update, and nothing is scored
    twice; the draws are those of the other behaviour, and the updates are not."""
    config = small(
        tmp_path / "run", steps=2, behavior="sampling",
        sampling=Sampling(max_tokens=3, top_k=4, top_p=0.9, temperature=0.7),
        optimizer=OptimizerConfig(learning_rate=1e-6), warm_start=WarmStartConfig(steps=3),
        **options,
    )  # fmt: skip
    run = funcrl.train(config)
    for row in run.history[1:]:
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5  # float32, in other shapes
        assert abs(row["sampling/importance_sampling_ratio/mean"] - 1) <= 1e-5
    whole = replace(config, behavior="policy", run_dir=tmp_path / "policy")
    policy = funcrl.train(whole)
    assert run.history[1]["reward"] == policy.history[1]["reward"]
    assert run.history[1]["entropy"] < policy.history[1]["entropy"]
    assert not equal(run.state.params, policy.state.params)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling": Sampling(max_tokens=3, min_tokens=1)}, "--sampling.min-tokens 0"),
        ({"numerics": "exact", "sampling": Sampling(top_k=2)}, "--behavior policy with --numerics"),
        ({"algorithm": AlgorithmConfig(name="sft")}, "--behavior policy with sft"),
        ({"lora": LoraConfig(rank=2), "warm_start": WarmStartConfig(steps=1)}, "adapters"),
    ],
)
def test_what_behavior_sampling_cannot_train_is_refused(tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        small(tmp_path / "run", behavior="sampling", **options)


@pytest.mark.slow
def test_reinforce_learns_from_equal_rewards(tmp_path):
    class Generous(Copy):
        def reward(self, prompt, completion):
            return {"correct": 1.0}

    options = {"algorithm": AlgorithmConfig(name="reinforce", kl=0.0), "num_generations": 1}
    rows = funcrl.train(small(tmp_path / "run", **options), task=Generous()).history
    assert all(row["num_tokens"] > 0 and row["grad_norm"] > 0 for row in rows[1:])
    with pytest.raises(ValueError, match="train expects --no-drop-zero-variance"):
        small(tmp_path / "other", drop_zero_variance=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_ends_near_zero_after_the_last_update(tmp_path, schedule):
    config = small(
        tmp_path / "run", steps=10, num_minibatches=2, num_iterations=2,
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule=schedule, warmup=8),
    )  # fmt: skip
    rates = [row["learning_rate"] for row in funcrl.train(config).history[1:]]
    assert max(rates) == pytest.approx(rates[2], rel=0.15)  # 8 updates are two steps
    assert rates[-1] <= 1e-3 * 1.01 / 32  # that of the last of 32 updates after the warm-up


RATES = {"constant": optim.constant, "linear": lambda rate: optim.linear(rate, 0.0, 6),
         "cosine": lambda rate: optim.warmup(4, optim.cosine(rate, 0.0, 2))}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", RATES)
def test_a_forked_run_follows_its_new_learning_rate_at_once(tmp_path, schedule):
    """Beside a run whose schedule is the one before the third update, the other from then on."""
    options = {"steps": 6, "evaluation": EvaluationConfig(every=0)}
    before, after = (
        OptimizerConfig(
            learning_rate=rate, schedule=schedule, warmup=4 if schedule == "cosine" else 0
        )
        for rate in (1e-3, 5e-3)
    )
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(
            small(folder, optimizer=before, **options),
            stop=lambda: len(runs.read_lines(folder / "metrics.jsonl")) == 4,
        )
    forked = small(tmp_path / "forked", optimizer=after, **options)
    resumed = funcrl.train(forked, fork=folder)

    low, high = RATES[schedule](1e-3), RATES[schedule](5e-3)

    def switched(count):
        return torch.where(count < 3, low(count), high(count))

    oracle = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(switched, weight_decay=0.0))
    config = small(tmp_path / "whole", **options)
    whole = funcrl.train(config, parts=funcrl.build(config)._replace(optimizer=oracle))
    assert [row["learning_rate"] for row in resumed.history[1:]] == [
        switched(torch.tensor(count)).item() for count in range(6)
    ]
    assert equal(resumed.state, whole.state)
    assert untimed(resumed.history) == untimed(whole.history)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_betas_are_those_of_the_moments(tmp_path, name):
    def is_of_muon(path, leaf):
        return leaf.ndim == 2 and "embed" not in path

    betas, rate = (0.5, 0.75), optim.constant(1e-2)
    plain = OptimizerConfig(name=name, learning_rate=1e-2, schedule="constant", warmup=0)
    oracle = optim.adamw(rate, betas, weight_decay=0.0)
    if name == "muon":
        others = optim.masked(oracle, lambda path, leaf: not is_of_muon(path, leaf))
        oracle = optim.chain(optim.masked(optim.muon(rate, weight_decay=0.0), is_of_muon), others)
    config = small(tmp_path / "whole", optimizer=plain)
    whole = funcrl.train(config, optimizer=optim.chain(optim.clip_by_global_norm(1.0), oracle))
    run, other = (
        funcrl.train(small(tmp_path / f"{each}", optimizer=replace(plain, betas=each)))
        for each in (betas, (0.9, 0.999))
    )
    assert equal(run.state, whole.state)
    assert not equal(run.state, other.state)


@pytest.mark.slow
def test_a_folder_has_one_run_at_a_time(tmp_path):
    class Intruder(Copy):
        def prompts(self, seed, start, count):
            if start:
                funcrl.train(small(tmp_path / "run", steps=9), task=Copy(), resume=True)
            return super().prompts(seed, start, count)

    with pytest.raises(FileExistsError, match="train expects.*--run-dir.*writing"):
        funcrl.train(small(tmp_path / "run"), task=Intruder())
    assert len(funcrl.train(small(tmp_path / "run"), task=Copy(), resume=True).history) == 5


@pytest.mark.slow
def test_a_step_whose_lines_could_not_be_written_is_done_again(tmp_path, monkeypatch):
    whole = funcrl.train(small(tmp_path / "whole"))
    plain = runs.append_lines

    def full_disk(path, rows):
        if path.name == "completions.jsonl" and rows[0]["step"] == 3:
            raise OSError(28, "No space left on device", str(path))
        plain(path, rows)

    monkeypatch.setattr(runs, "append_lines", full_disk)
    with pytest.raises(OSError, match=r"completions\.jsonl"):
        funcrl.train(small(tmp_path / "run"))
    monkeypatch.undo()
    resumed = funcrl.train(small(tmp_path / "run"), resume=True)
    assert equal(whole.state, resumed.state)
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("whole", "run")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_resume_that_cannot_go_on_leaves_the_folder_as_it_was(tmp_path):
    folder = tmp_path / "run"
    funcrl.train(small(folder, algorithm=AlgorithmConfig(kl=0.0)))
    before = (folder / "config.yaml").read_text()
    for options, option in (
        ({"algorithm": AlgorithmConfig(kl=0.3), "steps": 6}, r"--algorithm\.kl 0\.3 \(was 0\.0\)"),
        ({"algorithm": AlgorithmConfig(kl=0.0), "steps": 2}, "--steps"),
    ):
        with pytest.raises(ValueError, match=f"train expects.*{option}"):
            funcrl.train(small(folder, **options), resume=True)
        assert (folder / "config.yaml").read_text() == before


@pytest.mark.slow
def test_a_run_stopped_in_its_warm_start_can_be_begun_again(tmp_path):
    config = small(tmp_path / "run", warm_start=WarmStartConfig(steps=5, every=1, accuracy=1.0))
    notes = []
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(config, view=Notes(notes), stop=lambda: True)
    assert any("Stopped before the first step" in note for note in notes)
    assert any("at most 5 supervised steps, until 1.00" in note for note in notes)
    whole = funcrl.train(dataclasses.replace(config, run_dir=tmp_path / "whole"))
    assert equal(funcrl.train(config, resume=True).state, whole.state)


@pytest.mark.slow
def test_means_over_tokens_do_not_depend_on_the_mini_batches(tmp_path):
    """Not even where a mini-batch has no token left."""
    options = {"steps": 1, "num_prompts": 4, "mask_truncated": True,
               "sampling": Sampling(max_tokens=2),
               "optimizer": OptimizerConfig(learning_rate=1e-12)}  # fmt: skip
    one, many = (
        funcrl.train(small(tmp_path / str(n), num_minibatches=n, **options)).history[1]
        for n in (1, 16)
    )
    assert one["num_tokens"] == many["num_tokens"] > 0
    for name in ("entropy", "sampling/importance_sampling_ratio/mean"):
        assert many[name] == pytest.approx(one[name], rel=1e-5)


class Picky(Copy):
    """Held-out prompts that it cannot judge, too."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def reward(self, prompt, completion):
        return {"correct": self.value if prompt.answer in "369" else float(completion == "1")}


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "0.5", 10**400, 1e39, torch.ones(2)], ids=str)
def test_whatever_a_reward_returns_is_skipped_or_named(tmp_path, value):
    skipped = small(tmp_path / "skip", on_reward_error="skip", num_prompts=6)
    rows = funcrl.train(skipped, task=Picky(value)).history
    assert rows[-1]["num_reward_errors"] > 0
    assert rows[-1]["eval/num_prompts"] == 7
    with pytest.raises(RewardError, match="reward 'correct' of 'copy' is"):
        funcrl.train(small(tmp_path / "stop"), task=Picky(value))


@pytest.mark.slow
def test_a_group_with_one_reward_left_is_left_out(tmp_path):
    class Moody(Copy):
        def reward(self, prompt, completion):
            return {"correct": float("nan") if completion[:1] in "0123456" else 1.0}

    config = small(
        tmp_path / "run", on_reward_error="skip", num_prompts=16, num_generations=2,
        evaluation=EvaluationConfig(every=0), algorithm=AlgorithmConfig(name="rloo"),
    )  # fmt: skip
    assert funcrl.train(config, task=Moody()).history[-1]["step"] == 4


class Lonely(Copy):
    """Of the second and the third step's prompts, one completion each has a reward."""

    def __init__(self):
        super().__init__()
        self.graded = set()

    def prompts(self, seed, start, count):
        plain = super().prompts(seed, start, count)
        numbered = [Prompt(prompt.text, f"prompt {start + n}") for n, prompt in enumerate(plain)]
        return numbered if start in (3, 6) else plain

    def reward(self, prompt, completion):
        failed = prompt.answer.startswith("prompt") and prompt.answer in self.graded
        self.graded.add(prompt.answer)
        return {"correct": float("nan") if failed else float(completion[:1] > "4")}


@pytest.mark.slow
@pytest.mark.parametrize("drop_zero_variance", [False, True])
def test_a_step_without_two_rewards_to_compare_trains_on_nothing(tmp_path, drop_zero_variance):
    """It says so, keeps the state, and a run that is resumed around it ends in the same bits."""
    options = {"on_reward_error": "skip", "drop_zero_variance": drop_zero_variance,
               "optimizer": OptimizerConfig(schedule="constant"),
               "checkpoint": CheckpointConfig(every=1, keep_last=9)}  # fmt: skip
    notes = []
    whole = funcrl.train(small(tmp_path / "whole", **options), task=Lonely(), view=Notes(notes))
    assert [note for note in notes if "trains on nothing" in note] == [
        f"Step {step} trains on nothing: no group has two completions with a reward."
        for step in (2, 3)
    ]
    rows = whole.history
    assert [row["num_tokens"] > 0 for row in rows[1:]] == [True, False, False, True]
    assert [row.get("num_reward_errors", 0) for row in rows[1:]] == [0, 9, 9, 0]
    states = [
        funcrl.restore(tmp_path / "whole" / "checkpoints" / str(step), like=whole.state)[0]
        for step in (1, 3, 4)
    ]
    assert equal(states[0], states[1])
    assert not equal(states[1].params, states[2].params)
    part = tmp_path / "part"
    funcrl.train(small(part, **{**options, "steps": 2}), task=Lonely())
    resumed = funcrl.train(small(part, **options), task=Lonely(), resume=True)
    assert equal(resumed.state, whole.state)
    assert untimed(resumed.history[3:]) == untimed(whole.history[3:])


def test_a_reward_that_fails_for_every_completion_stops_the_run(tmp_path):
    class Broken(Copy):
        def reward(self, prompt, completion):
            raise OSError("no judge")

    config = small(tmp_path / "run", on_reward_error="skip", evaluation=EvaluationConfig(every=0))
    with pytest.raises(RewardError, match="grade expects.*no judge"):
        funcrl.train(config, task=Broken())


@pytest.mark.slow
def test_a_task_without_held_out_prompts_warms_up_on_others_of_its_own(tmp_path):
    class Open(Copy):
        def eval_prompts(self, count):
            return []

    config = small(tmp_path / "run", warm_start=WarmStartConfig(steps=300, accuracy=0.5, every=5))
    rows = funcrl.train(config, task=Open()).history
    assert rows[0]["warm_start/steps"] < 300
    assert rows[0]["warm_start/accuracy"] >= 0.5
    assert "eval/accuracy" not in rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_run_ends_in_the_same_bits(tmp_path, backend):
    """Beside one whose rows are as long: rounding may depend on how many numbers are summed.

    The compiled one writes its state into the memory of the old one, which checkpoints, a falling
    learning rate and the reference policy must not notice.
    """
    options = {
        "num_minibatches": 2, "length_multiple": 8, "algorithm": AlgorithmConfig(kl=0.1),
        "optimizer": OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup=2),
        "checkpoint": CheckpointConfig(every=1, keep_last=4),
    }  # fmt: skip
    config = CompileConfig(backend=backend, fuse="none")
    plain = funcrl.train(small(tmp_path / "plain", **options))
    compiled = funcrl.train(small(tmp_path / "compiled", compile=config, **options))
    assert equal(compiled.state, plain.state)
    counts = [row.pop("num_recompilations") for row in compiled.history[1:]]
    assert counts == [0] * 4  # of all prompts and completions, at most 8 tokens
    assert untimed(compiled.history) == untimed(plain.history)
    if backend == "aot_eager":
        return  # to take a run up again is to call the same program with another state
    resumed = funcrl.train(
        small(tmp_path / "compiled", compile=config, steps=6, **options), resume=True
    )
    plain = funcrl.train(small(tmp_path / "plain", steps=6, **options), resume=True)
    assert equal(resumed.state, plain.state)


@pytest.mark.slow
def test_a_run_that_fails_while_its_state_is_overwritten_saves_nothing_of_it(tmp_path):
    config = small(tmp_path / "run", checkpoint=CheckpointConfig(every=5))
    funcrl.train(dataclasses.replace(config, steps=1))
    parts, notes = funcrl.build(config), []
    view = SilentView()
    view.note = notes.append
    record = Record(config, tmp_path / "run", "test", view)
    record.resumed(empty_state(parts))
    state = record.progress.state
    row = {**record.progress.row, "step": 2}
    record.advance(state, row, [])  # whose checkpoint is not due
    before = funcrl.tree.map(torch.clone, state)
    record.give_up_state()
    state.params["norm.weight"].zero_()  # the first half of an update
    record.save_unsaved(KeyboardInterrupt())
    record.close()
    assert "Saved step 1 in" in notes[-1]
    saved, _ = funcrl.restore(tmp_path / "run" / runs.CHECKPOINTS, before)
    assert equal(saved, before)


@pytest.mark.parametrize(("options", "option"), [
    ({"sampling": Sampling(temperature=0.0)}, r"--sampling\.temperature"),
    ({"sampling": Sampling(num_samples=3)}, "--num-generations"),
    ({"compile": CompileConfig(cudagraph="full")}, "--device"),
    ({"length_multiple": 0}, "--length-multiple"),
    ({"pack_length": 64}, "--packing samples or prefixes"),
    ({"pack_rows": 2}, "--packing samples or prefixes"),
    ({"packing": "samples", "pack_length": 3}, "--pack-length above --sampling.max-tokens"),
])  # fmt: skip
def test_options_that_cannot_work_are_refused(tmp_path, options, option):
    with pytest.raises(ValueError, match=f"train expects.*{option}"):
        small(tmp_path, **options)


def test_a_missing_tracker_or_gpu_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="train expects --device"):
        funcrl.train(small(tmp_path / "run", device="cuda"))
    config = small(tmp_path / "run", log=LogConfig(trackers=("wandb",)))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="expects wandb"):
        funcrl.train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_an_evaluation_pushes_what_is_there_already(tmp_path, monkeypatch, rank):
    pushes, push = [], Sampler.push

    def recorded(sampler, params, version=0):
        is_there = sampler.pushed is not None and sampler.pushed.holds(params, version)
        pushes.append((version, is_there))
        push(sampler, params, version)

    monkeypatch.setattr(Sampler, "push", recorded)
    options = {"lora": LoraConfig(rank=rank), "evaluation": EvaluationConfig(every=1)}
    funcrl.train(small(tmp_path / "run", steps=2, warm_start=WarmStartConfig(steps=0), **options))
    assert pushes[2:] == [(1, False), (1, True), (2, False), (2, True)]

"""Rollouts that are drawn while earlier steps train: whose they are, and what ends them."""

import asyncio
import dataclasses
import math
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from cases import equal
from test_train import Copy, Notes, assert_kills_end_in_the_same_bits, small, untimed

import funcrl
from funcrl import runs
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.core.types import Samples
from funcrl.loop.rollouts.grade import RewardError
from funcrl.tasks import Prompt, SumDigits


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [each for each in threading.enumerate() if each.name.startswith("rollouts")]


class Numbered(SumDigits):
    """Whose prompts are the numbers of one stream: 1000=, 1001=, ..."""

    name = "numbered"

    def prompts(self, seed, start, count):
        return [Prompt(f"{1000 + start + n}=", str(n % 10)) for n in range(count)]


def recorded(config, task=None):
    """Parts whose step keeps the batches that it trains on."""
    parts, batches = funcrl.build(config, task), []

    def update(state, batch):
        batches.append(batch)
        return step.update(state, batch)

    step = parts.step
    return parts._replace(step=funcrl.Step(step.init, update)), batches


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_each_rollout_is_drawn_by_the_policy_so_many_steps_before(tmp_path, staleness):
    """With exact numerics what it was drawn with is known to the last bit."""
    config = small(
        tmp_path / "run", steps=5, max_staleness=staleness, numerics="exact",
        evaluation=EvaluationConfig(every=2, num_prompts=5),  # which push other policies
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=0),
        checkpoint=CheckpointConfig(every=1, keep_last=9),
    )  # fmt: skip
    parts, batches = recorded(config)
    trained = funcrl.train(config, parts=parts)
    policies = [
        funcrl.restore(tmp_path / "run" / "checkpoints" / str(step), like=trained.state)[0].params
        for step in range(6)
    ]
    for step, batch in enumerate(batches, start=1):
        version = max(0, step - 1 - staleness)
        scores = [
            funcrl.models.logprobs.score(parts.model_fn, params, batch).logprobs[batch.mask]
            for params in policies
        ]
        drawn_with = [torch.equal(each, batch.behavior_logprobs[batch.mask]) for each in scores]
        assert [index for index, is_it in enumerate(drawn_with) if is_it] == [version]
        row = trained.history[step]
        assert row["staleness"] == step - 1 - version
        differs = row["sampling/sampling_logp_difference/max"] > 0
        assert differs == (version != step - 1)
    lines = runs.read_lines(tmp_path / "run" / "completions.jsonl")
    assert {row["policy_version"] for row in lines if row["step"] == 5} == {4 - staleness}


def has_done(config, steps):
    return len(runs.read_lines(config.run_dir / "metrics.jsonl")) == 1 + steps


def test_several_updates_of_an_older_policys_rollout_want_a_bound_of_their_own(tmp_path):
    with pytest.raises(ValueError, match=r"--algorithm.max-importance .* 4 updates .* got none"):
        small(tmp_path, max_staleness=1, num_minibatches=2, num_iterations=2)


# What a checkpoint has to bring back, each in its own way.
KINDS = {
    "two behind, several updates": {
        "max_staleness": 2, "num_minibatches": 2, "num_iterations": 2,
        "algorithm": AlgorithmConfig(kl=0.1, entropy=0.05, max_importance=2.0),
    },
    "donated": {
        "max_staleness": 1, "length_multiple": 4,
        "compile": CompileConfig(backend="eager", fuse="none"),
    },
    "adapters, truncated": {
        "max_staleness": 2, "lora": LoraConfig(rank=2), "sampling": Sampling(max_tokens=3, top_k=5)
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_repeats_and_resumes_to_the_same_bits(tmp_path, name):
    """Stopped before, in and after the steps whose rollouts the first policy draws."""
    options = {"steps": 6, "optimizer": OptimizerConfig(schedule="constant", learning_rate=1e-2),
               "checkpoint": CheckpointConfig(every=4), **KINDS[name]}  # fmt: skip
    whole = funcrl.train(small(tmp_path / "whole", **options))
    for stop in (1, 3, 5):
        config = small(tmp_path / str(stop), **options)
        with pytest.raises(KeyboardInterrupt):
            funcrl.train(config, stop=partial(has_done, config, stop))
        resumed = funcrl.train(config, resume=True)
        assert equal(resumed.state, whole.state)
        assert untimed(resumed.history) == untimed(whole.history)
    again = funcrl.train(small(tmp_path / "again", **options))
    assert equal(again.state, whole.state)
    if name == "donated":
        plain = funcrl.train(small(tmp_path / "plain", **{**options, "compile": None}))
        assert equal(plain.state, whole.state)


@pytest.mark.slow
def test_kills_of_a_run_ahead_end_in_the_same_bits(tmp_path):
    """SIGKILL at random moments, while rollouts are being drawn."""
    assert_kills_end_in_the_same_bits(tmp_path, kills=2, max_staleness=2)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_prompt_is_trained_on_once_whatever_stops_the_run(tmp_path, staleness):
    class Stopping(Numbered):
        """Each of these rollouts ends the run once."""

        def __init__(self):
            super().__init__()
            self.stops = {2: KeyboardInterrupt, 4: RuntimeError, 6: KeyboardInterrupt}

        def prompts(self, seed, start, count):
            kind = self.stops.pop(1 + start // 3, None)
            if kind:
                raise kind
            return super().prompts(seed, start, count)

    config = small(
        tmp_path / "run", steps=8, max_staleness=staleness,
        evaluation=EvaluationConfig(every=0), checkpoint=CheckpointConfig(every=3),
        log=LogConfig(completions_every=1, num_completions=99),
    )  # fmt: skip
    task, resume = Stopping(), False
    while task.stops:
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            funcrl.train(config, task=task, resume=resume)
        resume = True
    funcrl.train(config, task=task, resume=True)
    lines = runs.read_lines(tmp_path / "run" / "completions.jsonl")
    assert [(row["step"], row["prompt"]) for row in lines] == [
        (1 + n // 3, f"{1000 + n}=") for n in range(24) for _ in range(4)
    ]


class Together(Copy):
    """The reward of the second rollout begins while the first step trains, and ends after it."""

    def __init__(self):
        super().__init__()
        self.training, self.rewarding = threading.Event(), threading.Event()
        self.calls = 0

    def reward(self, prompt, completion):
        self.calls += 1
        if self.calls == 13:  # the first of the second rollout
            assert self.training.wait(timeout=60)
            self.rewarding.set()
        return super().reward(prompt, completion)


@pytest.mark.slow
def test_a_rollout_is_drawn_and_rewarded_while_a_step_trains(tmp_path):
    task = Together()
    config = small(tmp_path / "run", steps=3, max_staleness=1, evaluation=EvaluationConfig(every=0))
    parts = funcrl.build(config, task)
    step = parts.step

    def update(state, batch):
        task.training.set()
        assert task.rewarding.wait(timeout=60)  # which never comes if one waits for the other
        return step.update(state, batch)

    parts = parts._replace(step=funcrl.Step(step.init, update))
    rows = funcrl.train(config, parts=parts).history
    assert all(row["time/wait"] <= row["step_time"] for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_is_raised_at_its_step_and_the_run_goes_on_from_there(tmp_path, kind):
    class Failing(Numbered):
        fails = True

        def prompts(self, seed, start, count):
            if self.fails and start == 9:
                raise kind("in the fourth rollout")
            return super().prompts(seed, start, count)

    config = small(tmp_path / "run", steps=6, max_staleness=2, checkpoint=CheckpointConfig(every=9))
    notes, task = [], Failing()
    # sys.exit of a task is an error like any other
    expected = funcrl.tasks.adapt.TaskError if kind is SystemExit else kind
    with pytest.raises(expected, match="in the fourth rollout") as raised:
        funcrl.train(config, task=task, view=Notes(notes))
    told = [*notes, *getattr(raised.value, "__notes__", [])]
    assert "Saved step 3 in" in told[-1]
    rows = runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    task.fails = False
    whole = funcrl.train(dataclasses.replace(config, run_dir=tmp_path / "whole"), task=task)
    assert equal(funcrl.train(config, task=task, resume=True).state, whole.state)


@pytest.mark.slow
def test_a_reward_that_fails_or_takes_too_long_ends_its_step_or_is_left_out(tmp_path):
    class Slow(Numbered):
        async def reward(self, prompt, completion):
            if prompt.text == "1007=":  # of the third step
                await asyncio.sleep(60)
            return {"correct": float(completion[:1] > "4")}

    options = {"max_staleness": 1, "reward_timeout": 0.05, "evaluation": EvaluationConfig(every=0)}
    with pytest.raises(RewardError, match=r"took longer than 0\.05 s"):
        funcrl.train(small(tmp_path / "stop", **options), task=Slow())
    rows = runs.read_lines(tmp_path / "stop" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    skipping = small(tmp_path / "skip", on_reward_error="skip", **options)
    rows = funcrl.train(skipping, task=Slow()).history
    assert [row.get("num_reward_errors", 0) for row in rows[1:]] == [0, 0, 4, 0]


class Uniform:
    """A generator of a stranger's: any token is as likely as any other; it counts its calls."""

    context_length = 64

    def __init__(self, vocab_size, fails_at=None):
        self.vocab_size, self.fails_at = vocab_size, fails_at
        self.pushed, self.threads = [], set()

    def push(self, params, version=0):
        self.pushed.append(version)

    def generate(self, prompts, sampling, seed):
        self.threads.add(threading.current_thread().name)
        if self.fails_at == self.pushed[-1]:
            raise OSError("the engine is gone")
        shape = len(prompts) * sampling.num_samples, sampling.max_tokens
        numbers = [funcrl.rng.fold_in(seed, n) for n in range(shape[0] * shape[1])]
        tokens = torch.tensor(numbers).remainder(self.vocab_size - 1).add(1).view(shape)
        logprobs = torch.full(shape, -math.log(self.vocab_size))
        mask, reasons = torch.ones(shape).bool(), ("length",) * shape[0]
        return Samples(tokens, mask, logprobs, logprobs, reasons, self.pushed[-1])

    def score(self, prompts):
        return [[-math.log(self.vocab_size)] * (len(prompt) - 1) for prompt in prompts]

    def close(self):
        pass


@pytest.mark.slow
def test_a_generator_of_one_s_own_is_used_by_one_thread_at_a_time(tmp_path):
    config = small(tmp_path / "run", steps=4, max_staleness=2)
    vocab_size = funcrl.build(config).task.tokenizer.vocab_size
    generator = Uniform(vocab_size)
    whole = funcrl.train(config, parts=funcrl.build(config, generator=generator))
    # Evaluations before the first step, of the second and of the last one among the rollouts.
    assert generator.pushed == [0, 0, 0, 0, 1, 2, 4]
    assert generator.threads == {"MainThread", "rollouts_0"}
    failing = Uniform(vocab_size, fails_at=1)
    broken = dataclasses.replace(config, run_dir=tmp_path / "broken")
    with pytest.raises(OSError, match="the engine is gone"):
        funcrl.train(broken, parts=funcrl.build(broken, generator=failing))
    lines = runs.read_lines(tmp_path / "broken" / "metrics.jsonl")
    assert [row["step"] for row in lines] == [0, 1, 2, 3]
    parts = funcrl.build(broken, generator=Uniform(vocab_size))
    assert equal(funcrl.train(broken, parts=parts, resume=True).state, whole.state)


@pytest.mark.slow
def test_an_error_of_a_step_ends_the_thread(tmp_path):
    config = small(tmp_path / "run", steps=5, max_staleness=2)
    parts, batches = recorded(config)
    step = parts.step

    def update(state, batch):
        if len(batches) == 2:
            raise MemoryError("no room")
        return step.update(state, batch)

    with pytest.raises(MemoryError, match="no room"):
        funcrl.train(config, parts=parts._replace(step=funcrl.Step(step.init, update)))
    parts, _ = recorded(config)
    resumed = funcrl.train(config, parts=parts, resume=True)
    whole = dataclasses.replace(config, run_dir=tmp_path / "whole")
    assert equal(resumed.state, funcrl.train(whole).state)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 1)])
def test_a_fork_may_draw_from_older_or_newer_policies(tmp_path, before, after):
    """It has the policies that its parent kept; the first rollouts are of the oldest of them."""
    options = {"steps": 6, "optimizer": OptimizerConfig(learning_rate=1e-2, schedule="constant")}
    parent = small(tmp_path / "parent", **{**options, "steps": 3, "max_staleness": before})
    funcrl.train(parent)
    with pytest.raises(ValueError, match=rf"train expects .*--max-staleness {after} \(was"):
        funcrl.train(dataclasses.replace(parent, max_staleness=after), resume=True)
    config = small(tmp_path / "whole", max_staleness=after, **options)
    whole = funcrl.train(config, fork=parent.run_dir)
    lines = runs.read_lines(config.run_dir / "completions.jsonl")
    versions = {row["step"]: row["policy_version"] for row in lines if row["step"] > 3}
    oldest = 3 - min(before, after)
    assert versions == {step: max(oldest, step - 1 - after) for step in (4, 5, 6)}
    stopped = dataclasses.replace(config, run_dir=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(stopped, fork=parent.run_dir, stop=lambda: True)
    resumed = funcrl.train(stopped, resume=True)
    assert equal(resumed.state, whole.state)
    assert untimed(resumed.history) == untimed(whole.history)


@pytest.mark.slow
def test_it_learns_from_policies_of_two_steps_ago(tmp_path):
    config = small(
        tmp_path / "run", steps=60, num_prompts=16, num_generations=8, max_staleness=2,
        warm_start=WarmStartConfig(steps=60, accuracy=0.3, every=1),
        optimizer=OptimizerConfig(learning_rate=3e-3), evaluation=EvaluationConfig(every=60),
        checkpoint=CheckpointConfig(every=60),
    )  # fmt: skip
    rows = funcrl.train(config, task=Copy()).history
    assert 0.3 <= rows[0]["eval/accuracy"] <= 0.8
    assert rows[-1]["eval/accuracy"] >= 0.9
    assert all(0.5 <= row["sampling/importance_sampling_ratio/mean"] <= 2 for row in rows[1:])


def test_stale_rollouts_are_corrected_for():
    for given, cap in ((None, 2.0), (5.0, 5.0)):
        options = {"max_staleness": 1, "algorithm": AlgorithmConfig(max_importance=given)}
        assert funcrl.build(small(None, **options)).algorithm.ratio.correction.cap == cap
    with pytest.raises(ValueError, match=r"train expects --no-vllm\.sleep with --max-staleness 1"):
        small(None, max_staleness=1, vllm=VLLMConfig(sleep=True))


def test_the_memory_estimate_counts_the_policies_that_are_kept():
    shape = funcrl.models.shape("micro", vocab_size=13)
    plain, one, donated = (
        funcrl.memory.estimate_memory(small(None, **options), shape, 6)
        for options in ({}, {"max_staleness": 1},
                        {"max_staleness": 1, "compile": CompileConfig()})
    )  # fmt: skip
    assert (plain.older, one.older) == (0, plain.parameters)
    assert donated.older == 2 * plain.parameters
    grown = one.peak - plain.peak - 2 * plain.parameters  # one in memory, one on its way to disk
    assert grown == min(plain.cache, plain.training)


BLOCKING = """
import time
n = 0
def score(prompt, completion):
    global n
    n += 1
    if n > 8:
        time.sleep(60)
    return float(n % 2)
"""


@pytest.mark.slow
def test_a_reward_that_blocks_is_left_by_a_third_signal(tmp_path):
    """The second says what it waits for; a thread that sleeps cannot be ended otherwise."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    (tmp_path / "block.py").write_text(BLOCKING)
    line = [
        "train", "--max-staleness", "1", "--reward", f"{tmp_path / 'block.py'}:score",
        "--num-prompts", "2", "--num-generations", "2", "--sampling.max-tokens", "3",
        "--warm-start.steps", "0", "--evaluation.every", "0", "--steps", "9", "--threads", "1",
        "--run-dir", str(folder),
    ]  # fmt: skip
    with log.open("wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-c", f"from funcrl.cli import main; main({line!r})"],
            stdout=file, stderr=file,
        )  # fmt: skip
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        for _ in range(2):
            time.sleep(0.5)
            run.send_signal(signal.SIGINT)
        wait_until(lambda: "One more Ctrl-C" in log.read_text())
        assert "Saved step 2" in log.read_text()
        run.send_signal(signal.SIGINT)
        assert run.wait(15) == 130
    finally:
        run.kill()
        run.wait()


def wait_until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)

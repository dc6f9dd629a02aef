"""Environments of gymnasium: what is observed, what an action does, and a run on one."""

import re

import gymnasium
import numpy as np
import pytest
from cases import equal

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.tasks import Gymnasium, Prompt


@pytest.fixture(scope="module")
def cartpole():
    return Gymnasium("CartPole-v1")


def played(task, prompt, actions):
    """Return every state of an episode."""
    states = [task.begin(prompt)]
    for action in actions:
        states.append(task.act(states[-1], f"{action} "))
    return states


def test_observations_are_the_environments_own(cartpole):
    """Each number is in the bin of its quantile, and the reward is the sum of gymnasium's."""
    prompt = cartpole.prompts(seed=0, start=3, count=1)[0]
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=prompt.data)
    state, total, over = cartpole.begin(prompt), 0.0, False
    assert prompt.text == cartpole.observe(state)
    for step in range(100):
        assert np.array_equal(state.observation, observation)
        state = cartpole.act(state, f"{step % 3 % 2} ")
        observation, reward, over, *_ = environment.step(step % 3 % 2)
        total += reward
        if over:
            break
        words = re.fullmatch(r"a(\d+) b(\d+) c(\d+) d(\d+) ", cartpole.observe(state))
        assert all(0 <= int(number) < 16 for number in words.groups())
    assert over
    assert cartpole.observe(state) is None
    assert cartpole.reward(prompt, state) == {"return": total, "solved": 0.0}
    assert 5 < total < 100


def test_bins_hold_equally_many_observations_of_random_play(cartpole):
    counts = np.zeros((4, 16))
    seen = 0
    for number in range(150):
        state = cartpole.begin(Prompt("", data=number))
        while (text := cartpole.observe(state)) is not None:
            for place, word in enumerate(text.split()):
                counts[place, int(word[1:])] += 1
            seen += 1
            action = funcrl.rng.fold_in(number, seen) % 2
            state = cartpole.act(state, f"{action} ")
    assert np.abs(counts / seen - 1 / 16).max() < 1 / 32  # half as many, or half as many again


def test_a_state_is_a_value(cartpole):
    """Each of an episode's states goes on alike, however often, in any order."""
    prompt = cartpole.prompts(seed=1, start=0, count=1)[0]
    actions = [0, 1, 1, 0, 1, 0, 0]
    states = played(cartpole, prompt, actions)
    again = played(cartpole, prompt, actions)
    assert [cartpole.observe(each) for each in states] == [cartpole.observe(each) for each in again]
    for number in (2, 5, 0, 2):
        for action in (1, 0):
            before = cartpole.observe(states[number])
            found = cartpole.act(states[number], f"{action} ")
            wanted = played(cartpole, prompt, [*actions[:number], action])[-1]
            assert np.array_equal(found.observation, wanted.observation)
            assert found.total == wanted.total == number + 1
            assert cartpole.observe(states[number]) == before
    last = cartpole.act(states[-1], "1 ")
    assert np.array_equal(last.observation, played(cartpole, prompt, [*actions, 1])[-1].observation)


@pytest.mark.parametrize("completion", ["", "2 ", "a3 ", "1 1 ", "x", "-1 ", "²", "99999999999 "])
def test_what_is_no_action_ends_the_episode(cartpole, completion):
    prompt = cartpole.prompts(seed=0, start=0, count=1)[0]
    state = played(cartpole, prompt, [0, 1])[-1]
    after = cartpole.act(state, completion)
    assert cartpole.observe(after) is None
    assert cartpole.reward(prompt, after)["return"] == 2.0
    assert cartpole.observe(cartpole.act(after, "1 ")) is None
    assert cartpole.observe(state) is not None


def test_it_does_not_pay_to_give_up():
    """A turn of MountainCar costs 1, and 200 of them are an episode: the threshold is -110."""
    task = funcrl.tasks.Gymnasium("MountainCar-v0")
    prompt = task.prompts(seed=0, start=0, count=1)[0]
    gave_up = task.act(task.act(task.begin(prompt), "1 "), "x ")
    assert task.reward(prompt, gave_up) == {"return": -200.0, "solved": 0.0}
    cut_off = played(task, prompt, [1] * 20)[-1]
    assert task.reward(prompt, cut_off) == {"return": -200.0, "solved": 0.0}
    whole = played(task, prompt, [1] * 200)[-1]
    assert task.observe(whole) is None
    assert task.reward(prompt, whole) == {"return": -200.0, "solved": 0.0}


def test_an_environment_without_a_threshold_counts_what_is_finished():
    """FrozenLake-v1 made by another name has none; its episodes end at a hole or the goal."""
    gymnasium.register("NoThreshold-v0", "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
                       max_episode_steps=20, kwargs={"is_slippery": False})  # fmt: skip
    task = funcrl.tasks.Gymnasium("NoThreshold-v0")
    prompt = task.prompts(seed=0, start=0, count=1)[0]
    hole = played(task, prompt, [2, 1])[-1]  # right, and down
    assert task.accuracy == "finished"
    assert task.reward(prompt, hole) == {"return": 0.0, "finished": 1.0}
    assert task.reward(prompt, task.act(task.begin(prompt), "x ")) == {
        "return": 0.0,
        "finished": 0.0,
    }


def test_a_controller_solves_it_in_words(cartpole):
    """Pushing to where the pole falls, as its last two words say, keeps it up for 500 turns."""
    prompt = cartpole.eval_prompts(1)[0]
    state = cartpole.begin(prompt)
    while (text := cartpole.observe(state)) is not None:
        x, speed, angle, turning = (int(word[1:]) - 7.5 for word in text.split())
        state = cartpole.act(state, "1 " if angle + 2 * turning + 0.3 * (x + speed) > 0 else "0 ")
    assert cartpole.reward(prompt, state) == {"return": 500.0, "solved": 1.0}
    assert cartpole.max_turns == 500


def test_starts_that_are_held_out_are_not_trained_on(cartpole):
    held_out = {prompt.data for prompt in cartpole.eval_prompts(20)}
    assert len(held_out) == 20
    assert not held_out & {prompt.data for prompt in cartpole.prompts(0, 0, 200)}


def test_an_environment_of_one_integer():
    task = Gymnasium("FrozenLake-v1")
    assert task.tokenizer.vocab_size == 1 + 4 + 16
    prompt = task.prompts(seed=0, start=0, count=1)[0]
    assert prompt.text == "a0 "
    states = played(task, prompt, [2, 2, 1, 1, 1, 2])
    assert [each.observation for each in played(task, prompt, [2, 2, 1, 1, 1, 2])] == [
        each.observation for each in states
    ]  # it slips at random, by the start's seed


def test_environments_that_do_not_fit_are_refused_by_name():
    for name, words in (
        ("Pendulum-v1", "discrete actions, got Box"),
        ("Blackjack-v1", "at most 26 numbers, or of one integer of a range, got Tuple"),
        ("NoSuch-v0", "the name of an environment that is installed, got 'NoSuch-v0'"),
    ):
        with pytest.raises(ValueError, match=f"^Gymnasium expects .*{re.escape(words)}"):
            Gymnasium(name)
    with pytest.raises(ValueError, match="^Gymnasium expects 2 <= bins <= 1000, got 1"):
        Gymnasium("CartPole-v1", bins=1)
    with pytest.raises(ValueError, match="^load expects a model that starts from nothing"):
        funcrl.tasks.load("gymnasium:CartPole-v1", tokenizer=funcrl.tasks.ByteTokenizer())


def small(run_dir, **options):
    return TrainConfig(**{
        "run_dir": run_dir, "model": "gru", "task": "gymnasium:CartPole-v1", "steps": 6,
        "threads": 1, "num_prompts": 4, "num_generations": 4, "packing": "samples",
        "sampling": Sampling(max_tokens=1), "algorithm": AlgorithmConfig(name="dr_grpo", kl=0.0),
        "warm_start": WarmStartConfig(steps=0), "evaluation": EvaluationConfig(every=0),
        "checkpoint": CheckpointConfig(every=2), **options,
    })  # fmt: skip


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(tmp_path):
    whole = funcrl.train(small(tmp_path / "whole"))
    steps = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(small(tmp_path / "part"), stop=lambda: next(steps))
    resumed = funcrl.train(small(tmp_path / "part"), resume=True)
    assert equal(resumed.state, whole.state)
    difference = "sampling/sampling_logp_difference/max"
    assert max(row[difference] for row in whole.history[1:]) < 1e-5  # of float32

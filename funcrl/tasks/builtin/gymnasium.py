"""Environments of gymnasium with discrete actions, whose observations are written as words."""

import math
import re
import string
from bisect import bisect
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from funcrl.core import checks, rng
from funcrl.tasks.builtin.generated import GeneratedTask
from funcrl.tasks.contracts import Environment, Prompt
from funcrl.tasks.tokenizers import WordTokenizer

_RANDOM_STEPS = 5000  # of random play, whose observations say where the bins are
_MOST_TURNS = 1000  # of an environment that names no limit
_NUM_STARTS = 1 << 31


class _Game:
    """An environment of gymnasium, and the actions that it has taken since its start."""

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self.seed = environment, seed
        self.actions: list[int] = []
        self.start, _ = environment.reset(seed=seed)

    def act(self, action: int) -> tuple[Any, float, bool]:
        """Return the observation after an action, its reward, and whether the episode is over."""
        observation, reward, ended, cut, _ = self.environment.step(action)
        self.actions.append(action)
        return observation, float(reward), bool(ended or cut)


class Play(NamedTuple):
    """An episode so far: the first `num_actions` of a game, which may have gone on since."""

    game: _Game
    observation: Any
    num_actions: int = 0
    total: float = 0.0  # of the rewards
    over: bool = False
    ended: bool = False  # by the environment, not by a word that is no action


class Gymnasium(GeneratedTask, Environment):
    """An environment of gymnasium: the policy reads an observation and writes an action.

    Each number of an observation is one word, its letter and its bin, such as `a3 b0 c7 d4 `; bins
    hold equally many of the observations of random play. An action is its number, `1 `, and any
    other completion ends the episode. A prompt is the first observation of a start, which the
    samples of a group share. A tenth of all starts is held out for evaluation; two starts may look
    the same to a policy, as all of FrozenLake's do.

    Rewards are `return`, the sum of the environment's own, and the task's accuracy, which has no
    weight: `solved`, whether the return has reached the threshold that gymnasium names, or without
    one `finished`, whether the environment has ended the episode. Each turn that is left when a
    policy ends an episode itself counts as the lowest reward of random play, if that is below 0: it
    does not pay to give up.

    Args:
        name: of an environment with discrete actions, whose observations are a vector of at most 26
            numbers, or one of a range of integers. An episode must be a function of its seed and
            its actions.
        bins: for each number of a vector.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.Gymnasium("CartPole-v1")
        >>> prompt = task.prompts(seed=0, start=0, count=1)[0]
        >>> state = task.begin(prompt)
        >>> after = task.act(state, "1 ")
        >>> prompt.text, task.observe(after), task.reward(prompt, after)
        ('a11 b6 c11 d9 ', 'a11 b9 c11 d6 ', {'return': 1.0, 'solved': 0.0})
    """

    stop = (" ",)

    def __init__(self, name: str, bins: int = 16) -> None:
        checks.check_range("Gymnasium", "bins", bins, 2, 1000)
        self._gymnasium = checks.import_extra(
            "Gymnasium", "gymnasium", f"for {name!r}", "gymnasium"
        )
        self.name, self._environment = f"gymnasium:{name}", name
        self._spare = self._made()  # for first observations
        self._first_action, self._num_actions = _actions_of(self._spare, self._gymnasium.spaces)
        observations, self._lowest = _random_play(self._spare, self._gymnasium.spaces)
        self._edges = _edges(self._spare, observations, bins, self._gymnasium.spaces)
        words = [
            f"{letter}{number}"
            for letter, edges in zip(string.ascii_lowercase, self._edges, strict=False)
            for number in range(len(edges) + 1)
        ]
        self.tokenizer = WordTokenizer([*map(str, range(self._num_actions)), *words])
        self.max_turns = self._spare.spec.max_episode_steps or _MOST_TURNS
        self._threshold = self._spare.spec.reward_threshold
        self.accuracy = "finished" if self._threshold is None else "solved"
        self.reward_weights: Mapping[str, float] = {self.accuracy: 0.0}

    def draw(self, *seed: int) -> tuple[Prompt, tuple[int]]:
        """Return the first observation of a start, and the seed of the start."""
        start = rng.fold_in(*seed) % _NUM_STARTS
        observation, _ = self._spare.reset(seed=start)
        return Prompt(self._words(observation), data=start), (start,)

    def begin(self, prompt: Prompt) -> Play:
        """Return the start of an episode."""
        game = _Game(self._made(), prompt.data)
        return Play(game, game.start)

    def act(self, state: Play, completion: str) -> Play:
        """Return the state after an action; anything else ends the episode."""
        word = completion.removesuffix(" ")
        number = int(word) if re.fullmatch(r"[0-9]{1,9}", word) else self._num_actions
        if state.over or number >= self._num_actions:
            return state._replace(over=True)
        game = state.game
        if len(game.actions) > state.num_actions:  # it has gone on from this state before
            game = _Game(self._made(), game.seed)
            for action in state.game.actions[: state.num_actions]:
                game.act(action)
        observation, reward, over = game.act(self._first_action + number)
        return Play(game, observation, state.num_actions + 1, state.total + reward, over, over)

    def observe(self, state: Play) -> str | None:
        """Return the observation in words; None at the end."""
        return None if state.over else self._words(state.observation)

    def reward(self, prompt: Prompt, state: Play) -> Mapping[str, float]:
        """Return the sum of the environment's rewards, and whether the episode was a success."""
        del prompt
        left = 0 if state.ended else self.max_turns - state.num_actions
        total = state.total + left * min(self._lowest, 0.0)
        success = state.ended if self._threshold is None else total >= self._threshold
        return {"return": total, self.accuracy: float(success)}

    def _made(self) -> Any:
        """Return a new environment, without gymnasium's checker, which takes as long as a step."""
        try:
            return self._gymnasium.make(self._environment, disable_env_checker=True)
        except self._gymnasium.error.Error as error:
            raise ValueError(
                f"Gymnasium expects the name of an environment that is installed, got "
                f"{self._environment!r}: {error}"
            ) from error

    def _words(self, observation: Any) -> str:
        numbers = np.ravel(observation).tolist()
        triples = zip(string.ascii_lowercase, self._edges, numbers, strict=False)
        return "".join(f"{letter}{bisect(edges, number)} " for letter, edges, number in triples)


def _actions_of(environment: Any, spaces: Any) -> tuple[int, int]:
    """Return the first action and the number of actions; raise where they are not discrete."""
    space = environment.action_space
    if not isinstance(space, spaces.Discrete):
        raise ValueError(
            f"Gymnasium expects an environment with discrete actions, got {space} of "
            f"{environment.spec.id}."
        )
    return int(space.start), int(space.n)


def _random_play(environment: Any, spaces: Any) -> tuple[list[Any], float]:
    """Return the observations of random play, which is always the same, and its lowest reward."""
    seen, over, lowest = [], True, math.inf
    first, count = _actions_of(environment, spaces)
    for step in range(_RANDOM_STEPS):
        if over:
            observation, _ = environment.reset(seed=step)
            over = False
        else:
            action = first + rng.fold_in(0, step) % count
            observation, reward, ended, cut, _ = environment.step(action)
            over, lowest = bool(ended or cut), min(lowest, float(reward))
        seen.append(observation)
    return seen, lowest


def _edges(environment: Any, seen: list[Any], bins: int, spaces: Any) -> list[list[float]]:
    """Return, for each number of an observation, the values between its bins, in order.

    They are quantiles of the observations that were seen.
    """
    space = environment.observation_space
    if isinstance(space, spaces.Discrete):
        return [[space.start + number + 0.5 for number in range(int(space.n) - 1)]]
    most = len(string.ascii_lowercase)
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.shape[0] > most:
        raise ValueError(
            f"Gymnasium expects observations of at most {most} numbers, or of one integer of a "
            f"range, got {space} of {environment.spec.id}."
        )
    quantiles = np.quantile(np.array(seen, np.float64), np.arange(1, bins) / bins, axis=0)
    return [sorted({*column}) for column in quantiles.T.tolist()]

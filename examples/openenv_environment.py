"""An environment of OpenEnv behind its server: a policy learns to find a digit in four guesses.

    python examples/openenv_environment.py       # needs openenv 0.10; a minute

A client with the methods that a policy may call is an environment as TRL's users write it.
"""

import socket
import threading

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from trl_environment import train


class Guess(Action):
    """What a policy does."""

    digit: int


class Hint(Observation):
    """What a policy reads."""

    text: str


class Digit(Environment):
    """The environment, on the server's side."""

    SUPPORTS_CONCURRENT_SESSIONS, state = True, State()

    def reset(self, seed=None, **_):
        """Think of a digit, which the seed says."""
        self.secret = (seed or 0) % 10
        return Hint(text="?")

    def step(self, action, **_):
        """Compare a guess."""
        above = action.digit - self.secret
        return Hint(text="-" if above > 0 else "+" if above else "=", reward=float(not above))


class Client:
    """The environment's methods, in the run's process."""

    def __init__(self) -> None:
        self.session = GenericEnvClient(base_url="http://127.0.0.1:8765").sync()

    def reset(self, seed: int, **_) -> str:
        """Begin with the row's seed."""
        self.reward = 0.0
        return self.session.reset(seed=seed).observation["text"]

    def guess(self, digit: int) -> str:
        """Guess a digit."""
        result = self.session.step({"digit": digit})
        self.reward = max(self.reward, result.reward)
        return result.observation["text"]

    def get_reward(self) -> float:
        """Return whether it was found."""
        return self.reward


def main(steps: int = 100) -> list[float]:
    """Return the mean reward of each step."""
    app = create_fastapi_app(Digit, Guess, Hint, max_concurrent_envs=300)
    place = socket.create_server(("127.0.0.1", 8765))  # clients wait here until it serves
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, args=([place],), daemon=True).start()
    trained = train(Client, [{"seed": n} for n in range(200)], steps=steps, num_prompts=16)
    return [row["reward"] for row in trained.history[1:]]


if __name__ == "__main__":
    print("reward:", *[f"{reward:.2f}" for reward in main()[::10]])

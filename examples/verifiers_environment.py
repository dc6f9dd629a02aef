"""An environment of the verifiers package: a policy learns to find a digit in four guesses.

    python examples/verifiers_environment.py     # needs verifiers; three minutes

The package plays, with its tasks, rewards and harness, and asks for tokens; its traces say which
were drawn. This harness plays the user in this process; those that run programs work as well.
"""

import aiohttp
from verifiers import v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

import funcrl
from funcrl import config

__all__ = ["Digits", "Player"]


class Digit(vf.TaskData):
    """What a task knows."""

    secret: str


class Guess(vf.Task[Digit]):
    """What a rollout is worth."""

    @vf.reward
    async def found(self, task: Digit, trace: vf.Trace) -> float:
        """Return 1 if the last guess is right."""
        return float(trace.last_reply == task.secret)


class Digits(vf.Taskset[Guess]):
    """The tasks: each digit, ten times."""

    def load(self) -> list[Guess]:
        """Return them."""
        return [Guess(Digit(id=str(n), prompt="?", secret=str(n % 10))) for n in range(100)]


class Player(vf.Harness[vf.HarnessConfig]):
    """Tells who guesses whether the digit is more or less."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, _trace, _runtime, endpoint, secret, _mcp_urls, data):
        """Play one rollout; every answer comes from the endpoint."""
        talk = [{"role": "user", "content": data.prompt}]
        key = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=key, raise_for_status=True) as http:
            for _ in range(4):
                asked = {"model": ctx.model, "messages": talk}
                async with http.post(f"{endpoint}/chat/completions", json=asked) as reply:
                    said = (await reply.json())["choices"][0]["message"]["content"] or ""
                if said == data.secret:
                    break
                hint = "+" if said < data.secret else "-"
                talk += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
        return vf.ProgramResult(0, "", "")


def main(steps: int = 60) -> list[float]:
    """Return the mean reward of each step."""
    here = {"id": "verifiers_environment"}  # the module with the taskset, and with the harness
    agent = {"harness": here, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": here, "agent": agent}))
    task = funcrl.tasks.from_verifiers(env, funcrl.tasks.CharTokenizer("0123456789?+-"))
    options = config.TrainConfig(
        steps=steps, num_prompts=16, num_generations=8, num_minibatches=4,
        sampling=config.Sampling(max_tokens=2, stop=tuple("0123456789")),
        algorithm=config.AlgorithmConfig(kl=0.0, entropy=0.0), warm_start=config.WarmStartConfig(0),
        optimizer=config.OptimizerConfig(learning_rate=4e-3))  # fmt: skip
    return [row["reward"] for row in funcrl.train(options, task=task).history[1:]]


if __name__ == "__main__":
    print("reward:", *[f"{reward:.2f}" for reward in main()[::10]])

"""An environment of verifiers in several turns: guess a digit, and hear of more or less."""

import httpx
from cases import TEMPLATES, tiny_tokenizer
from renderers import Qwen3RendererConfig
from verifiers import v1 as vf

import funcrl

__all__ = ["GuessTaskset", "Player"]

TURNS = 3
RENDERER = Qwen3RendererConfig(enable_thinking=False)
MARKS = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
         "<think>", "</think>"]  # fmt: skip


def qwen_tokenizer():
    tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return funcrl.tasks.ChatTokenizer(tokenizer._tokenizer)


class GuessData(vf.TaskData):
    secret: str


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def correct(self, task: GuessData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.secret)

    @vf.reward(weight=0.1)
    async def tried(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask]):
    def load(self):
        for digit in range(10):
            data = GuessData(name=f"digit {digit}", prompt="Guess a digit!", secret=str(digit))
            yield GuessTask(data)


class Player(vf.Harness[vf.HarnessConfig]):
    """Asks the policy, and answers as the user, within this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=None) as client:
            for _ in range(TURNS):
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages},
                )
                reply.raise_for_status()
                said = reply.json()["choices"][0]["message"]["content"] or ""
                if said.strip() == data.secret:
                    break
                hint = "more" if said.strip() < data.secret else "less"
                messages += [{"role": "assistant", "content": said},
                             {"role": "user", "content": hint}]  # fmt: skip
        return vf.ProgramResult(0, "", "")


def environment(**agent):
    """The environment, as its command line would make it."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = resolve_env_config(
        {
            "taskset": {"id": "verifiers_guess"},
            "agent": {
                "harness": {"id": "verifiers_guess"},
                "runtime": {"type": "subprocess"},
                **agent,
            },
        }
    )
    return load_environment(config)

"""The loop by hand, with vLLM drawing: generate, reward, collate, step, push.

    VLLM_LOGGING_LEVEL=ERROR python examples/vllm_loop.py    # vLLM runs funcrl's network
    VLLM_LOGGING_LEVEL=ERROR python examples/vllm_loop.py --form native    # or its own class

The engine starts in this process at the first push. docs/vllm.md says how to install vLLM, on a
GPU or on a CPU; --device cuda puts trainer and engine on one GPU.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import tyro

import funcrl
from funcrl import rollouts


@dataclass(frozen=True)
class Config:
    """Train a policy to repeat three digits, on completions that vLLM draws."""

    steps: int = 60
    """The number of rollouts, each with one update."""
    num_prompts: int = 32
    """The number of prompts in a rollout; each gets 8 completions."""
    form: Literal["unified", "native"] = "unified"
    """The network that vLLM runs: funcrl's own, or vLLM's class of the same architecture."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of trainer and engine."""


def share_right(completion: str, answer: str) -> float:
    """Return the share of the answer's characters that are right."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


def main(args: Config) -> list[float]:
    """Train, and return the mean reward of each rollout."""
    tokenizer = funcrl.tasks.CharTokenizer("0123456789>")
    rows = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}"} for n in range(1000)]
    task = funcrl.tasks.from_rows(rows, share_right, tokenizer=tokenizer)

    model = funcrl.models.Transformer(funcrl.models.shape("micro", tokenizer.vocab_size))
    algorithm = funcrl.grpo(correction=funcrl.ratios.truncated(2.0))  # vLLM's rounding is its own
    clip, adamw = funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.adamw(3e-3)
    step = funcrl.grpo_step(
        funcrl.logprob_fn(model), algorithm=algorithm, optimizer=funcrl.optim.chain(clip, adamw)
    )
    state = step.init(funcrl.init_params(model, seed=0, device=args.device))
    sampling = funcrl.generators.Sampling(num_samples=8, max_tokens=3)
    curve = []
    with closing(funcrl.generators.VLLM(model, args.form)) as engine:
        for index in range(args.steps):
            engine.push(state.params, version=index)
            prompts = task.prompts(0, start=index * args.num_prompts, count=args.num_prompts)
            completed = rollouts.complete(task, engine, prompts, sampling, seed=index)
            rewards = rollouts.grade(task, completed.prompts, completed.outcomes).total
            batch = funcrl.collate(rollouts.to_rollout(completed, rewards), algorithm)
            state, metrics = step(state, batch)
            curve.append(rewards.mean().item())
            if index % 10 == 0 or index == args.steps - 1:
                off = metrics.maxes["sampling/sampling_logp_difference/max"].item()
                print(f"step {index:3}  reward {curve[-1]:.3f}  vLLM's log-probs off by {off:.0e}")
    return curve


if __name__ == "__main__":
    main(tyro.cli(Config))

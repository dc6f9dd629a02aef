"""A policy from nothing: GRPO teaches a small transformer to reverse three digits.

    python examples/first_policy.py                 # about a minute on two CPU cores
    python examples/first_policy.py --steps 20      # a taste

Everything between a random network and a solved task is on this page: the task, the sampler, the
step and the loop. Nothing is pretrained and no answer is ever shown; the policy is told only how
many of its digits were right. Writes the learning curve as a PNG and as JSON lines.
"""

# %% The task: "1 2 3 =" is to be answered by "3 2 1"
import json
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import tyro
from torch import Tensor

import funcrl

DIGITS, EQUALS, VOCABULARY = 3, 10, 11


def prompts(seed: int, count: int) -> Tensor:
    """Return [count, DIGITS + 1] tokens: random digits and the equals sign."""
    digits = torch.randint(10, (count, DIGITS), generator=funcrl.rng.generator(seed))
    return torch.cat([digits, torch.full((count, 1), EQUALS)], dim=1)


def reward(tokens: Tensor) -> Tensor:
    """Return [B], the share of the answer's digits that are right."""
    question, answer = tokens[:, :DIGITS], tokens[:, DIGITS + 1 :]
    return (answer == question.flip(1)).float().mean(dim=1)


# %% The policy: a module without weights, and its parameters as a dictionary
config = funcrl.models.TransformerConfig(
    vocab_size=VOCABULARY, width=64, num_layers=2, num_heads=4, num_kv_heads=4, head_width=16,
    mlp_width=192,
)  # fmt: skip
model = funcrl.models.Transformer(config)
apply = funcrl.functional(model)


@torch.no_grad()
def sample(params: funcrl.types.Params, prompt: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens [B, T] and their log-probabilities [B, T], drawn token by token."""
    generator = funcrl.rng.generator(seed)
    tokens, logprobs = prompt, torch.zeros_like(prompt, dtype=torch.float32)
    for _ in range(DIGITS):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        scores = apply(params, tokens, positions)[:, -1].log_softmax(dim=-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
        logprobs = torch.cat([logprobs, scores.gather(1, drawn)], dim=1)
    return tokens, logprobs


def rollout(params: funcrl.types.Params, seed: int, step: int, n: int, g: int) -> funcrl.Rollout:
    """Return n prompts with g samples each."""
    prompt = prompts(funcrl.rng.fold_in(seed, step, 0), n).repeat_interleave(g, dim=0)
    tokens, logprobs = sample(params, prompt, funcrl.rng.fold_in(seed, step, 1))
    return funcrl.Rollout(
        tokens=tokens,
        mask=(torch.arange(tokens.shape[1]) > DIGITS).expand_as(tokens),
        behavior_logprobs=logprobs,
        rewards=reward(tokens),
        group=torch.arange(n).repeat_interleave(g),
        policy_version=torch.full((n * g,), step),
    )


# %% The loop: generate, reward, collate, step
@dataclass(frozen=True)
class Config:
    """Train a policy from nothing to reverse three digits."""

    steps: int = 300
    """The number of optimizer steps, one for each rollout."""
    prompts: int = 64
    """The number of prompts in a rollout."""
    samples: int = 16
    """The number of samples of each prompt: the group that the advantage compares."""
    learning_rate: float = 1e-3
    """The highest learning rate of AdamW, after ten steps of warm-up; half a cosine falls to 0."""
    entropy: float = 0.05
    """The weight of the entropy bonus: without it the policy settles on few answers too early."""
    seed: int = 0
    """The seed of the weights, the prompts and the samples."""
    out: Path = Path("runs/first_policy")
    """The folder for curve.png and metrics.jsonl."""


def train(args: Config) -> list[dict[str, float]]:
    """Return each step's metrics: those of the rollout and those of the update."""
    algorithm = funcrl.grpo(entropy=args.entropy)
    rate = funcrl.optim.warmup(10, funcrl.optim.cosine(args.learning_rate, 0.0, args.steps))
    optimizer = funcrl.optim.chain(
        funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.adamw(rate, weight_decay=0.0)
    )
    step = funcrl.grpo_step(funcrl.logprob_fn(model), algorithm=algorithm, optimizer=optimizer)
    state = step.init(funcrl.init_params(model, seed=args.seed), seed=args.seed)
    history = []
    for index in range(args.steps):
        start = time.perf_counter()
        data = rollout(state.params, args.seed, index, args.prompts, args.samples)
        state, metrics = step(state, funcrl.collate(data, algorithm))
        row = {"step": index, **funcrl.metrics.describe_rollout(data)}
        row |= funcrl.metrics.to_floats(metrics)
        history.append(row | {"step_time": time.perf_counter() - start})
        if index % 20 == 0 or index + 1 == args.steps:
            print(f"step {index:4d}  reward {row['reward']:.3f}  entropy {row['entropy']:.3f}")
    return history


def plot(history: list[dict[str, float]], path: Path) -> None:
    """Write the learning curve."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    steps = [row["step"] for row in history]
    axes.plot(steps, [row["reward"] for row in history], color="#3b6fb6", label="reward")
    axes.axhline(0.1, color="#999999", linewidth=1, linestyle=":", label="guessing")
    axes.set(xlabel="step", ylabel="share of digits right", ylim=(0, 1.02))
    axes.set_title("funcrl: GRPO from random weights, reversing three digits", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(args: Config) -> list[dict[str, float]]:
    """Train, and write what happened."""
    args.out.mkdir(parents=True, exist_ok=True)
    history = train(args)
    lines = "".join(json.dumps(row) + "\n" for row in history)
    (args.out / "metrics.jsonl").write_text(lines)
    plot(history, args.out / "curve.png")
    print(f"wrote {args.out / 'curve.png'} and {args.out / 'metrics.jsonl'}")
    return history


if __name__ == "__main__":
    main(tyro.cli(Config))

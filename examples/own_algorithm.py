"""An algorithm of your own: a quadratic trust region in place of GRPO's clip, beside GRPO.

    python examples/own_algorithm.py             # both learn to reverse three digits

An algorithm is five functions: advantage, ratio, surrogate, penalty and weight. Here one of them
is replaced. The loop is written out; `funcrl.train(config, parts=...)` takes an algorithm as well.
"""

from dataclasses import dataclass

import tyro

import funcrl
from funcrl import rollouts


def quadratic(_logprobs, ratio, advantages):
    """Return r A - |A| (r - 1)^2 / 0.4, whose gradient falls to 0 where r A has grown by 20 %."""
    objective = ratio * advantages - advantages.abs() * (ratio - 1) ** 2 / 0.4
    return funcrl.types.Surrogate(objective)


ALGORITHMS = {"grpo": funcrl.grpo(), "quadratic": funcrl.grpo()._replace(surrogate=quadratic)}


def share_right(completion: str, answer: str) -> float:
    """Return the share of the answer's characters that are right."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


ROWS = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}"[::-1]} for n in range(1000)]
WORDS = funcrl.tasks.CharTokenizer("0123456789>")
TASK = funcrl.tasks.from_rows(ROWS, share_right, tokenizer=WORDS)


@dataclass(frozen=True)
class Config:
    """Compare an algorithm of your own with GRPO on the same prompts and seeds."""

    steps: int = 60
    """The number of rollouts, with two updates each."""
    num_prompts: int = 32
    """The number of prompts in a rollout; each gets 8 completions."""
    seed: int = 0
    """The seed of the weights, the prompts and the samples."""


def train(algorithm: funcrl.Algorithm, args: Config) -> list[float]:
    """Return the mean reward of each rollout."""
    model = funcrl.models.Transformer(funcrl.models.shape("micro", WORDS.vocab_size))
    optimizer = funcrl.optim.chain(funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.adamw(2e-3))
    step = funcrl.grpo_step(funcrl.logprob_fn(model), algorithm=algorithm, optimizer=optimizer)
    state = step.init(funcrl.init_params(model, seed=args.seed))
    sampler = funcrl.generators.Sampler(model)
    sampling = funcrl.generators.Sampling(num_samples=8, max_tokens=3)
    curve = []
    for index in range(args.steps):
        sampler.push(state.params)
        prompts = TASK.prompts(args.seed, start=index * args.num_prompts, count=args.num_prompts)
        completed = rollouts.complete(TASK, sampler, prompts, sampling, seed=index)
        rewards = rollouts.grade(TASK, completed.prompts, completed.outcomes).total
        batch = funcrl.collate(rollouts.to_rollout(completed, rewards), algorithm)
        for _ in range(2):  # in the second update the ratios are no longer 1
            state, _ = step(state, batch)
        curve.append(rewards.mean().item())
    return curve


def main(args: Config) -> dict[str, list[float]]:
    """Train with each algorithm and print their rewards side by side."""
    curves = {name: train(algorithm, args) for name, algorithm in ALGORITHMS.items()}
    print("step  " + "  ".join(f"{name:>9}" for name in curves))
    for index in range(0, args.steps, 10):
        print(f"{index:4}  " + "  ".join(f"{curve[index]:9.3f}" for curve in curves.values()))
    return curves


if __name__ == "__main__":
    main(tyro.cli(Config))

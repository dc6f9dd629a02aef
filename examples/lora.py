"""Low-rank adapters: rewards choose one of the two things that the base model does.

    python examples/lora.py                      # 40 steps of GRPO on adapters of rank 4
    python examples/lora.py --out runs/merged    # writes base and adapters as one model

The step is GRPO's own: its parameters are the adapters, and the base is a constant.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

import funcrl
from funcrl import rollouts

WORDS = funcrl.tasks.CharTokenizer("0123456789>")


def digits(*strides: int) -> funcrl.tasks.Task:
    """Return a task that wants three digits as they are (stride 1), or from the end (-1)."""
    numbers = [f"{number:03d}" for number in range(1000)]
    rows = [{"prompt": f"{n}>", "answer": n[::stride]} for n in numbers for stride in strides]
    return funcrl.tasks.from_rows(rows, tokenizer=WORDS)


@dataclass(frozen=True)
class Config:
    """Train adapters to reverse three digits, on a base that repeats or reverses them."""

    steps: int = 40
    """The number of rollouts, each with one update of the adapters."""
    base_steps: int = 250
    """The number of supervised steps that make the base."""
    rank: int = 4
    """The rank of each adapter."""
    learning_rate: float = 3e-3
    """AdamW's learning rate for the adapters."""
    out: Path | None = None
    """The folder for the merged model; it is not written when left out."""


def main(args: Config) -> list[float]:
    """Train, and return the mean reward of each rollout."""
    model = funcrl.models.Transformer(funcrl.models.shape("micro", WORDS.vocab_size))
    model_fn, start = funcrl.logprob_fn(model), funcrl.init_params(model, seed=0)
    answers = funcrl.config.WarmStartConfig(steps=args.base_steps)
    base, _ = funcrl.warm_start(model_fn, start, digits(1, -1), answers)

    adapted = funcrl.lora(model_fn, base, rank=args.rank)
    clip, adamw = funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.adamw(args.learning_rate)
    step = funcrl.grpo_step(adapted.model_fn, optimizer=funcrl.optim.chain(clip, adamw))
    state = step.init(adapted.init(seed=0))
    trained, frozen = (sum(leaf.numel() for leaf in t.values()) for t in (state.params, base))
    print(f"{trained:,} numbers are trained, {frozen:,} stay as they are")

    task, sampler = digits(-1), funcrl.generators.Sampler(model)
    sampling = funcrl.generators.Sampling(num_samples=8, max_tokens=4)
    curve = []
    for index in range(args.steps):
        sampler.push(adapted.merge(state.params))
        prompts = task.prompts(seed=0, start=32 * index, count=32)
        completed = rollouts.complete(task, sampler, prompts, sampling, seed=index)
        rewards = rollouts.grade(task, completed.prompts, completed.outcomes).total
        batch = funcrl.collate(rollouts.to_rollout(completed, rewards), funcrl.grpo())
        state, _ = step(state, batch)
        curve.append(rewards.mean().item())
        if index % 5 == 0 or index == args.steps - 1:
            print(f"step {index:3}  reward {curve[-1]:.2f}  {prompts[0].text}{completed.texts[0]}")
    if args.out is not None:
        print("wrote", funcrl.save_params(args.out, model, adapted.merge(state.params)))
    return curve


if __name__ == "__main__":
    main(tyro.cli(Config))

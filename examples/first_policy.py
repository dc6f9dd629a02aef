"""Everything by hand: GRPO teaches a small transformer to reverse three digits, from nothing.

    python examples/first_policy.py              # 150 steps
    python examples/first_policy.py --steps 20   # a taste

Only the network and the step are funcrl's; prompts, sampling, reward and loop are on this page.
The policy is never shown an answer: it is told only how many of its digits were right.
"""

from dataclasses import dataclass

import torch
import tyro

import funcrl

DIGITS, EQUALS, VOCABULARY = 3, 10, 11  # "1 2 3 =" is to be answered by "3 2 1"


@dataclass(frozen=True)
class Config:
    """Train a policy from nothing to reverse three digits."""

    steps: int = 150
    """The number of rollouts, each with one update."""
    prompts: int = 32
    """The number of prompts in a rollout."""
    samples: int = 16
    """The number of samples of each prompt: the group that the advantage compares."""
    learning_rate: float = 2e-3
    """AdamW's learning rate."""


@torch.no_grad()
def make_rollout(apply, params: funcrl.types.Params, args: Config, step: int) -> funcrl.Rollout:
    """Return rewarded samples, drawn token by token."""
    generator = funcrl.rng.generator(0, step)
    digits = torch.randint(10, (args.prompts, DIGITS), generator=generator)
    prompts = torch.cat([digits, torch.full((args.prompts, 1), EQUALS)], dim=1)
    tokens = prompts.repeat_interleave(args.samples, dim=0)
    logprobs = torch.zeros(tokens.shape)
    for _ in range(DIGITS):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        scores = apply(params, tokens, positions)[:, -1].log_softmax(dim=-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
        logprobs = torch.cat([logprobs, scores.gather(1, drawn)], dim=1)
    right = tokens[:, DIGITS + 1 :] == tokens[:, :DIGITS].flip(1)
    return funcrl.Rollout(
        tokens=tokens,
        mask=(torch.arange(tokens.shape[1]) > DIGITS).expand_as(tokens),  # what was sampled
        behavior_logprobs=logprobs,
        rewards=right.float().mean(dim=1),
        group=torch.arange(args.prompts).repeat_interleave(args.samples),
        policy_version=torch.full((len(tokens),), step),
    )


def main(args: Config) -> list[float]:
    """Train, and return the mean reward of each rollout."""
    model = funcrl.models.Transformer(funcrl.models.shape("micro", VOCABULARY))
    apply = funcrl.functional(model)  # (params, tokens, positions) -> logits
    algorithm = funcrl.grpo(entropy=0.05)  # without the bonus it settles on few answers too early
    optimizer = funcrl.optim.adamw(args.learning_rate)
    step = funcrl.grpo_step(funcrl.logprob_fn(model), algorithm=algorithm, optimizer=optimizer)
    state = step.init(funcrl.init_params(model, seed=0))
    curve = []
    for index in range(args.steps):
        rollout = make_rollout(apply, state.params, args, index)
        state, metrics = step(state, funcrl.collate(rollout, algorithm))
        curve.append(rollout.rewards.mean().item())
        if index % 10 == 0 or index == args.steps - 1:
            print(f"step {index:3}  reward {curve[-1]:.3f}  entropy {metrics.means['entropy']:.2f}")
    return curve


if __name__ == "__main__":
    main(tyro.cli(Config))

"""From TRL to funcrl: rows and a reward of TRL's form train here, with TRL's loss and gradient.

    python examples/from_trl.py      # needs trl; half a minute on two CPU cores, no network

Run and model are in the first free runs/rows-1; `algorithm_of` is in trl_algorithm.py.
"""

from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import funcrl
from funcrl import config, rollouts
from trl_algorithm import algorithm_of

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def right(completions: list[str], answer: list[str], **_) -> list[float]:
    """Return 1 for a right answer: a reward function as TRL calls it."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def of_trl(args: GRPOConfig, model: Path, drawn: rollouts.Completed) -> list[float]:
    """Return TRL's loss and gradient norm, with `drawn` in place of what TRL would generate."""
    pairs = zip(drawn.samples.tokens, drawn.samples.mask, strict=True)
    given = {"prompt_ids": drawn.prompt_tokens, "logprobs": None,
             "completion_ids": [tokens[mask].tolist() for tokens, mask in pairs]}  # fmt: skip
    data = Dataset.from_list(rows := [prompt.data for prompt in drawn.prompts])
    trainer = GRPOTrainer(str(model), right, args, data, rollout_func=lambda *_: given)
    count = trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    loss = sum(trainer.training_step(trainer.model, rows, None) for _ in range(count))
    grads = [leaf.grad for leaf in trainer.model.parameters()]
    return [loss.item(), torch.nn.utils.get_total_norm(grads).item()]


def main(steps: int = 60, warm_start: int = 200) -> list[float]:
    """Return the mean reward of each step, after a comparison with TRL."""
    args = GRPOConfig("runs/trl", num_generations=8, max_completion_length=3, epsilon_high=0.28,
                      per_device_train_batch_size=16, gradient_accumulation_steps=8,
                      learning_rate=5e-4, bf16=False, use_cpu=True, report_to=[])  # fmt: skip
    options = config.TrainConfig(
        steps=steps, num_prompts=16, num_generations=8, microbatch=16,
        algorithm=config.AlgorithmConfig(
            "dapo", (args.epsilon, args.epsilon_high), kl=args.beta, entropy=args.entropy_coef),
        sampling=config.Sampling(max_tokens=3), warm_start=config.WarmStartConfig(warm_start),
        optimizer=config.OptimizerConfig(learning_rate=5e-4))  # fmt: skip
    task = funcrl.tasks.from_rows(ROWS, right, tokenizer=funcrl.tasks.CharTokenizer("0123456789+="))
    parts = funcrl.build(options, task=task, algorithm=algorithm_of(args))
    state, history, run = funcrl.train(options, parts=parts)
    parts.generator.push(state.params)
    drawn = rollouts.complete(task, parts.generator, task.prompts(1, 0, 16), parts.sampling, seed=1)
    rollout = rollouts.to_rollout(drawn, rollouts.grade(task, drawn.prompts, drawn.outcomes).total)
    _, metrics = parts.step(state, funcrl.collate(rollout, parts.algorithm))
    ours = [metrics.means["loss"].item(), metrics.maxes["grad_norm"].item()]
    theirs = of_trl(args, funcrl.export(run, run / "model", task), drawn)
    print("loss, norm of its gradient:", ours, "in funcrl,", theirs, "in TRL")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return [row["reward"] for row in history[1:]]


if __name__ == "__main__":
    print("reward:", *[f"{reward:.2f}" for reward in main()[::10]])

"""A whole GRPO step as one graph: traced, compiled, and writing into the old state's memory.

    python examples/compiled_step.py                            # the same bits as the plain step
    python examples/compiled_step.py --compile.backend inductor # faster, with other rounding

Forward pass, loss, backward pass, clipping and AdamW are one program.
"""

import time
from dataclasses import dataclass, field

import torch
import tyro

import funcrl
from funcrl import CompileConfig


@dataclass(frozen=True)
class Config:
    """Compare a compiled step with the plain one."""

    steps: int = 5
    """The number of steps that are timed."""
    rows: int = 32
    """The number of samples in the batch, in groups of 8."""
    length: int = 64
    """The number of tokens of a sample, the first 16 of which are the prompt."""
    num_layers: int = 4
    """The number of layers, 128 wide: equal layers are compiled once."""
    compile: CompileConfig = field(default_factory=lambda: CompileConfig(fuse="none"))


def make_batch(args: Config, vocab_size: int) -> funcrl.Batch:
    """Return a batch of random samples, half of which are right."""
    shape = (args.rows, args.length)
    rollout = funcrl.Rollout(
        tokens=torch.randint(vocab_size, shape, generator=funcrl.rng.generator(0)),
        mask=(torch.arange(args.length) >= 16).expand(shape),
        behavior_logprobs=torch.full(shape, -6.2),
        rewards=torch.arange(args.rows) % 2 * 1.0,
        group=torch.arange(args.rows) // 8,
        policy_version=torch.zeros(args.rows, dtype=torch.int64),
    )
    return funcrl.collate(rollout, funcrl.grpo())


def run(step: funcrl.Step, state: funcrl.TrainState, batch: funcrl.Batch, steps: int):
    """Return the state after some steps and the seconds that one took."""
    state, _ = step(state, batch)  # the first call of a compiled step compiles it
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = step(state, batch)
    return state, (time.perf_counter() - start) / steps


def main(args: Config) -> float:
    """Print times and the largest difference between the parameters, and return that."""
    config = funcrl.models.TransformerConfig(512, width=128, num_layers=args.num_layers)
    model = funcrl.models.Transformer(config)
    batch = make_batch(args, config.vocab_size)
    step = funcrl.grpo_step(funcrl.logprob_fn(model), optimizer=funcrl.optim.adamw(1e-3))
    state = step.init(funcrl.init_params(model, seed=0))

    graph = funcrl.trace(step.update, state, batch)
    print(f"{'operations in the graph':>24} {len(graph.graph.nodes)}")
    plain, seconds = run(step, state, batch, args.steps)
    print(f"{'plain step':>24} {1000 * seconds:.0f} ms")
    fast = funcrl.compile_step(funcrl.donate(step), state, batch, args.compile)
    compiled, seconds = run(fast, state, batch, args.steps)  # `state` is used up from here on
    print(f"{'compiled, donated step':>24} {1000 * seconds:.0f} ms")
    largest = max((leaf - compiled.params[name]).abs().max() for name, leaf in plain.params.items())
    print(f"{'largest difference':>24} {largest:.1e}")
    return largest.item()


if __name__ == "__main__":
    main(tyro.cli(Config))

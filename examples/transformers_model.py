"""A model of transformers: trained with GRPO, saved, and generating from transformers again.

    python examples/transformers_model.py                          # a tiny Llama of random weights
    python examples/transformers_model.py --model path/to/model --learning-rate 1e-5

The module trains as it is, with its own attention, and draws on its own cache.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import funcrl
from funcrl.config import AlgorithmConfig, OptimizerConfig, Sampling, TrainConfig, WarmStartConfig


@dataclass(frozen=True)
class Config:
    """Train a model of transformers to repeat three digits."""

    model: str | None = None
    """The folder or the hub's name of a model; a tiny Llama of random weights when left out."""
    steps: int = 100
    """The number of rollouts, each with one update."""
    learning_rate: float = 5e-3
    """The highest learning rate; a pretrained model wants 1e-6 to 1e-5."""
    run_dir: Path | None = None
    """The folder of the run, and of the model in it; the first free runs/repeat-1 if left out."""


def share_right(completion: str, answer: str) -> float:
    """Return the share of the answer's characters that are right."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer)


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def main(args: Config) -> list[dict[str, float]]:
    """Train, save, let transformers continue a prompt, and return the run's metrics."""
    attention = {"attn_implementation": "eager"}  # the fastest under vmap
    if args.model is None:
        tokenizer = funcrl.tasks.CharTokenizer("0123456789>")
        torch.manual_seed(0)
        sizes = {"vocab_size": tokenizer.vocab_size, "num_attention_heads": 4, **SIZES}
        module = LlamaForCausalLM(LlamaConfig(**sizes, **attention))
    else:
        source = funcrl.weights.find(args.model)  # a path, or a name that is fetched once
        tokenizer = funcrl.tasks.load_tokenizer(source)
        module = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **attention)
    rows = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}"} for n in range(1000)]
    task = funcrl.tasks.from_rows(rows, share_right, tokenizer=tokenizer, name="repeat")
    config = TrainConfig(
        run_dir=args.run_dir,
        steps=args.steps,
        num_prompts=32,
        sampling=Sampling(max_tokens=3),
        algorithm=AlgorithmConfig(kl=0.0),
        optimizer=OptimizerConfig(learning_rate=args.learning_rate),
        warm_start=WarmStartConfig(steps=0),
    )
    parts = funcrl.build(config, task=task, model=module.eval())
    trained = funcrl.train(config, parts=parts, view="live")
    params, out = trained.state.params, trained.run_dir / "model"
    source = source if args.model else trained.run_dir / "tokenizer"
    funcrl.save_params(out, module, params, tokenizer=source)

    model, words = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompt = torch.tensor([tokenizer.encode("417>")])
    tokens = model.generate(prompt, max_new_tokens=3, do_sample=False)[0]
    print(f"transformers reads {out} and generates {words.decode(tokens)}")
    return trained.history


if __name__ == "__main__":
    main(tyro.cli(Config))

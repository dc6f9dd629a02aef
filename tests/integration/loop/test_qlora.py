"""Adapters on a base in few bits: a run like any other, and a compiled step that keeps the bits."""

from dataclasses import replace

import pytest
import torch
import transformers
from cases import equal, small_network, tiny_batch

import funcrl
from funcrl import memory
from funcrl.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.core.types import Sample
from funcrl.loop.sources import Source, adapters_of


def config_of(run_dir, base_dtype, **options):
    return TrainConfig(**{
        "run_dir": run_dir, "steps": 4, "num_prompts": 3, "num_generations": 4,
        "lora": LoraConfig(rank=2, base_dtype=base_dtype),
        "sampling": Sampling(max_tokens=3), "warm_start": WarmStartConfig(steps=0),
        "evaluation": EvaluationConfig(every=2, num_prompts=5),
        "checkpoint": CheckpointConfig(every=2), **options,
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_dtype", "options"),
    [
        ("nf4", {}),
        ("int8", {"packing": "prefixes", "num_minibatches": 2, "dtype": "bfloat16"}),
        ("bfloat16", {"compile": funcrl.CompileConfig(), "dtype": "bfloat16"}),
    ],
)
def test_a_run_resumes_to_the_bit_and_is_exported(tmp_path, base_dtype, options):
    whole = funcrl.train(config_of(tmp_path / "whole", base_dtype, **options))
    parts = config_of(tmp_path / "parts", base_dtype, steps=2, **options)
    funcrl.train(parts)
    again = funcrl.train(replace(parts, steps=4), resume=True)
    assert equal(again.state, whole.state)
    bound = 5e-2 if "dtype" in options else 1e-5
    for row in whole.history[1:]:
        assert row["sampling/sampling_logp_difference/max"] <= bound
        assert row["grad_norm"] > 0
    folder = funcrl.export(tmp_path / "whole", tmp_path / "exported").parent
    _, params = funcrl.load_params(folder / "exported")
    loaded = funcrl.load_run(tmp_path / "whole")
    for name, leaf in loaded.params.items():
        assert torch.equal(params[name], leaf.float()), name


def transformer():
    shape = replace(funcrl.models.shape("tiny", vocab_size=13), num_layers=8)
    model = funcrl.models.Transformer(shape)
    return model, funcrl.init_params(model, seed=0), {}


def small():
    """Of few kernels, whose matrices are most of its memory."""
    torch.manual_seed(0)
    model = small_network(num_layers=8, width=64)
    base = {name: leaf.detach() for name, leaf in model.named_parameters()}
    return model, base, {"targets": lambda name: ".up." in name or ".down." in name}


def peak_of(step, state, batch):
    step(state, batch)
    with funcrl.memory_profile("test", stacks=False) as profile:
        step(state, batch)
    return profile.result.peak_allocated - profile.result.start_allocated


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), [("eager", transformer), ("inductor", small)])
def test_a_compiled_step_keeps_no_matrix_written_out_between_its_passes(backend, case):
    """Its peak is lower than that of merged weights, traced, by most of the adapted matrices."""
    model, base, options = case()
    batch = funcrl.tree.cast(tiny_batch(dtype=torch.float32), torch.float32)
    quantized = funcrl.models.qlora(model, base, rank=2, **options)
    merged = funcrl.lora(funcrl.logprob_fn(model), base, rank=2, **options)
    peaks = []
    for adapted, its_backend in ((quantized, backend), (merged, "eager")):
        config = funcrl.CompileConfig(backend=its_backend, fuse="none")
        step = funcrl.grpo_step(adapted.model_fn, optimizer=funcrl.optim.sgd(0.1))
        state = step.init(adapted.init(0))
        fast = funcrl.compile_step(step, state, batch, config)
        slow = quick = state
        for _ in range(3):
            slow, _ = step(slow, batch)
            quick, _ = fast(quick, batch)
        for name, leaf in slow.params.items():
            assert (quick.params[name] - leaf).abs().max() <= 1e-6, name
        peaks.append(peak_of(fast, state, batch))
    names = {name.rpartition(".lora_")[0] for name in state.params}
    assert peaks[0] <= peaks[1] - 0.75 * sum(base[name].nbytes for name in names)


@pytest.mark.parametrize("kind", ["PhiForCausalLM", "Olmo2ForCausalLM"])
@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_a_class_of_transformers_has_a_base_in_few_bits(tmp_path, kind, base_dtype):
    """As many linear layers as `lora` adapts, with biases (Phi): scores of the rounded base."""
    network = getattr(transformers, kind)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48,
        "intermediate_size": 40, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    network(network.config_class(**sizes)).save_pretrained(tmp_path)
    model, base = funcrl.load_params(tmp_path)
    base = {name: leaf + 0.1 for name, leaf in base.items()}  # biases and norms, too
    linear = {name for name, leaf in base.items() if ".layers." in name and leaf.ndim == 2}
    options = {"rank": 2, "targets": linear.__contains__}
    found = funcrl.models.qlora(model, base, base_dtype=base_dtype, **options)
    ops = funcrl.ops
    rounded = {
        name: ops.dequantize(ops.quantize(leaf, base_dtype)) if name in linear else leaf
        for name, leaf in base.items()
    }
    wanted = funcrl.lora(funcrl.logprob_fn(model), rounded, **options)
    moved = {name: leaf + 0.05 for name, leaf in wanted.init(0).items()}
    sample = Sample(torch.arange(9), torch.arange(9))
    difference = found.model_fn(moved, sample).logprobs - wanted.model_fn(moved, sample).logprobs
    assert difference.abs().max() <= 1e-4
    assert len(linear) == len({name.rpartition(".lora_")[0] for name in found.init(0)}) >= 12


def test_a_conv1d_of_gpt2_is_refused_by_name(tmp_path):
    kind = transformers.GPT2LMHeadModel
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 4, "vocab_size": 48}
    kind(kind.config_class(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"weight of an nn.Linear .*, got 'transformer.*Conv1D"):
        funcrl.models.qlora(*funcrl.load_params(tmp_path), targets=lambda name: ".h." in name)


class Doubled(torch.nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_layer_with_a_forward_of_its_own_is_not_taken_for_another():
    network = torch.nn.Sequential(torch.nn.Embedding(7, 4), Doubled(4, 7))
    base = dict(network.named_parameters())
    with pytest.raises(ValueError, match="^qlora expects .*forward of its own.*'1.weight' of Doub"):
        funcrl.models.qlora(network, base, rank=1, targets=lambda name: name == "1.weight")
    adapted = adapters_of(
        TrainConfig(lora=LoraConfig(rank=1, targets=("1.weight",))), funcrl.logprob_fn, network,
        Source(), torch.float32, base,
    )  # fmt: skip
    sample = Sample(torch.arange(5), torch.arange(5))
    found = adapted.model_fn(adapted.init(0), sample).logprobs
    assert torch.equal(found, funcrl.logprob_fn(network)(base, sample).logprobs)


def test_the_memory_estimate_knows_of_the_bits():
    """By hand: 98,304 numbers of 4.5 bits and more, and 1,216 others of two bytes."""
    shape = funcrl.models.shape("micro", vocab_size=13)
    whole = memory.num_params(shape)
    adapted = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    rank = 2
    trained = memory.num_trained(TrainConfig(lora=LoraConfig(rank=rank)), shape)
    for base_dtype, bits in (("nf4", 4.5), ("int8", 8.5), ("bfloat16", 16), ("float32", 32)):
        lora = LoraConfig(rank=rank, base_dtype=base_dtype)
        config = TrainConfig(lora=lora, dtype="bfloat16")
        found = memory.estimate_memory(config, shape, 6)
        kept = adapted * bits / 8 + 2 * (whole - adapted)
        assert found.parameters == 4 * trained + kept + 2 * whole
        assert found.gradients == 4 * trained
    exact = TrainConfig(lora=LoraConfig(rank=rank), numerics="exact")
    found = memory.estimate_memory(exact, shape, 6)
    assert found.parameters == 4 * trained + 8 * whole
    assert found.gradients == 4 * trained + 4 * whole


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lora": {"base_dtype": "nf4"}}, r"--lora.rank above 0 with a base in nf4"),
        ({"lora": {"rank": 2, "base_dtype": "nf3"}}, "base_dtype"),
        ({"lora": {"rank": 2, "base_dtype": "int8"}, "numerics": "exact"},
         "--lora.base-dtype float32 with --numerics exact"),
    ],
)  # fmt: skip
def test_what_has_no_such_base_is_refused(options, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        TrainConfig(**{**options, "lora": LoraConfig(**options["lora"])},
                    warm_start=WarmStartConfig(steps=0))  # fmt: skip

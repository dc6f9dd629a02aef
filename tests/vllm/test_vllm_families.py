"""Networks with sliding and delta layers in vLLM: what runs there, and what is refused."""

import importlib.util

import pytest
import torch
from engines import (
    PROMPTS,
    SHAPES,
    bound_of,
    has_vllm,
    largest,
    make,
    needs_vllm,
    rows_of,
    scored,
)

from funcrl.config import Sampling, VLLMConfig
from funcrl.generators import VLLM
from funcrl.generators.vllm.memory import cache_limits, samples_at_a_time
from funcrl.generators.vllm.plugin.native import fused_name
from funcrl.models import Transformer, TransformerConfig, shape
from funcrl.weights.names import as_stored

VARIANTS = [
    ("native", "llama3", "float32"), ("unified", "llama3", "float32"),
    ("native", "mistral", "float32"), ("unified", "mistral", "float32"),
    ("native", "gemma3", "float32"), ("unified", "gemma3", "float32"),
    ("unified", "options", "float32"), ("native", "qwen3.5", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "name", "dtype"), VARIANTS)
class TestEngine:
    pytestmark = needs_vllm

    def test_it_computes_what_the_trainer_does_after_every_push(self, form, name, dtype):
        if name == "qwen3.5" and importlib.util.find_spec("torchvision") is None:
            pytest.skip("vLLM's class imports torchvision")
        dtype = getattr(torch, dtype)
        model, params = make(name, dtype)
        # Room for some of the samples at a time: the others wait.
        least, most = cache_limits(model.config, VLLMConfig(slots=6, context_length=128), "float32")
        config = VLLMConfig(form=form, slots=6, context_length=128, cache_bytes=(least + most) // 2)
        generator = VLLM(model, config=config, dtype=dtype)
        try:
            for factor in (1.0, 1.1):
                pushed = {name: leaf * factor for name, leaf in params.items()}
                generator.push(pushed)
                samples = generator.generate(PROMPTS, Sampling(4, max_tokens=20), seed=0)
                rows = rows_of(samples, 4)
                bound, trainer = bound_of(model, pushed, rows), scored(model, pushed, rows)
                drawn = [
                    samples.logprobs[row, : int(samples.mask[row].sum())].tolist()
                    for row in range(16)
                ]
                ends = [all_of[-len(some) :] for all_of, some in zip(trainer, drawn, strict=True)]
                off = largest(generator.score(rows), trainer), largest(drawn, ends)
                print(f"prefill {off[0]:.2e}, decode {off[1]:.2e} (bound {bound:.2e})")
                assert max(off) <= bound
        finally:
            generator.close()


def test_every_parameter_has_a_place_in_vllm():
    model, params = make("qwen3.5")
    places = [fused_name(name) for name in as_stored(params, model.config)]
    assert len(set(places)) == len(places)
    assert ("model.layers.0.linear_attn.in_proj_qkvz.weight", 1) in places
    assert ("model.layers.0.linear_attn.in_proj_ba.weight", 0) in places
    assert ("model.layers.0.linear_attn.conv1d.weight", 0) in places
    assert ("model.layers.0.linear_attn.A_log", 0) in places
    assert ("model.layers.3.self_attn.qkv_proj.weight", 2) in places


def test_the_cache_has_blocks_for_states_as_for_keys_and_values():
    """A state of 0.8B is 16 x 128 x 128 float32 and 3 x 6,144 bfloat16 numbers: 1,085,440 bytes.

    A token of a layer of attention takes 2 x 2 x 256 x 2 bytes, so that 640 tokens are the first
    multiple of 128 that takes as much. A sample of 1,000 tokens has two such blocks in each of the
    6 layers of attention and one in each of the 18 others; vLLM keeps one of each layer.
    """
    network = shape("qwen3.5-0.8b", vocab_size=7)
    config = VLLMConfig(slots=3, context_length=1000)
    block = 640 * 2048
    assert cache_limits(network, config, "bfloat16") == (
        (30 + 24) * block, (3 * 30 + 24) * block,
    )  # fmt: skip
    room = [
        samples_at_a_time(
            network, VLLMConfig(slots=3, context_length=1000, cache_bytes=size * block), "bfloat16",
            longest,
        )
        for size, longest in ((54, 1000), (83, 1000), (84, 1000), (83, 600))
    ]  # fmt: skip
    assert room == [1, 1, 2, 2]
    # Of Gemma 3's 26 layers 4 are full: the 22 others share blocks in 6 groups of 4.
    gemma = shape("gemma3-1b", vocab_size=7)
    least, _ = cache_limits(gemma, VLLMConfig(slots=3, context_length=100), "bfloat16")
    assert least == 2 * 28 * 128 * (2 * 256 * 2)


@has_vllm
@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
def test_what_vllm_cannot_run_is_refused_before_it_starts():
    def refused(form, name, message, error=ValueError, dtype=torch.float32, **changes):
        fields = {"vocab_size": 7, "context_length": 64} | SHAPES[name] | changes
        with pytest.raises(error, match=f"^VLLM expects {message}"):
            VLLM(Transformer(TransformerConfig(**fields)), form, dtype=dtype)

    refused("unified", "qwen3.5", "a network without delta layers .*'native' .*sampler")
    refused("unified", "gemma3", "vLLM's own attention .*exact", numerics="exact")
    refused("unified", "gemma3", "vLLM's own attention .* 16 and auto", head_width=16)
    refused("native", "options", "a network that vLLM has a class for.*rotary_width=8.*'unified'")
    if torch.cuda.is_available():
        return
    half = {"dtype": torch.bfloat16}
    refused("native", "qwen3.5", "dtype bfloat16 for delta layers on a CPU, got float32")
    refused(
        "native", "qwen3.5", r"delta layers on a CPU .*\(32, 64, 4\)", delta_key_width=32, **half
    )
    if importlib.util.find_spec("torchvision") is None:
        refused("native", "qwen3.5", "torchvision", ImportError, **half)

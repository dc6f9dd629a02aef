"""Models of transformers in vLLM: its own class of each computes what the trainer's does."""

from dataclasses import replace

import pytest
import torch
import transformers
from cases import equal, num_letters, tiny_tokenizer
from engines import (
    DEVICE,
    DTYPE,
    PROMPTS,
    bound_of,
    has_vllm,
    largest,
    needs_vllm,
    rows_of,
    scored,
    untimed,
)

import funcrl
from funcrl import build
from funcrl.config import (
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.generators import VLLM, EngineError
from funcrl.generators.vllm.memory import shape_of
from funcrl.loop.from_config import generator_of
from funcrl.loop.parity import ParityConfig

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
NETWORKS = {
    "Phi3": {},  # whose checkpoints have q, k and v in one matrix
    "Gemma2": {"head_dim": 32, "sliding_window": 7},
    # Tied, with biases, and matrices that lie the other way.
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts, one by one on disk
    "SmolLM3": {},  # which vLLM runs as the class of transformers
}
CONFIG = VLLMConfig(slots=6, context_length=128)
SERVER = replace(CONFIG, form="server")


def module_of(name, **options):
    sizes = {} if name == "GPT2" else SIZES
    shape = getattr(transformers, f"{name}Config")(
        **{"vocab_size": 97} | sizes | NETWORKS[name] | options
    )
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    made = getattr(transformers, head)(shape)
    with torch.no_grad():
        for leaf in made.parameters():  # far from uniform, so that a mistake shows
            leaf.add_(0.05 * torch.randn_like(leaf))
    return made


def loaded(folder, name):
    """A model of transformers and its parameters, as they come from its folder."""
    module_of(name).save_pretrained(folder)
    model, params = funcrl.load_params(folder, DTYPE, DEVICE)
    model.config._experts_implementation = "eager"  # torch's grouped product has no float64
    return model, params


def check_engine(generator, model, params):
    """After each of two pushes an engine scores and draws with the trainer's log-probabilities."""
    for version, factor in enumerate((1.0, 1.1)):
        pushed = {name: leaf * factor for name, leaf in params.items()}
        generator.push(pushed, version)
        samples = generator.generate(PROMPTS, Sampling(4, max_tokens=20), seed=0)
        rows = rows_of(samples, 4)
        # Norms, softmax and rotation are float32 in float64, too: half of the rounding is hidden.
        bound, trainer = 2 * bound_of(model, pushed, rows), scored(model, pushed, rows)
        drawn = [
            samples.policy_logprobs[row, : int(samples.mask[row].sum())].tolist()
            for row in range(16)
        ]
        ends = [all_of[-len(some) :] for all_of, some in zip(trainer, drawn, strict=True)]
        off = largest(generator.score(rows), trainer), largest(drawn, ends)
        print(f"prefill {off[0]:.2e}, decode {off[1]:.2e} (bound {bound:.2e})")
        assert max(off) <= bound


@pytest.mark.parametrize(("name", "config"), [
    ("Phi3", CONFIG), ("Gemma2", CONFIG), ("GPT2", CONFIG), ("Mixtral", CONFIG),
    ("SmolLM3", SERVER),
])  # fmt: skip
class TestEngine:
    pytestmark = needs_vllm

    def test_it_computes_what_the_trainer_does_after_every_push(self, tmp_path, name, config):
        model, params = loaded(tmp_path, name)
        generator = VLLM(model, config=config, dtype=DTYPE)
        try:
            check_engine(generator, model, params)
        finally:
            generator.close()


class TestRun:
    pytestmark = needs_vllm

    def test_adapters_are_drawn_with_and_go_on_to_the_same_bits(self, tmp_path):
        tokenizer, folder = tiny_tokenizer(), tmp_path / "model"
        module_of("GPT2", vocab_size=tokenizer.vocab_size).save_pretrained(folder)
        tokenizer._tokenizer.save_pretrained(folder)
        rows = [{"prompt": text} for text in "abcdefgh"]
        task = funcrl.tasks.from_rows(rows, reward=num_letters, tokenizer=tokenizer)
        config = TrainConfig(
            model=str(folder), run_dir=tmp_path / "run", steps=3, num_prompts=2, num_generations=4,
            sampling=Sampling(max_tokens=4), warm_start=WarmStartConfig(steps=0),
            evaluation=EvaluationConfig(every=0), lora=LoraConfig(rank=2, targets=("c_attn",)),
            optimizer=OptimizerConfig(learning_rate=1e-3), generator="vllm", vllm=CONFIG,
        )  # fmt: skip
        whole = funcrl.train(replace(config, run_dir=tmp_path / "whole"), task=task)
        for row in whole.history[1:]:
            assert row["sampling/sampling_logp_difference/max"] < 1e-4
        stops = iter([False, True])
        with pytest.raises(KeyboardInterrupt):
            funcrl.train(config, task=task, stop=lambda: next(stops))
        resumed = funcrl.train(config, task=task, resume=True)
        assert untimed(resumed.history) == untimed(whole.history)
        assert equal(resumed.state.params, whole.state.params)
        question = ParityConfig(
            str(config.run_dir), generator="vllm", vllm=CONFIG, num_prompts=2, max_tokens=4
        )
        drawn, *scored = funcrl.parity(question).rows
        assert (drawn.name, drawn.tokens) == ("vLLM, as drawn", 32)
        assert [row.tokens for row in scored] == [8 * (16 + 4 - 1)] * 2 + [0, 0]
        assert max(row.max_abs_diff for row in (drawn, *scored)) < 1e-4


@has_vllm
@pytest.mark.vllm
@pytest.mark.filterwarnings("default")
class TestRefusals:
    @pytest.mark.parametrize(("kind", "sizes", "message"), [
        ("Mamba", {"hidden_size": 16, "state_size": 4}, ".* layers are attention, .*MambaForC"),
        ("Jamba", {"hidden_size": 16}, ".* layers are attention, .*JambaForC"),
        ("Bert", {"is_decoder": True, "hidden_size": 64, "num_attention_heads": 2},
         "a vLLM that has BertLMHeadModel, got one without"),
        ("Phi3", {"hidden_size": 16, "num_attention_heads": 2, "pad_token_id": 0},
         "a head_width that vLLM's attention has a kernel for, got 8; .* sampler any"),
        ("SmolLM3", SIZES, "--vllm.form server for SmolLM3ForCausalLM"),
    ])  # fmt: skip
    def test_what_vllm_cannot_run_is_refused_before_it_starts(self, kind, sizes, message):
        config = getattr(transformers, f"{kind}Config")(**{"num_hidden_layers": 2} | sizes)
        head = "BertLMHeadModel" if kind == "Bert" else f"{kind}ForCausalLM"
        with torch.device("meta"):
            model = getattr(transformers, head)(config)
        with pytest.raises(ValueError, match=f"^VLLM expects {message}"):
            VLLM(model)

    def test_what_vllm_s_class_cannot_start_says_so(self):
        """Its GPT-2 has fewer activations."""
        model = module_of("GPT2", activation_function="mish")
        generator = VLLM(model, config=CONFIG)
        with pytest.raises(
            EngineError, match="^VLLM expects a GPT2LMHeadModel that vLLM can run, got"
        ):
            generator.push(dict(model.named_parameters()))

    def test_a_network_of_one_s_own(self):
        with pytest.raises(ValueError, match="^VLLM expects a Transformer or .*, got Linear;"):
            VLLM(torch.nn.Linear(2, 2))

    def test_a_gpu_whose_rest_is_not_known(self):
        sizes = SIZES | {"num_local_experts": 4, "kv_channels": 32}
        model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes))
        config = TrainConfig(device="cuda", generator="vllm")
        with pytest.raises(ValueError, match="^train expects --vllm.cache-bytes .*JetMoeForCausal"):
            generator_of("train", config, model, build(TrainConfig()).task, 1)


def test_a_cache_is_as_large_as_its_layers_ask_for():
    """Gemma 2's layers take turns; GPT-2 says neither how wide its heads are nor the MLP.

    Qwen2 with experts has a window of 0, which is none.
    """
    gemma, gpt = shape_of(module_of("Gemma2")), shape_of(module_of("GPT2"))
    assert (gemma.kinds, gemma.head_width, gemma.num_kv_heads) == (("sliding", "full"), 32, 1)
    assert (gpt.kinds, gpt.head_width, gpt.num_kv_heads) == (("full", "full"), 32, 2)
    assert (gpt.mlp_width, gpt.context_length) == (256, 256)
    config = transformers.Qwen2MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=8)
    assert config.sliding_window == 0
    assert shape_of(transformers.Qwen2MoeForCausalLM(config)).window is None

"""The estimate of memory of networks that are no Transformer, against bytes that were counted."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import transformers
from cases import random_case, tiny_batch
from torch import nn

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import memory, optim
from funcrl.config import AlgorithmConfig, CheckpointConfig, LoraConfig, Sampling, TrainConfig
from funcrl.loop.from_config import plain_model_fn
from funcrl.loop.module_memory import Uncounted, cached_by_row
from funcrl.models.functional import without_weights

# torch has no rule to batch nn.GRUCell: it runs one sample after the other, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
NETWORKS = {
    "Phi3": {},
    "Gemma2": {"head_dim": 32},
    "GPT2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                 "head_dim": 32},
    "Bloom": {"n_layer": 3, "n_head": 4},  # one row after the other
}  # fmt: skip
OPTIONS = TrainConfig(
    num_prompts=2, num_generations=4, sampling=Sampling(max_tokens=40), slots=4,
    checkpoint=CheckpointConfig(every=0), algorithm=AlgorithmConfig(kl=0.0),
)  # fmt: skip


def module_of(name):
    sizes = {"vocab_size": 512} if name == "GPT2" else SIZES
    config = getattr(transformers, f"{name}Config")(**sizes | NETWORKS[name])
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    made = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    return made.eval()


def loaded(name):
    """A model without its weights, and its parameters."""
    if name in ("tiny", "lstm", "gru"):
        shapes, kind = {}, funcrl.models.Transformer
        if name != "tiny":
            shapes, kind = funcrl.models.RECURRENT_SHAPES, funcrl.models.Recurrent
        shape = replace(shapes[name], vocab_size=512) if shapes else funcrl.models.shape(name, 512)
        return kind(shape), funcrl.init_params(kind(shape), seed=0)
    module = Cells() if name == "Cells" else module_of(name)
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    return without_weights(module), params


class Cells(nn.Module):
    """A network of one's own, called token by token, that does not say its vocabulary."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(512, 64), nn.GRUCell(64, 64)
        self.out = nn.Linear(64, 512)

    def forward(self, tokens):
        rows = self.embed(tokens)
        state = torch.zeros_like(rows[0])
        return self.out(torch.stack([state := self.cell(row, state) for row in rows]))


def peak_of_a_step(model_fn, params, batch, **options):
    """The peak of a step beyond the state that it begins with."""
    step = funcrl.grpo_step(model_fn, optimizer=optim.adamw(1e-3), **options)
    state = step.init(params)
    return peak_bytes(lambda: step(state, batch))


def measured_and_estimated(name, rows=8, **changes):
    """The peak of a step, and the estimate."""
    (model, params), options = loaded(name), replace(OPTIONS, num_generations=rows // 2, **changes)
    model_fn = plain_model_fn("train", options, model)
    measured = peak_of_a_step(model_fn, params, tiny_batch(rows=rows, length=48))
    estimate = memory.estimate_memory(options, model, 8)
    assert estimate.parameters == sum(leaf.nbytes for leaf in params.values())
    return measured, estimate.training


@pytest.mark.parametrize("rows", [8, 64])  # the update is the peak, or the logits' gradient
@pytest.mark.parametrize("name", [*NETWORKS, "Cells", "lstm", "gru"])
def test_it_is_near_the_measured_peak_of_a_step(name, rows):
    measured, estimated = measured_and_estimated(name, rows)
    print(f"{measured / estimated:.3f}")
    assert 0.8 <= measured / estimated <= 1.2, (measured, estimated)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", ["Phi3", "GPT2", "Bloom", "Cells"])
def test_it_is_in_half_precision(name, rows):
    measured, estimated = measured_and_estimated(name, rows, dtype="bfloat16")
    print(f"{measured / estimated:.3f}")
    assert 0.8 <= measured / estimated <= 1.2, (measured, estimated)


@pytest.mark.parametrize("student", ["tiny", "Gemma2"])
def test_a_teacher_gives_the_logits_of_all_tokens(student):
    """And so does a student of funcrl's own, which cuts them in chunks where it learns alone."""
    (model, params), teacher = loaded(student), funcrl.Teacher(*loaded("GPT2"))
    distill = AlgorithmConfig(name="distill", kl=0.0)
    options = replace(OPTIONS, algorithm=distill, teacher="GPT2", logprob_chunk=8)
    model_fn = plain_model_fn("train", options, model, teacher)
    batch = funcrl.collate(random_case(prompts=2, length=48).rollout, funcrl.distill())
    measured = peak_of_a_step(model_fn, params, batch, algorithm=funcrl.distill())
    estimate = memory.estimate_memory(options, model, 8, teacher=teacher.model)
    assert estimate.teacher == sum(leaf.nbytes for leaf in teacher.params.values())
    print(f"{measured / estimate.training:.3f}")
    assert 0.8 <= measured / estimate.training <= 1.2, (measured, estimate)


def test_adapters_alone_are_trained():
    """By hand: of GPT-2's three layers four matrices each, of 128 x 384, 128, 512 and 512 x 128."""
    options, model = replace(OPTIONS, lora=LoraConfig(rank=2)), without_weights(module_of("GPT2"))
    trained = 3 * 2 * ((128 + 384) + (128 + 128) + (128 + 512) + (512 + 128))
    assert memory.num_trained(options, model) == trained
    estimate = memory.estimate_memory(options, model, 8)
    assert (estimate.gradients, estimate.optimizer) == (4 * trained, 8 * trained)


def test_a_cache_has_keys_and_values():
    model = without_weights(module_of("Qwen3Moe"))
    keys = 3 * 2 * 32 * 48  # of three layers and two heads
    assert cached_by_row(model, 48, torch.bfloat16) == 2 * 2 * keys
    assert cached_by_row(model, 48, torch.float32) == 2 * 4 * keys
    assert memory.estimate_memory(OPTIONS, model, 8).cache == 4 * 2 * 4 * keys


def test_no_model_is_kept_alive():
    model = without_weights(module_of("GPT2"))
    reference = weakref.ref(model)
    memory.estimate_memory(replace(OPTIONS, lora=LoraConfig(rank=2)), model, 8)
    del model
    gc.collect()
    assert reference() is None


def test_a_forward_that_needs_values_is_not_counted():
    sizes = SIZES | {"num_hidden_layers": 1, "num_local_experts": 4, "kv_channels": 32}
    model = without_weights(transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes)))
    with pytest.raises(Uncounted, match="^JetMoeForCausalLM, which does not run on meta tensors"):
        memory.estimate_memory(OPTIONS, model, 8)

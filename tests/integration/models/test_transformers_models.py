"""transformers' Llama, Qwen2 and GPT-2 as model functions: plain, per sample, traced, compiled."""

import functools

import pytest
import torch
import transformers
from cases import equal, gradient_of_row, relative, tiny_batch

import funcrl
from funcrl import CompileConfig, optim, tree

# torch has no rule to batch its fused attention: it runs one sample after the other, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

BATCH = tiny_batch(rows=2, length=4)
T = BATCH.tokens.shape[1]
WIDTHS = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": T, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip
SIZES = {"Llama": ("LlamaForCausalLM", WIDTHS), "Qwen2": ("Qwen2ForCausalLM", WIDTHS),
         "GPT2": ("GPT2LMHeadModel", GPT2)}  # fmt: skip


def causal(dtype=torch.float64):
    """Return the mask [1, 1, T, T] that is added to scores."""
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    return torch.zeros(T, T, dtype=dtype).masked_fill(~seen, -torch.inf)[None, None]


# What a model is called with beside its tokens, for a sample.
WORKS = {
    "plain": lambda sample: {},
    "positions": lambda sample: {"position_ids": sample.positions[None]},
    "mask": lambda sample: {
        "attention_mask": causal(), "position_ids": sample.positions[None], "use_cache": False,
    },
}  # fmt: skip
REFUSED = {
    "positions": lambda sample: {"position_ids": sample.positions[None], "use_cache": False},
    "mask of [1, T]": lambda sample: {"attention_mask": torch.ones_like(sample.tokens)[None]},
}


@functools.cache
def module_of(family, attention="sdpa"):
    name, sizes = SIZES[family]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=11, attn_implementation=attention, **sizes
    )
    torch.manual_seed(0)
    return getattr(transformers, name)(config).double().eval()


def model_of(family, call, attention="sdpa"):
    """Return the parameters and the model function of one call."""
    module = module_of(family, attention)
    apply = funcrl.functional(module)

    def model_fn(params, sample):
        logits = apply(params, input_ids=sample.tokens[None], **call(sample)).logits[0]
        return funcrl.token_scores(logits, sample.tokens)

    return {name: leaf.detach() for name, leaf in module.named_parameters()}, model_fn


def sgd(model_fn, **options):
    """Return a step whose rate changes at each step; SGD leaves rounding as it is."""
    return funcrl.grpo_step(model_fn, optimizer=optim.sgd(optim.linear(1.0, 0.0, 4)), **options)


def three_steps(step, params):
    state, states = step.init(params), []
    for _ in range(3):
        state, _ = step(state, BATCH)
        states.append(state)
    return states


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("call", WORKS)
@pytest.mark.parametrize("family", SIZES)
def test_scores_and_gradients_are_the_module_s_own(family, call, attention):
    params, model_fn = model_of(family, WORKS[call], attention)

    def loss(params, sample):
        return (sample.token_weights * model_fn(params, sample).logprobs).sum()

    got = funcrl.per_sample_grad(loss)(params, BATCH)
    module = module_of(family, attention)
    for row in range(2):
        for name, wanted in gradient_of_row(module, BATCH, row).items():
            assert (got[name][row] - wanted).abs().max() <= 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize(("call", "attention"), [("mask", "sdpa"), ("positions", "eager")])
@pytest.mark.parametrize("family", SIZES)
def test_a_traced_step_has_the_step_s_bits(family, call, attention):
    params, model_fn = model_of(family, WORKS[call], attention)
    step = sgd(model_fn)
    state = step.init(params)
    assert equal(funcrl.trace(step.update, state, BATCH)(state, BATCH), step(state, BATCH))


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_three_compiled_steps_have_the_step_s_bits(family):
    params, model_fn = model_of(family, WORKS["plain"])
    step = sgd(model_fn)
    config = CompileConfig(backend="aot_eager", fuse="none")
    fast = funcrl.compile_step(step, step.init(params), BATCH, config)
    assert equal(three_steps(fast, params), three_steps(step, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"), [("Llama", "eager"), ("Qwen2", "eager"), ("GPT2", "aot_eager")]
)
def test_three_fused_steps_change_rounding_alone(family, backend):
    params, model_fn = model_of(family, WORKS["plain"])
    step = sgd(model_fn, per_sample=funcrl.clip_per_sample(0.01))
    config = CompileConfig(backend=backend, fuse="per_sample")
    fast = funcrl.compile_step(step, step.init(params), BATCH, config)
    assert relative(three_steps(fast, params), three_steps(step, params)) <= 1e-12


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("family", SIZES)
def test_a_call_that_reads_values_is_refused_with_what_to_pass(family, call):
    params, model_fn = model_of(family, REFUSED[call])
    step = sgd(model_fn)
    state = step.init(params)
    for run in (step, funcrl.donate(step), lambda *args: funcrl.trace(step.update, *args)):
        with pytest.raises(ValueError, match=r"functional .* masking_utils.*attention_mask"):
            run(state, BATCH)
    # One sample alone has values.
    model_fn(params, tree.map(lambda leaf: leaf[0], BATCH))


@pytest.mark.parametrize("family", SIZES)
def test_without_a_cache_a_trace_is_refused_with_what_to_pass(family):
    params, model_fn = model_of(family, lambda sample: {"use_cache": False})
    step = sgd(model_fn)
    state = step.init(params)
    step(state, BATCH)
    with pytest.raises(ValueError, match=r"functional .* masking_utils.*attention_mask"):
        funcrl.compile_step(step, state, BATCH)


@pytest.mark.parametrize("family", SIZES)
def test_a_config_that_was_saved_in_training_is_scored(family, monkeypatch):
    """Trainers switch the cache off, and without one transformers reads positions."""
    module = module_of(family)
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    wanted = funcrl.score(funcrl.logprob_fn(module), params, BATCH)
    monkeypatch.setattr(module.config, "use_cache", False)
    assert equal(funcrl.score(funcrl.logprob_fn(module), params, BATCH), wanted)

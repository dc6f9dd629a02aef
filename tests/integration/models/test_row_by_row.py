"""Models of transformers that torch.vmap cannot run: one row after the other, the same numbers."""

import functools

import pytest
import torch
import transformers
from cases import equal, gradient_of_row, relative, tiny_batch

import funcrl
from funcrl import CompileConfig, optim
from funcrl.config import Sampling
from funcrl.core.types import Sample
from funcrl.models.networks import runs_under_vmap

SIZES = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
           "shared_expert_intermediate_size": 8}  # fmt: skip
# What vmap refuses: a write into a tensor of none, an autograd.Function, values that are read.
NETWORKS = {
    "Mamba": {"num_hidden_layers": 1, "state_size": 4},
    "Bloom": {"n_layer": 1, "n_head": 2},
    "JetMoe": {"num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8,
               "num_local_experts": 4},
    "Qwen3Next": EXPERTS | {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 1, "head_dim": 8, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "FalconH1": {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8,
                 "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4},
}  # fmt: skip
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BATCH = tiny_batch(rows=4, length=7)


@functools.cache
def module_of(name):
    shape = getattr(transformers, f"{name}Config")(**SIZES | ENDS | NETWORKS[name])
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")._from_config(
        shape, attn_implementation="eager"
    )
    with torch.no_grad():
        for leaf in made.parameters():  # of Falcon H1's some are nearly 0
            leaf.add_(0.1 * torch.randn_like(leaf))
    double = name != "Qwen3Next"  # torch's grouped product of experts has none
    return (made.double() if double else made).eval()


def params_of(module):
    return {name: leaf.detach() for name, leaf in module.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_the_module_s_own(name):
    module = module_of(name)
    params, model_fn = params_of(module), funcrl.logprob_fn(module)
    assert not runs_under_vmap(module)

    def loss(params, sample):
        return (sample.token_weights * model_fn(params, sample).logprobs).sum()

    own = funcrl.per_sample_grad(loss)(params, BATCH)
    summed = torch.func.grad(
        lambda params: torch.vmap(loss, in_dims=(None, 0))(params, BATCH).sum()
    )(params)
    rows = [gradient_of_row(module, BATCH, row) for row in range(4)]
    # A part of the others is computed in float32, whatever the parameters are.
    bound = 1e-12 if name in ("Bloom", "JetMoe") else 1e-6
    for key in params:
        for row in range(4):
            assert (own[key][row] - rows[row][key]).abs().max() <= bound, key
        assert (summed[key] - sum(row[key] for row in rows)).abs().max() <= bound, key


@pytest.mark.parametrize(("name", "message"), [
    ("Mamba", "that torch.vmap can run, got one that writes into a tensor"),
    ("Bloom", "that torch.vmap can run, got one that has an autograd.Function"),
    ("JetMoe", r"that reads no tensor's value .* of modeling_jetmoe\.py"),
])  # fmt: skip
def test_by_hand_a_call_is_refused_with_the_reason(name, message):
    module = module_of(name)
    apply, params = funcrl.functional(module), params_of(module)
    with pytest.raises(ValueError, match=f"^functional .* of {name}ForCausalLM {message}"):
        torch.vmap(lambda tokens: apply(params, input_ids=tokens[None]).logits)(BATCH.tokens)


def test_a_second_derivative_is_refused():
    module = module_of("Mamba")
    model_fn, params = funcrl.logprob_fn(module), params_of(module)
    name = "backbone.norm_f.weight"

    def loss(leaf):
        rows = torch.vmap(model_fn, in_dims=(None, 0))(params | {name: leaf}, BATCH)
        return rows.logprobs.sum()

    with pytest.raises(NotImplementedError, match="^logits_fn expects .* differentiated once"):
        torch.func.grad(lambda leaf: torch.func.grad(loss)(leaf).sum())(params[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_drawn_is_scored_alike(name):
    """On each layer's own kind of cache, from which samples that end leave."""
    module = module_of(name)
    params, sampler = params_of(module), funcrl.generators.HuggingFace(module)
    sampler.push(params)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 8, 7]]
    sampling = Sampling(num_samples=3, max_tokens=9, stop_tokens=(5, 6, 7))
    samples = sampler.generate(prompts, sampling, seed=1)
    assert {*samples.finish_reasons} == {"stop", "length"}
    model_fn = funcrl.logprob_fn(module)
    for row, mask in enumerate(samples.mask):
        prompt = prompts[row // 3]
        tokens = torch.tensor([[*prompt, *samples.tokens[row][mask].tolist()]])
        sample = Sample(tokens, torch.arange(tokens.shape[1])[None])
        wanted = funcrl.score(model_fn, params, sample).logprobs[0, len(prompt) :]
        assert (wanted - samples.policy_logprobs[row][mask]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["Mamba", "Qwen3Next"])  # the second has experts in float32
def test_three_compiled_steps_change_rounding_alone(name):
    module = module_of(name)
    params = params_of(module)
    step = funcrl.grpo_step(
        funcrl.logprob_fn(module), optimizer=optim.sgd(optim.linear(1.0, 0.0, 4)), microbatch=2
    )
    batch = funcrl.tree.map(lambda leaf: leaf[:2], BATCH)
    fast = funcrl.compile_step(step, step.init(params), batch, CompileConfig(backend="eager"))

    def three(step):
        state = step.init(params)
        return [state := step(state, batch)[0] for _ in range(3)]

    assert relative(three(fast), three(step)) <= 1e-6
    assert not equal(three(step)[-1].params, params)


def test_a_step_that_reads_values_is_not_compiled():
    module = module_of("JetMoe")
    step = funcrl.grpo_step(funcrl.logprob_fn(module), optimizer=optim.sgd(1.0))
    state = step.init(params_of(module))
    with pytest.raises(ValueError, match=r"^functional .* reads no .* of modeling_jetmoe\.py"):
        funcrl.compile_step(step, state, BATCH)

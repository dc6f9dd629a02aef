"""Models that funcrl's own network is not: loaded, trained, resumed and exported by name alone."""

from dataclasses import replace

import pytest
import torch
import transformers
from cases import equal, num_letters, tiny_tokenizer
from safetensors.torch import load_file, save_file
from saved_models import rewrite

import funcrl
from funcrl.config import EvaluationConfig, LoraConfig, OptimizerConfig, Sampling, TrainConfig
from funcrl.core.types import Sample
from funcrl.models.lora import layer_weights
from funcrl.weights import load_network, transformers_class

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
OF_TWO = SIZES | {"num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 16}  # fmt: skip
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.3, 2.0],
             "long_factor": [2.0, 5.0, 9.0]}  # fmt: skip
# The class, its configuration, and whether funcrl's own Transformer is that network.
NETWORKS = {
    "mistral": ("MistralForCausalLM", OF_TWO | {"sliding_window": None}, True),
    "mistral window": ("MistralForCausalLM", OF_TWO | {"sliding_window": 5}, True),
    "mistral yarn": ("MistralForCausalLM", OF_TWO | {
        "sliding_window": None, "rope_parameters": YARN}, False),
    "mistral window linear": ("MistralForCausalLM", OF_TWO | {
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, False),
    "llama linear": ("LlamaForCausalLM", OF_TWO | {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, True),
    "llama yarn": ("LlamaForCausalLM", OF_TWO | {"rope_parameters": YARN}, False),
    "llama biases": ("LlamaForCausalLM", OF_TWO | {
        "attention_bias": True, "mlp_bias": True}, False),
    "llama gelu": ("LlamaForCausalLM", OF_TWO | {"hidden_act": "gelu"}, False),
    "llama dynamic": ("LlamaForCausalLM", OF_TWO | {
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, False),
    "qwen2 window": ("Qwen2ForCausalLM", OF_TWO | {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, False),
    "qwen3 biases": ("Qwen3ForCausalLM", OF_TWO | {"attention_bias": True}, False),
    "gpt2": ("GPT2LMHeadModel", {
        "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}, False),
    "gpt without a cache": ("OpenAIGPTLMHeadModel", {
        "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}, False),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZES, False),
    "phi": ("PhiForCausalLM", SIZES | {"hidden_size": 32}, False),
    "phi3": ("Phi3ForCausalLM", SIZES, False),
    "phi3 long": ("Phi3ForCausalLM", SIZES | {
        "original_max_position_embeddings": 40, "rope_parameters": LONG_ROPE}, False),
    "olmo2": ("Olmo2ForCausalLM", SIZES, False),
    "smollm3": ("SmolLM3ForCausalLM", OF_TWO, False),
    "mamba": ("MambaForCausalLM", {
        "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, False),
    "mixtral": ("MixtralForCausalLM", OF_TWO | {"num_local_experts": 4}, False),
    "qwen3 experts": ("Qwen3MoeForCausalLM", OF_TWO | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, False),
    "falcon": ("FalconForCausalLM", {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}, False),
}  # fmt: skip
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TOKENS = torch.randint(0, 48, (3, 40), generator=torch.Generator().manual_seed(0))
ROWS = Sample(TOKENS, torch.arange(40).expand(3, 40))


def drawn(kind, **options):
    """A network of transformers with random parameters, biases and norms among them."""
    network = getattr(transformers, kind)
    torch.manual_seed(0)
    made = network(network.config_class(**options)).eval()
    with torch.no_grad():
        for leaf in made.parameters():
            leaf.add_(0.2 * torch.randn_like(leaf))
    return made


def peer(name, vocab_size=48):
    kind, options, _ = NETWORKS[name]
    return drawn(kind, vocab_size=vocab_size, **SPECIAL, **options)


# transformers counts the tokens of each expert by an operation that vmap runs row by row.
SLOW_EXPERTS = pytest.mark.filterwarnings("ignore:There is a performance drop")


@SLOW_EXPERTS
@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_transformers(tmp_path, name):
    network = peer(name)
    network.save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    assert isinstance(model, funcrl.models.Transformer) == NETWORKS[name][2]
    assert type(load_network(tmp_path)) is type(model)
    assert all(leaf.is_meta for leaf in model.parameters())
    with torch.no_grad():
        wanted = network(TOKENS).logits
    found = torch.vmap(funcrl.models.logits_fn(model), (None, 0))(params, ROWS)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    funcrl.save_params(tmp_path / "again", model, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(theirs(TOKENS).logits, wanted)


@pytest.mark.parametrize(("kind", "options", "has_buffers"), [
    ("Phi3", SIZES, False),
    ("GPT2", NETWORKS["gpt2"][1], False),
    ("Glm4Moe", OF_TWO | {  # a bias of each expert, which is no parameter
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8}, True),
])  # fmt: skip
def test_a_network_reads_weights_only_for_the_buffers_beside_them(
    tmp_path, monkeypatch, kind, options, has_buffers
):
    made = drawn("GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM", vocab_size=48,
                 **SPECIAL, **options)  # fmt: skip
    for name, buffer in made.named_buffers():
        if name in made.state_dict():
            buffer.uniform_()
    made.save_pretrained(tmp_path)
    loaded, _ = funcrl.load_params(tmp_path)
    reads, read = [], transformers_class._load
    monkeypatch.setattr(transformers_class, "_load", lambda *args: reads.append(1) or read(*args))
    drawn_before = torch.get_rng_state()
    network = load_network(tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn_before)
    assert len(reads) == has_buffers
    assert [*map(str, network.named_parameters())] == [*map(str, loaded.named_parameters())]
    assert all(leaf.is_meta for leaf in network.parameters())
    assert equal(dict(network.named_buffers()), dict(loaded.named_buffers()))
    assert transformers_class.config_json(network, "float32") == transformers_class.config_json(
        loaded, "float32"
    )


@pytest.mark.parametrize("name", ["mistral window", "llama linear"])
@pytest.mark.parametrize("numerics", ["native", "exact"])
def test_what_a_transformer_draws_is_scored_alike(tmp_path, name, numerics):
    peer(name).save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    model = funcrl.models.Transformer(replace(model.config, numerics=numerics))
    sampler = funcrl.generators.Sampler(model)
    sampler.push(params)
    samples = sampler.generate([[1, 2, 3]], Sampling(4, max_tokens=20), seed=0)
    tokens = torch.cat([torch.tensor([[1, 2, 3]] * 4), samples.tokens], dim=1)
    rows = Sample(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    scored = funcrl.models.logprobs.score(funcrl.logprob_fn(model), params, rows).logprobs[:, 3:]
    if numerics == "exact":
        assert torch.equal(scored, samples.logprobs)
    else:
        assert (scored - samples.logprobs).abs().max() <= 1e-5


def folder_of(tmp_path, name):
    """A folder with a network and a tokenizer of bytes, as a hub has it."""
    tokenizer = tiny_tokenizer()
    peer(name, tokenizer.vocab_size).save_pretrained(tmp_path / "model")
    tokenizer._tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config_of(folder, run_dir, **options):
    return TrainConfig(
        model=str(folder), task="sum_digits", run_dir=run_dir, num_prompts=4, num_generations=4,
        sampling=Sampling(max_tokens=4), evaluation=EvaluationConfig(every=2, num_prompts=4),
        warm_start=funcrl.config.WarmStartConfig(steps=0), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("network", "rank"), [
    ("gpt2", 0), ("gpt2", 2), ("falcon", 2), ("mamba", 2),
])  # fmt: skip
def test_a_run_goes_on_and_is_exported(tmp_path, network, rank):
    folder, lines = folder_of(tmp_path, network), []
    task = funcrl.tasks.from_rows(
        [{"prompt": text} for text in "abcdefghijklmnop"], reward=num_letters,
        tokenizer=funcrl.tasks.load_tokenizer(folder),
    )  # fmt: skip

    class Noting(funcrl.run.views.SilentView):
        def note(self, line):
            lines.append(line)

    def run(name, steps, **options):
        given = {"lora": LoraConfig(rank=rank), "optimizer": OptimizerConfig(learning_rate=1e-2)}
        config = config_of(folder, tmp_path / name, steps=steps, **given)
        return funcrl.train(config, task=task, view=Noting(), **options)

    whole = run("whole", 3)
    kind = NETWORKS[network][0]
    (line,) = (line for line in lines if f"{kind} runs as its class in transformers" in line)
    assert line.endswith("one row after the other.") == (network == "mamba")
    run("parts", 2)
    parts = run("parts", 3, resume=True)
    for name, leaf in whole.state.params.items():
        assert torch.equal(leaf, parts.state.params[name])
    assert any(row.get("grad_norm") for row in whole.history)
    out = funcrl.export(tmp_path / "whole", tmp_path / "out", task=task)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    trained = funcrl.load_run(tmp_path / "whole", task=task)
    row = Sample(*(each[0] for each in ROWS))
    with torch.no_grad():
        wanted = exported(TOKENS[:1]).logits[0]
    found = funcrl.models.logits_fn(trained.model)(trained.params, row)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_gate_that_is_narrower_than_the_rank_gets_no_adapter():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16}  # fmt: skip
    shape = transformers.Qwen2MoeConfig(vocab_size=48, **OF_TWO, **experts)
    network = transformers.Qwen2MoeForCausalLM(shape)
    every = layer_weights(network, 1)
    gates = {f"model.layers.{layer}.mlp.shared_expert_gate.weight" for layer in range(4)}
    assert every > gates
    assert layer_weights(network, 2) == every - gates
    assert layer_weights(network, 1000) == every  # which an error says of the first of them


@pytest.mark.parametrize(("options", "message"), [
    ({"numerics": "exact"}, "--numerics native .*GPT2LMHeadModel"),
    ({"packing": "samples"}, "--packing none .*GPT2LMHeadModel"),
    ({"attend": "flash"}, "--attend native .*GPT2LMHeadModel"),
    ({"algorithm": funcrl.config.AlgorithmConfig("ppo", kl=0.0)}, "own with ppo.*GPT2LMHeadModel"),
])  # fmt: skip
def test_what_only_a_transformer_has_is_refused(tmp_path, options, message):
    folder = folder_of(tmp_path, "gpt2")
    with pytest.raises(ValueError, match=f"^train expects .*{message}"):
        funcrl.train(config_of(folder, tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "options"), [
    ("BertLMHeadModel", {}),  # as an encoder: a token sees those after it
    ("RobertaForCausalLM", {"is_decoder": True}),  # its positions begin after its padding's
])  # fmt: skip
def test_a_class_that_is_not_causal_is_refused(tmp_path, kind, options):
    options = SPECIAL | SIZES | {"pad_token_id": 1} | options
    drawn(kind, vocab_size=48, **options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^load_params expects a causal .* got a {kind} whose"):
        funcrl.load_params(tmp_path)


@SLOW_EXPERTS
def test_gradients_of_experts_are_transformers(tmp_path):
    network = peer("mixtral")
    network.save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    loss = torch.log_softmax(network(TOKENS).logits[:, :-1], -1)
    loss.gather(2, TOKENS[:, 1:, None]).sum().backward()
    model_fn = funcrl.logprob_fn(model)

    def total(params):
        return torch.vmap(model_fn, (None, 0))(params, ROWS).logprobs[:, 1:].sum()

    found = torch.func.grad(total)(params)
    for name, leaf in network.named_parameters():
        assert (found[name] - leaf.grad).abs().max() <= 1e-4 * leaf.grad.abs().max().clamp(min=1)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    peer("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = next(iter(sorted(whole)))
    for tensors, message in (
        ({key: leaf for key, leaf in whole.items() if key != name}, "missing .*h.0"),
        (whole | {"something.else": torch.zeros(2)}, "unexpected something.else"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"^load_params .*GPT2LMHeadModel .*{message}"):
            funcrl.load_params(tmp_path)
    save_file(whole, file, metadata={"format": "pt"})
    rewrite(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ValueError, match="^load_params expects weights that are not quantised"):
        funcrl.load_params(tmp_path)


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 long"])
def test_a_rotation_does_not_depend_on_other_rows(tmp_path, name):
    network = peer(name)
    network.save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    sampler = funcrl.generators.HuggingFace(model)
    sampler.push(params)
    samples = sampler.generate([[1, 2, 3]], Sampling(4, max_tokens=50), seed=0)
    assert samples.tokens.shape[1] == 37  # 40 with the prompt
    longer = torch.arange(41)[None]
    with torch.no_grad():
        short = network(longer[:, :40]).logits
        assert (network(longer).logits[:, :40] - short).abs().max() > 1e-2  # of other angles
    with pytest.raises(ValueError, match=f"^logits_fn .* at most 40 .*{type(network).__name__}"):
        funcrl.score(funcrl.logprob_fn(model), params, Sample(longer, longer))

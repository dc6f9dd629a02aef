"""Generators of networks that are not funcrl's: the same samples as by hand, token by token."""

import functools

import pytest
import torch
import transformers
from torch import nn

import funcrl
from funcrl.generators import HuggingFace, Recompute, Sampler, Sampling, State
from funcrl.generators.embedded import hugging_face

# torch has no rule to batch its fused attention: it runs one sample after the other, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

WIDTHS = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip
BART = {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 2,
        "max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "Llama": ("LlamaForCausalLM", WIDTHS),
    "GPT2": ("GPT2LMHeadModel", GPT2),
    "Mistral": ("MistralForCausalLM", {**WIDTHS, "sliding_window": 4}),
    # Its positions are places, whatever the mask: a padded row has other logits.
    "Bart": ("BartForCausalLM", BART),
}
# Its attention is computed in float32, and has a mask of the size of its context.
NEO = {"GPTNeo": ("GPTNeoForCausalLM", {
    "hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8,
    "attention_types": [[["global"], 1]], "max_position_embeddings": 64})}  # fmt: skip
PROMPTS = [[1, 3], [4, 5, 6], [1, 3], [7, 8, 9, 10, 4, 4]]
SAMPLING = Sampling(num_samples=3, max_tokens=9, stop_tokens=(2,))


@functools.cache
def module_of(family):
    name, sizes = (FAMILIES | NEO)[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=11, **sizes)
    torch.manual_seed(0)
    module = getattr(transformers, name)(config).double().eval()
    # Three times the initial weights, so that one token is likelier than another.
    return module, {name: 3 * leaf.detach() for name, leaf in module.named_parameters()}


class GRU(nn.Module):
    """A recurrent policy: its second argument is a state, and not the positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 11)

    def forward(self, tokens, state=None):
        rows = self.embed(tokens)
        state = torch.zeros_like(rows[0]) if state is None else state
        states = [state := self.cell(row, state) for row in rows]
        return self.out(torch.stack(states))


def by_hand(logits_fn, params, samples):
    """Check each log-probability against the network's own, of the prompt and the sample so far."""
    for row, prompt in enumerate(p for p in PROMPTS for _ in range(SAMPLING.num_samples)):
        tokens = list(prompt)
        for token, logprob in zip(samples.tokens[row], samples.logprobs[row], strict=True):
            if not samples.mask[row, len(tokens) - len(prompt)]:
                break
            ids = torch.tensor(tokens)
            logits = logits_fn(params, funcrl.types.Sample(ids, torch.arange(len(ids))))[-1]
            assert abs(logits.log_softmax(-1)[token] - logprob) < 1e-12
            tokens.append(int(token))
            if len(tokens) - len(prompt) == samples.mask.shape[1]:
                break


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_draws_the_same_on_its_cache_and_by_recomputing(family):
    module, params = module_of(family)
    drawn = []
    for generator in (HuggingFace(module), Recompute(module), HuggingFace(module, slots=3)):
        generator.push(params, version=7)
        drawn.append(generator.generate(PROMPTS, SAMPLING, seed=5))
    cached, recomputed, few = drawn
    assert cached.policy_version == 7
    assert {*cached.finish_reasons} == {"stop", "length"}  # rows leave the cache on the way
    for other in (recomputed, few):
        assert torch.equal(cached.tokens, other.tokens)
        assert torch.equal(cached.mask, other.mask)
        assert cached.finish_reasons == other.finish_reasons
        assert (cached.logprobs - other.logprobs).abs().max() < 1e-12
    by_hand(funcrl.models.logits_fn(module), params, cached)


@pytest.mark.parametrize(("family", "bound"), [("GPT2", 1e-12), ("GPTNeo", 1e-6)])
def test_a_prompt_without_room_for_all_tokens_is_not_padded_beyond_the_context(family, bound):
    module, params = module_of(family)
    prompts, sampling = [[1, 2], [3] * 60, [4] * 30, [5] * 60], Sampling(max_tokens=34)
    drawn = []
    for generator in (HuggingFace(module), Recompute(module)):
        generator.push(params)
        drawn.append(generator.generate(prompts, sampling, seed=5))
    cached, recomputed = drawn
    assert cached.mask.sum(dim=1).tolist() == [34, 4, 34, 4]
    assert torch.equal(cached.tokens, recomputed.tokens)
    assert (cached.logprobs - recomputed.logprobs).abs().max() < bound


@pytest.mark.parametrize(
    ("family", "tokens", "num_batches"), [("Llama", 24, 1), ("Llama", 8, 3), ("Bart", 24, 3)]
)
def test_prompts_of_all_lengths_are_one_batch_where_padding_changes_nothing(
    monkeypatch, family, tokens, num_batches
):
    """Four prompts, the longest of six tokens, unless a forward pass may have fewer tokens."""
    monkeypatch.setattr(hugging_face, "PASS_TOKENS", tokens)
    module, params = module_of(family)
    generator, calls = HuggingFace(module), []
    generator.push(params)
    one = Sampling(max_tokens=1)
    generator.generate(PROMPTS, one, seed=5)  # after which it is known

    def count(called, *_):
        if type(called) is type(module):
            calls.append(called)

    with nn.modules.module.register_module_forward_hook(count):
        generator.generate(PROMPTS, one, seed=5)
    assert len(calls) == num_batches


def test_recompute_draws_what_the_sampler_draws():
    shape = funcrl.models.TransformerConfig(vocab_size=11, width=16, num_layers=2, num_heads=2,
                                            num_kv_heads=1, head_width=8)  # fmt: skip
    model = funcrl.models.Transformer(shape)
    params = funcrl.tree.map(torch.Tensor.double, funcrl.init_params(model, seed=0))
    sampler, recompute = Sampler(model), Recompute(model, slots=4)
    for generator in (sampler, recompute):
        generator.push(params)
    ours, theirs = (g.generate(PROMPTS, SAMPLING, seed=3) for g in (sampler, recompute))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert (ours.logprobs - theirs.logprobs).abs().max() < 1e-12
    assert sampler.score(PROMPTS)[1] == pytest.approx(recompute.score(PROMPTS)[1], abs=1e-12)
    assert recompute.context_length == shape.context_length


def test_a_recurrent_policy_generates_and_its_state_is_not_the_positions():
    torch.manual_seed(0)
    module = GRU().double()
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    generator = Recompute(module)
    generator.push(params)
    samples = generator.generate(PROMPTS, SAMPLING, seed=1)
    by_hand(funcrl.models.logits_fn(module), params, samples)
    scores = funcrl.logprob_fn(module)(params, funcrl.types.Sample(torch.tensor([1, 3]), None))
    logits = module(torch.tensor([1, 3]))
    assert torch.equal(scores.logprobs[1], logits[0].log_softmax(-1)[3])


def test_any_function_of_logits_generates_up_to_its_stop_string():
    def counting(params, sample):  # the next token is one more, with a probability of nearly 1
        return params["sharp"] * nn.functional.one_hot((sample.tokens + 1) % 6, 6)

    generator = Recompute(counting, decode=lambda tokens: "".join(map(str, tokens)))
    assert generator.state is State.EMPTY
    generator.push({"sharp": torch.tensor(100.0)})
    drawn = generator.generate([[0], [3, 1]], Sampling(max_tokens=9, stop=("45",)), seed=0)
    assert drawn.tokens[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert drawn.mask.sum(dim=1).tolist() == [5, 4]
    short = Recompute(counting, context_length=3)
    short.push({"sharp": torch.tensor(100.0)})
    assert short.generate([[0]], Sampling(max_tokens=9), seed=0).tokens.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="1 to 2 tokens"):
        short.generate([[0, 1, 2]], Sampling(), seed=0)
    with pytest.raises(ValueError, match="tokens from 0 on"):
        short.generate([[-1]], Sampling(), seed=0)


def test_what_does_not_fit_is_refused_with_what_does():
    with pytest.raises(TypeError, match=r"Sampler .*GRU.*HuggingFace\(model\).*Recompute\(model\)"):
        Sampler(GRU())
    with pytest.raises(TypeError, match=r"HuggingFace .*takes a cache.*GRU.*Recompute\(model\)"):
        HuggingFace(GRU())
    with pytest.raises(ValueError, match="embed.weight"):
        Recompute(GRU()).push({})
    with pytest.raises(TypeError, match="Recompute expects parameters"):
        Recompute(lambda params, sample: params).push([])
    for options, name in (({"chunk": 4}, "chunk"), ({"attend": funcrl.ops.attend_flash}, "attend")):
        with pytest.raises(ValueError, match=f"logprob_fn expects no {name}= .*GRU"):
            funcrl.logprob_fn(GRU(), **options)


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_what_vmap_cannot_run_is_said_with_what_to_write(layer):
    module = layer(4, 4).double()

    def model_fn(params, row):  # torch's own call, which funcrl does not see
        states = torch.func.functional_call(module, params, (row,))[0]
        return funcrl.TokenScores(states[:, 0], states[:, 1])

    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    rows = torch.zeros(2, 3, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=rf"score .* that of nn\.{layer.__name__}; write"):
        funcrl.score(model_fn, params, rows)
    with pytest.raises(NotImplementedError, match=r"per_sample_grad .*nn\.GRU.* loop"):
        funcrl.per_sample_grad(lambda p, row: model_fn(p, row).logprobs.sum())(params, rows)


def test_a_value_that_a_model_function_reads_is_said():
    def reading(params, row):
        return (params["w"] * row).sum() if float(row.sum()) > 0 else params["w"].sum()

    with pytest.raises(ValueError, match=r"per_sample_grad .* reads no .* in reading\(\) at line"):
        funcrl.per_sample_grad(reading)({"w": torch.ones(2)}, torch.ones(3, 2))


def test_positions_are_given_by_name_wherever_they_stand():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, tokens, mask=None, positions=None):
            assert mask is None
            return torch.stack([tokens, positions], dim=-1) * self.weight

    sample = funcrl.types.Sample(torch.tensor([4, 5]), torch.tensor([0, 1]))
    found = funcrl.models.logits_fn(Masked())({"weight": torch.ones(1)}, sample)
    assert found.tolist() == [[4, 0], [5, 1]]

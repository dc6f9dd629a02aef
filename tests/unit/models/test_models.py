"""The transformer against transformers' Llama, Qwen2 and Qwen3; scores against their definition."""

import pytest
import torch
from cases import random_case, tiny_model
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl

FAMILIES = {
    "Llama": {"qk_norm": False, "qkv_bias": False, "tied": True},
    "Qwen2": {"qk_norm": False, "qkv_bias": True, "tied": False},
    "Qwen3": {"qk_norm": True, "qkv_bias": False, "tied": True},
}
NAMES = (
    ("unembed.", "lm_head."),
    ("embed.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    ("attention_norm", "input_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    (".attention.", ".self_attn."),
    ("mlp.gate.", "mlp.gate_proj."),
    ("mlp.up.", "mlp.up_proj."),
    ("mlp.down.", "mlp.down_proj."),
)


def their_name(name: str) -> str:
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    for letter in "qkvo":
        name = name.replace(f"self_attn.{letter}.", f"self_attn.{letter}_proj.")
    return "model.norm.weight" if name == "norm.weight" else name


def theirs(family: str, tied: bool):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6,
        attn_implementation="eager", tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family):
    options = FAMILIES[family]
    model = tiny_model(**options)
    params = funcrl.init_params(model, seed=3, dtype=torch.float64)
    # Away from the neutral start, so that norms and biases are seen.
    params = {
        name: leaf + 0.3 * torch.randn(leaf.shape, generator=funcrl.rng.generator(5, i)).double()
        for i, (name, leaf) in enumerate(params.items())
    }
    peer = theirs(family, options["tied"])
    missing, unexpected = peer.load_state_dict(
        {their_name(name): leaf for name, leaf in params.items()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if options["tied"] else set())
    tokens = torch.tensor([[1, 5, 2, 9, 10], [3, 3, 0, 7, 4]])
    expected = peer(tokens).logits
    apply = funcrl.functional(model)
    for got in (
        apply(params, tokens, torch.arange(5).expand(2, 5)),
        vmap(lambda row: apply(params, row, torch.arange(5)))(tokens),
    ):
        # Both compute rotary angles in float32, whose last bit differs between the formulas.
        assert (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_no_token_sees_the_future():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    apply = funcrl.functional(model)
    first = apply(params, torch.tensor([1, 2, 3, 4]), torch.arange(4))
    second = apply(params, torch.tensor([1, 2, 9, 9]), torch.arange(4))
    assert torch.equal(first[:2], second[:2])
    assert not torch.equal(first[2:], second[2:])


def test_only_relative_positions_matter():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    apply, tokens = funcrl.functional(model), torch.tensor([1, 2, 3, 4])
    shifted = apply(params, tokens, torch.arange(4) + 7)
    assert torch.allclose(apply(params, tokens, torch.arange(4)), shifted, atol=1e-6)


def test_attention_is_an_argument():
    seen = []

    def attend(q, k, v):
        seen.append(q.shape)
        return funcrl.ops.attend_causal(q, k, v)

    model = tiny_model()
    params = funcrl.init_params(model, seed=0)
    funcrl.functional(model)(params, torch.tensor([1, 2, 3]), torch.arange(3), attend=attend)
    assert seen == [torch.Size([2, 3, 8])] * 2


def test_init_is_a_function_of_the_seed():
    model = tiny_model()
    first, again, other = (funcrl.init_params(model, seed=seed) for seed in (0, 0, 1))
    assert list(first) == sorted(first)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(16))


def test_scores_by_hand():
    # softmax(log 1, log 3) = (1/4, 3/4); the token at 1 was 1, that at 2 was 0.
    logits = torch.tensor([1.0, 3.0]).log().expand(3, 2)
    scores = funcrl.token_scores(logits, torch.tensor([0, 1, 0]))
    assert torch.allclose(scores.logprobs, torch.tensor([1.0, 0.75, 0.25]).log())
    entropy = -(0.25 * torch.tensor(0.25).log() + 0.75 * torch.tensor(0.75).log())
    assert torch.allclose(scores.entropy, torch.stack([torch.zeros(()), entropy, entropy]))
    # At temperature 2 the odds are sqrt(3) to 1.
    warm = funcrl.token_scores(logits, torch.tensor([0, 1, 0]), temperature=2.0).logprobs
    assert torch.allclose(warm[1], (torch.tensor(3.0).sqrt() / (1 + 3**0.5)).log())


def test_forbidden_tokens_have_no_entropy():
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    scores = funcrl.token_scores(logits, torch.tensor([0, 0]))
    assert torch.equal(scores.entropy, torch.zeros(2))
    assert torch.equal(scores.logprobs, torch.zeros(2))


def test_low_precision_logits_are_scored_in_float32():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores = funcrl.token_scores(logits, torch.arange(5))
    assert scores.logprobs.dtype == torch.float32
    cold = funcrl.token_scores(logits, torch.arange(5), temperature=0.7)
    assert torch.equal(cold[0], funcrl.token_scores(logits.float(), torch.arange(5), 0.7)[0])
    assert torch.equal(scores.logprobs, funcrl.token_scores(logits.float(), torch.arange(5))[0])


def test_score_is_the_model_function_row_by_row():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    model_fn = funcrl.logprob_fn(model)
    rows = funcrl.Sample(
        torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), torch.arange(3).expand(3, 3)
    )
    whole = funcrl.score(model_fn, params, rows)
    for microbatch in (1, 2, 3):
        parts = funcrl.score(model_fn, params, rows, microbatch)
        assert torch.allclose(parts.logprobs, whole.logprobs, atol=1e-14)
    single = model_fn(params, funcrl.Sample(rows.tokens[1], rows.positions[1]))
    assert torch.allclose(single.logprobs, whole.logprobs[1], atol=1e-14)
    assert torch.allclose(single.entropy, whole.entropy[1], atol=1e-14)
    assert not whole.logprobs.requires_grad


def naive_entropy(log_softmax):
    return -(log_softmax.exp() * log_softmax).sum(-1)


def test_the_entropy_op_under_every_transform():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def total(op, x):
        return (weights * vmap(lambda row: op(row.log_softmax(-1)))(x)).sum()

    op = funcrl.ops.entropy
    leaf = logits[0].log_softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(op, leaf)
    assert torch.autograd.gradgradcheck(op, leaf)
    expected = grad(lambda x: total(naive_entropy, x))(logits)
    for got in (
        grad(lambda x: total(op, x))(logits),
        make_fx(grad(lambda x: total(op, x)))(logits)(logits),
    ):
        assert (got - expected).abs().max() <= 1e-14
    each = vmap(grad(lambda x: op(x.log_softmax(-1)).sum()))(logits)
    naive = vmap(grad(lambda x: naive_entropy(x.log_softmax(-1)).sum()))(logits)
    assert (each - naive).abs().max() <= 1e-14
    graph = make_fx(vmap(grad(lambda x: op(x.log_softmax(-1)).sum())))(logits)
    assert torch.equal(graph(logits), each)


def test_a_forbidden_token_does_not_poison_the_gradient():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)

    def total(x, token):
        scores = funcrl.token_scores(x, torch.tensor([0, token]))
        return scores.logprobs.sum() + scores.entropy.sum()

    got = grad(total)(logits, 2)
    expected = grad(total)(logits[:, [0, 2]], 1)
    assert torch.allclose(got[:, [0, 2]], expected, atol=1e-15)
    assert got[0, 1] == 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
def test_packed_rows_are_the_samples_by_themselves(name):
    """The whole step of a transformer: samples laid end to end do not see each other."""
    algorithm = getattr(funcrl, name)(clip=(0.9, 9.0))
    case = random_case(4)
    tokens = torch.randint(11, case.rollout.mask.shape, generator=torch.Generator().manual_seed(1))
    rollout = case.rollout._replace(tokens=tokens)
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    optimizer = funcrl.optim.sgd(1.0)
    step = funcrl.grpo_step(funcrl.logprob_fn(model), algorithm=algorithm, optimizer=optimizer)
    state = step.init(params)
    expected, metrics = step(state, funcrl.collate(rollout, algorithm))
    packed = funcrl.pack(rollout, algorithm, length=20)
    assert packed.segment_ids.max() > 0
    got, packed_metrics = step(state, packed)
    for name, leaf in expected.params.items():
        assert (got.params[name] - leaf).abs().max() <= 1e-12, name
    packed_numbers = funcrl.metrics.to_floats(packed_metrics)
    numbers = funcrl.metrics.to_floats(metrics)
    assert packed_numbers.pop("padding_frac") < numbers.pop("padding_frac")
    for name, value in numbers.items():
        assert abs(packed_numbers[name] - value) <= 1e-12, name
    assert metrics.maxes["grad_norm"] > 0.01


def test_packed_rows_need_a_model_that_takes_attend():
    model = torch.nn.Embedding(11, 11)
    packed = funcrl.pack(random_case(4).rollout, funcrl.grpo(), length=20)
    row = funcrl.tree.map(lambda leaf: leaf[0], packed)
    with pytest.raises(ValueError, match="logprob_fn expects one sample a row.*Embedding"):
        funcrl.logprob_fn(model)({"weight": torch.zeros(11, 11)}, row)


def test_the_temperature_is_that_of_sampling():
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    sample = funcrl.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
    logits = funcrl.functional(model)(params, *sample)
    got = funcrl.logprob_fn(model, temperature=2.0)(params, sample)
    expected = (logits[:-1] / 2).log_softmax(-1).gather(-1, sample.tokens[1:, None]).squeeze(-1)
    assert torch.allclose(got.logprobs[1:], expected, atol=1e-14)


def test_initial_deviations():
    model = funcrl.models.Transformer(funcrl.models.TransformerConfig(num_layers=2))
    params = funcrl.init_params(model, seed=0)
    # 128 x 128 normal numbers: their deviation is within 5 / sqrt(2 * 16384) = 2.8% of the true.
    assert params["blocks.0.attention.q.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    for name in ("attention.o", "mlp.down"):
        leaf = params[f"blocks.1.{name}.weight"]
        assert leaf.std().item() == pytest.approx(0.02 / 2, rel=0.03)


def test_configs_are_refused():
    config = funcrl.models.TransformerConfig
    with pytest.raises(ValueError, match="TransformerConfig .*num_kv_heads"):
        config(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="TransformerConfig .*head_width"):
        config(head_width=7)
    with pytest.raises(ValueError, match="TransformerConfig expects width"):
        config(width=0)
    with pytest.raises(ValueError, match="token_scores .*temperature"):
        funcrl.token_scores(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0)


class DoubledNorm(funcrl.models.layers.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("names", [("q_norm",), ("q_norm", "k_norm")])
def test_a_norm_of_ones_own_is_used_by_exact_numerics_too(names):
    logits = {}
    for numerics in ("native", "exact"):
        shape = funcrl.models.TransformerConfig(vocab_size=7, width=8, numerics=numerics)
        model = funcrl.models.Transformer(shape)
        for block in model.blocks:
            for name in names:
                with torch.device("meta"):
                    norm = DoubledNorm(shape.head_width, shape.norm_eps, model.ops)
                setattr(block.attention, name, norm)
        params = funcrl.init_params(model, seed=0, dtype=torch.float64)
        tokens = torch.tensor([1, 2, 3, 4])
        logits[numerics] = funcrl.functional(model)(params, tokens, torch.arange(4))
    torch.testing.assert_close(logits["exact"], logits["native"], rtol=1e-6, atol=1e-8)

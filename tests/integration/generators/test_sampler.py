"""The embedded sampler: exact distributions, exact log-probabilities, no neighbour matters."""

import math

import pytest
import torch
from cases import tiny_model

import funcrl
from funcrl import rng
from funcrl.generators import Sampler, Sampling, State, draw, sample, sampling_logprobs
from funcrl.generators.packed import pack_weights
from funcrl.models.functional import bind

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [5, 8]]


def make(dtype=torch.float64, scale=6.0, **options):
    """A tiny model whose distributions are far from uniform."""
    model = tiny_model(**options)
    params = funcrl.init_params(model, seed=0, dtype=dtype)
    return model, funcrl.tree.map(lambda leaf: leaf * scale if leaf.ndim == 2 else leaf, params)


def teacher_forced(model, params, prompts, samples, temperature=1.0):
    """Score every sampled token by `logprob_fn` on the whole sequence: [B, S]."""
    model_fn = funcrl.logprob_fn(model, temperature)
    group = len(samples.tokens) // len(prompts)
    scored = torch.zeros_like(samples.logprobs)
    for row in range(len(samples.tokens)):
        prompt = prompts[row // group]
        count = int(samples.mask[row].sum())
        tokens = torch.tensor([*prompt, *samples.tokens[row, :count].tolist()])
        positions = torch.arange(len(tokens))
        scores = model_fn(params, funcrl.Sample(tokens, positions))
        scored[row, :count] = scores.logprobs[len(prompt) :].to(scored.dtype)
    return scored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["double", "float"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": True, "qk_norm": False}, {"tied": False}, {"num_kv_heads": 2}],
    ids=["qwen3", "qwen2", "untied", "all-heads"],
)
def test_log_probabilities_equal_teacher_forcing(dtype, bound, options):
    model, params = make(dtype, **options)
    sampling = Sampling(num_samples=3, max_tokens=9, stop_tokens=(0,))
    samples = sample(model, params, PROMPTS, sampling, seed=1, slots=5)
    forced = teacher_forced(model, params, PROMPTS, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= bound
    assert torch.equal(samples.logprobs, samples.policy_logprobs)


def test_log_probabilities_of_packed_weights_equal_teacher_forcing():
    """Matrices large enough for oneDNN's layout."""
    model, params = make(
        torch.float32, 1.0, vocab_size=1024, width=256, mlp_width=1024, head_width=128
    )
    network = pack_weights(model, params)
    assert network.ops is not model.ops
    samples = sample(model, params, PROMPTS, Sampling(num_samples=2, max_tokens=6), seed=1)
    forced = teacher_forced(model, params, PROMPTS, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= 1e-5


def test_packed_weights_in_bfloat16_are_as_near_to_float64_as_others():
    """Not every processor has oneDNN's layout of them."""
    options = {"vocab_size": 64, "width": 256, "mlp_width": 1024, "head_width": 128}
    model, params = make(torch.float64, 1.0, **options)
    tokens = torch.arange(12).expand(2, 12)
    positions = torch.arange(12).expand(2, 12)
    exact = funcrl.functional(model)(params, tokens, positions)
    halves = funcrl.tree.cast(params, torch.bfloat16)
    errors = [
        (network(tokens, positions) - exact).abs().mean()
        for network in (pack_weights(model, halves), bind(model, halves))
    ]
    assert 0 < errors[0] <= 2 * errors[1]


def test_tempered_log_probabilities_are_those_of_the_tempered_policy():
    model, params = make()
    samples = sample(model, params, PROMPTS, Sampling(max_tokens=9, temperature=0.7), seed=1)
    tempered = teacher_forced(model, params, PROMPTS, samples, temperature=0.7)
    raw = teacher_forced(model, params, PROMPTS, samples)
    assert (samples.logprobs - tempered).abs().max() <= 1e-12
    assert (samples.policy_logprobs - raw).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_is_the_argmax_of_the_whole_forward_pass_at_each_step(dtype):
    model, params = make(dtype)
    apply = funcrl.functional(model)
    samples = sample(model, params, PROMPTS, Sampling(max_tokens=12, temperature=0), seed=1)
    assert samples.tokens.unique().numel() > 3  # not one token again and again
    for prompt, tokens in zip(PROMPTS, samples.tokens.tolist(), strict=True):
        for count, token in enumerate(tokens):
            seen = torch.tensor([*prompt, *tokens[:count]])
            assert apply(params, seen, torch.arange(len(seen)))[-1].argmax() == token
    assert torch.equal(samples.logprobs, torch.zeros_like(samples.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_is_the_same_alone_and_in_any_batch(dtype):
    model, params = make(dtype)
    sampling = Sampling(num_samples=4, max_tokens=10, stop_tokens=(0, 7))
    together = sample(model, params, PROMPTS, sampling, seed=5)
    ended = together.mask.sum(dim=1)
    assert ended.unique().numel() > 2  # rows leave at different times
    for slots in (4, 7, 9):
        again = sample(model, params, PROMPTS, sampling, seed=5, slots=slots)
        assert torch.equal(again.tokens, together.tokens)
        assert again.finish_reasons == together.finish_reasons
    for index, prompt in enumerate(PROMPTS):
        alone = sample(model, params, [prompt], sampling, seed=5)
        rows = slice(4 * index, 4 * index + 4)
        width = alone.tokens.shape[1]
        assert torch.equal(alone.tokens, together.tokens[rows, :width])
        assert torch.equal(alone.mask, together.mask[rows, :width])
    back = sample(model, params, PROMPTS[::-1], sampling, seed=5)
    assert torch.equal(back.tokens[-4:], together.tokens[:4])
    fewer = sample(model, params, PROMPTS, Sampling(2, 10, stop_tokens=(0, 7)), seed=5)
    width = fewer.tokens.shape[1]
    assert torch.equal(fewer.tokens[:2], together.tokens[:2, :width])


def test_seeds_and_copies_of_a_prompt_give_other_samples():
    model, params = make(scale=1.0)
    one = sample(model, params, PROMPTS, Sampling(max_tokens=12), seed=0)
    assert torch.equal(
        one.tokens, sample(model, params, PROMPTS, Sampling(max_tokens=12), 0).tokens
    )
    assert not torch.equal(
        one.tokens, sample(model, params, PROMPTS, Sampling(max_tokens=12), 1).tokens
    )
    twice = sample(model, params, [[1], [1]], Sampling(2, max_tokens=12), seed=0)
    four = sample(model, params, [[1]], Sampling(4, max_tokens=12), seed=0)
    assert torch.equal(twice.tokens, four.tokens)
    assert len({tuple(row) for row in four.tokens.tolist()}) == 4


def known(sampling, probabilities):
    """The sampling distribution, by a loop over sorted tokens."""
    weights = {t: p ** (1 / sampling.temperature) for t, p in enumerate(probabilities)}
    total = sum(weights.values())
    weights = {token: weight / total for token, weight in weights.items()}
    order = sorted(weights, key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass < sampling.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    best = max(weights[token] for token in nucleus)
    kept = [token for token in nucleus if weights[token] >= sampling.min_p * best]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


CASES = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(top_p=0.75),
    Sampling(min_p=0.3),
    Sampling(temperature=1.5, top_k=6, top_p=0.85, min_p=0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", CASES, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}")
def test_twenty_thousand_draws_follow_the_known_distribution(sampling):
    """Chi-square below its 0.999 quantile; with fixed seeds, so that it cannot fail by chance."""
    probabilities = [0.02, 0.3, 0.05, 0.18, 0.11, 0.25, 0.01, 0.08]
    wanted = torch.tensor(known(sampling, probabilities), dtype=torch.float64)
    logits = torch.tensor(probabilities, dtype=torch.float64).log() + 3.0
    logprobs = sampling_logprobs(logits[None], sampling)
    assert (logprobs[0].exp() - wanted).abs().max() <= 1e-12
    count = 20_000
    seeds = torch.tensor([rng.fold_in(11, row) for row in range(count)])
    tokens = draw(logprobs.expand(count, -1), rng.uniform(seeds, 1)[:, 0])
    seen = torch.bincount(tokens, minlength=8).double()
    possible = wanted > 0
    assert seen[~possible].sum() == 0
    statistic = ((seen - count * wanted)[possible] ** 2 / (count * wanted[possible])).sum()
    # Wilson and Hilferty: chi^2_k at 3.09 deviations, the 0.999 quantile.
    k = max(int(possible.sum()) - 1, 1)
    assert statistic <= k * (1 - 2 / (9 * k) + 3.09 * math.sqrt(2 / (9 * k))) ** 3


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.5)], ids=["k", "p"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 1, 2)])
def test_equals_of_the_last_token_kept_are_kept_too(sampling, order):
    """Of 0.4 and three times 0.2 the second most likely has two equals; 0.4 alone is below p."""
    probabilities = torch.tensor([0.4, 0.2, 0.2, 0.2, 0.0])[list(order)]
    found = sampling_logprobs(probabilities.log()[None], sampling)[0].exp()
    assert torch.allclose(found, probabilities)


@pytest.mark.slow
def test_whole_samples_follow_the_policy():
    """20,000 completions of two tokens against the product of the policy's probabilities."""
    model, params = make(scale=4.0, vocab_size=4)
    count = 20_000
    samples = sample(model, params, [[1, 2]], Sampling(count, max_tokens=2), seed=3, slots=count)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    model_fn = funcrl.logprob_fn(model)
    rows = funcrl.Sample(
        torch.cat([torch.tensor([[1, 2]]).expand(16, 2), pairs], dim=1),
        torch.arange(4).expand(16, 4),
    )
    wanted = funcrl.score(model_fn, params, rows).logprobs[:, 2:].sum(dim=1).exp()
    seen = torch.bincount(4 * samples.tokens[:, 0] + samples.tokens[:, 1], minlength=16).double()
    assert ((seen - count * wanted) ** 2 / (count * wanted)).sum() <= 37.7  # chi^2_15 at 0.999


def test_top_p_beyond_the_likely_few_sorts_the_whole_vocabulary():
    logits = torch.zeros(1, 5000, dtype=torch.float64)
    kept = sampling_logprobs(logits + torch.arange(5000) * 1e-9, Sampling(top_p=0.5)).isfinite()
    assert 2500 <= kept.sum() <= 2501
    assert kept[0, -2500:].all()


def test_uniform_numbers_are_those_of_fold_in():
    seeds = [0, 1, 2**63 - 1, rng.fold_in(3, 4)]
    numbers = rng.uniform(torch.tensor(seeds), 5)
    for row, seed in enumerate(seeds):
        for index in range(5):
            assert numbers[row, index].item() == (rng.fold_in(seed, index) >> 10) / 2**53
    many = rng.uniform(torch.arange(50_000), 1)
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005


def test_stop_tokens_end_a_sample_and_stay_in_it():
    model, params = make()
    samples = sample(model, params, PROMPTS, Sampling(4, max_tokens=30, stop_tokens=(0, 3)), seed=2)
    for row, reason in enumerate(samples.finish_reasons):
        tokens = samples.tokens[row][samples.mask[row]].tolist()
        assert (tokens[-1] in (0, 3)) == (reason == "stop")
        assert not {0, 3} & set(tokens[:-1])
        assert reason == "stop" or len(tokens) == 30
    assert "stop" in samples.finish_reasons


def test_min_tokens_forbids_stopping_and_is_in_the_log_probabilities():
    model, params = make()
    sampling = Sampling(4, max_tokens=8, min_tokens=5, stop_tokens=(0, 3))
    samples = sample(model, params, PROMPTS, sampling, seed=2)
    assert samples.mask.sum(dim=1).min() >= 6 - 1
    early = samples.tokens[:, :5]
    assert not torch.isin(early, torch.tensor([0, 3])).any()
    forced = teacher_forced(model, params, PROMPTS, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= 1e-12
    assert (samples.logprobs[:, :5] > forced[:, :5]).any()  # renormalised without the stop tokens


def test_stop_strings_end_a_sample_wherever_tokens_split_them():
    model, params = make()

    def decode(tokens):
        return "".join("abcdefghijk"[token] for token in tokens)

    free = sample(model, params, PROMPTS, Sampling(max_tokens=30), seed=2)
    text = decode(free.tokens[0].tolist())
    stop = text[4:7]
    stopped = sample(
        model, params, PROMPTS, Sampling(max_tokens=30, stop=(stop,)), seed=2, decode=decode
    )
    got = decode(stopped.tokens[0][stopped.mask[0]].tolist())
    assert got == text[: text.index(stop) + 3]
    assert stopped.finish_reasons[0] == "stop"
    late = Sampling(max_tokens=30, min_tokens=20, stop=(stop,))
    assert sample(model, params, PROMPTS, late, seed=2, decode=decode).mask[0].sum() >= 20


def test_a_sample_ends_at_the_context_length():
    model, params = make(context_length=8)
    samples = sample(model, params, PROMPTS, Sampling(max_tokens=30), seed=0)
    assert samples.mask.sum(dim=1).tolist() == [8 - len(prompt) for prompt in PROMPTS]
    assert set(samples.finish_reasons) == {"length"}


def test_finished_samples_cost_nothing(monkeypatch):
    """The rows of all forward passes are the tokens that were fed, not slots times the longest."""
    model, params = make()
    from funcrl.generators.embedded import cache

    rows = []
    plain = cache.extend

    def counted(model, cache, tokens, positions, longest):
        rows.append(len(tokens))
        return plain(model, cache, tokens, positions, longest)

    monkeypatch.setattr(cache, "extend", counted)
    samples = sample(model, params, PROMPTS, Sampling(4, 20, stop_tokens=(0, 3)), seed=2)
    assert sum(rows) == int(samples.mask.sum()) - len(samples.tokens)


def test_a_push_is_a_reference_and_takes_effect():
    model, params = make()
    sampler = Sampler(model)
    sampler.push(params, version=4)
    assert all(sampler.pushed.params[name] is leaf for name, leaf in params.items())
    first = sampler.generate(PROMPTS, Sampling(max_tokens=9), seed=0)
    other = funcrl.tree.map(lambda leaf: leaf.flip(0), params)
    sampler.push(other, version=5)
    second = sampler.generate(PROMPTS, Sampling(max_tokens=9), seed=0)
    assert (first.policy_version, second.policy_version) == (4, 5)
    fresh = sample(model, other, PROMPTS, Sampling(max_tokens=9), seed=0)
    assert torch.equal(second.tokens, fresh.tokens)
    assert not torch.equal(second.tokens, first.tokens)


def test_a_push_of_what_is_there_does_nothing(monkeypatch):
    model, params = make()
    packed = []

    def counted(*args):
        packed.append(args)
        return pack_weights(*args)

    monkeypatch.setattr("funcrl.generators.embedded.sampler.pack_weights", counted)
    sampler = Sampler(model)

    def push_and_draw(params, version):
        sampler.push(params, version)
        drawn = sampler.generate(PROMPTS, Sampling(max_tokens=2), seed=0)
        fresh = sample(model, params, PROMPTS, Sampling(max_tokens=2), seed=0)
        packed.pop()  # the fresh sampler's
        assert torch.equal(drawn.tokens, fresh.tokens)
        assert drawn.policy_version == version
        return len(packed)

    assert push_and_draw(params, 1) == 1
    assert push_and_draw(params, 1) == 1
    assert push_and_draw(dict(params), 1) == 1  # another dictionary of the same tensors
    assert push_and_draw(params, 2) == 2
    params["norm.weight"].mul_(1.5)
    assert push_and_draw(params, 2) == 3
    params["norm.weight"] = params["norm.weight"].clone()  # another tensor in the same dictionary
    assert push_and_draw(params, 2) == 4
    params["norm.weight"].data = params["norm.weight"] * 2  # a write that torch does not count
    assert push_and_draw(params, 2) == 5
    with torch.inference_mode():  # where torch counts no writes at all
        params = {name: leaf.clone() for name, leaf in params.items()}
    assert push_and_draw(params, 2) == 6
    assert push_and_draw(params, 2) == 7


def test_a_samplers_states_and_its_sleep():
    model, params = make()
    sampler = Sampler(model)
    assert sampler.state is State.EMPTY
    for call in (lambda: sampler.score(PROMPTS), sampler.sleep):
        with pytest.raises(RuntimeError, match=r"Sampler\.(score|sleep) .*call push"):
            call()
    sampler.push(params)
    assert sampler.state is State.READY
    first = sampler.generate(PROMPTS, Sampling(max_tokens=3), seed=0)
    sampler.sleep()
    assert sampler.state is State.ASLEEP
    again = sampler.generate(PROMPTS, Sampling(max_tokens=3), seed=0)
    assert sampler.state is State.READY
    assert torch.equal(again.logprobs, first.logprobs)
    sampler.close()
    assert sampler.state is State.CLOSED
    with pytest.raises(RuntimeError, match=r"Sampler\.generate .* one that is closed"):
        sampler.generate(PROMPTS, Sampling(), seed=0)


def test_the_sampler_scores_as_the_model_does():
    model, params = make()
    sampler = Sampler(model)
    sampler.push(params)
    model_fn = funcrl.logprob_fn(model)
    for prompt, found in zip(PROMPTS, sampler.score(PROMPTS), strict=True):
        row = funcrl.Sample(torch.tensor(prompt), torch.arange(len(prompt)))
        wanted = model_fn(params, row).logprobs[1:]
        torch.testing.assert_close(torch.tensor(found, dtype=wanted.dtype), wanted)


def test_bfloat16_is_one_cast_of_the_parameters():
    model, params = make(torch.float32)
    sampler = Sampler(model, dtype=torch.bfloat16)
    sampler.push(params)
    sampling = Sampling(2, max_tokens=6)
    cast = sample(model, funcrl.tree.cast(params, torch.bfloat16), PROMPTS, sampling, seed=0)
    mine = sampler.generate(PROMPTS, sampling, seed=0)
    assert torch.equal(mine.tokens, cast.tokens)
    assert torch.equal(mine.logprobs, cast.logprobs)
    assert mine.logprobs.dtype == torch.float32


def test_samples_can_be_trained_on():
    """They come out of inference mode as ordinary tensors."""
    model, params = make()
    samples = sample(model, params, PROMPTS, Sampling(max_tokens=3), seed=0)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (samples.logprobs * weight).sum().backward()
    assert not samples.logprobs.is_inference()


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], Sampling(), "generate .*at least one prompt"),
        ([[]], Sampling(), "generate .*prompts .*4095.* got 0 in prompt 0"),
        ([[1], [11]], Sampling(), "generate .*tokens .*vocab_size=11, got 11 in prompt 1"),
        ([[1]], Sampling(stop=("x",)), "generate .*decode.*stop="),
        ([[1]], Sampling(stop_tokens=(11,)), "generate .*stop_tokens"),
        ([[1] * 4096], Sampling(), "generate .*prompts .*got 4096 in prompt 0"),
    ],
)
def test_bad_requests_are_refused(prompts, sampling, message):
    model, params = make()
    with pytest.raises(ValueError, match=message):
        sample(model, params, prompts, sampling, seed=0)


def test_bad_sampling_is_refused():
    for options in (
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"top_k": -1},
        {"max_tokens": 0}, {"num_samples": 0}, {"min_tokens": 65}, {"stop": ("",)},
    ):  # fmt: skip
        (name,) = options
        with pytest.raises(ValueError, match=f"Sampling .*{name}"):
            Sampling(**options)
    with pytest.raises(RuntimeError, match=r"Sampler\.generate .*call push"):
        Sampler(tiny_model()).generate([[1]], Sampling(), seed=0)
    with pytest.raises(TypeError, match="Sampler .*Transformer or Recurrent, got Linear"):
        Sampler(torch.nn.Linear(2, 2))


@pytest.mark.gpu
def test_the_sampler_on_the_gpu_equals_teacher_forcing():
    model, params = make(torch.float64)
    params = funcrl.tree.map(lambda leaf: leaf.cuda(), params)
    samples = sample(model, params, PROMPTS, Sampling(3, 9, stop_tokens=(0,)), seed=1, slots=5)
    samples = funcrl.tree.map(lambda leaf: leaf.cpu() if torch.is_tensor(leaf) else leaf, samples)
    params = funcrl.tree.map(lambda leaf: leaf.cpu(), params)
    forced = teacher_forced(model, params, PROMPTS, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= 1e-5  # float32 rotary angles differ


def letters(tokens):
    return "".join("abcdefghijk"[token] for token in tokens)


@pytest.mark.slow
@pytest.mark.parametrize("min_tokens", [0, 4, 9, 20])
def test_a_stop_string_counts_from_the_token_after_min_tokens_on(min_tokens):
    """Wherever an earlier one stands: the first whose end comes later ends the sample."""
    model, params = make()
    free = letters(
        sample(model, params, PROMPTS, Sampling(max_tokens=60), seed=2).tokens[0].tolist()
    )
    pairs = [free[at : at + 2] for at in range(len(free) - 1)]
    stop = max(set(pairs), key=pairs.count)
    ends = [at + 2 for at in range(len(free) - 1) if free[at : at + 2] == stop]
    assert len(ends) > 1
    wanted = next((end for end in ends if end > min_tokens), 60)
    sampling = Sampling(max_tokens=60, min_tokens=min_tokens, stop=(stop,))
    stopped = sample(model, params, PROMPTS, sampling, seed=2, decode=letters)
    # No token is barred here, so that the draws are those of the free sample.
    assert letters(stopped.tokens[0][stopped.mask[0]].tolist()) == free[:wanted]


def test_a_stop_string_is_found_among_tokens_without_text():
    model, params = make()

    def decode(tokens):
        return "".join("abc"[token] for token in tokens if token < 3)

    free = sample(model, params, PROMPTS, Sampling(max_tokens=60), seed=2).tokens[0].tolist()
    stop = decode(free)[2:4]
    wanted = next(n for n in range(61) if stop in decode(free[:n]))
    stopped = sample(
        model, params, PROMPTS, Sampling(max_tokens=60, stop=(stop,)), seed=2, decode=decode
    )
    assert int(stopped.mask[0].sum()) == wanted


def test_parameters_that_were_written_into_are_read_again():
    model, params = make(torch.float32)
    sampler = Sampler(model)
    sampler.push(params)
    sampling = Sampling(2, max_tokens=9)
    before = sampler.generate(PROMPTS, sampling, seed=0)
    for leaf in params.values():
        leaf.mul_(0.5)
    after, fresh = (
        sampler.generate(PROMPTS, sampling, 0),
        sample(model, params, PROMPTS, sampling, 0),
    )
    assert torch.equal(after.logprobs, fresh.logprobs)
    assert not torch.equal(after.logprobs, before.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_policy_is_an_error(temperature):
    model, params = make()
    params = {**params, "norm.weight": params["norm.weight"] * torch.nan}
    with pytest.raises(FloatingPointError, match="generate .*logits"):
        sample(model, params, PROMPTS, Sampling(max_tokens=3, temperature=temperature), seed=0)


def test_a_neighbour_does_not_matter_even_where_the_padding_token_is_broken():
    model, params = make(tied=False)
    weight = params["embed.weight"].clone()
    weight[0] = torch.nan
    prompts = [[1, 2], [3, 4, 5, 6, 7]]
    apart = {**params, "embed.weight": weight}
    sampling = Sampling(max_tokens=1)
    alone = sample(model, apart, prompts[:1], sampling, seed=0)
    both = sample(model, apart, prompts, sampling, seed=0)
    assert (alone.logprobs[0] - both.logprobs[0]).abs().max() <= 1e-12


def test_prompts_may_be_tensors():
    model, params = make()
    sampling = Sampling(max_tokens=6)
    rows = [torch.tensor([1, 2, 3])]
    mine = sample(model, params, rows, sampling, seed=0)
    assert torch.equal(mine.tokens, sample(model, params, [[1, 2, 3]], sampling, seed=0).tokens)


def test_a_long_limit_costs_nothing_where_the_context_is_short():
    model, params = make(context_length=8)
    samples = sample(model, params, PROMPTS, Sampling(max_tokens=10**12), seed=0)
    assert set(samples.finish_reasons) == {"length"}


@pytest.mark.parametrize("params", [{}, {"x": torch.zeros(1)}, None])
def test_push_refuses_what_are_no_parameters(params):
    model, _ = make()
    with pytest.raises((TypeError, ValueError), match="functional expects"):
        Sampler(model).push(params)

"""Exact numerics inside vLLM: every log-probability is the trainer's, to the last bit."""

from dataclasses import replace

import pytest
import torch
from engines import DEVICE, PROMPTS, cache_of, make, needs_vllm, rows_of

import funcrl
from funcrl.config import Sampling, VLLMCompileConfig, VLLMConfig
from funcrl.generators import VLLM, sampling_logprobs
from funcrl.generators.vllm.settings import EngineSetup, who_draws
from funcrl.models import Transformer
from funcrl.ops import EXACT

pytestmark = needs_vllm
VARIANTS = [
    ("llama", "float32", "sampling"),
    ("qwen2", "bfloat16", "policy"),
    ("qwen3", "bfloat16", "sampling"),
]


def exact(shape, dtype):
    """An exact model of one of the `SHAPES`, and its parameters."""
    model, params = make(shape, dtype)
    return funcrl.models.Transformer(replace(model.config, numerics="exact")), params


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def engine(request):
    shape, dtype, logprobs = request.param
    dtype = getattr(torch, dtype)
    model, params = exact(shape, dtype)
    config = VLLMConfig(context_length=256, logprobs=logprobs)
    generator = VLLM(model, config=config, dtype=dtype)
    generator.push(params, version=3)
    yield generator, model, params
    generator.close()


@pytest.fixture(scope="module")
def pieces():
    """An engine that cuts prompts into pieces of 32 tokens, and keeps none; with 5 free blocks."""
    model, params = exact("qwen3", torch.bfloat16)
    cache = cache_of(6, model.config, torch.bfloat16)
    config = VLLMConfig(context_length=256, cache_bytes=cache, slots=16)
    generator = VLLM(model, config=config, dtype=torch.bfloat16)
    changes = {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 32,
    }
    setup = generator._setup
    generator._setup = setup._replace(overrides=setup.overrides | changes)
    generator.push(params)
    yield generator, model, params
    generator.close()


def prompts_of(count, longest=60):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(97, (each,), generator=generator).tolist() for each in lengths]


def trainers(model, params, rows, temperature=1.0):
    """The trainer's log-probabilities of each row's tokens, from the second on; all rows at once,
    padded, which changes no bit of exact numerics."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=DEVICE)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
    batch = funcrl.Sample(tokens, torch.arange(tokens.shape[1], device=DEVICE).expand_as(tokens))
    scored = funcrl.score(funcrl.logprob_fn(model, temperature), params, batch).logprobs
    return [scored[row, 1 : len(values)] for row, values in enumerate(rows)]


def check_equal(samples, kept, prompts, model, params, temperature=1.0):
    """Every sampled token's log-probability is the trainer's."""
    group = len(samples.tokens) // len(prompts)
    rows = rows_of(samples, group, prompts)
    for row, scored in enumerate(trainers(model, params, rows, temperature)):
        length = int(samples.mask[row].sum())
        assert torch.equal(kept[row, :length], scored[-length:]), row


def check_scores(generator, model, params, rows):
    scores = generator.score(rows)
    for found, wanted in zip(scores, trainers(model, params, rows), strict=True):
        assert torch.equal(torch.tensor(found, device=DEVICE), wanted.double())


def count_tokens(generator):
    """A list that will hold how many tokens each forward pass has, padding included."""
    counts = []

    def hook(module, args, kw):
        counts.append(len(kw["input_ids"] if "input_ids" in kw else args[0]))

    generator._engine._llm.apply_model(
        lambda model: model.register_forward_pre_hook(hook, with_kwargs=True)
    )
    return counts


class TestEngine:
    @pytest.mark.parametrize("count", [1, 7, 64])
    def test_every_sampled_token(self, engine, count):
        generator, model, params = engine
        prompts = prompts_of(count)
        samples = generator.generate(prompts, Sampling(max_tokens=12), seed=0)
        assert torch.equal(samples.logprobs, samples.policy_logprobs)
        check_equal(samples, samples.logprobs, prompts, model, params)

    def test_at_a_temperature(self, engine):
        """Of what was sampled from or of the policy, whichever the engine keeps."""
        generator, model, params = engine
        samples = generator.generate(PROMPTS, Sampling(4, max_tokens=12, temperature=0.7), seed=0)
        if generator._config.logprobs == "policy":
            check_equal(samples, samples.policy_logprobs, PROMPTS, model, params)
            assert samples.logprobs[samples.mask].isnan().all()
        else:
            check_equal(samples, samples.logprobs, PROMPTS, model, params, temperature=0.7)
            assert samples.policy_logprobs[samples.mask].isnan().all()

    def test_truncated(self, engine):
        generator, model, params = engine
        sampling = Sampling(4, max_tokens=12, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)
        samples = generator.generate(PROMPTS, sampling, seed=0)
        if generator._config.logprobs == "policy":
            check_equal(samples, samples.policy_logprobs, PROMPTS, model, params)
            return
        apply = funcrl.functional(model)
        for row, tokens in enumerate(rows_of(samples, 4)):
            tokens = torch.tensor(tokens, device=DEVICE)
            logits = apply(params, tokens, torch.arange(len(tokens), device=DEVICE))
            wanted = sampling_logprobs(logits[-13:-1], sampling, EXACT.log_softmax)
            chosen = wanted.gather(1, tokens[-12:, None]).squeeze(1)
            assert torch.equal(samples.logprobs[row], chosen)

    def test_greedy_and_with_a_shortest_length(self, engine):
        """What vLLM then draws from is not what it was given: the policy's numbers are kept."""
        generator, model, params = engine
        for sampling in (
            Sampling(2, max_tokens=6, temperature=0.0),
            Sampling(2, max_tokens=6, min_tokens=4, stop_tokens=(5, 6, 7), temperature=0.7),
        ):
            samples = generator.generate(PROMPTS, sampling, seed=0)
            check_equal(samples, samples.policy_logprobs, PROMPTS, model, params)
            assert samples.logprobs[samples.mask].isnan().all()

    def test_what_a_cache_has_already(self, engine):
        """A prompt's first block of 128 tokens is not computed again; its numbers are the same."""
        generator, model, params = engine
        counts = count_tokens(generator)
        prompts = [[*range(90), *range(60), extra] for extra in range(4)]
        sampling = Sampling(max_tokens=4)
        generator.push(params)  # which empties the cache
        computed = []
        for _ in range(2):
            counts.clear()
            samples = generator.generate(prompts, sampling, seed=0)
            check_equal(samples, samples.logprobs, prompts, model, params)
            computed.append(sum(counts))
        assert computed[1] <= computed[0] - 128

    def test_scores(self, engine):
        generator, model, params = engine
        check_scores(generator, model, params, [*prompts_of(20, 200)[:10], [1, 2]])

    def test_after_a_push(self, engine):
        generator, model, params = engine
        other = {name: leaf * 1.02 for name, leaf in params.items()}
        generator.push(other)
        samples = generator.generate(PROMPTS, Sampling(2, max_tokens=8), seed=0)
        check_equal(samples, samples.logprobs, PROMPTS, model, other)
        with pytest.raises(AssertionError):
            check_equal(samples, samples.logprobs, PROMPTS, model, params)
        generator.push(params, version=3)


class TestPieces:
    def test_scores_of_prompts_in_pieces(self, pieces):
        generator, model, params = pieces
        counts = count_tokens(generator)
        rows = [row for row in prompts_of(12, 100) if len(row) > 1]
        check_scores(generator, model, params, rows)
        assert max(counts) <= 32 < max(map(len, rows))

    def test_what_was_evicted_and_computed_again(self, pieces):
        """Six samples that grow to two blocks each, where there are five blocks."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        generator, model, params = pieces
        llm, counts = generator._engine._llm, count_tokens(generator)
        generator.generate([[1]], Sampling(max_tokens=1, temperature=0.0), seed=0)
        counts.clear()
        request = SamplingParams(
            temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompts = [[token] * 100 + [token + 1, 3] for token in range(6)]
        for row, prompt in enumerate(prompts):
            llm.add_request(str(row), {"prompt_token_ids": prompt}, request)
        done = {}
        while len(done) < 6:
            done |= {int(each.request_id): each.outputs[0] for each in llm.step() if each.finished}
        assert sum(counts) > 6 * (102 + 39)  # some were computed twice
        for row, prompt in enumerate(prompts):
            tokens = list(done[row].token_ids)
            pairs = zip(done[row].logprobs, tokens, strict=True)
            found = torch.tensor([each[token].logprob for each, token in pairs], device=DEVICE)
            (wanted,) = trainers(model, params, [prompt + tokens])
            assert torch.equal(found, wanted[-40:])


# --- what needs no engine ---------------------------------------------------------------------


def test_what_would_change_bits_is_refused():
    model, _ = exact("llama", torch.float32)
    with pytest.raises(ValueError, match=r"VLLM .*--vllm\.attention auto or funcrl .*got vllm"):
        VLLM(model, config=VLLMConfig(attention="vllm"))
    compiled = VLLMConfig(compile=VLLMCompileConfig(backend="inductor"))
    with pytest.raises(ValueError, match=r"VLLM .*--vllm\.compile\.backend eager .*got inductor"):
        VLLM(model, config=compiled)


def test_places_of_tokens_and_of_padding():
    """A prompt of 3, its end after 5 others, one decoded token, and two rows of padding."""
    from funcrl.generators.vllm.plugin.attention import token_places

    starts = torch.tensor([0, 3, 5, 6, 6], dtype=torch.int32)
    lengths = torch.tensor([3, 7, 9, 0], dtype=torch.int32)
    request, last = token_places(starts, lengths, 8)
    assert request[:6].tolist() == [0, 0, 0, 1, 1, 2]
    assert last.tolist() == [0, 1, 2, 5, 6, 8, -1, -1]
    assert request.max() < 4


def test_a_packed_score_survives_another_softmax():
    from funcrl.generators.vllm.plugin.attention import pack_scores, unpack_score

    logits = torch.randn(50, 97) * torch.logspace(-6, 2, 50)[:, None]
    logits[0] = torch.tensor([0.0] + [-200.0] * 96)  # one token is certain
    wanted = EXACT.log_softmax(logits, 1.0)
    normalised = pack_scores(logits).log_softmax(-1)[:, :97]
    found = [[unpack_score(each) for each in row] for row in normalised.tolist()]
    assert wanted[0, 0] == 0
    assert torch.equal(torch.tensor(found), wanted)


def test_the_second_runners_sampler_reports_what_it_was_given():
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from funcrl.generators.vllm.plugin.attention import GivenLogprobs

    class Greedy:
        state = "vLLM's own"

        def __call__(self, logits, batch):
            tokens = logits.argmax(dim=-1, keepdim=True)
            found = LogprobsTensors(tokens.int(), logits.log_softmax(-1).gather(1, tokens), None)
            return SamplerOutput(tokens, found if batch else None, None, None, None)

    sampler = GivenLogprobs(Greedy(), 7)
    logprobs = torch.randn(5, 7).log_softmax(-1) + 1e-4
    wide = torch.nn.functional.pad(logprobs, (0, 1))  # of no token, and the largest
    output = sampler(wide, True)
    assert output.sampled_token_ids.max() < 7
    assert torch.equal(output.logprobs_tensors.logprobs, logprobs.amax(dim=-1, keepdim=True))
    assert sampler(wide, False).logprobs_tensors is None
    assert sampler.state == "vLLM's own"


def test_who_draws_and_whose_numbers_are_kept():
    """A server's model cannot be told of a request: what it would have to know is seen here."""
    model, _ = exact("llama", torch.float32)
    config = VLLMConfig(logprobs="sampling")
    setup = EngineSetup(model, config, "float32", {}, None, None, None)
    hot = Sampling(3, temperature=0.7, top_k=5)
    plain, given, kept = who_draws(setup, hot)
    assert (plain, given) == (Sampling(3), hot)
    assert kept.logprobs == "sampling"
    policy = setup._replace(config=VLLMConfig())
    assert who_draws(policy, hot) == (hot, Sampling(), VLLMConfig())
    native = setup._replace(model=Transformer(replace(model.config, numerics="native")))
    assert who_draws(native, hot) == (hot, Sampling(), config)

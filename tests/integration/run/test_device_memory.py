"""The memory of a device, against tensors whose bytes are known."""

import math

import pytest
import torch

import funcrl
from funcrl import memory_profile, memory_stats, reset_peak
from funcrl.run.memory import MemoryProfiler

KB = 1000
HAS_GPU = torch.cuda.is_available()
WITHOUT_GPU = pytest.mark.skipif(HAS_GPU, reason="what happens where there is no GPU")


def sizes(profile, at_least=KB):
    """Bytes of what a block allocated and that was alive at its peak."""
    return [b.num_bytes for b in profile.live if not b.is_from_before and b.num_bytes >= at_least]


def test_resident_memory_grows_and_its_peak_stays_until_it_is_reset():
    before = reset_peak("cpu")
    big = torch.zeros(25 * KB * KB, dtype=torch.float32)
    held = memory_stats("cpu")
    assert held.allocated - before.allocated > 95e6
    del big
    after = memory_stats("cpu")
    assert held.allocated - after.allocated > 95e6
    # Linux adds up the pages of each processor now and then: a few more or fewer.
    assert after.peak_allocated >= held.allocated - 1e6
    assert reset_peak("cpu").peak_allocated < held.allocated


def test_a_system_that_does_not_say_holds_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("funcrl.run.memory._STATUS", tmp_path / "nothing")
    monkeypatch.setattr("funcrl.run.memory._CLEAR", tmp_path / "no folder" / "nothing")
    assert reset_peak("cpu") == memory_stats("cpu") == ("cpu", 0, 0, 0, 0)


@WITHOUT_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1)])
def test_a_gpu_that_is_not_there_holds_nothing(device):
    assert reset_peak(device) == memory_stats(device) == (str(device), 0, 0, 0, 0)
    with memory_profile("nothing", device) as memory:
        torch.zeros(KB)
    assert memory.result == ("nothing", str(device), 0, 0, 0, ())


@WITHOUT_GPU
def test_without_a_gpu_the_device_is_the_cpu():
    assert memory_stats().device == reset_peak().device == "cpu"
    with memory_profile("x", stacks=False) as memory:
        pass
    assert memory.result.device == "cpu"


@pytest.mark.parametrize("function", [memory_stats, reset_peak, lambda d: memory_profile("x", d)])
@pytest.mark.parametrize("device", ["mps", "meta", "the gpu", "cpu:x"])
def test_other_devices_are_refused_by_name(function, device):
    with pytest.raises(ValueError, match="expects device to be a CPU or a CUDA GPU, got "):
        function(device)


def test_the_peak_is_the_sum_of_what_was_alive_then():
    kept = torch.zeros(KB)

    def block():
        first = torch.zeros(2 * KB)
        second = torch.ones(3 * KB)  # 8,000 + 12,000 alive
        del first
        return second + kept.sum()  # 12,000 + 12,000 and two small ones

    with memory_profile("block", "cpu") as memory:
        block()
    found = memory.result
    assert (found.label, found.device) == ("block", "cpu")
    assert sizes(found) == [12 * KB, 12 * KB]
    assert sum(block.num_bytes for block in found.live) == found.peak_allocated
    assert found.live == tuple(sorted(found.live, key=lambda block: -block.num_bytes))
    assert 24 * KB <= found.peak_allocated - found.start_allocated <= 24 * KB + 64
    assert any(b.num_bytes == 4 * KB and b.is_from_before for b in found.live)  # `kept`
    assert found.peak_reserved >= found.peak_allocated


def freed_in_the_block(device):
    """The profile of a block that frees 400,000 bytes from before it, then needs 200,000."""
    held = [torch.zeros(100 * KB, device=device), torch.zeros(KB, device=device)]

    def block():
        held.pop(0)
        torch.zeros(50 * KB, device=device)

    with memory_profile("block", device, stacks=False) as memory:
        block()
    return memory.result


def test_on_a_cpu_what_was_alive_before_counts_until_its_memory_is_used_again():
    found = freed_in_the_block("cpu")
    grown = found.peak_allocated - found.start_allocated
    used_again = not sizes(found)  # malloc decides where a tensor goes
    assert grown == (0 if used_again else 200 * KB)
    assert 400 * KB in [block.num_bytes for block in found.live]
    assert sum(block.num_bytes for block in found.live) == found.peak_allocated


@pytest.mark.gpu
def test_on_a_gpu_what_was_alive_before_and_freed_makes_room():
    found = freed_in_the_block("cuda")
    assert found.peak_allocated == found.start_allocated  # its peak is its start
    assert not sizes(found)


def test_each_tensor_has_the_place_of_its_allocation():
    x = torch.ones(KB, requires_grad=True)

    def forward(x):
        return torch.exp(x.repeat(3))

    with memory_profile("gradient", "cpu") as memory:
        forward(x).sum().backward()
    lines = {b.operator: b.where for b in memory.result.live if b.operator and b.num_bytes >= KB}
    first = forward.__code__.co_firstlineno
    assert lines["aten::exp"].endswith(f"test_device_memory.py:{first + 1} in forward")
    assert all("test_device_memory.py" in where for where in lines.values())
    assert "ExpBackward0" in lines
    assert "aten::exp, " in str(memory.result)


def test_what_an_operator_needs_for_itself_is_counted():
    @torch.library.custom_op("test_memory::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(10)
        return wide[: x.numel()] + wide[: x.numel()]

    with memory_profile("inside", "cpu") as memory:
        twice(torch.ones(KB))
    assert max(sizes(memory.result)) == 40 * KB


def test_without_stacks_the_numbers_are_the_same():
    x = torch.randn(300, 300)

    def block():
        return ((x @ x).relu() @ x).sum()

    found = []
    for stacks in (True, False):
        with memory_profile("x", "cpu", stacks=stacks) as memory:
            block()
        found.append(memory.result)
    with_stacks, without = (sizes(each) for each in found)
    assert with_stacks == without == [360 * KB, 360 * KB]
    grown = [each.peak_allocated - each.start_allocated for each in found]
    assert grown[0] == grown[1]
    assert not any(block.where for block in found[1].live)


def test_a_decorated_function_is_profiled_at_each_call():
    profiles = []

    @memory_profile("double", "cpu", report=profiles.append)
    def double(x):
        """Twice x."""
        return 2 * x

    assert torch.equal(double(torch.ones(KB)), torch.full((KB,), 2.0))
    double(torch.ones(2 * KB))
    assert double.__doc__ == "Twice x."
    assert [sizes(each) for each in profiles] == [[4 * KB], [8 * KB]]


def test_an_error_in_the_block_passes_and_the_profile_is_there():
    profiler = memory_profile("fails", "cpu")

    def fail():
        with profiler:
            torch.ones(KB)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert sizes(profiler.result) == [4 * KB]
    with profiler:  # and torch's profiler is free again
        pass
    assert len(profiler.profiles) == 2


def test_profiles_within_profiles_and_results_too_early_are_refused():
    profiler = memory_profile("early", "cpu")
    with pytest.raises(ValueError, match="memory_profile expects the block 'early' to have ended"):
        _ = profiler.result
    with memory_profile("outer", "cpu") as outer:
        with pytest.raises(RuntimeError, match="no other profile of torch .* when 'early' begins"):
            profiler.__enter__()
        torch.ones(KB)
    assert sizes(outer.result) == [4 * KB]


def test_it_sees_through_transforms():
    weight, rows = torch.randn(10, 10), torch.randn(20, 10)

    def loss(weight, row):
        return (weight @ row).tanh().sum()

    def block():
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, rows)

    expected = block()
    with memory_profile("vmap", "cpu") as memory:
        result = block()
        inside = memory_stats("cpu")
    assert torch.equal(result, expected)
    assert inside.allocated
    assert max(sizes(memory.result)) == 20 * 10 * 10 * 4


def test_text_shows_the_largest_and_counts_the_rest():
    before = torch.ones(KB)
    with memory_profile("many", "cpu") as memory:
        kept = [torch.ones(KB * KB) for _ in range(15)]
    first, second, *lines, last = str(memory.result).splitlines()
    assert first.startswith("many on cpu: peak ")
    assert (len(before), len(kept), len(lines)) == (KB, 15, 10)
    old = sum(block.is_from_before for block in memory.result.live)
    assert f"from before, in {old:,} tensor" in second
    assert all("aten::ones, test_device_memory.py:" in line for line in lines)
    assert last.endswith(f"in {len(memory.result.live) - old - 10} more")


def test_memory_of_unknown_origin_is_not_from_before():
    before = torch.zeros(KB)
    with memory_profile("storage", "cpu", stacks=False) as memory:
        storage = torch.UntypedStorage(KB * KB)  # by no operator, and without stacks at no place
    assert (len(before), len(storage)) == (KB, KB * KB)
    assert sizes(memory.result) == [KB * KB]
    lines = str(memory.result).splitlines()
    assert lines[-1] == "  1.0 MB  of unknown origin"
    old = funcrl.MemoryBlock(4, "", "", is_from_before=True)
    one, two = (funcrl.MemoryProfile("x", "cpu", 0, 4, 5, (old,) * count) for count in (1, 2))
    assert str(one).endswith("from before, in 1 tensor")
    assert str(two).endswith("from before, in 2 tensors")


def test_types_are_plain():
    assert isinstance(memory_profile("x", "cpu"), MemoryProfiler)
    block = funcrl.MemoryBlock(4, "aten::mm", "f.py:3 in f")
    profile = funcrl.MemoryProfile("x", "cpu", 0, 4, 5, (block,))
    assert math.prod(profile[2:5]) == 0
    assert str(profile).splitlines()[1] == "  0.0 MB  aten::mm, f.py:3 in f"


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_allocators():
    kept = torch.ones(KB * KB, device="cuda")  # 4,000,256 bytes with what the allocator adds
    before = reset_peak()
    assert before.allocated == before.peak_allocated == torch.cuda.memory_allocated()

    def block():
        x = kept.repeat(3)
        return (x * 2).sum()

    with memory_profile("gpu") as memory:
        block()
    found, stats = memory.result, memory_stats()
    assert found.device == "cuda"
    assert found.peak_allocated == stats.peak_allocated == torch.cuda.max_memory_allocated()
    assert found.peak_reserved == torch.cuda.max_memory_reserved() >= found.peak_allocated
    assert found.start_allocated == before.allocated
    assert sum(b.num_bytes for b in found.live) == found.peak_allocated
    # Other tests' tensors may be larger; of these two the allocator may give either more memory.
    largest = [b for b in found.live if not b.is_from_before][:2]
    assert {b.operator for b in largest} == {"aten::repeat", "aten::mul"}
    assert all("test_device_memory.py" in b.where for b in largest)
    with pytest.raises(ValueError, match="memory_stats expects one of . GPUs, got 'cuda:77'"):
        memory_stats("cuda:77")


@pytest.mark.gpu
def test_on_a_gpu_the_backwards_thread_is_counted():
    x = torch.ones(KB * KB, device="cuda", requires_grad=True)
    x.exp().sum().backward()
    x.grad = None
    with memory_profile("gradient") as memory:
        x.exp().sum().backward()
    found = memory.result
    assert sum(b.num_bytes for b in found.live) == found.peak_allocated
    assert "ExpBackward0" in [b.operator for b in found.live]

"""Every public function under torch's defaults of others: they decide nothing here.

A notebook often begins with `torch.set_default_device("cuda")`, and a script of float64 with
`torch.set_default_dtype`. What is computed follows the arguments: equal bits, dtypes and devices.
"""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from cases import equal, tiny_batch, tiny_model
from test_purity import TABLE_OF_CALLS, TRAIN

import funcrl
from funcrl import tree
from funcrl.config import AlgorithmConfig, LoraConfig, Sampling
from funcrl.weights.gguf import STORAGES

# The meta device stands for any other: nothing can be read from a tensor that is made there.
DEFAULTS = [
    pytest.param(("meta", torch.float64), id="meta and float64"),
    pytest.param((None, torch.bfloat16), id="bfloat16"),
    pytest.param(("cuda", torch.float32), id="cuda", marks=pytest.mark.gpu),
]


@contextlib.contextmanager
def defaults(device, dtype):
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@functools.cache
def result_of(name):
    fn, args = TABLE_OF_CALLS[name]
    return fn(*args)


def check_same(got, expected):
    for one, other in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("others", DEFAULTS)
@pytest.mark.parametrize("name", TABLE_OF_CALLS)
def test_public_functions_do_not_read_the_defaults(name, others):
    expected = result_of(name)
    fn, args = TABLE_OF_CALLS[name]
    with defaults(*others):
        got = fn(*args)
    check_same(got, expected)


RUNS = {
    "a reference and truncated sampling": {
        "algorithm": AlgorithmConfig(kl=0.1),
        "sampling": Sampling(max_tokens=3, top_k=3, min_p=0.05, temperature=0.8),
    },
    "adapters, mini-batches and masks": {
        "lora": LoraConfig(rank=2),
        "num_minibatches": 2,
        "length_multiple": 4,
        "mask_truncated": True,
        "overlong": 2,
    },
    "packed rows": {"packing": "prefixes", "attend": "flash", "num_minibatches": 2},
    "bfloat16 on an environment": {"dtype": "bfloat16", "task": "calculator", "logprob_chunk": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("others", DEFAULTS)
@pytest.mark.parametrize("name", RUNS)
def test_runs_do_not_read_the_defaults(name, others, tmp_path):
    config = replace(TRAIN, run_dir=tmp_path / "plain", **RUNS[name])
    expected = funcrl.train(config).state
    with defaults(*others):
        got = funcrl.train(replace(config, run_dir=tmp_path / "others")).state
    check_same(got, expected)


@pytest.mark.parametrize("others", DEFAULTS)
@pytest.mark.parametrize("storage", STORAGES.values(), ids=lambda storage: storage.name)
def test_quantized_numbers_are_decoded_where_they_are_read(storage, others):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 64, (3, storage.block_bytes), generator=generator, dtype=torch.uint8)
    expected = storage.decode(raw)
    with defaults(*others):
        got = storage.decode(raw)
    check_same(got, expected)


@pytest.mark.gpu
def test_parameters_a_step_and_samples_on_a_gpu_that_is_the_default():
    model, batch = tiny_model(), tree.cast(tiny_batch(), torch.float32)

    def on_the_gpu():
        params = funcrl.init_params(model, seed=0, device="cuda")
        step = funcrl.grpo_step(funcrl.logprob_fn(model), per_sample=funcrl.clip_per_sample(0.1))
        given = tree.map(lambda leaf: leaf.to("cuda"), batch)
        state, metrics = step(step.init(params), given)
        sampling = Sampling(num_samples=2, max_tokens=6, top_p=0.9, min_p=0.01)
        samples = funcrl.generators.sample(model, state.params, [[1, 2], [3]], sampling, seed=0)
        return params, state, metrics, samples[:4]

    expected = on_the_gpu()
    assert all(leaf.is_cuda for leaf in tree.leaves(expected))
    with defaults("cuda", torch.float32):
        got = on_the_gpu()
        on_the_cpu = funcrl.init_params(model, seed=0)
    assert equal(got, expected)
    assert equal(on_the_cpu, tree.map(torch.Tensor.cpu, expected[0]))

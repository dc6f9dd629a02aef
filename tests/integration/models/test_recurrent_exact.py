"""Recurrent networks with exact numerics: a sample has its bits wherever it is computed."""

import itertools
from functools import partial

import pytest
import torch
from cases import random_case, relative

import funcrl
from funcrl.config import EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.core.types import Sample
from funcrl.models import Recurrent, RecurrentConfig
from funcrl.ops import gru_scan, lstm_scan
from funcrl.ops.recurrent import contract

CELLS = ("lstm", "gru")
SCANS = {"lstm": lstm_scan, "gru": gru_scan}
ROWS, STEPS = 33, 6


def network(cell, dtype=torch.float32, numerics="exact", **options):
    """Return a network for 11 tokens, and parameters whose logits differ by some units."""
    config = RecurrentConfig(
        **{"vocab_size": 11, "width": 20, "cell": cell, "numerics": numerics, **options}
    )
    model = Recurrent(config)
    params = funcrl.init_params(model, seed=5, dtype=torch.float32)
    last = "embed.weight" if model.config.tied else "unembed.weight"
    return model, funcrl.tree.cast(params | {last: 20 * params[last]}, dtype)


def scan_inputs(cell, width, layers, dtype=torch.float32):
    """Return x [33, 6, D] and parameters, all of them random."""
    module = Recurrent(RecurrentConfig(width=width, num_layers=layers, cell=cell)).layers
    generator = torch.Generator().manual_seed(width + layers)
    params = {
        name: torch.randn(leaf.shape, generator=generator) / (3 * width) ** 0.5
        for name, leaf in module.named_parameters()
    }
    x = torch.randn(ROWS, STEPS, width, generator=generator)
    return funcrl.tree.cast((x, params), dtype)


def rows_of(tokens):
    return Sample(tokens, torch.arange(tokens.shape[-1]).expand_as(tokens))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("width", [8, 20, 33, 128])
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_has_its_bits_in_any_batch_row_and_part(cell, width, layers):
    for dtype in (torch.float32, torch.bfloat16):
        x, params = scan_inputs(cell, width, layers, dtype)
        run = partial(SCANS[cell], params=params, backend="exact")
        whole, _ = run(x)
        for size in (1, 2, 5):
            assert torch.equal(run(x[-size:])[0], whole[-size:])
        some = x[10:16]
        starts = torch.arange(6 * STEPS) % STEPS == 0
        packed, _ = run(some.flatten(0, 1), resets=starts)
        assert torch.equal(packed, whole[10:16].flatten(0, 1))
        outputs, state = run(some[:, :4])
        for step in range(4, STEPS):
            after, state = run(some[:, step, None], state=state)
            outputs = torch.cat([outputs, after], dim=1)
        assert torch.equal(outputs, whole[10:16])


def test_an_activation_has_one_value_wherever_a_number_stands():
    x = 4 * torch.randn(301, generator=torch.Generator().manual_seed(0))
    operations = [
        contract.EXACT.sigmoid_,
        torch.Tensor.tanh_,
        lambda x: contract.EXACT.addcmul(x, x + 0.7, x),
    ]
    for operation in operations:
        alone = torch.stack([operation(each.clone()) for each in x])
        for start in range(17):
            assert torch.equal(operation(x[start:].clone()), alone[start:])


@pytest.mark.parametrize("cell", CELLS)
def test_it_is_the_native_scan_up_to_rounding(cell):
    for width, layers in itertools.product((8, 33, 128), (1, 2)):
        x, params = scan_inputs(cell, width, layers)
        exact, native = (SCANS[cell](x, params, backend=name)[0] for name in ("exact", "op"))
        wide = SCANS[cell](x.double(), funcrl.tree.cast(params, torch.float64), backend="loop")[0]
        assert (exact - native).abs().max() < 1e-6
        assert (exact - wide).abs().max() < 1e-6


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_recomputed_has_the_same_bits(cell):
    x, params = scan_inputs(cell, 20, 2)

    def gradients(recompute):
        def loss(params):
            return SCANS[cell](x, params, backend="exact", recompute=recompute)[0].square().sum()

        return torch.func.grad(loss)(params)

    kept = gradients("none")
    for recompute in ("full", "chunk"):
        for name, leaf in gradients(recompute).items():
            assert torch.equal(leaf, kept[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_a_packed_sample_has_the_scores_that_it_has_alone(cell, dtype):
    model, params = network(cell, num_layers=2, dtype=dtype)
    model_fn = funcrl.logprob_fn(model)
    case = random_case(prompts=4, samples=3, length=12)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, case.rollout.tokens.shape, generator=generator)
    packed = funcrl.pack(case.rollout._replace(tokens=tokens), funcrl.grpo(), length=30)
    scores = funcrl.score(model_fn, params, packed)
    assert int(packed.segment_ids.max()) >= 2
    for row, ids in enumerate(packed.segment_ids):
        for segment in range(int(ids.max()) + 1):
            places = (ids == segment).nonzero().squeeze(1)
            alone = model_fn(params, rows_of(packed.tokens[row, places]))
            # A sample's first token has the score of the one before it, and no weight.
            for whole, own in zip(scores[:2], alone[:2], strict=True):
                assert torch.equal(whole[row, places][1:], own[1:])


@pytest.mark.parametrize("cell", CELLS)
def test_scores_are_those_of_any_batch_and_chunk(cell):
    model, params = network(cell, num_layers=2)
    tokens = torch.randint(0, 11, (33, 10), generator=torch.Generator().manual_seed(1))
    wanted = funcrl.score(funcrl.logprob_fn(model), params, rows_of(tokens))
    for size in (1, 2, 5):
        found = funcrl.score(funcrl.logprob_fn(model, chunk=7), params, rows_of(tokens), size)
        assert torch.equal(found.logprobs, wanted.logprobs)
        assert torch.equal(found.entropy, wanted.entropy)
    native = network(cell, num_layers=2, numerics="native")[0]
    near = funcrl.score(funcrl.logprob_fn(native), params, rows_of(tokens))
    assert relative(near, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_the_sampler_draws_with_the_numbers_of_the_trainer(cell, dtype):
    """And so do samples that go on from the states of an earlier call."""
    model, params = network(cell, num_layers=2)
    sampler = funcrl.generators.Sampler(model, slots=3, dtype=dtype)
    sampler.push(params)
    model_fns = [funcrl.logprob_fn(model, each, dtype=dtype) for each in (0.7, 1.0)]
    sampling = Sampling(num_samples=3, max_tokens=7, temperature=0.7)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1, 2]]
    for turn in range(2):
        samples = sampler.generate(prompts, sampling, seed=turn)
        answers = [row.tolist() for row in samples.tokens]
        wholes = [[*prompts[row // 3], *answer] for row, answer in enumerate(answers)]
        for row, whole in enumerate(wholes):
            given = len(prompts[row // 3])
            drawn, policy = (
                each(params, rows_of(torch.tensor(whole))).logprobs[given:] for each in model_fns
            )
            assert torch.equal(samples.logprobs[row], drawn)
            assert torch.equal(samples.policy_logprobs[row], policy)
        prompts = [[*whole, 5] for whole in wholes[::3]]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_is_the_native_one_up_to_rounding_in_any_micro_batches(cell, tied):
    case = random_case(prompts=4, samples=2, length=9, dtype=torch.float32)
    tokens = torch.randint(0, 11, (8, 9), generator=torch.Generator().manual_seed(2))
    batch = funcrl.collate(case.rollout._replace(tokens=tokens), funcrl.grpo())
    batch = batch._replace(behavior_logprobs=batch.behavior_logprobs.float())
    steps = []
    for numerics, microbatch in (("native", None), ("exact", None), ("exact", 2), ("exact", 4)):
        model, params = network(cell, num_layers=2, numerics=numerics, tied=tied)
        model_fn = funcrl.logprob_fn(model)
        step = funcrl.grpo_step(model_fn, optimizer=funcrl.optim.sgd(0.1), microbatch=microbatch)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, batch)
        steps.append(state.params)
    for found in steps[1:]:
        assert relative(found, steps[0]) < 1e-6
    assert relative(steps[0], params) > 1e-4  # they did train


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_agrees_with_its_sampler_at_every_step(tmp_path, cell):
    config = TrainConfig(
        run_dir=tmp_path / "run", model=cell, numerics="exact", steps=3, threads=1, num_prompts=2,
        num_generations=4, sampling=Sampling(max_tokens=4, temperature=0.7), packing="samples",
        warm_start=WarmStartConfig(steps=2), evaluation=EvaluationConfig(every=0),
    )  # fmt: skip
    trained = funcrl.train(config)
    difference = "sampling/sampling_logp_difference/max"
    assert [row[difference] for row in trained.history[1:]] == [0.0] * 3
    model, params, _ = funcrl.load_run(tmp_path / "run")
    assert model.config.numerics == "exact"
    assert params.keys() == trained.state.params.keys()


def test_what_exact_numerics_do_not_take_is_refused():
    with pytest.raises(ValueError, match="^RecurrentConfig expects backend='auto' with numerics="):
        RecurrentConfig(numerics="exact", backend="loop")
    native, params = network("gru", numerics="native")
    tokens = torch.arange(3)
    with pytest.raises(ValueError, match="^Recurrent expects no dtype= with native numerics"):
        funcrl.functional(native)(params, tokens, tokens, dtype=torch.bfloat16)
    for cell in CELLS:
        x, params = (
            funcrl.tree.map(lambda leaf: leaf.to("meta"), part) for part in scan_inputs(cell, 8, 1)
        )
        with pytest.raises(ValueError, match=f"^{cell}_scan with backend='exact' expects x on a C"):
            SCANS[cell](x, params, backend="exact")

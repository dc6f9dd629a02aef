"""The recurrent network: torch's own layers, packed rows, gradients, and steps with it."""

import dataclasses

import pytest
import torch
from cases import equal, random_case, relative
from torch import nn

import funcrl
from funcrl.core.types import Sample
from funcrl.models import Recurrent, RecurrentConfig

CELLS = ("lstm", "gru")


def tiny(cell="lstm", **options):
    """Return a network of two layers for 11 tokens, and parameters of float64."""
    config = RecurrentConfig(
        **{"vocab_size": 11, "width": 8, "num_layers": 2, **options, "cell": cell}
    )
    model = Recurrent(config)
    params = funcrl.init_params(model, seed=3, dtype=torch.float64)
    # Ten times the first output weights, so that one token is likelier than another.
    return model, params | {"unembed.weight": 10 * params["unembed.weight"]}


def rollout_of(rows=6, length=9):
    """Return a ragged rollout of tokens below 11."""
    case = random_case(prompts=rows // 2, samples=2, length=length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (rows, length), generator=generator)
    rewards = torch.randn(rows, generator=generator, dtype=torch.float64)
    return case.rollout._replace(tokens=tokens, rewards=rewards)


def scored(model, params, tokens, **options):
    """Return the scores of one sample alone."""
    sample = Sample(tokens, torch.arange(len(tokens)))
    return funcrl.logprob_fn(model, **options)(params, sample)


def samples_of(packed):
    """Yield the row, the places and the tokens of each sample of a packed batch."""
    for row, ids in enumerate(packed.segment_ids):
        for segment in range(int(ids.max()) + 1):
            places = (ids == segment).nonzero().squeeze(1)
            yield row, places, packed.tokens[row, places]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_it_is_torch_layers_between_an_embedding_and_a_projection(cell, lead):
    model, params = tiny(cell)
    layers = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](8, 8, num_layers=2, batch_first=True).double()
    names = {name.removeprefix("layers."): leaf for name, leaf in params.items()}
    layers.load_state_dict({name: names[name] for name in layers.state_dict()})
    tokens = torch.randint(0, 11, (*lead, 7))
    positions = torch.arange(7).expand(*lead, 7)
    wanted = layers(params["embed.weight"][tokens])[0] @ params["unembed.weight"].T
    found = funcrl.functional(model)(params, tokens, positions)
    assert (found - wanted).abs().max() < 1e-12
    hidden = funcrl.functional(model)(params, tokens, positions, head=lambda x, weight: x)
    assert (hidden @ params["unembed.weight"].T - wanted).abs().max() < 1e-12


def test_the_output_may_be_the_embedding():
    model = Recurrent(RecurrentConfig(vocab_size=11, width=8, tied=True))
    params = funcrl.init_params(model, seed=0)
    assert "unembed.weight" not in params
    tokens = torch.tensor([1, 2])
    logits = funcrl.functional(model)(params, tokens, torch.arange(2))
    hidden = funcrl.functional(model)(params, tokens, torch.arange(2), head=lambda x, _: x)
    assert torch.equal(logits, hidden @ params["embed.weight"].T)


@pytest.mark.parametrize("cell", CELLS)
def test_new_weights_have_the_deviations_that_the_network_names(cell):
    model = Recurrent(RecurrentConfig(vocab_size=500, width=48, cell=cell))
    params = funcrl.init_params(model, seed=0)
    for name, deviation in {**model.deviations, "unembed.weight": 0.02}.items():
        if "bias" in name:
            assert not params[name].any()
        else:
            assert abs(params[name].std() / deviation - 1) < 0.05  # of 6912 numbers or more


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("chunk", [None, 3, "all"])
def test_a_sample_of_a_packed_row_has_the_scores_that_it_has_alone(cell, chunk):
    model, params = tiny(cell)
    packed = funcrl.pack(rollout_of(), funcrl.grpo(), length=20)
    scores = funcrl.score(funcrl.logprob_fn(model, chunk=chunk), params, packed)
    for row, places, tokens in samples_of(packed):
        alone = scored(model, params, tokens)
        # The first token of a sample is predicted by the sample before, and weighs nothing.
        for found, wanted in zip(scores[:2], alone[:2], strict=True):
            assert (found[row, places][1:] - wanted[1:]).abs().max() < 1e-12


@pytest.mark.parametrize("cell", CELLS)
def test_no_bit_of_a_sample_depends_on_another_one_of_its_row(cell):
    model, params = tiny(cell)
    packed = funcrl.pack(rollout_of(), funcrl.grpo(), length=20)
    assert int(packed.segment_ids[0].max()) >= 2  # there is a sample before and one after
    before = funcrl.score(funcrl.logprob_fn(model), params, packed)
    changed = packed.segment_ids.eq(1) & torch.tensor(
        [[True]] + [[False]] * (len(packed.tokens) - 1)
    )
    other = packed._replace(tokens=torch.where(changed, (packed.tokens + 1) % 11, packed.tokens))
    after = funcrl.score(funcrl.logprob_fn(model), params, other)
    # What a sample's last token says of the next sample's first one is scored, and weighs nothing.
    starts = packed.segment_ids != packed.segment_ids.roll(1, dims=1)
    for old, new in zip(before[:2], after[:2], strict=True):
        assert torch.equal(old[~changed & ~starts], new[~changed & ~starts])
    assert not torch.equal(before.logprobs[changed], after.logprobs[changed])


def test_what_shares_a_prompt_is_refused():
    model, params = tiny()
    prefixed = funcrl.pack_groups(rollout_of(), funcrl.grpo(), length=20)
    with pytest.raises(
        ValueError, match="^logprob_fn expects rows without shared prefixes.*Recurrent"
    ):
        funcrl.score(funcrl.logprob_fn(model), params, prefixed)
    with pytest.raises(ValueError, match="^logprob_fn expects no attend= .*for Recurrent"):
        funcrl.logprob_fn(model, attend=funcrl.ops.attend_flash)


@pytest.mark.parametrize("cell", CELLS)
def test_a_sample_has_the_gradient_that_it_has_alone(cell):
    model, params = tiny(cell)
    batch = funcrl.collate(rollout_of(), funcrl.grpo())
    model_fn = funcrl.logprob_fn(model)

    def loss_fn(params, sample):
        return funcrl.policy_loss(funcrl.grpo(), model_fn(params, sample), sample)[0]

    grads = funcrl.per_sample_grad(loss_fn)(params, batch)
    for row in range(len(batch.tokens)):
        sample = funcrl.tree.map(lambda leaf, row=row: leaf[row], batch)
        alone = torch.func.grad(lambda p, sample=sample: loss_fn(p, sample))(params)
        for name, leaf in alone.items():
            assert (grads[name][row] - leaf).abs().max() < 1e-12


@pytest.mark.parametrize("cell", CELLS)
def test_steps_packed_and_compiled_are_the_steps_of_samples_one_a_row(cell):
    """Three of each in a row: a state that leaked, or a buffer that was kept, would show."""
    model, params = tiny(cell)
    step = funcrl.grpo_step(funcrl.logprob_fn(model, chunk=4), optimizer=funcrl.optim.adamw(1e-2))
    batch = funcrl.collate(rollout_of(), funcrl.grpo())
    packed = funcrl.pack(rollout_of(), funcrl.grpo(), length=20)
    first = step.init(params)
    compiled = funcrl.compile_step(step, first, packed, funcrl.config.CompileConfig(fuse="none"))
    plain = of_rows = in_graph = first
    for _ in range(3):
        plain, in_graph = step(plain, packed)[0], compiled(in_graph, packed)[0]
        of_rows = step(of_rows, batch)[0]
    assert equal(plain, in_graph)
    for name, leaf in of_rows.params.items():
        assert relative(plain.params[name], leaf) < 1e-9  # three steps of AdamW divide by sqrt(v)
        assert not torch.equal(leaf, params[name])


def test_wrong_shapes_of_a_network_are_refused():
    for wrong, words in (
        ({"num_layers": 0}, "num_layers"), ({"cell": "rnn"}, "cell"), ({"width": 1 << 40}, "width"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^RecurrentConfig expects.* {words}"):
            dataclasses.replace(RecurrentConfig(), **wrong)
    model, params = tiny()
    with pytest.raises(ValueError, match="^Recurrent expects positions of the shape of tokens"):
        funcrl.functional(model)(params, torch.arange(3), torch.arange(2))

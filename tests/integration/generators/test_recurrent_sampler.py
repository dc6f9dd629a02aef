"""The sampler of a recurrent network: what it draws, and the states that it keeps for turns."""

import pytest
import torch

import funcrl
from funcrl.core.types import Sample
from funcrl.generators import Recompute, Sampler, Sampling
from funcrl.models import Recurrent, RecurrentConfig

PROMPTS = [[1, 3], [4, 5, 6], [1, 3], [7, 8, 9, 10, 4, 4], [2]]
SAMPLING = Sampling(num_samples=3, max_tokens=9, stop_tokens=(0,))


class Counting(Recurrent):
    """A network that notes how many tokens it reads."""

    read_tokens = 0

    def read(self, tokens, state=None, resets=None):
        """Read tokens, and count them."""
        Counting.read_tokens += tokens.numel()
        return super().read(tokens, state, resets)


def make(cell="lstm", kind=Recurrent, seed=3):
    """Return a network of two layers for 11 tokens, and parameters of float64."""
    model = kind(RecurrentConfig(vocab_size=11, width=8, num_layers=2, cell=cell))
    params = funcrl.init_params(model, seed=seed, dtype=torch.float64)
    # Fifty times the first output weights, so that one token is likelier than another.
    return model, params | {"unembed.weight": 50 * params["unembed.weight"]}


def pushed(model, params, **options):
    sampler = Sampler(model, **options)
    sampler.push(params, version=5)
    return sampler


def continued(samples, new=lambda row: [4, 2]):
    """Return the contexts of each sample's next turn."""
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLING.num_samples)]
    return [
        [*prompt, *tokens[mask].tolist(), *new(row)]
        for row, (prompt, tokens, mask) in enumerate(
            zip(prompts, samples.tokens, samples.mask, strict=True)
        )
    ]


def assert_same(found, wanted):
    """The same tokens, and log-probabilities up to rounding."""
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.mask, wanted.mask)
    assert found.finish_reasons == wanted.finish_reasons
    assert (found.logprobs - wanted.logprobs).abs().max() < 1e-12


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("slots", [3, 7, 256])
def test_samples_are_those_that_are_drawn_by_recomputing(cell, slots):
    """Prompts of any length enter together, in every order of free rows."""
    model, params = make(cell)
    found = pushed(model, params, slots=slots).generate(PROMPTS, SAMPLING, seed=5)
    whole = Recompute(model)
    whole.push(params)
    assert_same(found, whole.generate(PROMPTS, SAMPLING, seed=5))
    assert {*found.finish_reasons} == {"stop", "length"}
    assert found.policy_version == 5


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_log_probabilities_are_the_trainers(cell):
    model, params = make(cell)
    samples = pushed(model, params).generate(PROMPTS, SAMPLING, seed=5)
    model_fn = funcrl.logprob_fn(model)
    for row, context in enumerate(continued(samples, new=lambda _: [])):
        tokens = torch.tensor(context)
        scores = model_fn(params, Sample(tokens, torch.arange(len(tokens)))).logprobs
        drawn = samples.logprobs[row][samples.mask[row]]
        assert (scores[-len(drawn) :] - drawn).abs().max() < 1e-12


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_context_that_goes_on_costs_its_new_tokens(cell):
    """And its samples are those of a sampler that has kept nothing, turn after turn."""
    model, params = make(cell, Counting)
    sampler = pushed(model, params)
    samples = sampler.generate(PROMPTS, SAMPLING, seed=5)
    contexts = continued(samples)
    for turn in range(3):
        one = Sampling(max_tokens=2 + turn)
        Counting.read_tokens = 0
        found = sampler.generate(contexts, one, seed=turn)
        # The last token of the turn before was drawn and not read; the last one here is neither.
        new = 3 * len(contexts)
        assert Counting.read_tokens == new + len(contexts) * (one.max_tokens - 1)
        assert_same(found, pushed(model, params).generate(contexts, one, seed=turn))
        contexts = [
            [*context, *tokens.tolist(), 4, 2]
            for context, tokens in zip(contexts, found.tokens, strict=True)
        ]


def test_only_states_of_the_call_before_are_kept():
    model, params = make(kind=Counting)
    sampler = pushed(model, params)
    contexts = continued(sampler.generate(PROMPTS, SAMPLING, seed=5))
    sampler.generate([[1, 2]], SAMPLING, seed=5)
    Counting.read_tokens = 0
    sampler.generate(contexts, Sampling(max_tokens=1), seed=0)
    assert Counting.read_tokens == sum(map(len, contexts))


def test_what_is_forgotten_leaves_no_trace():
    """A run that resumes has no states, so a rollout that finds some would have other bits."""
    model, params = make(kind=Counting)
    sampler, fresh = pushed(model, params), pushed(model, params)
    contexts = continued(sampler.generate(PROMPTS, SAMPLING, seed=5))
    sampler.forget()
    Counting.read_tokens = 0
    found = sampler.generate(contexts, SAMPLING, seed=6)
    assert Counting.read_tokens >= sum(map(len, contexts))
    wanted = fresh.generate(contexts, SAMPLING, seed=6)
    assert found.finish_reasons == wanted.finish_reasons
    assert all(torch.equal(one, other) for one, other in zip(found[:4], wanted[:4], strict=True))


def test_a_rollout_goes_on_from_no_earlier_one():
    """Its prompts begin with whole samples of the rollout before."""
    task = funcrl.tasks.SumDigits()
    model = Counting(RecurrentConfig(vocab_size=task.tokenizer.vocab_size, width=8))
    sampler = pushed(model, funcrl.init_params(model, seed=0))
    prompts, sampling = task.prompts(seed=0, start=0, count=2), Sampling(2, max_tokens=4)
    first = funcrl.rollouts.complete(task, sampler, prompts, sampling, seed=0)
    longer = [
        prompt._replace(text=prompt.text + text + "1")
        for prompt, text in zip(prompts, first.texts[::2], strict=True)
    ]
    length = sum(len(task.tokenizer.encode(prompt.text)) for prompt in longer)
    Counting.read_tokens = 0
    funcrl.rollouts.complete(task, sampler, longer, Sampling(1, max_tokens=1), seed=0)
    assert Counting.read_tokens == length


def test_other_parameters_find_no_old_states():
    """After a push, and after a write into parameters that are held."""
    model, params = make()
    _, others = make(seed=4)
    sampler = pushed(model, params)
    contexts = continued(sampler.generate(PROMPTS, SAMPLING, seed=5))
    one = Sampling(max_tokens=4)
    wanted = pushed(model, others).generate(contexts, one, seed=0)
    sampler.push(others)
    assert_same(sampler.generate(contexts, one, seed=0), wanted)
    held = {name: leaf.clone() for name, leaf in params.items()}
    sampler.push(held)
    assert continued(sampler.generate(PROMPTS, SAMPLING, seed=5)) == contexts
    for name, leaf in held.items():
        leaf.copy_(others[name])
    assert_same(sampler.generate(contexts, one, seed=0), wanted)


@pytest.mark.parametrize("new", [lambda row: [], lambda row: [4] * (row % 4)])
def test_contexts_of_different_lengths_and_none_at_all_go_on(new):
    """Some are prompts that a sample of the same prompt began with, some are seen for the first."""
    model, params = make()
    sampler = pushed(model, params)
    contexts = [*continued(sampler.generate(PROMPTS, SAMPLING, seed=5), new), *PROMPTS, [9, 9]]
    found = sampler.generate(contexts, SAMPLING, seed=6)
    assert_same(found, pushed(model, params).generate(contexts, SAMPLING, seed=6))


class Counter(funcrl.tasks.Environment):
    """Answers each completion with its length in letters, four times at most."""

    name, max_turns, tokenizer = "counter", 4, funcrl.tasks.CharTokenizer("abcdefghij")

    def prompts(self, seed, start, count):
        """Return prompts of different lengths."""
        del seed
        return [
            funcrl.tasks.Prompt("abcdefghij"[number % 7 :])
            for number in range(start, start + count)
        ]

    def begin(self, prompt):
        """Begin with nothing."""
        return ()

    def act(self, state, completion):
        """Add a completion."""
        return (*state, completion)

    def observe(self, state):
        """Say how long the last completion was."""
        return "b" * (len(state[-1]) % 3) + "c"

    def reward(self, prompt, state):
        """Reward nothing."""
        return {"correct": 0.0}


def test_the_turns_of_an_environment_are_those_of_a_generator_that_keeps_nothing():
    task = Counter()
    model, params = make()
    found = []
    for generator in (Sampler(model, slots=9), Recompute(model)):
        generator.push(params)
        sampling, prompts = Sampling(num_samples=4, max_tokens=6), task.prompts(0, 0, 5)
        found.append(funcrl.rollouts.complete(task, generator, prompts, sampling, seed=0))
    ours, plain = found
    assert ours.texts == plain.texts
    assert ours.turns == plain.turns
    assert {*ours.turns} == {1, 2, 3, 4}  # those that are cut off are the last of their episode
    assert (ours.samples.logprobs - plain.samples.logprobs).abs().max() < 1e-12


def test_a_network_that_is_neither_is_refused_by_name():
    with pytest.raises(
        TypeError, match="^Sampler expects a funcrl.models.Transformer or Recurrent"
    ):
        Sampler(torch.nn.Linear(2, 2))

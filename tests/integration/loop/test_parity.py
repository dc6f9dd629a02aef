"""Each way to compute log-probabilities against one sample at a time, and what tells them apart."""

from dataclasses import replace
from itertools import count

import mine
import pytest
import torch

import funcrl
from funcrl.config import LoraConfig, TrainConfig, WarmStartConfig
from funcrl.core.types import Rollout, Sample
from funcrl.loop.parity import ParityConfig, ParityRow, compare_ways, format_parity
from funcrl.loop.parity_ways import LOGPROBS, Way, sampler_ways, trainer_side
from funcrl.models import Transformer, TransformerConfig
from funcrl.ops.exact import EXACT
from funcrl.run.trust import TrustError

PROMPT = 9
FORMS = {
    "llama": {"qk_norm": False, "tied": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_width": 24},
}


def make(form="qwen3", dtype=torch.float32, ops="exact", rows=5, length=21, layers=2):
    config = TransformerConfig(
        vocab_size=61,
        width=40,
        num_layers=layers,
        mlp_width=72,
        **{"head_width": 16, **FORMS[form]},
    )
    model = Transformer(config, ops)
    params = funcrl.init_params(model, seed=0)
    drawn = torch.Generator().manual_seed(1)
    for name, leaf in params.items():  # norms that are not 1 and biases that are not 0
        params[name] = (leaf + 0.1 * torch.randn(leaf.shape, generator=drawn)).to(dtype)
    return model, params, torch.randint(61, (rows, length), generator=drawn)


def other_model(ops):
    return Transformer(make()[0].config, ops)


def trainer(model, params, tokens):
    """The trainer's forward pass of one sample at a time as one more way."""
    return Way("trainer", lambda recorded: trainer_side(model, params, tokens, recorded))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_exact_numerics_are_equal_in_every_way(form, dtype):
    model, params, tokens = make(form, dtype)
    ways = [*sampler_ways(model, params, tokens, PROMPT), trainer(model, params, tokens)]
    rows = compare_ways(ways, model, params, tokens, bisect=True)
    assert {row.name: row.different for row in rows} == {way.name: 0 for way in ways}
    assert all(row.equal and row.tokens >= 20 and not row.first_difference for row in rows)
    expected = torch.stack([part.values for part in trainer_side(model, params, tokens)[LOGPROBS]])
    assert torch.equal(batched(model, params, tokens, 64), expected)  # padded to 64 tokens
    for rows_of_samples in (1, 2, 7, 64):  # batches of other sizes
        filled = tokens[torch.arange(rows_of_samples) % len(tokens)]
        found = batched(model, params, filled, tokens.shape[1])
        assert torch.equal(found[: len(tokens)], expected[:rows_of_samples])
    for pack in (funcrl.pack, funcrl.pack_groups):
        for sample, found in packed(model, params, tokens, pack).items():
            assert torch.equal(found, expected[sample, -len(found) :]), pack


def batched(model, params, tokens, length):
    """The log-probabilities of a batch that is padded to a length."""
    padded = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))
    positions = torch.arange(length).expand_as(padded)
    scores = funcrl.score(funcrl.logprob_fn(model), params, Sample(padded, positions))
    return scores.logprobs[:, 1 : tokens.shape[1]]


def packed(model, params, tokens, pack):
    """The log-probabilities of the drawn tokens of samples that lie end to end, by sample."""
    count, length = tokens.shape
    drawn = (torch.arange(length) >= PROMPT).expand(count, length)
    numbers = torch.arange(count)
    # A token's behaviour log-probability says which sample it is of.
    rollout = Rollout(tokens, drawn, numbers[:, None].expand(count, length).double(),
                      torch.zeros(count), numbers, torch.zeros_like(numbers))  # fmt: skip
    rows = pack(rollout, funcrl.grpo(), 3 * length + 5)  # a length that leaves padding
    scored = funcrl.score(funcrl.logprob_fn(model), params, rows).logprobs
    owner = rows.behavior_logprobs[rows.mask]
    found = {sample: scored[rows.mask][owner == sample] for sample in range(count)}
    assert all(len(each) == length - PROMPT for each in found.values())
    return found


def test_native_numerics_differ_and_the_attention_of_the_first_layer_is_named():
    model, params, tokens = make(ops="native")
    ways = sampler_ways(model, params, tokens, PROMPT)
    rows = compare_ways(ways, model, params, tokens, bisect=True)
    assert any(row.different for row in rows)
    for row in rows:
        assert row.max_abs_diff < 1e-4
        assert row.first_difference.startswith("layer 0, attention") or row.equal


def test_bisect_names_the_operation_of_the_layer_that_is_changed():
    calls = count()

    def swiglu(gate, up):
        return EXACT.swiglu(gate, up) + (1e-3 if next(calls) % 2 else 0.0)  # the second layer's

    model, params, tokens = make()
    changed = other_model(EXACT._replace(swiglu=swiglu))
    (row,) = compare_ways([trainer(changed, params, tokens)], model, params, tokens, True)
    assert row.different == row.tokens == 100
    assert row.first_difference == "layer 1, mlp: swiglu, 105 of 105 tokens, by at most 1.0e-03"


def test_bisect_looks_into_the_sampler():
    def attend_last(positions, layer, places):
        attend = EXACT.attend_last(positions, layer, places)
        # Of a token at an even position alone.
        return lambda q, k, v: (
            attend(q, k, v) * (1 + 1e-3 * (positions % 2 == 0)[:, None, None, None])
        )

    model, params, tokens = make()
    ways = sampler_ways(
        other_model(EXACT._replace(attend_last=attend_last)), params, tokens, PROMPT
    )
    prefill, decode = compare_ways(ways, model, params, tokens, bisect=True)
    assert prefill.equal
    # Places 10, 12 ... 18 of 5 samples; 0 to 8 are the prompt's, and 20 is never entered.
    assert decode.first_difference.startswith("layer 0, attention: attend, 25 of 100 tokens")


OWN = {"lstm": "lstm", "GRU": f"{mine.__file__}:Policy", "GPT-2": f"{mine.__file__}:gpt2"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("model", OWN.values(), ids=OWN)
def test_any_network_and_its_run_draw_as_the_trainer_scores(model, tmp_path, monkeypatch):
    question = ParityConfig(model, num_prompts=2, num_samples=3, prompt_tokens=4, max_tokens=5)
    run = TrainConfig(
        tmp_path / "run", model=model, steps=1, num_prompts=2, num_generations=2,
        warm_start=WarmStartConfig(steps=0), lora=LoraConfig(2 if model == OWN["GPT-2"] else 0),
    )  # fmt: skip
    funcrl.train(run)
    for each in (question, replace(question, model=str(tmp_path / "run"))):
        result = funcrl.parity(each)
        assert [(row.name, row.tokens) for row in result.rows] == [("sampler, as drawn", 30)]
        assert result.largest <= 2e-6
    with pytest.raises(ValueError, match="^parity expects a funcrl.models.Transformer with --bis"):
        funcrl.parity(replace(question, bisect=True))
    if model != "lstm":
        monkeypatch.setattr("funcrl.run.trust.default_store", lambda: tmp_path / "another account")
        with pytest.raises(TrustError, match="^parity expects"):
            funcrl.parity(each)
        assert funcrl.parity(each, trust=True) == result


def test_recording_changes_no_result():
    model, params, tokens = make()
    for way in (trainer(model, params, tokens), *sampler_ways(model, params, tokens, PROMPT)):
        plain, recorded = way.run(False), way.run(True)
        assert list(plain) == [LOGPROBS]
        assert len(recorded) > 20
        for one, two in zip(plain[LOGPROBS], recorded[LOGPROBS], strict=True):
            assert one[:2] == two[:2]
            assert torch.equal(one.values, two.values)


def test_a_table_and_its_limit():
    config = ParityConfig(numerics="exact", bisect=True)
    assert (config.limit, ParityConfig().limit) == (0.0, 1e-3)
    assert ParityConfig(numerics="exact", tolerance=0.1).limit == 0.1
    rows = (
        ParityRow("one", 1200, 0, 0.0),
        ParityRow("another", 7, 2, 3e-7, "layer 0, mlp: swiglu"),
        ParityRow("third", skipped="needs a GPU"),
    )
    result = funcrl.parity(ParityConfig(num_prompts=1, max_tokens=2))
    assert [row.name.partition(", ")[2] for row in result.rows] == ["as drawn", "prefill", "decode"]
    result = result._replace(rows=rows)
    assert result.largest >= 3e-7
    text = format_parity(config, result).splitlines()
    assert text[-4:] == [
        "  one        1,200 tokens  equal",
        "  another        7 tokens  2 differ, by at most 3.0e-07",
        "           first: layer 0, mlp: swiglu",
        "  third          - tokens  not computed: needs a GPU",
    ]
    broken = result._replace(rows=(rows[0]._replace(max_abs_diff=float("nan")),))
    assert not broken.largest <= 1.0
    same = format_parity(config, result._replace(rows=rows[:1])).splitlines()
    assert same[-1] == "Nothing differs in any layer."

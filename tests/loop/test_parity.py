"""Each way to compute log-probabilities against one sample at a time, and what tells them apart."""

from itertools import count

import pytest
import torch

import funcrl
from funcrl.loop.parity import ParityConfig, ParityRow, format_parity
from funcrl.loop.parity.comparison import compare_ways
from funcrl.loop.parity.generators import sampler_ways
from funcrl.loop.parity.sides import LOGPROBS, Way, tokens_fn
from funcrl.loop.parity.trainer import batched, trainer_ways
from funcrl.models import Transformer, TransformerConfig
from funcrl.ops.exact import EXACT

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


def vmapped(model, params, tokens, size, name="other"):
    length = tokens.shape[1]
    return Way(name, lambda rec: batched(tokens_fn(model, rec), params, tokens, size, length))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_exact_numerics_are_equal_in_every_way(form, dtype):
    model, params, tokens = make(form, dtype)
    ways = [
        *trainer_ways(model, params, tokens, PROMPT, compiled=False),
        *sampler_ways(model, params, tokens, PROMPT),
        vmapped(model, params, tokens, 256),
    ]
    rows = list(compare_ways(iter(ways), model, params, tokens, bisect=True))
    assert {row.name: row.different for row in rows} == {way.name: 0 for way in ways}
    names = " ".join(row.name for row in rows)
    assert all(f"batch of {size}" in names for size in (1, 5, 7, 64)), names
    assert all(row.equal and row.tokens >= 20 and not row.first_difference for row in rows)


@pytest.mark.slow
def test_the_compiled_step_of_exact_numerics_is_equal():
    model, params, tokens = make("qwen2", layers=1)
    ways = trainer_ways(model, params, tokens, PROMPT, compiled=True)
    compiled = [way for way in ways if "compiled" in way.name]
    rows = list(compare_ways(iter(compiled), model, params, tokens))
    assert [(row.name, row.different) for row in rows] == [
        ("trainer, step compiled, aot_eager", 0),
        ("trainer, step compiled, inductor", 0),
    ]


def test_native_numerics_differ_and_the_attention_of_the_first_layer_is_named():
    model, params, tokens = make(ops="native")
    ways = sampler_ways(model, params, tokens, PROMPT)
    rows = list(compare_ways(ways, model, params, tokens, bisect=True))
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
    (row,) = compare_ways(iter([vmapped(changed, params, tokens, 3)]), model, params, tokens, True)
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


def test_recording_changes_no_result():
    model, params, tokens = make()
    for way in (vmapped(model, params, tokens, 5), *sampler_ways(model, params, tokens, PROMPT)):
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
    result = funcrl.parity(ParityConfig(num_prompts=1, max_tokens=2, rows="generator"))
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

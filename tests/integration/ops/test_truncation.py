"""Log-probabilities of the distribution that was drawn from, beside a loop over its tokens."""

import math

import pytest
import torch
from cases import tiny_batch, tiny_model
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl.generators import Sampling, draw_tokens, sampling_logprobs
from funcrl.ops import Truncation

V, TEMPERATURE = 11, 0.7
TRUNCATIONS = [
    Truncation(top_k=3),
    Truncation(top_p=0.6),
    Truncation(min_p=0.2),
    Truncation(top_k=6, top_p=0.8, min_p=0.1),
]


def literal(logits, token, truncation):
    """Log-probabilities of one row, as the three rules read, for a token that was drawn."""
    kept = {v: math.exp(logit / TEMPERATURE) for v, logit in enumerate(logits.tolist())}

    def shares():
        total = sum(kept.values())
        return {v: mass / total for v, mass in kept.items()}

    ordered = sorted(kept, key=kept.__getitem__, reverse=True)
    if truncation.top_k:
        kept = {v: kept[v] for v in ordered[: truncation.top_k]}
    if truncation.top_p < 1:
        share, before, nucleus = shares(), 0.0, []
        for v in [v for v in ordered if v in kept]:
            if before >= truncation.top_p:
                break
            nucleus.append(v)
            before += share[v]
        kept = {v: kept[v] for v in nucleus}
    if truncation.min_p:
        best = max(kept.values())
        kept = {v: mass for v, mass in kept.items() if mass >= truncation.min_p * best}
    kept[token] = math.exp(logits[token] / TEMPERATURE)
    share = shares()
    logprobs = torch.full((len(logits),), -torch.inf, dtype=torch.float64)
    for v, each in share.items():
        logprobs[v] = math.log(each)
    return logprobs


def rows_of(seed=0, count=40):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, V, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, V, (count,), generator=generator)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_each_row_equals_a_loop_over_the_vocabulary(truncation):
    logits, tokens = rows_of()
    kept = funcrl.ops.truncated_logits(logits, tokens, truncation, TEMPERATURE)
    mine = (kept / TEMPERATURE).log_softmax(dim=-1)
    theirs = torch.stack(
        [
            literal(row, token, truncation)
            for row, token in zip(logits, tokens.tolist(), strict=True)
        ]
    )
    assert torch.equal(mine == -torch.inf, theirs == -torch.inf)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert (theirs == -torch.inf).any()
    assert mine.gather(1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("chunk", [None, 3, "all"])
def test_scores_of_draws_are_those_of_the_sampler(truncation, chunk):
    """Also of the gradient, by autograd of the literal rows, in any chunk, one sample or many."""
    logits, _ = rows_of()
    sampling = Sampling(
        temperature=TEMPERATURE, top_k=truncation.top_k, top_p=truncation.top_p,
        min_p=truncation.min_p,
    )  # fmt: skip
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = torch.zeros(40, dtype=torch.int64)
    tokens, drawn, _ = draw_tokens(logits, counts, uniform, sampling)

    def scores(logits, tokens):
        if chunk is None:
            shifted = torch.cat([tokens[:1], tokens])
            rows = torch.cat([logits, logits[:1]])
            found = funcrl.token_scores(rows, shifted, TEMPERATURE, truncation)
            return found.logprobs[1:], found.entropy[1:]
        return funcrl.ops.linear_scores(
            logits, torch.eye(V, dtype=torch.float64), tokens, TEMPERATURE, chunk,
            truncation=truncation,
        )  # fmt: skip

    def summed(scores):
        return lambda logits, tokens: sum(
            (each * torch.arange(1.0, 1 + len(each))).sum() for each in scores(logits, tokens)
        )

    def plain(logits, tokens):
        whole = sampling_logprobs(logits.detach(), sampling)
        kept = (logits / TEMPERATURE).masked_fill(whole == -torch.inf, -torch.inf)
        logprobs = kept.log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
        return chosen, funcrl.ops.entropy(logprobs)

    torch.testing.assert_close(scores(logits, tokens)[0], drawn, rtol=0, atol=1e-12)
    mine, theirs = grad(summed(scores)), grad(summed(plain))
    torch.testing.assert_close(mine(logits, tokens), theirs(logits, tokens), rtol=0, atol=1e-12)
    traced = make_fx(mine)(logits, tokens)
    assert torch.equal(traced(logits, tokens), mine(logits, tokens))
    four = logits.view(4, 10, V), tokens.view(4, 10)
    each = torch.stack([theirs(*row) for row in zip(*four, strict=True)])
    torch.testing.assert_close(vmap(mine)(*four), each, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 4])
def test_packed_rows_and_micro_batches_make_no_difference(chunk):
    truncation = Truncation(top_k=4, top_p=0.9)
    model, batch = tiny_model(logit_cap=5.0), tiny_batch()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    model_fn = funcrl.logprob_fn(model, TEMPERATURE, chunk=chunk, truncation=truncation)
    assert not torch.equal(
        funcrl.score(model_fn, params, batch).logprobs,
        funcrl.score(funcrl.logprob_fn(model, TEMPERATURE), params, batch).logprobs,
    )
    steps = [
        funcrl.grpo_step(model_fn, optimizer=funcrl.optim.sgd(0.1), microbatch=size)
        for size in (None, 2, 1)
    ]
    cases = [(step, batch) for step in steps] + [(steps[0], funcrl.packing.pack_batch(batch, 16))]
    whole, *others = [step(step.init(params), rows)[0].params for step, rows in cases]
    for other in others:
        for name, leaf in whole.items():
            torch.testing.assert_close(other[name], leaf, rtol=0, atol=1e-12)


def test_exact_numerics_refuse_a_truncated_distribution():
    model = tiny_model()
    model.ops = funcrl.ops.EXACT
    with pytest.raises(ValueError, match="logprob_fn expects a network of native operations"):
        funcrl.logprob_fn(model, truncation=Truncation(top_k=3))
    funcrl.logprob_fn(model, truncation=Truncation())

"""Values in a notebook: a few lines, whatever their size, and still plain NamedTuples."""

import inspect

import optree
import pytest
import torch
from cases import equal

import funcrl
from funcrl import losses, ratios, surrogates
from funcrl.core.printing import remembers, summary


def test_trees_of_tensors_are_a_line():
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
    step = funcrl.grpo_step(funcrl.logprob_fn(model))
    state = step.init(funcrl.init_params(model, seed=0))
    numbers = sum(leaf.numel() for leaf in state.params.values())
    assert repr(state).startswith(f"TrainState(params=24 tensors of {numbers:,} numbers, opt_state")
    assert repr(state).endswith("step=tensor(0), seed=tensor(0))")
    ones = torch.ones(2, 3)
    batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
    assert repr(batch) == (
        "Batch(tokens=int64[2, 3], positions=int64[2, 3], mask=bool[2, 3], "
        "behavior_logprobs=float32[2, 3], advantages=float32[2, 3], token_weights=float32[2, 3])"
    )
    assert summary(ones.to("meta")) == "float32[2, 3] on meta"
    doubled = optree.tree_map(lambda leaf: leaf * 2, batch)
    assert type(doubled) is funcrl.Batch
    assert equal(doubled.advantages, 2 * ones)
    shown = []
    torch.func.vmap(lambda row: shown.append(repr(row)) or row.advantages)(batch._replace(
        ref_logprobs=ones))  # fmt: skip
    assert shown[0].startswith("Batch(tokens=int64[3], ")


@pytest.mark.slow
def test_a_compiled_step_is_a_line():
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
    step = funcrl.grpo_step(funcrl.logprob_fn(model))
    state, ones = step.init(funcrl.init_params(model, seed=0)), torch.ones(2, 3)
    batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
    fast = funcrl.compile_step(step, state, batch)
    assert repr(fast).startswith("Step(compile_step(Step(grpo_step), CompileConfig(backend=")
    assert len(repr(fast)) < 300


def test_an_algorithm_shows_its_numbers():
    algorithm = funcrl.grpo(kl=0.1, entropy=0.02, correction=ratios.truncated(2.0))
    assert repr(algorithm) == (
        "Algorithm(advantage=by_group(standardize), "
        "ratio=corrected(token, truncated(cap=2.0, level='token')), "
        "surrogate=clipped(low=0.2, high=0.2), "
        "penalty=penalty(kl=0.1, kl_estimator='k3', entropy=0.02), weight=sequence_mean)"
    )
    assert repr(funcrl.dr_grpo(length=4)).endswith("weight=constant(length=4))")


def test_a_function_that_was_made_has_its_arguments():
    assert losses.penalty(0.1).kl == 0.1
    assert losses.penalty(kl_estimator=losses.k2).kl == 0
    assert surrogates.clipped(0.1, dual_clip=3.0).dual_clip == 3.0
    first, second = surrogates.clipped(0.1), surrogates.clipped(0.3)
    assert (first.low, second.low) == (0.1, 0.3)
    assert "clipped(low=0.1, high=0.2)" in repr(first)
    given = {"a": 1}

    @remembers
    def make(options, last=None):
        return lambda: options

    made = make(given, 2)
    assert made() is made.options is given
    assert made.__qualname__ == "make(options={'a': 1}, last=2)"


def test_an_optimizer_is_shown_as_the_call_that_makes_it():
    from funcrl import optim

    rate = optim.warmup(3, optim.cosine(1e-2, 0.0, 9))
    made = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, weight_decay=0.1))
    assert repr(made) == (
        "chain(clip_by_global_norm(max_norm=1.0), adamw(warmup(steps=3, cosine(initial=0.01, "
        "final=0.0, steps=9)), weight_decay=0.1))"
    )
    assert repr(optim.masked(optim.sgd(0.1), lambda path, leaf: True)).startswith(
        "masked(inner=sgd(learning_rate=0.1), "
    )
    own = funcrl.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, ()))
    assert repr(own).startswith("GradientTransformation(")


def test_a_signature_says_what_an_argument_takes():
    shown = str(inspect.signature(funcrl.grpo_step))
    assert "microbatch: Optional[Annotated[int, 'a 64-bit integer above 0']] = None" in shown
    assert "mesh: funcrl.parallel.mesh.Mesh = Mesh()" in shown
    axis = funcrl.parallel.Axis(size=2, rank=1)
    assert repr(funcrl.parallel.Mesh(all=axis)) == f"Mesh(all={axis})"
    for name in funcrl.__all__:
        if inspect.isfunction(each := getattr(funcrl, name)):
            assert "Kind(" not in str(inspect.signature(each)), name


def test_completions_and_a_loaded_run_are_a_line():
    parts = funcrl.build(funcrl.config.TrainConfig())
    parts.generator.push(funcrl.init_params(parts.model, seed=0))
    prompts = parts.task.prompts(seed=0, start=0, count=2)
    sampling = funcrl.generators.Sampling(num_samples=3, max_tokens=4)
    completed = funcrl.rollouts.complete(parts.task, parts.generator, prompts, sampling, seed=0)
    assert repr(completed).startswith("Completed(2 prompts x 3 completions of ")
    assert len(repr(completed)) < 120
    params = funcrl.init_params(parts.model, seed=0)
    loaded = funcrl.loop.export.LoadedRun(parts.model, params, parts.task)
    numbers = sum(leaf.numel() for leaf in params.values())
    assert repr(loaded) == (
        f"LoadedRun(model=Transformer, params={len(params)} tensors of {numbers:,} numbers, "
        f"task='sum_digits')"
    )

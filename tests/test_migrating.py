"""TRL's own trainer and funcrl give the same loss and gradient on one rollout."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import peer_trl
import pytest
import torch

import funcrl
from funcrl import advantages, aggregation, ratios

pytestmark = [
    pytest.mark.slow,
    # torch has no rule to batch its attention, and says so.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

SCALE = advantages.by_group(partial(advantages.standardize, eps=1e-4))  # TRL's eps
# What docs/migrating.md says: TRL's options, and funcrl's algorithm.
NAMED = {
    "grpo": ({"loss_type": "grpo"}, lambda: funcrl.grpo(scale_rewards=SCALE)),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28}, lambda: funcrl.dapo(scale_rewards=SCALE)
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"}, lambda: funcrl.dr_grpo(length=6)
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
         "epsilon_high": 4e-4},
        lambda: funcrl.gspo(scale_rewards=SCALE),
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        lambda: funcrl.cispo(clip=(1, 0.1), scale_rewards=SCALE),
    ),
}  # fmt: skip
# TRL's other options, by `algorithm_of` of the example.
OPTIONS = {
    "the default loss": {},
    "a KL penalty": {"beta": 0.3},
    "a KL penalty of old": {"beta": 0.3, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "gspo with a KL penalty": {
        "beta": 0.3, "use_bias_correction_kl": False, **NAMED["gspo"][0],
    },
    "the deviation of the batch": {"scale_rewards": "batch"},
    "no deviation": {"scale_rewards": False},
    "two-sided clipping": {"delta": 1.3, "loss_type": "grpo"},
    "sequences of tokens": {"importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "bnpo at once": {"loss_type": "bnpo", "per_device_train_batch_size": 12},
    "entropy": {"entropy_coef": 0.1, "per_device_train_batch_size": 12},
}  # fmt: skip


def given(prompt_lengths):
    """Return three prompts with four completions each, one to six tokens long.

    Three rows do not end in the end token; their rewards differ within two of the groups.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = [1, 6, 3, 2, 5, 4, 6, 1, 2, 6, 3, 4]
    digits = lambda count: torch.randint(10, (count,), generator=draw).tolist()
    prompts = [digits(length) for length in prompt_lengths for _ in range(4)]
    completions = [digits(length - 1) + [peer_trl.END] for length in lengths]
    for row in (1, 6, 9):
        completions[row][-1] = 3
    return peer_trl.Given(
        prompts,
        completions,
        logprobs=[(-2 - torch.rand(n, generator=draw)).tolist() for n in lengths],
        rewards=[[float(row % 3), float(row % 2)] if row < 8 else [1.0, 0.5] for row in range(12)],
    )


def to_rollout(given, dtype):
    rows = [p + c for p, c in zip(given.prompts, given.completions, strict=True)]
    pairs = list(zip(given.prompts, given.completions, given.logprobs, strict=True))
    pad = funcrl.batching.pad_rows
    return funcrl.Rollout(
        tokens=pad(rows, torch.int64),
        mask=pad([[False] * len(p) + [True] * len(c) for p, c, _ in pairs], torch.bool),
        behavior_logprobs=pad([[0.0] * len(p) + logprobs for p, _, logprobs in pairs], dtype),
        rewards=torch.tensor(given.rewards, dtype=dtype).sum(dim=1),
        group=torch.arange(12) // 4,
        policy_version=torch.zeros(12, dtype=torch.int64),
    )


def parameters(module):
    return {name: leaf.detach().clone() for name, leaf in module.named_parameters()}


def ours(module, given, policies, algorithm, correction=None, mask_truncated=False):
    """Return the gradient, with the loss and metrics, of funcrl for the same rollout.

    Args:
        module: the network.
        given: what the generator drew.
        policies: the parameters of the reference, of the policy that drew, and of the one that is
            trained.
        algorithm: a `funcrl.Algorithm`.
        correction: of the generator's log-probabilities, where it is not the policy itself.
        mask_truncated: whether completions without an end are left out.
    """
    reference, old, moved = policies
    model_fn = funcrl.logprob_fn(module)
    rollout = to_rollout(given, next(iter(moved.values())).dtype)
    if mask_truncated:
        ends = torch.tensor([row[-1] == peer_trl.END for row in given.completions])
        rollout = funcrl.mask_truncated(rollout, ~ends)
    sample = funcrl.Sample(rollout.tokens, torch.arange(rollout.tokens.shape[1]).expand(12, -1))
    scores = funcrl.score(model_fn, old, sample)
    if correction is None:
        rollout = rollout._replace(behavior_logprobs=scores.logprobs)
    ref_logprobs = funcrl.score(model_fn, reference, sample).logprobs
    batch = funcrl.collate(rollout, algorithm, ref_logprobs)
    if correction is not None:
        batch = funcrl.recenter(correction)(scores, batch)
    loss_fn = lambda params, row: funcrl.policy_loss(algorithm, model_fn(params, row), row)
    return funcrl.grads.summed_gradient(loss_fn, microbatch=5)(moved, batch)


def theirs(family, prompt_lengths, dtype, tmp_path, **options):
    """Return the module, the rollout, its three policies, and TRL's configuration and result."""
    module = peer_trl.network(family, tmp_path / "reference").to(dtype)
    drawn = given(prompt_lengths)
    policies = [parameters(module)]
    for seed in (1, 2):  # what drew, and after the first pass
        draw = torch.Generator().manual_seed(seed)
        noise = lambda leaf: 0.1 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        policies.append({name: leaf + noise(leaf) for name, leaf in policies[-1].items()})
    module.load_state_dict(policies[1], strict=False)
    if options.get("multi_objective_aggregation") is None:
        drawn = drawn._replace(rewards=[[sum(row)] for row in drawn.rewards])
    options = {"per_device_train_batch_size": 4, "num_generations": 4} | options
    options["gradient_accumulation_steps"] = 12 // options["per_device_train_batch_size"]
    args, result = peer_trl.run(module, drawn, tmp_path, policies[2], **options)
    fresh = peer_trl.network(family, tmp_path / "reference").to(dtype)  # TRL has changed its own
    return fresh, drawn, policies, args, result


def compare(got, wanted, bound):
    assert abs(got.loss - wanted.loss) <= bound
    norm = funcrl.tree.global_norm(wanted.grads)
    assert norm > 1e-3
    difference = funcrl.tree.global_norm(funcrl.tree.add(got.grads, funcrl.tree.scale(wanted.grads, -1.0)))
    print("LOSS", got.loss.item(), abs(got.loss - wanted.loss).item(), (difference / norm).item())
    assert difference <= bound * norm


@pytest.mark.parametrize("name", NAMED)
def test_the_loss_is_trl_s(name, tmp_path):
    options, algorithm = NAMED[name]
    module, drawn, policies, _, wanted = theirs("Llama", (2, 5, 3), torch.float32, tmp_path, **options)
    got = ours(module, drawn, policies, algorithm())
    compare(got, wanted, 1e-6)


@pytest.mark.parametrize("name", NAMED)
def test_the_loss_is_trl_s_in_float64(name, tmp_path):
    options, algorithm = NAMED[name]
    module, drawn, policies, _, wanted = theirs("GPT2", (3, 3, 3), torch.float64, tmp_path, **options)
    got = ours(module, drawn, policies, algorithm())
    print({k: v for k, v in wanted.metrics.items() if "clip_ratio" in k})
    compare(got, wanted, 1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_are_trl_s(name, tmp_path):
    from from_trl import algorithm_of
    module, drawn, policies, args, wanted = theirs("GPT2", (3, 3, 3), torch.float64, tmp_path, **OPTIONS[name])
    got = ours(module, drawn, policies, algorithm_of(args))
    compare(got, wanted, 1e-12)

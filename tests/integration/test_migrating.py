"""TRL's own trainer and funcrl give the same loss and gradient on one rollout."""

import dataclasses
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peer_trl
import pytest
import torch
import transformers
import yaml
from cases import tiny_tokenizer

import funcrl
from funcrl import advantages, aggregation, ratios
from funcrl.config import EvalConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.loop.evaluate import format_evaluation
from funcrl.run import runs

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    # TRL's own, where the vLLM beside it is newer, and at what takes the place of its generator.
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
standardize = advantages.by_group(partial(advantages.standardize, eps=1e-4))  # TRL's eps
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4,
        "epsilon_high": 4e-4}  # fmt: skip
AT_ONCE = {"per_device_train_batch_size": 12}
# As docs/migrating.md has them: TRL's options, and funcrl's algorithm.
ALGORITHMS = {
    "grpo": ({"loss_type": "grpo"}, funcrl.grpo(scale_rewards=standardize)),
    "dapo": ({"epsilon_high": 0.28}, funcrl.dapo(scale_rewards=standardize)),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, funcrl.dr_grpo(length=6)),
    "gspo": (GSPO, funcrl.gspo(scale_rewards=standardize)),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        funcrl.cispo(clip=(1, 0.1), scale_rewards=standardize),
    ),
    "sapo": ({"loss_type": "sapo"}, funcrl.sapo(scale_rewards=standardize)),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        funcrl.grpo(
            level="sequence",
            weight=partial(aggregation.constant, length=1),
            scale_rewards=standardize,
        ),
    ),
}
FIVE = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
# By `algorithm_of` of examples/trl_algorithm.py, as those above.
OPTIONS = {
    "the defaults": {},
    "a KL penalty": {"beta": 0.3},
    "a KL penalty by the sequence": {"beta": 0.3, "use_bias_correction_kl": False, **GSPO},
    "the deviation of the batch": {"scale_rewards": "batch", "loss_type": "grpo"},
    "no deviation": {"scale_rewards": False},
    "two-sided clipping": {"delta": 1.3, "loss_type": "grpo"},
    "ratios of sequences, mean of tokens": {"importance_sampling_level": "sequence"},
    "bnpo": {"loss_type": "bnpo", **AT_ONCE},
    "entropy": {"entropy_coef": 0.1, **AT_ONCE},
    "temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0},
    "luspo by the token": {"loss_type": "luspo"},
}
BY_SEQUENCE = {"beta": 0.3, "importance_sampling_level": "sequence"}
# What it refuses, and the option that it names.
REFUSED = [
    ({"loss_type": "vespo"}, "loss_type .*luspo, got 'vespo'"),
    ({"loss_type": "new"}, "loss_type .*, got 'new'"),
    ({"importance_sampling_level": "turn"}, "importance_sampling_level token or sequence, got"),
    ({"scale_rewards": "step"}, "scale_rewards group or batch or none, got 'step'"),
    (
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation sum_then_normalize, got 'normalize_then_sum'",
    ),
    ({"off_policy_mask_threshold": 0.05}, "off_policy_mask_threshold None, got 0.05"),
    ({"top_entropy_quantile": 0.3}, "top_entropy_quantile 1, got 0.3"),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy False, got True"),
    (BY_SEQUENCE, "use_bias_correction_kl False with beta and ratios of sequences, got True"),
    ({"entropy_coef": 0.1, "loss_type": "grpo"}, "entropy_coef 0 with grpo, .*, got 0.1"),
    (
        {"entropy_coef": 0.1, "gradient_accumulation_steps": 2},
        "gradient_accumulation_steps 1 with bnpo or entropy_coef, got 2",
    ),
    (
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
        "gradient_accumulation_steps 1 with bnpo or entropy_coef, got 2",
    ),
    ({"loss_type": "cispo"}, "epsilon_high of at least 1 with cispo, got 0.2"),
    ({"delta": 1.05}, r"delta above 1 \+ epsilon_high, got 1.05"),
]
CORRECTIONS = {
    "sequence_mask": ratios.masked(3.0),
    "sequence_truncate": ratios.truncated(3.0, "sequence"),
    "token_mask": ratios.masked(3.0, level="token"),
    "token_truncate": ratios.truncated(3.0),
}


class Case(NamedTuple):
    """A rollout, its policies, and what TRL made of it."""

    module: Any  # of transformers; its parameters are not used
    given: peer_trl.Given
    policies: list[dict[str, torch.Tensor]]  # the reference, the one that drew, the trained one
    args: Any  # TRL's configuration
    result: peer_trl.Result


def given(prompt_lengths):
    """Return three prompts with four completions each, of one to six tokens.

    Three rows do not end in the end token. The rewards differ within two of the groups.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = [1, 6, 3, 2, 5, 4, 6, 1, 2, 6, 3, 4]
    digits = [torch.randint(10, (6,), generator=draw).tolist() for _ in range(15)]
    prompts = [digits[row // 4][: prompt_lengths[row // 4]] for row in range(12)]
    completions = [[*digits[3 + n][: length - 1], peer_trl.END] for n, length in enumerate(lengths)]
    for row in (1, 6, 9):
        completions[row][-1] = 3
    return peer_trl.Given(
        prompts,
        completions,
        logprobs=[(-1 - 3 * torch.rand(n, generator=draw)).tolist() for n in lengths],
        rewards=[[row % 3, row % 2] if row < 8 else [1.0, 0.5] for row in range(12)],
    )


def case_of(tmp_path, *, exact, vllm=False, two_rewards=False, **options):
    """Return TRL's result: in float64 with prompts of one length, or in float32 with its kernel.

    Its left padding would shift the positions that GPT-2 learns, so that those are of one length.
    """
    family, dtype = ("GPT2", torch.float64) if exact else ("Llama", torch.float32)
    drawn = given((3, 3, 3) if exact else (2, 5, 3))
    if not two_rewards:
        drawn = drawn._replace(rewards=[[sum(row)] for row in drawn.rewards])
    module = peer_trl.network(family, tmp_path / "reference").to(dtype)
    policies = [parameters(module)]
    draw = torch.Generator().manual_seed(2)
    for _ in range(2):
        noise = {name: torch.empty_like(leaf) for name, leaf in policies[-1].items()}
        for leaf in noise.values():
            leaf.normal_(0, 0.1, generator=draw)
        policies.append(funcrl.tree.add(policies[-1], noise))
    module.load_state_dict(policies[1], strict=False)
    options = {"per_device_train_batch_size": 4, "num_generations": 4} | options
    options["gradient_accumulation_steps"] = 12 // options["per_device_train_batch_size"]
    args, result = peer_trl.run(module, drawn, tmp_path, policies[2], vllm=vllm, **options)
    fresh = peer_trl.network(family, tmp_path / "reference").to(
        dtype
    )  # the trainer changes its own
    return Case(fresh, drawn, policies, args, result)


def parameters(module):
    return {name: leaf.detach().clone() for name, leaf in module.named_parameters()}


def rollout_of(case):
    given, dtype = case.given, next(case.module.parameters()).dtype
    rows = list(zip(given.prompts, given.completions, given.logprobs, strict=True))
    pad = funcrl.batching.pad_rows
    return funcrl.Rollout(
        tokens=pad([p + c for p, c, _ in rows], torch.int64),
        mask=pad([[False] * len(p) + [True] * len(c) for p, c, _ in rows], torch.bool),
        behavior_logprobs=pad([[0.0] * len(p) + drawn for p, _, drawn in rows], dtype),
        rewards=torch.tensor(given.rewards, dtype=dtype).sum(dim=1),
        group=torch.arange(12) // 4,
        policy_version=torch.zeros(12, dtype=torch.int64),
    )


def gradient_of(case, algorithm, rollout=None, correction=None):
    """Return funcrl's loss, gradient and metrics.

    Args:
        case: what TRL was given.
        algorithm: a `funcrl.Algorithm`.
        rollout: of the case, if some of it is different.
        correction: of the generator's log-probabilities, where it is not the policy itself.
    """
    rollout = rollout_of(case) if rollout is None else rollout
    reference, old, trained = case.policies
    model_fn = funcrl.logprob_fn(case.module)
    tokens = rollout.tokens
    sample = funcrl.Sample(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    scores = funcrl.score(model_fn, old, sample)
    if correction is None:  # the trainer's own are the old log-probabilities
        rollout = rollout._replace(behavior_logprobs=scores.logprobs)
    ref_logprobs = funcrl.score(model_fn, reference, sample).logprobs
    batch = funcrl.collate(rollout, algorithm, ref_logprobs)
    if correction is not None:
        batch = funcrl.recenter(correction)(scores, batch)

    def loss_fn(params, row):
        return funcrl.policy_loss(algorithm, model_fn(params, row), row)

    return funcrl.grads.summed_gradient(loss_fn, microbatch=5)(trained, batch)


def assert_same(got, wanted, loss_bound=None):
    """Both sides compute the log-probabilities, which are near 3, with other roundings.

    Losses and gradients are sums of ratios of their exponentials, of size 1, whose relative error
    is the error of a log-probability; 16 units in the last place of these leave room for the
    network's. Measured is a tenth of it.
    """
    bound = 16 * 2 * torch.finfo(wanted.loss.dtype).eps
    assert abs(got.loss - wanted.loss) <= (bound if loss_bound is None else loss_bound)
    assert abs(wanted.loss) > 1e-3
    difference = {name: got.grads[name] - leaf for name, leaf in wanted.grads.items()}
    norm = funcrl.tree.global_norm(wanted.grads)
    assert norm > 1e-2
    assert funcrl.tree.global_norm(difference) <= bound * norm


@pytest.fixture
def algorithm_of(monkeypatch):
    # Tests beside this one look at the folder, and at who can be imported.
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    peer_trl.import_trl()
    from trl_algorithm import algorithm_of

    return algorithm_of


@pytest.mark.parametrize("name", FIVE)
def test_the_loss_is_trl_s(name, tmp_path):
    options, algorithm = ALGORITHMS[name]
    case = case_of(tmp_path, exact=False, **options)
    assert_same(gradient_of(case, algorithm), case.result, loss_bound=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_is_trl_s_in_float64(name, tmp_path, algorithm_of):
    options, algorithm = ALGORITHMS[name]
    case = case_of(tmp_path, exact=True, **options)
    for each in (algorithm, algorithm_of(case.args)):
        assert_same(gradient_of(case, each), case.result)
    if name in FIVE:  # ratios beyond the bounds, on both sides where there are two
        two = ("clip_ratio/low_mean", "clip_ratio/high_mean")
        for share in ("cispo_clip_ratio",) if name == "cispo" else two:
            assert max(case.result.metrics[share]) > 0.05


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_vespo_is_trl_s(beta, tmp_path):
    """As docs/algorithms.md composes it."""
    blocks = (ROOT / "docs" / "algorithms.md").read_text()
    page: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", blocks, re.DOTALL)), page)
    algorithm = funcrl.dapo(scale_rewards=standardize, kl=beta, kl_estimator="k3+")._replace(
        ratio=page["whole_completion"], surrogate=page["vespo"](positive=(1.5, 3.0))
    )
    case = case_of(tmp_path, exact=True, loss_type="vespo", vespo_k_pos=1.5, beta=beta)
    assert_same(gradient_of(case, algorithm), case.result)


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_are_trl_s(name, tmp_path, algorithm_of):
    case = case_of(tmp_path, exact=True, **OPTIONS[name])
    assert_same(gradient_of(case, algorithm_of(case.args)), case.result)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_without_a_counterpart_are_refused(options, words, tmp_path, algorithm_of):
    config = peer_trl.import_trl().GRPOConfig
    args = config(str(tmp_path), use_cpu=True, bf16=False, **options)
    with pytest.raises(ValueError, match=f"^algorithm_of expects {words}"):
        algorithm_of(args)


def test_metrics_are_trl_s(tmp_path, algorithm_of):
    """Those of tokens; TRL takes them of each micro-batch, and here there is one."""
    case = case_of(tmp_path, exact=True, beta=0.3, use_bias_correction_kl=False, **AT_ONCE)
    sums = gradient_of(case, algorithm_of(case.args)).metrics.sums
    for name in ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        [wanted] = case.result.metrics[name]
        assert abs(sums[name] / 43 - wanted) <= 1e-6, name  # of 43 tokens; TRL's sums are float32
    [low], [high] = (case.result.metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high"))
    assert case.result.metrics["clip_ratio/region_mean"] == [pytest.approx(low + high)]


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_correction_of_vllm_is_trl_s(mode, tmp_path, algorithm_of):
    options = {"beta": 0.3, "vllm_importance_sampling_mode": mode}
    case = case_of(tmp_path, exact=True, vllm=True, **options)
    [smallest] = case.result.metrics["sampling/importance_sampling_ratio/min"]
    [largest] = case.result.metrics["sampling/importance_sampling_ratio/max"]
    assert smallest == 0 if "mask" in mode else largest == 3
    got = gradient_of(case, algorithm_of(case.args), correction=CORRECTIONS[mode])
    assert_same(got, case.result)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_a_row_without_a_token_counts_as_one_in_trl(loss_type, tmp_path, algorithm_of):
    case = case_of(tmp_path, exact=True, loss_type=loss_type, mask_truncated_completions=True)
    ends = torch.tensor([row[-1] == peer_trl.END for row in case.given.completions])
    assert ends.sum() == 9
    rollout = funcrl.mask_truncated(rollout_of(case), ~ends)
    algorithm = algorithm_of(case.args)
    share = 1.0 if loss_type == "dapo" else 9 / 12
    got = gradient_of(case, algorithm, rollout)
    scaled = peer_trl.Result(got.loss * share, funcrl.tree.scale(got.grads, share), {})
    assert_same(scaled, case.result)


def test_the_mask_of_what_is_off_policy_is_trl_s():
    trl = peer_trl.import_trl()
    generator = torch.Generator().manual_seed(0)
    logprobs, behavior = (
        -torch.rand(40, 6, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.arange(6) < torch.randint(0, 7, (40, 1), generator=generator)
    advantages = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    keeps = trl.GRPOTrainer.get_off_policy_mask(
        advantages, logprobs, behavior, mask.double(), off_policy_threshold=0.1
    )
    assert 5 < keeps.sum() < 35
    batch = funcrl.Batch(
        torch.zeros(40, 6, dtype=torch.int64), torch.arange(6).expand(40, 6), mask, behavior,
        advantages.expand(40, 6), mask.double(),
    )  # fmt: skip
    scores = funcrl.TokenScores(logprobs, torch.zeros_like(logprobs))
    found = funcrl.off_policy_mask(0.1)(scores, batch).advantages
    assert torch.equal(found, (advantages * keeps).expand(40, 6))


def test_rewards_that_are_normalised_before_they_are_added(tmp_path):
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    case = case_of(tmp_path, exact=True, two_rewards=True, **options)
    rollout = rollout_of(case)
    both = torch.tensor(case.given.rewards, dtype=torch.float64)
    each = {name: standardize(both[:, n], rollout.group) for n, name in enumerate("ab")}
    total = funcrl.rewards.weighted_sum(each, {"a": 1.0, "b": 0.5})
    algorithm = funcrl.dapo(clip=(0.2, 0.2))._replace(
        advantage=lambda rewards, group: advantages.standardize(rewards, eps=1e-4)
    )
    assert_same(gradient_of(case, algorithm, rollout._replace(rewards=total)), case.result)


def test_the_example_runs(tmp_path, algorithm_of, monkeypatch):
    import from_trl

    monkeypatch.chdir(tmp_path)
    assert len(from_trl.main(steps=2, warm_start=5)) == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "runs"]
    run = tmp_path / "runs" / "rows-1"
    assert (run / "model" / "config.json").exists()
    asked = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]
    shown = {"name": "dapo", "clip": [0.2, 0.28], "kl": 0.0, "entropy": 0.0}
    assert shown.items() <= asked.items()


def test_the_page_names_every_option_of_trl():
    trl = peer_trl.import_trl()
    page = (ROOT / "docs" / "migrating.md").read_text()
    named = set(re.findall(r"`([a-z0-9_]+)", page))
    own = {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    inherited = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert own - inherited <= named, sorted(own - inherited - named)


def test_trl_s_own_reward_functions_get_what_trl_gives_them():
    from trl import rewards

    functions = [
        rewards.accuracy_reward,
        rewards.think_format_reward,
        rewards.get_cosine_scaled_reward(max_len=8),
        rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        rewards.get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4),
    ]
    folder = Path(peer_trl.import_trl().__file__).parent / "chat_templates"
    tokenizer = tiny_tokenizer((folder / "qwen2_5.jinja").read_text())
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": f"${n + 1}$"}
        for n in range(4)
    ]
    task = funcrl.tasks.from_rows(rows, functions, tokenizer=tokenizer, held_out=0)
    prompts = task.prompts(0, 0, 4)
    right = prompts[0].data["solution"].strip("$")
    texts = [rf"<think>\nIt is.\n</think>\n\boxed{{{right}}}", r"\boxed{9}", "no", ""]
    ids = [[1, 2, 3], [4] * 6, [5] * 9, []]
    graded = funcrl.rollouts.grade(task, prompts, texts, completion_ids=ids)
    given = {
        "prompts": [each.data["prompt"] for each in prompts],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": ids,
        "solution": [each.data["solution"] for each in prompts],
    }
    assert len(graded.rewards) == len(functions)
    for function in functions:
        found = graded.rewards[function.__name__]
        wanted = [math.nan if each is None else each for each in function(**given)]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)
        assert found.unique().numel() > 1


def test_trl_s_overlong_punishment_trains_what_ours_does(tmp_path):
    """Over a warm start, the steps and the evaluation of a run."""
    from trl.rewards import get_soft_overlong_punishment

    punish = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)]

    def right(prompt, completion):
        return float(completion == prompt.answer)

    config = TrainConfig(
        steps=2, num_prompts=4, num_generations=4, sampling=Sampling(max_tokens=8),
        warm_start=WarmStartConfig(steps=30), evaluation=EvaluationConfig(every=2, num_prompts=4),
    )  # fmt: skip
    ours, theirs = (
        funcrl.train(
            replace(config, overlong=overlong, run_dir=tmp_path / f"{overlong}"),
            task=funcrl.tasks.from_rows(rows, functions),
        )
        for overlong, functions in ((4, right), (0, [right, punish]))
    )
    for one, other in zip(ours.history[1:], theirs.history[1:], strict=True):
        assert one["reward"] == other["reward"]
    assert min(row["reward"] for row in ours.history[1:]) < 0
    for name, leaf in ours.state.params.items():
        assert torch.equal(leaf, theirs.state.params[name])

    seen = []

    def length(completion_ids, trainer_state, log_metric, log_extra):
        log_metric("longest", max(map(len, completion_ids)))
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    task = funcrl.tasks.from_rows(rows, length)
    out = tmp_path / "seen.jsonl"
    found = funcrl.evaluate(EvalConfig(run=theirs.run_dir, num_prompts=4, out=out), task=task)
    assert found.rewards["length"] == pytest.approx(found.mean_length, abs=1e-6)
    assert seen == [(2, 2)]
    lengths = [row["rewards"]["length"] for row in runs.read_lines(out)]
    assert found.metrics == {"longest": max(lengths)}
    assert f"longest     {max(lengths):.3f}" in format_evaluation(found)
    assert [row["extra"]["tokens"] for row in runs.read_lines(out)] == lengths


def test_trl_s_callbacks_of_reward_functions_are_those_of_a_run(tmp_path):
    """Its `accuracy_reward` logs columns."""
    from trl.rewards import accuracy_reward

    steps = []

    def curriculum(completions, trainer_state, log_metric, **kwargs):
        assert trainer_state.max_steps == 2
        steps.append(trainer_state.global_step)
        log_metric("curriculum/step", trainer_state.global_step)
        return [float(trainer_state.global_step)] * len(completions)

    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": f"${n + 1}$"}
        for n in range(20)
    ]
    folder = Path(peer_trl.import_trl().__file__).parent / "chat_templates"
    tokenizer = tiny_tokenizer((folder / "qwen2_5.jinja").read_text())
    task = funcrl.tasks.from_rows(rows, [accuracy_reward, curriculum], tokenizer=tokenizer)
    config = TrainConfig(
        steps=2, num_prompts=4, num_generations=4, sampling=Sampling(max_tokens=4),
        warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=2, num_prompts=2),
        run_dir=tmp_path / "run",
    )  # fmt: skip
    history = funcrl.train(config, task=task).history
    assert [row.get("curriculum/step") for row in history] == [None, 0, 1]
    assert [row.get("eval/curriculum/step") for row in history] == [0, None, 2]
    assert [row.get("rewards/curriculum/mean") for row in history] == [None, 0, 1]
    assert steps == [0, 0, 1, 2]
    seen = runs.read_lines(tmp_path / "run" / runs.COMPLETIONS)
    assert all(row["extra"].keys() == {"solution", "gold_parsed", "answer_parsed"} for row in seen)
    assert {row["extra"]["solution"] for row in seen} <= {row["solution"] for row in rows}

    def own_name(completions, log_metric):
        log_metric("reward", 1.0)
        return [1.0] * len(completions)

    task = funcrl.tasks.from_rows(rows, own_name, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="log_metric expects a name .* no metric .* got 'reward'"):
        funcrl.train(replace(config, run_dir=None, evaluation=EvaluationConfig(every=0)), task=task)

"""Environments: several turns, of which exactly the policy's own tokens are trained on."""

from types import SimpleNamespace

import pytest
import torch
from cases import TEMPLATES, equal, tiny_tokenizer

import funcrl
from funcrl.config import (
    AlgorithmConfig,
    EvaluationConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.core.types import Samples
from funcrl.loop.episodes import Failure, demonstration
from funcrl.loop.rollouts.draw import complete, to_rollout
from funcrl.loop.rollouts.grade import RewardError, grade, punish_overlong
from funcrl.tasks import Calculator, CharTokenizer, Environment, Prompt
from funcrl.tasks.contracts import end_tokens


class Script:
    """A generator that says what it is told to, turn by turn, one text for each row."""

    def __init__(self, tokenizer, *turns, context_length=1000):
        self.tokenizer, self.turns, self.context_length = tokenizer, list(turns), context_length
        self.contexts, self.seeds = [], []

    def push(self, params, version=0):
        pass

    def score(self, prompts):
        raise NotImplementedError

    def close(self):
        pass

    def generate(self, prompts, sampling, seed):
        self.contexts.append([list(prompt) for prompt in prompts])
        self.seeds.append(seed)
        rows = [self._say(text, sampling) for text in self.turns.pop(0)]
        assert len(rows) == len(prompts) * sampling.num_samples
        width = max(len(row) for row, _ in rows)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        mask = torch.tensor([[k < len(row) for k in range(width)] for row, _ in rows])
        logprobs = torch.where(mask, -torch.arange(1.0, width + 1), 0.0)
        return Samples(tokens, mask, logprobs, logprobs, tuple(why for _, why in rows), 7)

    def _say(self, text, sampling):
        tokens = self.tokenizer.encode(text)[: sampling.max_tokens]
        if len(tokens) == sampling.max_tokens:
            return tokens, "length"
        ends = [] if text.endswith(sampling.stop) else end_tokens(self.tokenizer)
        return tokens + ends, "stop"


def play(*turns, samples=1, max_tokens=12, task=None, count=1, **options):
    task = task or Calculator()
    script = Script(task.tokenizer, *turns, **options)
    prompts = [Prompt("38*27=", "1026", (38, 27)), Prompt("11*12=", "132", (11, 12))][:count]
    completed = complete(task, script, prompts, Sampling(samples, max_tokens=max_tokens), seed=3)
    return completed, script


def rewards(completed, task=None):
    graded = grade(task or Calculator(), completed.prompts, completed.outcomes)
    return {name: values.tolist() for name, values in graded.rewards.items()}


def test_the_calculator_is_an_environment_and_sum_digits_is_not():
    assert isinstance(Calculator(), Environment)
    assert not isinstance(funcrl.tasks.SumDigits(), Environment)


def test_every_token_of_an_episode_and_who_said_it():
    completed, script = play(["[38*27]", "1026"], ["1026"], samples=2)
    encode = Calculator().tokenizer.encode
    asked = encode("38*27=")
    assert script.contexts == [[asked], [asked + encode("[38*27]1026;")]]
    assert completed.texts == ["[38*27]1026;1026", "1026"]
    assert completed.turns == [2, 1]
    assert rewards(completed) == {"correct": [1, 1], "called": [1, 0]}
    rollout = to_rollout(completed, torch.tensor([1.0, 0.0]))
    first = "38*27=[38*27]1026;1026"
    said = "......xxxxxxx.....xxxx" + "x"  # and the end token
    assert rollout.tokens[0].tolist() == [*encode(first), 0]
    assert rollout.mask[0].tolist() == [char == "x" for char in said]
    # The generator's own numbers, -1, -2, ... in each turn, at the tokens that it drew.
    drawn = rollout.behavior_logprobs[0][rollout.mask[0]]
    assert drawn.tolist() == [-1, -2, -3, -4, -5, -6, -7, -1, -2, -3, -4, -5]
    assert rollout.behavior_logprobs[0][~rollout.mask[0]].abs().sum() == 0
    assert rollout.mask[1].nonzero().squeeze(1).tolist() == [6, 7, 8, 9, 10]
    assert rollout.policy_version.tolist() == [7, 7]
    assert script.seeds[0] != script.seeds[1]


def test_the_loss_does_not_see_what_the_environment_said():
    completed, _ = play(["[38*27]", "1026"], ["1026"], samples=2)
    batch = funcrl.collate(to_rollout(completed, torch.tensor([1.0, 0.0])), funcrl.grpo())
    sample = funcrl.tree.map(lambda leaf: leaf[0], batch)
    scores = funcrl.TokenScores(
        sample.behavior_logprobs.clone().requires_grad_(),
        torch.ones_like(sample.behavior_logprobs, requires_grad=True),
    )
    loss, _ = funcrl.policy_loss(funcrl.grpo(kl=0.0, entropy=0.1), scores, sample)
    for gradient in torch.autograd.grad(loss, scores[:2]):
        assert torch.equal(gradient != 0, sample.mask)


@pytest.mark.parametrize(
    ("missing", "taken"),
    [
        ((), "logprobs"),
        (("policy_logprobs",), "logprobs"),
        (("logprobs",), "policy_logprobs"),
        (("logprobs", "policy_logprobs"), "policy_logprobs"),
    ],
)
def test_a_rollout_takes_the_log_probabilities_that_there_are(missing, taken):
    """Those of the draws, or else the policy's; of an environment's words neither says anything."""
    completed, _ = play(["[38*27]", "1026"], ["1026"], samples=2)
    samples = completed.samples
    fields = {"logprobs": samples.logprobs, "policy_logprobs": 2 * samples.policy_logprobs}
    for name in missing:
        fields[name] = fields[name].masked_fill(samples.mask, torch.nan)
    completed = completed._replace(samples=samples._replace(**fields))
    rollout = to_rollout(completed, torch.tensor([1.0, 0.0]))
    wanted, got = fields[taken][samples.mask], rollout.behavior_logprobs[rollout.mask]
    assert torch.allclose(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert rollout.behavior_logprobs[~rollout.mask].abs().sum() == 0
    if len(missing) == 2:
        with pytest.raises(ValueError, match=r"collate expects.*rollout\.behavior_logprobs"):
            funcrl.collate(rollout, funcrl.grpo())
    else:
        assert torch.equal(funcrl.collate(rollout, funcrl.grpo()).mask, rollout.mask)


def test_a_rollout_has_its_dtypes_whatever_a_generator_counts_in():
    completed, _ = play(["12", "1026"], samples=2)
    samples = completed.samples._replace(
        tokens=completed.samples.tokens.to(torch.int32), mask=completed.samples.mask.to(torch.int64)
    )
    total = torch.tensor([1.0, 0.0])
    for got, expected in zip(
        to_rollout(completed._replace(samples=samples), total),
        to_rollout(completed, total),
        strict=True,
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_one_log_probability_that_is_missing_is_not_taken_from_the_other_kind():
    completed, _ = play(["12", "1026"], samples=2)
    holed = completed.samples.logprobs.clone()
    holed[0, 0] = torch.nan
    completed = completed._replace(samples=completed.samples._replace(logprobs=holed))
    rollout = to_rollout(completed, torch.tensor([1.0, 0.0]))
    assert rollout.behavior_logprobs[rollout.mask].isnan().sum() == 1


@pytest.mark.parametrize("total", [torch.ones(1), torch.ones(3), torch.ones(2, 1), torch.ones(())])
def test_a_rollout_has_a_reward_for_each_completion(total):
    completed, _ = play(["1", "2"], samples=2)
    with pytest.raises(ValueError, match="to_rollout expects total.*shape"):
        to_rollout(completed, total)
    for infinite in (torch.inf, -torch.inf):  # a weighted sum that overflows, say: not "no reward"
        with pytest.raises(ValueError, match=f"to_rollout expects total.*{infinite} in row 1"):
            to_rollout(completed, torch.tensor([0.0, infinite]))
    graded = grade(Calculator(), completed.prompts, completed.outcomes)
    with pytest.raises(ValueError, match="punish_overlong expects lengths"):
        punish_overlong(graded, total, 9, cache=2)


@pytest.mark.parametrize(
    ("turns", "reasons", "texts"),
    [
        # Calls without end: three turns, and the last call is not answered.
        ([["[1*1]"]] * 3, ["length"], ["[1*1]1;[1*1]1;[1*1]"]),
        # Cut off in the middle of a call.
        ([["[1*1" + "1" * 20]], ["length"], ["[1*1" + "1" * 8]),
        # Not a product, and then an answer.
        ([["[=]"], ["5"]], ["stop"], ["[=]?;5"]),
        ([[""]], ["stop"], [""]),
    ],
)
def test_how_episodes_end(turns, reasons, texts):
    completed, script = play(*turns)
    assert list(completed.samples.finish_reasons) == reasons
    assert completed.texts == texts
    assert not script.turns  # nothing was asked for after the end
    ends = completed.samples.mask.long() * torch.arange(1, completed.samples.mask.shape[1] + 1)
    assert ends.max() == completed.samples.tokens.shape[1]  # what is said last is the policy's


def test_an_episode_ends_where_the_context_does():
    """The prompt has 6 tokens, the call 7, the answer to it 5: 18 leave no room below 18."""
    for context_length, turns in ((19, 2), (18, 1)):
        scripted = [["[38*27]"], ["1026"]][:turns]
        completed, _ = play(*scripted, context_length=context_length)
        assert completed.turns == [turns]
        assert completed.samples.finish_reasons == (("stop",) if turns == 2 else ("length",))


def test_rows_go_on_alone_and_stay_in_their_places():
    turns = ["[38*27]", "5", "12", "[11*12]"], ["1026", "132"]
    completed, script = play(*turns, samples=2, count=2)
    assert completed.texts == ["[38*27]1026;1026", "5", "12", "[11*12]132;132"]
    assert rewards(completed)["correct"] == [1, 0, 0, 1]
    assert len(script.contexts[1]) == 2
    assert [prompt.text for prompt in completed.prompts] == ["38*27="] * 2 + ["11*12="] * 2


class Fragile(Calculator):
    def act(self, state, completion):
        return super().act(state, completion)._replace(display=str(1 // len(completion)))


def test_an_environment_that_raises_is_an_outcome():
    task = Fragile()
    completed, _ = play(["", "5"], ["5"], ["5"], samples=2, task=task)
    assert isinstance(completed.outcomes[0], Failure)
    with pytest.raises(RewardError, match="environment 'calculator' raised ZeroDivisionError"):
        grade(task, completed.prompts, completed.outcomes)
    graded = grade(task, completed.prompts, completed.outcomes, on_error="skip")
    assert graded.total.isnan().tolist() == [True, False]


def test_a_prompt_for_each_completion_is_graded():
    prompts = Calculator().prompts(seed=0, start=0, count=2)
    with pytest.raises(ValueError, match="grade expects a prompt for each outcome.*2.* and 1 out"):
        grade(Calculator(), prompts, ["1"])


def test_no_completion_has_no_reward():
    with pytest.raises(RewardError, match="grade expects at least one reward"):
        grade(Calculator(), [], [])


class Mute(Calculator):
    def observe(self, state):
        return "what no tokenizer of its own has" if state.display else None


def test_an_observation_that_cannot_be_told_is_a_failure_too():
    task = Mute()
    completed, _ = play(["[1*1]", "5"], samples=2, task=task)
    graded = grade(task, completed.prompts, completed.outcomes, on_error="skip")
    assert graded.total.isnan().tolist() == [True, False]


@pytest.mark.slow
def test_a_product_and_its_mirror_are_on_the_same_side():
    held_out = {frozenset(prompt.data) for prompt in Calculator(1).eval_prompts(100)}
    trained = {frozenset(prompt.data) for prompt in Calculator(1).prompts(0, 0, 500)}
    assert held_out
    assert not held_out & trained


class Guess:
    """Say numbers until one is right; every answer is a message."""

    name, max_turns, tokenizer = "guess", 4, CharTokenizer("0123456789<>=?")

    def prompts(self, seed, start, count):
        return [
            Prompt("?", str(funcrl.rng.fold_in(seed, n) % 10)) for n in range(start, start + count)
        ]

    def eval_prompts(self, count):
        return [Prompt("?", str(n)) for n in range(min(count, 10))]

    def begin(self, prompt):
        return SimpleNamespace(gold=prompt.answer, last="")

    def act(self, state, completion):
        return SimpleNamespace(gold=state.gold, last=completion)

    def observe(self, state):
        return None if state.last == state.gold else "<" if state.last < state.gold else ">"

    def reward(self, prompt, state):
        return {"correct": float(state.last == prompt.answer)}


@pytest.mark.parametrize("template", ["chatml", "llama"])
def test_messages_make_the_conversation_that_the_template_writes(template):
    """Prompt, answers and replies, put together as tokens, are the whole conversation's tokens."""
    tokenizer = tiny_tokenizer(TEMPLATES[template])
    inner = tokenizer._tokenizer
    task = Guess()
    task.tokenizer = tokenizer
    script = Script(tokenizer, ["3"], ["7"], ["5"])
    script._say = lambda text, _: ([*tokenizer.encode_answer(text), tokenizer.end], "stop")
    completed = complete(task, script, [Prompt("Guess!", "5")], Sampling(max_tokens=9), seed=0)
    said = [("user", "Guess!"), ("assistant", "3"), ("user", "<"), ("assistant", "7"),
            ("user", ">"), ("assistant", "5")]  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in said]
    whole = inner.encode(
        inner.apply_chat_template(messages, tokenize=False), add_special_tokens=False
    )
    row = to_rollout(completed, torch.ones(1))
    tokens = row.tokens[0].tolist()
    assert whole[: len(tokens)] == tokens
    wanted = [token for text in "375" for token in (*tokenizer.encode_answer(text), tokenizer.end)]
    assert row.tokens[0][row.mask[0]].tolist() == wanted


def test_a_stop_token_that_is_not_the_end_is_followed_by_it():
    task = Guess()
    script = Script(task.tokenizer, ["3"], ["5"])
    script._say = lambda text, _: (task.tokenizer.encode(text + "="), "stop")
    sampling = Sampling(max_tokens=9, stop_tokens=tuple(task.tokenizer.encode("=")))
    completed = complete(task, script, [Prompt("?", "5")], sampling, seed=0)
    row = to_rollout(completed, torch.ones(1))
    encode = task.tokenizer.encode
    assert row.tokens[0].tolist() == [*encode("?3="), 0, *encode("<5=")]
    assert row.mask[0].tolist() == [False, True, True, False, False, True, True]


def test_sampled_episodes_score_as_they_were_drawn():
    """Teacher forcing gives every sampled token the log-probability that it was drawn with."""
    task = Calculator()
    model = funcrl.models.Transformer(funcrl.models.shape("micro", task.tokenizer.vocab_size))
    params = funcrl.init_params(model, seed=0)
    sampler = funcrl.generators.Sampler(model, decode=task.tokenizer.decode)
    sampler.push(params)
    sampling = Sampling(8, max_tokens=12)
    completed = complete(task, sampler, task.prompts(0, 0, 8), sampling, seed=1)
    assert max(completed.turns) > 1
    rollout = to_rollout(completed, torch.zeros(64))
    positions = torch.arange(rollout.tokens.shape[1]).expand_as(rollout.tokens)
    batch = funcrl.types.Sample(rollout.tokens, positions)
    scored = funcrl.models.logprobs.score(funcrl.logprob_fn(model), params, batch).logprobs
    assert (scored - rollout.behavior_logprobs)[rollout.mask].abs().max() <= 1e-5
    again = complete(task, sampler, task.prompts(0, 0, 8), sampling, seed=1)
    assert equal(again.samples.tokens, completed.samples.tokens)


def test_equal_contexts_go_on_differently():
    """Samples of one prompt that said the same still draw numbers of their own."""
    task = Guess()
    model = funcrl.models.Transformer(funcrl.models.shape("micro", task.tokenizer.vocab_size))
    sampler = funcrl.generators.Sampler(model, decode=task.tokenizer.decode)
    sampler.push(funcrl.init_params(model, seed=0))
    completed = complete(task, sampler, [Prompt("?", "no")], Sampling(200, max_tokens=1), seed=1)
    drawn = completed.samples.tokens.tolist()
    # Those that ended their turn at once have all read the same.
    going = [row for row, turns in zip(drawn, completed.turns, strict=True) if turns > 1]
    assert len(going) > 5
    assert len({tuple(row) for row in going}) > 2


def test_a_demonstration_is_what_a_policy_would_have_said():
    task = Calculator()
    prompt = task.prompts(0, 0, 1)[0]
    tokens, mask, _ = demonstration(task, prompt)
    first, second = task.demonstrate(prompt)
    script = Script(task.tokenizer, [first], [second])
    row = to_rollout(complete(task, script, [prompt], Sampling(max_tokens=20), 0), torch.ones(1))
    assert row.tokens[0].tolist() == tokens
    assert row.mask[0].tolist() == mask
    with pytest.raises(ValueError, match="warm_start expects.*'guess'.*demonstrate"):
        demonstration(funcrl.tasks.check_task("warm_start", Guess()), Prompt("?", "5"))


def test_without_an_end_token_only_lengths_and_stop_strings_end_a_turn():
    task = Calculator()
    prompt = task.prompts(0, 0, 1)[0]
    usual = demonstration(task, prompt).tokens
    task.tokenizer.end = None
    # The first action ends with a stop string, the second with the end token.
    assert demonstration(task, prompt).tokens == [token for token in usual if token]
    first, second = task.demonstrate(prompt)
    script = Script(task.tokenizer, [first], [second])
    completed = complete(task, script, [prompt], Sampling(max_tokens=20), 0)
    row = to_rollout(completed, torch.ones(1))
    assert row.tokens[0].tolist() == demonstration(task, prompt).tokens
    assert completed.outcomes[0] == play([first], [second])[0].outcomes[0]


def test_an_environment_without_all_of_its_parts_is_refused():
    class Half(funcrl.tasks.SumDigits):
        act = Calculator.act

    config = TrainConfig(run_dir=None)
    with pytest.raises(ValueError, match="train expects.*begin"):
        funcrl.build(config, Half())


def calculator_run(folder, **options):
    return TrainConfig(
        **{
            "run_dir": folder,
            "task": "calculator",
            "steps": 3,
            "num_prompts": 4,
            "sampling": Sampling(max_tokens=8),
            "algorithm": AlgorithmConfig(kl=0.0, entropy=0.0),
            "optimizer": OptimizerConfig(learning_rate=1e-3),
            "warm_start": WarmStartConfig(steps=3),
            "evaluation": EvaluationConfig(every=2, num_prompts=20, temperature=1.0),
            "log": LogConfig(completions_every=1),
            **options,
        }
    )


@pytest.mark.slow
def test_a_run_on_an_environment_resumes_to_the_same_bits(tmp_path):
    whole = funcrl.train(calculator_run(tmp_path / "whole"))
    calls = iter([False, False, True])  # asked in the warm start too
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(calculator_run(tmp_path / "cut"), stop=lambda: next(calls, True))
    rest = funcrl.train(calculator_run(tmp_path / "cut"), resume=True)
    assert equal(whole.state.params, rest.state.params)
    assert 1 <= whole.history[1]["completions/mean_turns"] <= 3


@pytest.mark.slow
def test_a_run_trains_adapters_and_evaluates_what_they_come_to(tmp_path):
    config = calculator_run(tmp_path / "run", lora=LoraConfig(rank=2))
    trained = funcrl.train(config)
    assert all(name.rpartition(".")[2].startswith("lora_") for name in trained.state.params)
    parts = funcrl.build(config)
    policy = parts.policy(trained.state.params)
    base = funcrl.loop.build.first_params(funcrl.build(calculator_run(None)))
    moved = {name for name, leaf in policy.items() if not torch.equal(leaf, base[name])}
    assert moved == {name for name, leaf in base.items() if leaf.ndim == 2 and "blocks" in name}
    result = funcrl.evaluate(
        funcrl.config.EvalConfig(run=tmp_path / "run", num_prompts=20, temperature=1.0)
    )
    assert result.task == "calculator"


@pytest.mark.slow
def test_the_calculator_is_learnt(tmp_path):
    """From a policy that is right once in three to one that is mostly right, within 50 steps."""
    config = calculator_run(
        tmp_path / "run", steps=50, num_prompts=32, warm_start=WarmStartConfig(steps=400),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup=5),
        evaluation=EvaluationConfig(every=50, temperature=1.0),
    )  # fmt: skip
    history = funcrl.train(config).history
    assert history[0]["eval/accuracy"] < 0.5
    assert history[-1]["eval/accuracy"] > history[0]["eval/accuracy"] + 0.2

"""Reward functions of every form: of one completion, a batch, by name, async; their errors."""

import asyncio
import inspect
import time

import pytest
import torch
from cases import tiny_tokenizer

from funcrl import rollouts
from funcrl.loop.episodes import Failure
from funcrl.loop.rollouts.grade import RewardError
from funcrl.tasks import Prompt, RewardLimits, SumDigits, TrainerState, from_rows, with_rewards
from funcrl.tasks.adapt import guard

ROWS = [{"prompt": f"{n}?", "answer": n, "level": n % 2} for n in range(4)]
PROMPTS = [Prompt(row["prompt"], str(row["answer"]), row) for row in ROWS]
TEXTS = ["0", "9", "22", "3"]


def graded(reward, texts=TEXTS, **options):
    task = from_rows(ROWS, reward, held_out=0.0)
    found = rollouts.grade(task, PROMPTS, texts, **options)
    return {name: values.tolist() for name, values in found.rewards.items()}


def by_position(prompt, completion):
    return completion == prompt.answer


def by_other_names(p, text):
    return float(text == p.answer)


def in_another_order(completion, prompt):
    return completion == prompt.answer


def by_columns(completion, answer):
    return completion == str(answer)  # the column, an integer


def by_column_of_its_own(completion, level):
    return len(completion) + 10 * level


def by_all_columns(completion, **columns):
    return len(completion) + 10 * columns["level"]


def of_a_batch(prompts, completions, answers):
    return [
        p == f"{a}?" and c == str(a) for p, c, a in zip(prompts, completions, answers, strict=True)
    ]


def as_trl_writes_it(completions, answer, **kwargs):
    assert set(kwargs) == {"prompts", "level", "log_metric", "log_extra"}
    return torch.tensor([float(c == str(a)) for c, a in zip(completions, answer, strict=True)])


async def one_by_one(prompt, completion):
    # The first ends last.
    await asyncio.sleep(0.02 if completion == "0" else 0)
    return completion == prompt.answer


async def all_at_once(completions, answers):
    await asyncio.sleep(0)
    return [text == str(answer) for text, answer in zip(completions, answers, strict=True)]


@pytest.mark.parametrize(
    "function",
    [
        by_position, by_other_names, in_another_order, by_columns, of_a_batch, as_trl_writes_it,
        one_by_one, all_at_once,
    ],
)  # fmt: skip
def test_every_form_of_a_reward_gives_the_same(function):
    # "0" and "3" are the answers 0 and 3; "9" is not 1 and "22" is not 2.
    assert graded(function) == {function.__name__: [1.0, 0.0, 0.0, 1.0]}


@pytest.mark.parametrize("function", [by_column_of_its_own, by_all_columns])
def test_columns_are_arguments(function):
    assert graded(function) == {function.__name__: [1.0, 11.0, 2.0, 11.0]}


def test_functions_may_be_several_and_return_several():
    def both(completion):
        return {"long": float(len(completion) > 1), "nine": completion == "9"}

    found = graded([by_position, both])
    assert found == {
        "by_position": [1.0, 0.0, 0.0, 1.0],
        "long": [0.0, 0.0, 1.0, 0.0],
        "nine": [0.0, 1.0, 0.0, 0.0],
    }
    task = from_rows(ROWS, {"a": by_position, "b": both}, weights={"a": 2.0})
    total = rollouts.grade(task, PROMPTS, TEXTS, {"nine": 0.5}).total
    assert total.tolist() == [2.0, 0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="names of their own.*'by_position' twice"):
        from_rows(ROWS, [by_position, by_position])


class Float(SumDigits):
    def reward(self, prompt, completion):
        return super().reward(prompt, completion)["correct"]


class Later(SumDigits):
    async def reward(self, prompt, completion):
        await asyncio.sleep(0)
        return super().reward(prompt, completion)


class Batched(SumDigits):
    def reward_batch(self, prompts, completions):
        return [float(c == p.answer) for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("made", [SumDigits, Float, Later, Batched])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_task_rewards_by_a_number_later_or_in_batches(made, guarded):
    task = guard(made()) if guarded else made()
    prompts = [Prompt("1+2=", "3"), Prompt("1+3=", "4")]
    found = rollouts.grade(task, prompts, ["3", "3"])
    assert {name: values.tolist() for name, values in found.rewards.items()} == {
        "correct": [1.0, 0.0]
    }
    assert rollouts.accuracies(task, found).tolist() == [1.0, 0.0]
    more = rollouts.grade(with_rewards(task, {"one": lambda p, c: 1}), prompts, ["3", "3"])
    assert more.total.tolist() == [2.0, 1.0]


def of_tokens(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]


def of_all_there_is(prompts, **columns):
    return [float(sum(ids)) for ids in columns["completion_ids"]]


@pytest.mark.parametrize("function", [of_tokens, of_all_there_is])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_function_of_a_batch_gets_the_tokens(function, guarded):
    task = with_rewards(from_rows(ROWS, by_position), {"sums": function})
    ids = [[1, 2], [], [3], [4]]
    found = rollouts.grade(guard(task) if guarded else task, PROMPTS, TEXTS, completion_ids=ids)
    assert found.rewards["sums"].tolist() == [3, 0, 3, 4]
    assert found.rewards["by_position"].tolist() == [1, 0, 0, 1]
    failed = [TEXTS[0], Failure("The environment raised."), *TEXTS[2:]]
    found = rollouts.grade(task, PROMPTS, failed, on_error="skip", completion_ids=ids)
    assert found.rewards["sums"][[0, 2, 3]].tolist() == [3, 3, 4]
    with pytest.raises(ValueError, match="grade expects .* completion_ids, got 3 for 4 outcomes"):
        rollouts.grade(task, PROMPTS, TEXTS, completion_ids=ids[:3])


def logging(completions, trainer_state, log_metric, log_extra):
    log_metric("count", len(completions))
    log_metric("count", torch.tensor(0.0))
    log_extra("first", [text[:1] for text in completions])
    log_extra("kind", [complex(len(text)) for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


async def logging_later(prompts, **given):
    await asyncio.sleep(0.001)
    return logging(*(given[name] for name in inspect.signature(logging).parameters))


def logging_of_one(completion, trainer_state, log_metric=None, **columns):
    assert columns["level"] in (0, 1)
    assert "trainer_state" not in columns
    log_metric("length", len(completion))
    return trainer_state.global_step / trainer_state.max_steps


def logging_of_all(log_metric, **given):
    log_metric("length", sum(map(len, given["completions"])))
    return [0.25] * len(given["completions"])


@pytest.mark.parametrize(("function", "logged"), [(logging_of_one, 5 / 4), (logging_of_all, 5)])
def test_a_function_of_one_completion_logs_too(function, logged):
    task = with_rewards(from_rows(ROWS, by_position, held_out=0), {"logging": function})
    found = rollouts.grade(task, PROMPTS, TEXTS, trainer_state=TrainerState(1, 4))
    assert found.rewards["logging"].tolist() == [0.25] * 4
    assert found.metrics == {"length": logged}


class Logging(SumDigits):
    accuracy = "logging"

    def reward_batch(self, prompts, completions, **given):
        del given["limits"]
        return logging(completions, **given)


@pytest.mark.parametrize(
    "task", [from_rows(ROWS, logging), from_rows(ROWS, logging_later), Logging()]
)
def test_a_function_of_a_batch_logs_and_asks_how_far_the_run_is(task):
    state = TrainerState(global_step=1, max_steps=4)
    found = rollouts.grade(guard(task), PROMPTS, TEXTS, trainer_state=state)
    assert found.total.tolist() == [0.25] * 4
    assert found.metrics == {"count": 2.0}
    assert [row["first"] for row in found.extra] == ["0", "9", "2", "3"]
    assert [row["kind"] for row in found.extra] == ["(1+0j)", "(1+0j)", "(2+0j)", "(1+0j)"]
    failed = [TEXTS[0], Failure("The environment raised."), *TEXTS[2:]]
    found = rollouts.grade(task, PROMPTS, failed, on_error="skip", trainer_state=state)
    assert found.metrics == {"count": 1.5}
    assert [row.get("first") for row in found.extra] == ["0", None, "2", "3"]


def test_what_is_logged_wrong_is_refused_by_name():
    def too_few(completions, log_extra):
        log_extra("half", completions[:2])

    def no_number(completions, log_metric):
        log_metric("length", "2")

    def no_name(completions, log_metric):
        log_metric(2, 2)

    with pytest.raises(RewardError, match="'too_few' .*log_extra expects .* 4 .*'half', got 2"):
        graded(too_few)
    with pytest.raises(
        RewardError, match="'no_number' .*log_metric expects a number as 'length', got '2'"
    ):
        graded(no_number)
    with pytest.raises(RewardError, match="'no_name' .*log_metric expects name .*got 2"):
        graded(no_name)


def test_what_grade_does_not_get_is_asked_for_where_it_is_needed():
    def of_state(completions, trainer_state=None, completion_ids=None):
        return [float(trainer_state is completion_ids is None)] * len(completions)

    with pytest.raises(RewardError, match=r"'of_tokens' takes .* grade\(..., completion_ids="):
        graded(of_tokens)
    with pytest.raises(RewardError, match=r"'logging' takes .* grade\(..., trainer_state="):
        graded(logging)
    assert graded(of_state) == {"of_state": [1.0] * 4}


def test_a_task_of_rows_is_as_accurate_as_its_first_reward_or_the_correct_one():
    def correct(completion):
        return completion == "9"

    for functions, expected in (
        ([by_position], [1.0, 0.0, 0.0, 1.0]),
        ([by_position, correct], [0.0, 1.0, 0.0, 0.0]),
    ):
        task = from_rows(ROWS, functions)
        found = rollouts.grade(task, PROMPTS, TEXTS)
        assert rollouts.accuracies(task, found).tolist() == expected


def test_at_most_so_many_run_at_a_time_and_each_has_its_own_time():
    running, most = [], []

    async def slow(completion):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return 1.0

    # Four in turn take 0.08 s, more than the limit of each.
    assert graded(slow, limits=RewardLimits(1, timeout=0.06)) == {"slow": [1.0] * 4}
    assert max(most) == 1
    most.clear()
    graded(slow, limits=RewardLimits(3))
    assert max(most) == 3


def test_a_late_reward_is_an_error_and_is_not_waited_for():
    async def slow(completion):
        if completion == "9":
            await asyncio.to_thread(time.sleep, 1.0)  # which nothing can cancel
        return 1.0

    start = time.monotonic()
    with pytest.raises(
        RewardError, match=r"'slow' took longer than 0.05 s \(--reward-timeout\).*9"
    ):
        graded(slow, limits=RewardLimits(timeout=0.05))
    assert time.monotonic() - start < 0.9
    found = graded(slow, limits=RewardLimits(timeout=0.05), on_error="skip")
    assert [value == 1.0 for value in found["slow"]] == [True, False, True, True]


def test_async_rewards_run_where_a_loop_runs_already():
    async def cell():  # as in Jupyter
        return graded(one_by_one)

    assert asyncio.run(cell()) == {"one_by_one": [1.0, 0.0, 0.0, 1.0]}


def test_an_interrupt_ends_the_loop_at_once():
    async def slow(completion):
        if completion == "9":
            raise KeyboardInterrupt
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        graded(slow)


def raises(completion):
    return {"a": 1}["b"] if completion == "9" else 1.0


def raises_in_a_library(completions):
    return [float(each) for each in torch.ones(2).view(3)]


async def raises_later(completion):
    await asyncio.sleep(0)
    return raises(completion)


@pytest.mark.parametrize(
    ("function", "error"),
    [(raises, "KeyError: 'b'"), (raises_later, "KeyError: 'b'"),
     (raises_in_a_library, "RuntimeError: shape")],
)  # fmt: skip
def test_an_error_has_the_file_the_line_the_completion_and_the_prompt(function, error):
    inner = raises if function is raises_later else function
    line = inspect.getsourcelines(inner)[1] + 1
    with pytest.raises(RewardError) as found:
        graded(function)
    text = str(found.value)
    assert f"The reward '{function.__name__}' raised {error}" in text
    assert f"({__file__}, line {line})" in text
    row = 0 if function is raises_in_a_library else 1
    assert f"for the completion '{TEXTS[row]}' of '{ROWS[row]['prompt']}'." in text
    assert isinstance(found.value.__cause__.__cause__, KeyError | RuntimeError)


def test_an_error_is_of_a_few_lines_however_long_the_completion_is():
    def refuses(completion):
        raise ValueError(completion)

    with pytest.raises(RewardError) as found:
        graded(refuses, texts=["x" * 100_000] * 4)
    assert len(str(found.value)) < 1500


def test_a_reward_that_fails_is_skipped_in_every_form():
    for function in (raises, raises_later):
        values = graded(function, on_error="skip")[function.__name__]
        assert [value == 1.0 for value in values] == [True, False, True, True]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0], r"'f' gave 1 for a batch of 4 completions"),
        (lambda completions: 1.0, r"'f' gave 1.0 for a batch of 4"),
        (lambda completion: None, r"reward 'f' of 'rows' is None"),
        (lambda completion: float("nan"), r"reward 'f' of 'rows' is nan"),
        (lambda completion: {}, r"reward of 'rows' is empty"),
        (lambda completion: {"f": "good"}, r"reward 'f' of 'rows' is 'good'"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(function, message):
    with pytest.raises(RewardError, match=message):
        graded({"f": function})


def typo(completion, anwser):
    return 1.0


def nothing():
    return 1.0


def of_trainer(prompts, completions, trainer):
    return completions


@pytest.mark.parametrize(
    ("function", "name"), [(typo, "anwser"), (nothing, "no arguments"), (of_trainer, "trainer")]
)
def test_a_function_of_something_else_is_refused_before_any_work(function, name):
    with pytest.raises(ValueError, match=f"{function.__name__}.*what there is.*{name}"):
        from_rows(ROWS, function)


VERL = [
    {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": 2}, "extra_info": 7},
    {"prompt": "2+1=", "data_source": "sums", "reward_model": {"ground_truth": 3}, "extra_info": 8},
]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info in (7, 8)) == ("sums", True)
    return float(solution_str == str(ground_truth))


def as_verl_documents_it(solution_str, ground_truth, **kwargs):
    return float(solution_str == str(ground_truth))


def of_verls_batches(solution_strs, ground_truths, data_sources):
    assert set(data_sources) == {"sums"}
    return [float(a == str(b)) for a, b in zip(solution_strs, ground_truths, strict=True)]


@pytest.mark.parametrize("function", [compute_score, as_verl_documents_it, of_verls_batches])
def test_verls_functions_get_what_their_parameters_name(function):
    task = from_rows(VERL, function, held_out=0.0)
    prompts = sorted(task.prompts(0, 0, 2))
    assert rollouts.grade(task, prompts, ["2", "2"]).total.tolist() == [1.0, 0.0]


def test_verls_ground_truth_is_the_answer_of_other_rows():
    rows = [{"prompt": "1+1=", "answer": "2"}]
    task = from_rows(rows, as_verl_documents_it, held_out=0.0)
    assert rollouts.grade(task, task.prompts(0, 0, 1), ["2"]).total.tolist() == [1.0]
    both = [{"prompt": "1+1=", "answer": "wrong", "ground_truth": "2"}]
    task = from_rows(both, as_verl_documents_it, held_out=0.0)
    assert rollouts.grade(task, task.prompts(0, 0, 1), ["2"]).total.tolist() == [1.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda question, response: 1.0,
        lambda completion, reference: 1.0,
        lambda prompt, target: 1.0,
        lambda prediction, label: 1.0,
        compute_score,  # whose rows have no data_source here
    ],
)
def test_parameters_that_nothing_is_known_of_are_refused(function):
    with pytest.raises(ValueError, match="expected to take what there is"):
        from_rows([{"prompt": "1+1=", "answer": "2"}], {"one": function})


def by_messages(prompts, completions, **kwargs):
    """As TRL's documentation has it for conversations."""
    assert [each[-1]["role"] for each in prompts] == ["user"] * len(prompts)
    return [float(completion[0]["content"] == "4") for completion in completions]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_trls_functions_get_messages_on_rows_of_messages(column):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    rows = [{column: [{"role": "user", "content": "2+2"}]}]
    task = from_rows(rows, by_messages, tokenizer=tiny_tokenizer(template), held_out=0.0)
    prompts = task.prompts(0, 0, 2)
    assert rollouts.grade(task, prompts, ["4", "5"]).total.tolist() == [1.0, 0.0]


class Stop(BaseException):
    """What is no `Exception`, as those of test frameworks."""


def test_whatever_a_reward_raises_is_its_own():
    class Number:
        def __float__(self):
            raise Stop("float")

    def raises(prompt, completion):
        raise Stop("reward")

    task = from_rows([{"prompt": "1"}], {"number": lambda prompt, completion: Number()})
    with pytest.raises(RewardError, match="raised Stop: float"):
        rollouts.grade(task, task.prompts(0, 0, 1), ["2"])
    task = from_rows([{"prompt": "1"}], {"one": raises})
    with pytest.raises(RewardError, match="'one' raised Stop: reward"):
        rollouts.grade(task, task.prompts(0, 0, 1), ["2"])

    def interrupted(prompt, completion):
        raise KeyboardInterrupt

    task = from_rows([{"prompt": "1"}], {"one": interrupted})
    with pytest.raises(KeyboardInterrupt):
        rollouts.grade(task, task.prompts(0, 0, 1), ["2"])

"""What a task must have, what it has by default, and objects of other classes in its place."""

import copy
import pickle

import pytest

import funcrl
from funcrl.tasks import Calculator, CharTokenizer, Environment, Prompt, SumDigits, Task, Tokenizer
from funcrl.tasks import check_task as checked_task
from funcrl.tasks.adapt import guard

DEFAULTS = {"accuracy": "correct", "reward_weights": {}, "stop": (), "max_turns": 1}


class Letters:
    """A tokenizer of no base class."""

    vocab_size, end = 4, 0

    def encode(self, text):
        return ["_abc".index(char) for char in text]

    def decode(self, tokens):
        return "".join("_abc"[token] for token in tokens if token)


class Plain:
    """A task of no base class, with the members that are needed."""

    name, tokenizer = "plain", Letters()

    def prompts(self, seed, start, count):
        return [Prompt("ab", "ba")] * count

    def reward(self, prompt, completion):
        return {"correct": float(completion == prompt.answer)}


class Turning(Plain):
    """An environment of no base class."""

    max_turns = 2

    def begin(self, prompt):
        return ""

    def act(self, state, completion):
        return state + completion

    def observe(self, state):
        return None

    def reward(self, prompt, state):
        return {"correct": float(state == prompt.answer)}


class Inheriting(Task):
    name, tokenizer = "inheriting", CharTokenizer("abc")
    prompts, reward = Plain.prompts, Plain.reward


@pytest.mark.parametrize("made", [Plain, Inheriting])
def test_what_a_task_leaves_out_has_a_default(made):
    task = checked_task("f", made())
    assert isinstance(task, Task)
    assert not isinstance(task, Environment)
    assert {name: getattr(task, name) for name in DEFAULTS} == DEFAULTS
    assert task.eval_prompts(3) == []
    assert task.extract("ab") is None
    assert task.demonstrate(Prompt("ab", "ba")) == "ba"
    assert isinstance(task.tokenizer, Tokenizer)
    assert tuple(task.tokenizer.ends) == ()
    assert task.tokenizer.encode_answer("ab") == task.tokenizer.encode_reply("ab") == [1, 2]


def test_a_task_of_the_base_class_stays_itself():
    task = SumDigits()
    assert checked_task("f", task) is task


def test_an_object_that_acts_is_an_environment():
    task = checked_task("f", Turning())
    assert isinstance(task, Environment)
    assert task.max_turns == 2
    assert list(task.demonstrate(Prompt("ab"))) == []


def test_members_of_an_object_are_read_when_they_are_asked_for():
    inner = Plain()
    task = checked_task("f", inner)
    inner.accuracy, inner.extra = "other", 5
    assert (task.accuracy, task.extra) == ("other", 5)
    with pytest.raises(AttributeError):
        _ = task.nothing


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_task_in_place_of_another_can_be_copied(again):
    task = again(checked_task("f", Plain()))
    assert task.name == "plain"
    assert task.tokenizer.encode_reply("ab") == [1, 2]


@pytest.mark.parametrize("missing", ["tokenizer", "prompts", "reward"])
@pytest.mark.parametrize("base", [object, Task])
def test_a_task_without_a_needed_member_is_refused(missing, base):
    members = {name: getattr(Plain, name) for name in ("name", "tokenizer", "prompts", "reward")}
    del members[missing]
    with pytest.raises(ValueError, match=f"^train expects a task with .*, got no {missing}"):
        checked_task("train", type("Half", (base,), members)())


@pytest.mark.parametrize("base", [Plain, Inheriting, Turning])
def test_a_task_without_a_name_has_that_of_its_class(base):
    members = {name: getattr(base, name) for name in dir(base) if not name.startswith("_")}
    del members["name"]
    parent = Task if base is Inheriting else object
    nameless = type("Nameless", (parent,), members)()
    task = checked_task("f", nameless)
    assert task.name == "Nameless"
    assert checked_task("f", task) is task
    assert isinstance(task, Environment) == (base is Turning)


@pytest.mark.parametrize("missing", ["max_turns", "begin", "act", "observe", "reward"])
def test_an_environment_without_a_needed_member_is_refused(missing):
    names = ("name", "tokenizer", "max_turns", "prompts", "begin", "act", "observe", "reward")
    members = {name: getattr(Turning, name) for name in names if name != missing}
    with pytest.raises(ValueError, match=f"^f expects an environment with .*, got no {missing}"):
        checked_task("f", type("Half", (Environment,), members)())


@pytest.mark.parametrize("missing", ["vocab_size", "end", "encode", "decode"])
def test_a_tokenizer_without_a_needed_member_is_refused(missing):
    members = {name: value for name, value in vars(Letters).items() if name != missing}
    task = Plain()
    task.tokenizer = type("Half", (), members)()
    with pytest.raises(ValueError, match=f"^f expects a tokenizer with .*, got no {missing}"):
        checked_task("f", task)


def test_a_class_is_no_task():
    with pytest.raises(TypeError, match="^f expects a task, got the class Plain"):
        checked_task("f", Plain)


@pytest.mark.slow
def test_a_task_of_no_base_class_is_trained_on_as_one_of_the_base_class(tmp_path):
    """The same numbers, and the same warm start from the prompts' answers."""
    config = funcrl.config.TrainConfig(
        run_dir=tmp_path / "plain", steps=1, num_prompts=2, num_generations=2,
        warm_start=funcrl.config.WarmStartConfig(steps=2),
        evaluation=funcrl.config.EvaluationConfig(num_prompts=2),
    )  # fmt: skip
    plain = funcrl.train(config, task=Plain())
    config = funcrl.config.TrainConfig(**vars(config) | {"run_dir": tmp_path / "inheriting"})
    inheriting = funcrl.train(config, task=Inheriting())
    for name, leaf in plain.state.params.items():
        assert leaf.equal(inheriting.state.params[name])


def test_rewards_are_added_to_an_environment():
    task = funcrl.tasks.with_rewards(Calculator(), {"more": lambda prompt, state: 0.5})
    assert isinstance(task, Environment)
    assert task.stop == Calculator().stop
    prompt = task.prompts(0, 0, 1)[0]
    assert task.reward(prompt, task.begin(prompt)) == {"correct": 0, "called": 0, "more": 0.5}


class Broken(SumDigits):
    """A task with a mistake in an optional member, and in a needed one if asked for."""

    @property
    def stop(self):
        return self.no_such_member


def test_a_member_that_raises_is_not_taken_for_one_that_is_not_there():
    guarded = guard(checked_task("train", Broken()))
    with pytest.raises(AttributeError, match="no_such_member"):
        guarded.stop  # noqa: B018 (it is read for its error)

    class Worse(Plain):
        @property
        def tokenizer(self):
            return self.no_such_member

    with pytest.raises(AttributeError, match="no_such_member"):
        checked_task("train", Worse())


def test_a_member_that_is_set_is_set_for_the_task_too():
    class Harder(Plain):
        difficulty = 1

        def prompts(self, seed, start, count):
            return [Prompt(str(self.difficulty))] * count

    task = checked_task("train", Harder())
    task.difficulty = 5
    assert task.prompts(0, 0, 1)[0].text == "5"
    assert "Harder" in repr(task)

"""Environments by TRL's convention: what a policy reads, what its calls do, what is refused."""

import asyncio
from pathlib import Path
from typing import Literal

import peer_trl
import pytest
import torch
from cases import TEMPLATES, equal, tiny_pretrained, tiny_tokenizer
from datasets import Dataset
from test_episodes import Script

import funcrl
import trl_environment
from funcrl.config import EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.loop.rollouts.draw import complete, to_rollout
from funcrl.loop.rollouts.grade import grade
from funcrl.tasks import (
    Environment,
    ToolCall,
    ToolResults,
    from_environment,
    json_calls,
    python_calls,
)


class Guess:
    """Which digit is it?"""

    def reset(self, secret, **row):
        self.secret, self.found = secret, False
        return f" Below {row.get('limit', 10)}."

    def guess(self, digit: int) -> str:
        """
        Guess the digit.

        Args:
            digit: from 0 to 9.

        Returns:
            What is wrong with it.
        """
        self.found = digit == self.secret
        return "yes" if self.found else "more" if digit < self.secret else "less"

    async def hint(self) -> str:
        """
        Ask for help.

        Returns:
            The digit.
        """
        await asyncio.sleep(0)
        return f"it is {self.secret}"

    def get_reward(self):
        return float(self.found)

    def _hidden(self):
        raise AssertionError


ROWS = [{"prompt": "Guess!", "secret": digit} for digit in range(10)]


def called(name, **arguments):
    """A call as Qwen's models write it."""
    shown = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{shown}}}}}\n</tool_call>'


def template_of_trl(name):
    """One of the chat templates that TRL carries, of a model's own repository."""
    return (Path(peer_trl.import_trl().__file__).parent / f"chat_templates/{name}").read_text()


def play(task, prompt, *turns):
    """Return the one episode in which a policy says these turns."""
    script = Script(task.tokenizer, *[[turn] for turn in turns], context_length=10_000)
    end = task.tokenizer.end
    script._say = lambda text, _: ([*task.tokenizer.encode_answer(text), end], "stop")
    return complete(task, script, [prompt], Sampling(max_tokens=200), seed=0)


def rewards(task, completed):
    graded = grade(task, completed.prompts, completed.outcomes)
    return {name: values.tolist() for name, values in graded.rewards.items()}


@pytest.mark.parametrize("template", ["qwen2_5.jinja", "qwen3_instruct_2507.jinja"])
def test_an_episode_is_the_conversation_that_the_template_writes(template):
    """Prompt, calls and results, put together as tokens, are the whole conversation's tokens."""
    tokenizer = tiny_tokenizer(template_of_trl(template))
    task = from_environment(Guess, ROWS, tokenizer=tokenizer, held_out=0)
    prompt = next(p for p in task.prompts(0, 0, 10) if p.data["secret"] == 7)
    said = f"{called('guess', digit=5)}\n{called('hint')}", called("guess", digit=7), "It is 7."
    completed = play(task, prompt, *said)
    messages = [
        {"role": "user", "content": "Guess! Below 10."},
        {"role": "assistant", "content": said[0]},
        {"role": "tool", "content": "more"},
        {"role": "tool", "content": "it is 7"},
        {"role": "assistant", "content": said[1]},
        {"role": "tool", "content": "yes"},
        {"role": "assistant", "content": said[2]},
    ]
    inner, tools = tokenizer._tokenizer, [Guess().guess, Guess().hint]
    text = inner.apply_chat_template(messages, tools=tools, tokenize=False)
    whole = inner.encode(text, add_special_tokens=False)
    row = to_rollout(completed, torch.ones(1))
    tokens = row.tokens[0].tolist()
    assert tokens == whole[: len(tokens)]
    wanted = [token for text in said for token in (*tokenizer.encode_answer(text), tokenizer.end)]
    assert row.tokens[0][row.mask[0]].tolist() == wanted
    assert completed.turns == [3]
    assert rewards(task, completed) == {"environment": [1], "calls": [3], "failed_calls": [0]}


@pytest.mark.parametrize("template", ["qwen2_5.jinja", "qwen3.jinja"])
def test_trl_takes_the_same_object_and_writes_the_same_tokens(template, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = peer_trl.import_trl()
    tokenizer = tiny_tokenizer(template_of_trl(template))
    tokenizer._tokenizer.eos_token = "<|im_end|>"  # as Qwen's models have it
    tokenizer._tokenizer.pad_token = "</s>"
    folder, _ = tiny_pretrained(tmp_path / "model")
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    trainer = trl.GRPOTrainer(
        str(folder), None, args, Dataset.from_list(rows),
        processing_class=tokenizer._tokenizer, environment_factory=Guess,
    )  # fmt: skip
    task = from_environment(Guess, rows, tokenizer=tokenizer, held_out=0)
    prompt = task.prompts(0, 0, 1)[0]
    shown = [{"role": "user", "content": "Guess! Below 10."}]
    ids = tokenizer._tokenizer.apply_chat_template(
        shown, tools=trainer.tools, add_generation_prompt=True, return_dict=False,
        chat_template=trainer.chat_template,
    )  # fmt: skip
    assert task.tokenizer.encode(prompt.text) == ids
    for results in (["more"], ["more", "it is 7"]):
        messages = [{"role": "tool", "name": "guess", "content": each} for each in results]
        suffix = trainer._get_tool_suffix_ids(messages)
        assert task.tokenizer.encode_results(results) == suffix


def test_what_goes_wrong_in_a_call_is_told_to_the_policy_and_counted():
    class Broken(Guess):
        def broken(self) -> str:
            raise RuntimeError("out of order")

    task = from_environment(Broken, ROWS, max_turns=9)
    prompt = task.prompts(0, 0, 1)[0]
    state, told = task.begin(prompt), []
    for call in ("broken()", "other()", "_hidden()", "get_reward()", "guess(number=1)"):
        state = task.act(state, call)
        told += task.observe(state).texts
    assert told[0] == "{'error': 'out of order'}"
    assert all("no tool" in text and "guess" in text for text in told[1:4])
    assert "unexpected keyword argument 'number'" in told[4]
    assert task.reward(prompt, state) == {"environment": 0.0, "calls": 5.0, "failed_calls": 5.0}
    assert task.reward_weights == {"calls": 0.0, "failed_calls": 0.0}
    assert task.observe(task.act(state, "I give up.")) is None


def test_the_forms_of_a_call():
    one = ToolCall("guess", {"digit": 5})
    assert json_calls(f"Hm. {called('guess', digit=5)} {called('guess', digit=5)}") == [one, one]
    for wrong in ("", "5", '{"name": 3}', '{"name": "guess", "arguments": [5]}', "[" * 9000):
        assert json_calls(f"<tool_call>{wrong}</tool_call>") == [ToolCall("", {})]
        assert json_calls(wrong) == []
    assert python_calls(' guess(digit=-1, names=["a"])\n')[0].arguments == {
        "digit": -1,
        "names": ["a"],
    }
    for wrong in (
        "5",
        "guess",
        "guess(5)",
        "guess(digit=x)",
        "a.b()",
        "guess(",
        "(" * 999,
    ):
        assert python_calls(wrong) == []


def test_reward_functions_get_what_trls_get():
    def found(environments, **columns):
        assert [each.secret for each in environments] == columns["secret"]
        return [float(each.found) for each in environments]

    def short(completions, **columns):
        assert all(each["role"] in ("assistant", "tool") for said in completions for each in said)
        return [-float(len(said)) for said in completions]

    def one(prompt, state):
        return float(state.environment.found)

    task = from_environment(Guess, ROWS, [found, short, one], weights={"short": 0.1}, held_out=0)
    prompt = task.prompts(0, 0, 1)[0]
    right = f"guess(digit={prompt.data['secret']})"
    graded = rewards(task, play(task, prompt, right, "done"))
    assert graded == {"environment": [1], "calls": [1], "failed_calls": [0], "found": [1],
                      "short": [-3], "one": [1]}  # fmt: skip


def test_a_tool_may_be_async_within_an_event_loop():
    """As in a notebook, whose cells run in one."""
    task = from_environment(Guess, ROWS, held_out=0)

    async def cell():
        return task.act(task.begin(task.prompts(0, 0, 1)[0]), "hint()")

    state = asyncio.run(cell())
    assert state.results.texts[0].startswith("it is ")
    assert state.failed_calls == 0


def test_a_reward_may_be_async():
    class Judged(Guess):
        async def get_reward(self):
            await asyncio.sleep(0)
            return 0.5

    task = from_environment(Judged, ROWS, held_out=0)
    completed = play(task, task.prompts(0, 0, 1)[0], "no idea")
    assert rewards(task, completed)["environment"] == [0.5]


def test_an_environment_without_a_reward_is_rewarded_by_functions():
    def found(completions):
        return [float("yes" in str(each)) for each in completions]

    task = from_environment(without("get_reward"), ROWS, found, held_out=0)
    prompt = next(p for p in task.prompts(0, 0, 10) if p.data["secret"] == 7)
    completed = play(task, prompt, "guess(digit=7)", "It is 7.")
    assert rewards(task, completed) == {"calls": [1.0], "failed_calls": [0.0], "found": [1.0]}


def test_a_reset_that_raises_is_named():
    class Gone(Guess):
        def reset(self, **row):
            raise ConnectionError("no server")

    task = from_environment(Gone, ROWS, held_out=0)
    with pytest.raises(ValueError, match="reset of Gone, an .* raised ConnectionError: no server"):
        task.prompts(0, 0, 1)


def test_an_object_is_made_once_and_reset_often():
    made = []

    class Counted(Guess):
        def __init__(self):
            made.append(self)

    task = from_environment(Counted, ROWS, held_out=0)
    for step in range(3):
        states = [task.begin(prompt) for prompt in task.prompts(0, 4 * step, 4)]
        states = [task.act(state, "guess(digit=1)") for state in states]
        assert len({id(state.environment) for state in states}) == 4
        del states  # the rollouts are gone
    assert len(made) == 4


def test_a_row_says_which_environment_is_meant():
    class Other:
        def reset(self, **row):
            return "Say."

        def say(self, word: str) -> str:
            return word

        def get_reward(self):
            return 2.0

    rows = [{"environment": kind, "prompt": "", "secret": 1, "n": n}
            for n, kind in enumerate(["guess", "other"] * 5)]  # fmt: skip
    task = from_environment({"guess": Guess, "other": Other}, rows, held_out=0)
    for prompt in task.prompts(0, 0, 10):
        state = task.act(task.begin(prompt), "say(word='x')")
        is_other = prompt.data["environment"] == "other"
        assert (task.observe(state) == ToolResults(("x",))) is is_other
        assert task.reward(prompt, state)["environment"] == 2.0 * is_other
        assert prompt.text == ("Say." if is_other else " Below 10.")
    with pytest.raises(ValueError, match=r"guess, other in the column environment, got 'x' in row"):
        from_environment({"guess": Guess, "other": Other}, [{**rows[0], "environment": "x"}])


def test_a_reset_that_draws_at_random_is_refused():
    count = iter(range(100))

    class Random(Guess):
        def reset(self, **row):
            return f"Number {next(count)}."

    task = from_environment(Random, ROWS, held_out=0)
    with pytest.raises(ValueError, match=r"reset of Random to return the same text .* 'Number 1.'"):
        task.begin(task.prompts(0, 0, 1)[0])


def without(name):
    return type("Lacking", (), {k: v for k, v in vars(Guess).items() if k != name})


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (without("reset"), {}, "a method reset, got none in Lacking"),
        (without("get_reward"), {}, "a method get_reward of each .* none of the environment"),
        ({"a": Guess, "b": without("get_reward")}, {}, "a method get_reward .* got none of b"),
        (type("Mute", (), {"reset": print, "get_reward": print}), {}, "a method reset, got none"),
        (Guess, {"weights": {"found": 2.0}}, "weights with reward functions, got 'found' alone"),
        (Guess, {"rows": [{"prompt": 3}]}, "a text or messages as prompt, got 3 in row 0"),
        (Guess, {"rows": []}, "rows in environment, got none"),
        (Guess, {"reward": lambda a, b, c: 0}, "names of their own"),
    ],
)
def test_what_is_no_environment_is_refused(factory, options, message):
    with pytest.raises(ValueError, match=f"^from_environment expects .*{message}"):
        from_environment(factory, **{"rows": ROWS, **options})


def test_a_template_tells_of_the_tools_or_is_refused():
    class Undocumented(Guess):
        def pass_on(self, word):
            return word

    template = template_of_trl("qwen2_5.jinja")
    with pytest.raises(ValueError, match=r"types and a docstring .* Undocumented\.pass_on"):
        from_environment(Undocumented, ROWS, tokenizer=tiny_tokenizer(template))
    with pytest.raises(ValueError, match="a chat template with a place for tools"):
        from_environment(Guess, ROWS, tokenizer=tiny_tokenizer(TEMPLATES["chatml"]))
    plain = tiny_tokenizer(TEMPLATES["chatml"])
    task = from_environment(Guess, ROWS, tokenizer=plain, read_calls=python_calls)
    assert "Guess! Below 10." in task.prompts(0, 0, 1)[0].text


@pytest.mark.parametrize(("template", "message"), [
    ("gemma4.jinja", "that writes what tools return, got one that leaves it out"),
    ("phi3.jinja", "that writes what tools return, got one that leaves it out"),
    ("gemma3.jinja", "with messages of tools, got Conversation roles must alternate"),
])  # fmt: skip
def test_a_template_that_has_no_place_for_results_is_refused(template, message):
    tokenizer = tiny_tokenizer(template_of_trl(template))
    with pytest.raises(ValueError, match=f"^from_environment expects .*{message}"):
        from_environment(Guess, ROWS, tokenizer=tokenizer, read_calls=python_calls)
    # Within an answer they need no message.
    from_environment(Guess, ROWS, tokenizer=tokenizer, read_calls=python_calls, stop=(")",))


class Search(Guess):
    def look(
        self, shelf: int, title: str, kind: Literal["5", "6"] | None, others: list, new: bool
    ) -> str:
        """
        Look for a book.

        Args:
            shelf: from 0 to 9.
            title: of the book.
            kind: of the shelf.
            others: that it stands beside.
            new: whether it is.

        Returns:
            What it was called with.
        """
        return repr((shelf, title, kind, others, new))


@pytest.mark.parametrize(
    "template",
    ["qwen2_5.jinja", "qwen3_5_think.jinja", "qwen3_6.jinja", "nemotron_3_nano.jinja",
     "llama3_2.jinja"],
)  # fmt: skip
def test_calls_are_read_as_the_template_writes_them(template):
    inner = tiny_tokenizer().inner
    inner.add_tokens(["<|eot_id|>"], special_tokens=True)
    inner.chat_template = template_of_trl(template)
    tokenizer = funcrl.tasks.ChatTokenizer(inner)
    task = from_environment(Search, ROWS, tokenizer=tokenizer)
    state = task.begin(task.prompts(0, 0, 1)[0])

    def result(answer):
        return task.observe(task.act(state, answer))

    for shelf, kind in ((4, "5"), ("top", None)):
        values = (shelf, '12\n"and" <b>', kind, [1, {"a": None}, "7"], False)
        call = dict(zip(("shelf", "title", "kind", "others", "new"), values, strict=True))
        assert result(tokenizer.written_call("look", call)) == ToolResults((repr(values),))
    assert result("It is 4.") is None
    if "llama" not in template:  # whose calls have no tags
        assert "no call that can be read" in result("<tool_call>look</tool_call>").texts[0]


def test_a_template_whose_calls_nothing_here_reads_asks_for_a_reader():
    tokenizer = tiny_tokenizer(template_of_trl("lfm2_2_5.jinja"))
    with pytest.raises(ValueError, match=r"^from_environment expects read_calls= .*\[guess\("):
        from_environment(Guess, ROWS, tokenizer=tokenizer)
    from_environment(Guess, ROWS, tokenizer=tokenizer, read_calls=python_calls)


def test_each_template_of_trl_writes_a_prompt_or_is_refused():
    """A processor's template may take parts of messages alone, and write no text."""
    user = [{"role": "user", "content": "2+2?"}]
    folder = Path(peer_trl.import_trl().__file__).parent / "chat_templates"
    templates = {each.name: each.read_text() for each in folder.glob("*.jinja")}
    assert len(templates) > 60
    of_one_question = "{{ messages[-1].content }} Answer:"
    for name, template in {**templates, "plain": of_one_question}.items():
        if name.startswith(("idefics3", "llava_next", "smolvlm")):
            with pytest.raises(ValueError, match="^ChatTokenizer expects .* content is a text"):
                tiny_tokenizer(template)
            continue
        tokenizer = tiny_tokenizer(template)
        wanted = tokenizer.inner.apply_chat_template(user, add_generation_prompt=True)
        assert tokenizer.encode("2+2?") == wanted["input_ids"], name
        assert "2+2?" in tokenizer.inner.decode(wanted["input_ids"]), name


@pytest.mark.parametrize("returned", [3, None, ""])
def test_a_prompt_is_needed_from_the_row_or_from_reset(returned):
    odd = type("Odd", (Guess,), {"reset": lambda self, **row: returned})
    task = from_environment(odd, [{"secret": 1}], held_out=0)
    with pytest.raises(ValueError, match=r"from_environment expects .*reset of Odd"):
        task.prompts(0, 0, 1)


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits(tmp_path):
    def task():
        made = from_environment(
            trl_environment.Guess, [{"secret": n % 10, "n": n} for n in range(40)],
            tokenizer=funcrl.tasks.CharTokenizer("0123456789?+-="), max_turns=4,
            read_calls=trl_environment.read_calls, stop=tuple("0123456789"), name="guess",
        )  # fmt: skip
        assert isinstance(made, Environment)
        return made

    def options(name):
        return TrainConfig(
            steps=4, num_prompts=2, num_generations=4, sampling=Sampling(max_tokens=2),
            warm_start=WarmStartConfig(steps=0), run_dir=tmp_path / name,
            evaluation=EvaluationConfig(every=2, num_prompts=4),
        )  # fmt: skip

    whole = funcrl.train(options("whole"), task=task())
    calls = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(options("cut"), task=task(), stop=lambda: next(calls, True))
    rest = funcrl.train(options("cut"), task=task(), resume=True)
    assert equal(whole.state.params, rest.state.params)

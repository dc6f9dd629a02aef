"""Tasks with pretrained tokenizers: what is asked, what counts as right, and what is trained on."""

import copy
import gc
import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
import transformers
from cases import TEMPLATES, tiny_model, tiny_pretrained, tiny_tokenizer

import funcrl
from funcrl.config import EvaluationConfig, OptimizerConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.tasks import (
    ChatTokenizer,
    Countdown,
    Environment,
    Judge,
    Prompt,
    ReasoningGym,
    SumDigits,
    boxed_answer,
    last_number,
    load,
    load_tokenizer,
    marked_answer,
    matches,
    same_number,
    tagged_answer,
    with_rewards,
)
from funcrl.tasks.builtin.generated import evaluate

# --- answers ----------------------------------------------------------------------------------

RIGHT = ["1234", " 1234 ", "$1234", "1,234", "$1,234", "1234.0", "1,234.00", "1234.", "+1234"]
# What a reward must not pay for, although the digits are there.
WRONG = [
    "12,34",
    "1,2,3,4",
    "1.234",
    "1 234",
    "123,4",
    "1234%",
    "1234 thousand",
    "1234 dollars",
    "1234 or 1235",
    "about 1234",
    "1234 - 1",
    "1234/1",
    "12345",
    "-1234",
    "1234.5",
    "$",
    "",
    "x = 1234",
    "1234\n5678",
    "one thousand",
    "1234e1",
    "0x4d2",
    "\u0661\u0662\u0663\u0664",
    "\uff11\uff12\uff13\uff14",
    "1234..",
    "--1234",
    "1_234",
]


@pytest.mark.parametrize("answer", RIGHT)
def test_the_same_number_is_right_however_it_is_written(answer):
    assert same_number(answer, "1234")


@pytest.mark.parametrize("answer", WRONG)
def test_a_near_miss_is_wrong(answer):
    assert not same_number(answer, "1234")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("#### 5", "5"),
        ("3 #### 5", "5"),
        ("#### 4\n#### 5", "5"),
        ("5", ""),
        ("#### 5 apples", "5 apples"),
        ("the answer is 5 ####", ""),
        ("#### 5\nBut maybe 6", "5\nBut maybe 6"),
    ],
)
def test_the_marked_answer_is_all_that_follows_the_last_mark(text, wanted):
    assert marked_answer(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer> 5 </answer>!", "5"),
        ("<answer>5", ""),
        ("5</answer>", ""),
        ("<answer><answer>5</answer>", "5"),
    ],
)
def test_the_tagged_answer_is_the_last_one(text, wanted):
    assert tagged_answer(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4 + 7 = 11", "11"),
        ("It is 13.", "13"),
        ("1,234 it is", "1234"),
        ("none", ""),
        ("3.5", ""),
        ("12 or 3.5", "12"),
        ("4+7+2=13", "13"),
        ("**13**", "13"),
        ("(13)", "13"),
        ("$13, then", "13"),
        ("2+0", "0"),
        ("-13", ""),
        ("is \u221213", ""),
        ("13%", ""),
        ("13 %", ""),
        ("13 .5", ""),
        ("x13y", ""),
        ("x13", ""),
        ("13e0", ""),
        ("1,234%", ""),
    ],
)
def test_the_last_number(text, wanted):
    assert last_number(text) == wanted


# --- gsm8k ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gsm8k():
    """The real data, from the package that carries it."""
    return load("gsm8k", tiny_tokenizer())


def test_the_checker_agrees_with_all_gold_answers(gsm8k):
    test = gsm8k.eval_prompts(10_000)
    assert len(test) == len(set(test)) == 1319
    for prompt in test:
        assert gsm8k.reward(prompt, f"So it is. #### {prompt.answer}") == {
            "correct": 1,
            "format": 1,
        }
        other = str(int(prompt.answer.replace(",", "")) + 1)
        assert gsm8k.reward(prompt, f"#### {other}")["correct"] == 0
        assert gsm8k.reward(prompt, f"It is {prompt.answer}.")["correct"] == 0
    assert not {prompt.text for prompt in test} & {each.text for each in gsm8k.prompts(0, 0, 7473)}


@pytest.mark.parametrize(
    ("completion", "correct", "vote"),
    [
        ("So it is \\boxed{50}.", 1, "50"),
        ("\\boxed{40}, no: \\boxed{50.0}", 1, "50"),
        ("\\boxed{50} #### 40", 0, "40"),  # the mark, which was asked for, counts first
        ("\\boxed{50 apples}", 0, "50 apples"),
    ],
)
def test_a_boxed_number_answers_where_there_is_no_mark(gsm8k, completion, correct, vote):
    found = gsm8k.reward(Prompt("How many?", "50"), completion)
    assert found == {"correct": correct, "format": float("####" in completion)}
    assert gsm8k.extract(completion) == vote


def test_an_epoch_is_a_permutation_and_the_next_one_another(gsm8k):
    first, second = (gsm8k.prompts(3, start, 7473) for start in (0, 7473))
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(set(first)) == 7473
    assert gsm8k.prompts(3, 7470, 6) == [*first[7470:], *second[:3]]
    assert gsm8k.prompts(4, 0, 9) != first[:9]


def test_problems_of_ones_own(tmp_path):
    for split in ("train", "test"):
        row = {"question": f"{split}?", "answer": "Well. #### 1,000"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    assert task.reward(task.eval_prompts(1)[0], "#### 1000")["correct"] == 1
    (tmp_path / "test.jsonl").write_text('{"question": "?", "answer": "no mark"}\n')
    with pytest.raises(ValueError, match="^gsm8k .*row 1 of test"):
        load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    for text in ("[1]", '{"answer": "#### 1"}', "null"):
        (tmp_path / "test.jsonl").write_text(text)
        with pytest.raises(ValueError, match="^gsm8k .*(row|line) 1 of"):
            load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    (tmp_path / "test.jsonl").write_text('\n{"question": "a"')
    with pytest.raises(ValueError, match=r"^gsm8k .*line 2 of .*test.jsonl"):
        load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    (tmp_path / "test.jsonl").write_text((tmp_path / "train.jsonl").read_text())
    with pytest.raises(ValueError, match=r"^gsm8k .*train and test.*train\?"):
        load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=f"^gsm8k .*{tmp_path}/train"):
        load(f"gsm8k:{tmp_path}", tiny_tokenizer())


def test_a_number_has_one_vote_however_it_is_written(gsm8k):
    texts = ["#### 1,234", "#### $1234.00", "#### 1234", "#### 5", "#### 5", "5"]
    assert [gsm8k.extract(text) for text in texts] == ["1234"] * 3 + ["5", "5", ""]
    assert gsm8k.extract("#### 1000 apples") == "1000 apples"
    assert gsm8k.extract("#### 1,000") == "1000"


def test_problems_in_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split in ("train", "test"):
        rows = pyarrow.table({"question": [f"{split}?"], "answer": ["#### 7"]})
        pyarrow.parquet.write_table(rows, tmp_path / f"{split}.parquet")
    task = load(f"gsm8k:{tmp_path}", tiny_tokenizer())
    assert task.eval_prompts(1)[0].answer == "7"
    assert task.prompts(0, 0, 1)[0].text.startswith("train?")


# --- math ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def competition():
    return load("math", tiny_tokenizer())


def test_math_agrees_with_all_gold_answers(competition):
    test = competition.eval_prompts(10_000)
    train = competition.prompts(0, 0, 7498)  # of 7,500, two of which have an empty box
    assert len(test) == len(set(test)) == 500
    assert sorted(train) == sorted(competition.prompts(0, 7498, 7498))
    assert not {prompt.text for prompt in test} & {prompt.text for prompt in train}
    for prompt in test:
        completion = f"As \\boxed{{?}} shows, it is $\\boxed{{{prompt.answer}}}$."
        assert competition.reward(prompt, completion) == {"correct": 1, "format": 1}


# (gold, the same, not the same)
MEANT = [
    ("\\frac{1}{2}", ["0.5", "\\frac12", "\\dfrac{1}{2}", "1/2", "\\frac24"], ["2", "1", "-0.5"]),
    ("2\\sqrt{3}", ["\\sqrt{12}", "\\sqrt{3}\\cdot2"], ["\\sqrt{6}", "3.46"]),
    ("(3,\\frac{\\pi}{2})", ["\\left( 3, \\frac{\\pi}{2} \\right)"], ["(\\frac{\\pi}{2},3)", "3"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2"], ["x^2+2x", "(x+1)^3"]),
    ("1,234", ["1234"], ["1.234", "1234, 5", "1234 or 5", ""]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("gold", "same", "other"), MEANT)
def test_math_compares_what_is_meant(competition, gold, same, other):
    def correct(answer):
        return competition.reward(Prompt("?", gold), f"\\boxed{{{answer}}}")["correct"]

    assert [correct(answer) for answer in same] == [1] * len(same)
    assert [correct(answer) for answer in other] == [0] * len(other)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{4}, no: \\boxed{ 5 }", "5"),
        ("\\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{5", ""),
        ("\\boxed{4} \\boxed{5", ""),
        ("5", ""),
        ("boxed{5}", ""),
    ],
)
def test_the_boxed_answer_is_the_last_one(text, wanted):
    assert boxed_answer(text) == wanted


@pytest.mark.slow
def test_an_answer_that_would_take_for_ever_is_wrong():
    judge = Judge(seconds=0.5)
    assert judge.same("2.0", "2")
    child = judge._child
    assert not judge.same("9^{9^{9^9}}", "2")
    assert child.returncode is not None
    assert judge.same("2.0", "2")  # by another process
    assert judge._child is not child
    judge._child.kill()
    assert judge.same("4/2", "2")  # one that died is replaced
    assert not judge.same("1" * 10_000, "2")
    child = judge._child
    del judge
    gc.collect()
    assert child.poll() is not None  # nothing is left behind


@pytest.mark.parametrize(
    "answer", ["\\neq 5", "6 \\Rightarrow 5", "3=5", "x=1=5", "1*5", "\\sum_{i=1}^{5}1"]
)
def test_a_number_is_to_be_worked_out(competition, answer):
    assert competition.reward(Prompt("?", "5"), f"\\boxed{{{answer}}}")["correct"] == 0
    assert competition.reward(Prompt("?", "5"), "\\boxed{x = 5}")["correct"] == 1


@pytest.mark.slow
def test_problems_of_ones_own_for_math(tmp_path):
    for split in ("train", "test"):
        row = {"problem": f"{split}?", "solution": "Well, \\boxed{\\frac12}."}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = load(f"math:{tmp_path}", tiny_tokenizer())
    assert task.prompts(0, 0, 1)[0].text.startswith("train?")
    assert task.reward(task.eval_prompts(1)[0], "\\boxed{0.5}")["correct"] == 1
    (tmp_path / "test.jsonl").write_text('{"problem": "?", "solution": "no box"}\n')
    with pytest.raises(ValueError, match="^math .*row 1 of"):
        load(f"math:{tmp_path}", tiny_tokenizer())
    (tmp_path / "test.jsonl").write_text('{"problem": "?"\n')
    with pytest.raises(ValueError, match="^math .*line 1 of"):
        load(f"math:{tmp_path}", tiny_tokenizer())


# --- rewards put together ---------------------------------------------------------------------


def test_more_rewards_are_weighed_beside_the_tasks_own():
    thinks = matches("<think>.*</think>.+")
    lengths = lambda prompt, text: float(len(text))  # noqa: E731 (what a user would write)
    task = with_rewards(
        Gsm8kLike(), {"thinks": thinks, "length": lengths}, {"length": -0.01, "thinks": 0.5}
    )
    prompts = [Prompt("?", "5")] * 2
    graded = funcrl.rollouts.grade(task, prompts, ["<think>\n</think>5", "5"])
    assert list(graded.rewards) == ["correct", "format", "thinks", "length"]
    # 1 + 0.1 + 0.5 - 0.17 for the first, 1 + 0.1 - 0.01 for the second
    assert graded.total.tolist() == pytest.approx([1.43, 1.09])
    again = funcrl.rollouts.grade(task, prompts, ["5", "5"], {"length": 0.0})
    assert again.total.tolist() == pytest.approx([1.1, 1.1])
    with pytest.raises(ValueError, match="^grade .*weight.*'size'"):
        funcrl.rollouts.grade(task, prompts, ["5", "5"], {"size": 0.0})
    with pytest.raises(ValueError, match="^with_rewards .*names.*'correct'"):
        with_rewards(Gsm8kLike(), {"correct": thinks}).reward(prompts[0], "5")
    with pytest.raises(ValueError, match="^with_rewards .*weights .*'x'"):
        with_rewards(Gsm8kLike(), {"thinks": thinks}, {"x": 1.0})
    wrapped = with_rewards(funcrl.tasks.Calculator(), {"x": lengths})
    assert not isinstance(task, Environment)
    assert isinstance(wrapped, Environment)
    assert copy.deepcopy(wrapped).name == "calculator"


class Gsm8kLike(SumDigits):
    reward_weights = {"correct": 1.0, "format": 0.1}  # noqa: RUF012 (read only)

    def reward(self, prompt, completion):
        return {"correct": 1.0, "format": 1.0}


def test_a_run_punishes_what_is_too_long(tmp_path):
    config = TrainConfig(
        run_dir=tmp_path / "run", steps=1, num_prompts=4, overlong=4,
        sampling=Sampling(max_tokens=6), warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=0),
    )  # fmt: skip
    row = funcrl.train(config).history[1]
    assert -1 <= row["rewards/overlong/mean"] < 0
    total = row["rewards/correct/mean"] + row["rewards/overlong/mean"]
    assert row["reward"] == pytest.approx(total, abs=1e-6)
    with pytest.raises(ValueError, match="^train .*--overlong .*9"):
        TrainConfig(overlong=9, sampling=Sampling(max_tokens=8))


# --- countdown, reasoning-gym, words ----------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * 5 + 7", 22),
        ("(7 - 3) / 5", Fraction(4, 5)),
        ("7 * 5", None),
        ("3 * 5 + 7 + 3", None),
        ("3 ** 5 + 7", None),
        ("3 * 5 +", None),
        ("3 / (5 - 5) + 7", None),
        ("", None),
        ("abs(3) * 5 + 7", None),
        ("3.0 * 5 + 7", None),
        ("True + 5 + 7", None),
        ("-3 * 5 + 7", None),
        ("(" * 150 + "3", None),
    ],
)
def test_an_expression_of_exactly_the_numbers_has_a_value(expression, value):
    assert evaluate(expression, [3, 5, 7]) == value


def solutions(numbers, target):
    """Some expression with the target's value: the puzzles come from left to right."""
    texts = {str(numbers[0])}
    for number in numbers[1:]:
        texts = {f"({text}) {sign} {number}" for text in texts for sign in "+-*"}
    return [text for text in texts if evaluate(text, numbers) == target]


@pytest.mark.slow
def test_every_puzzle_has_a_solution_and_no_held_out_one_is_trained_on():
    task = Countdown(tiny_tokenizer(), count=3)
    held_out, trained = task.eval_prompts(50), task.prompts(0, 0, 300)
    assert len(held_out) == 50
    for prompt in [*held_out, *trained[:50]]:
        numbers, _, target = prompt.answer.partition("=")
        numbers = [int(number) for number in numbers.split()]
        found = solutions(numbers, int(target))
        assert found
        answer = f"<answer>{found[0]}</answer>"
        assert task.reward(prompt, answer) == {"correct": 1.0, "format": 1.0}
        assert task.reward(prompt, f"<answer>{target}</answer>")["correct"] == 0.0

    def puzzles(prompts):
        return {
            (tuple(sorted(p.answer.split("=")[0].split())), p.answer.split("=")[1]) for p in prompts
        }

    assert not puzzles(held_out) & puzzles(trained)
    many = task.eval_prompts(800)
    assert len(puzzles(many)) == len(many) == 800  # (3, 5, 7) and (5, 3, 7) are one puzzle
    assert task.prompts(0, 5, 3) == trained[5:8]


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["chain_sum", "spell_backward", "simple_equations"])
def test_a_generator_of_reasoning_gym(generator):
    task = load(f"reasoning_gym:{generator}", tiny_tokenizer())
    held_out, trained = task.eval_prompts(100), task.prompts(0, 0, 40)
    assert task.name == f"reasoning_gym:{generator}"
    assert not {p.text for p in task.eval_prompts(500)} & {p.text for p in trained}
    assert task.prompts(0, 7, 2) == trained[7:9]
    for prompt in [*held_out[:20], *trained[:20]]:
        right = task.reward(prompt, f"Hm. <answer>{prompt.answer}</answer>")
        assert right == {"correct": 1.0, "format": 1.0}
        assert task.reward(prompt, "<answer>banana</answer>")["correct"] < 1.0
        assert task.reward(prompt, prompt.answer) == {"correct": 0.0, "format": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generator", "answers"),
    [
        ("prime_factorization", ["two times 3", "2 * x"]),
        ("boxnet", ["0", "[[1]]", '{"a": 1}']),
        ("game_of_life", ["{}", '{"a": 1}']),
        ("complex_arithmetic", ["nan", "nan + nani", "inf"]),
        ("countdown", ["9**9**9", "9*\n*9**9", "9!!!!", "exit()", "().__class__"]),
        ("binary_matrix", ["9**9**9", "9*\n*9**9**9", "exit()"]),
        ("spiral_matrix", ["9**9**9", "exit()"]),
        ("string_insertion", ["9**9**9", "exit()"]),
        ("n_queens", ["9**9**9", "exit()"]),
    ],
)
def test_a_wrong_answer_of_any_kind_scores_low(generator, answers):
    """A verifier that raises would end a run, one that runs text as Python could do anything."""
    task = load(f"reasoning_gym:{generator}", tiny_tokenizer())
    prompts = task.eval_prompts(20)
    for answer in answers:
        completion = f"<answer>{answer}</answer>"
        assert all(task.reward(prompt, completion)["correct"] < 0.1 for prompt in prompts)
    for prompt in prompts:
        known = prompt.answer not in ("None", "")  # some generators know no answer of their own
        assert task.reward(prompt, task.demonstrate(prompt))["correct"] == float(known)


def test_generators_that_pay_for_anything_or_never_end_are_refused():
    for name in ("game_of_life_halting", "puzzle24", "simple_integration", "composite"):
        with pytest.raises(ValueError, match=f"^reasoning_gym .*'{name}': it"):
            ReasoningGym(name, tiny_tokenizer())


@pytest.mark.slow
def test_problems_that_depend_on_the_hash_seed_need_a_fixed_one():
    script = """
from funcrl.tasks import ReasoningGym
for name in ("isomorphic_strings", "polynomial_multiplication", "ransom_note"):
    task = ReasoningGym(name, None)
    print([(prompt.text, prompt.answer) for prompt in task.eval_prompts(20)])
    assert all(task.reward(p, task.demonstrate(p))["correct"] == 1 for p in task.eval_prompts(9))
    for text in ("x**9**9**9", "(x**9)**9", "exit()", "1" * 60 + "!"):
        assert task.reward(task.eval_prompts(1)[0], f"<answer>{text}</answer>")["correct"] == 0
"""

    def run(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    first, second, random = run("0"), run("0"), run("random")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "reasoning_gym expects PYTHONHASHSEED=0" in random.stderr


@pytest.mark.parametrize("name", ["gsm8k", "countdown", "countdown:5", "reasoning_gym:chain_sum"])
def test_what_a_task_demonstrates_is_right(name):
    task = load(name, tiny_tokenizer())
    for prompt in task.prompts(0, 0, 50):
        shown = funcrl.loop.episodes.demonstration(task, prompt)
        assert task.reward(prompt, shown.outcome) == {"correct": 1.0, "format": 1.0}
        said = [token for token, mine in zip(*shown[:2], strict=True) if mine]
        assert task.tokenizer.decode(said) == shown.outcome
        assert "<<" not in shown.outcome


def test_a_warm_start_on_wrong_answers_is_refused_before_any_step():
    class Marked(SumDigits):
        """Wants a mark, and has none in its answers."""

        def reward(self, prompt, completion):
            return {"correct": float(marked_answer(completion) == prompt.answer)}

    task = Marked(3)
    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
    with pytest.raises(ValueError, match="^warm_start .*demonstrations"):
        funcrl.warm_start(
            funcrl.logprob_fn(model), funcrl.init_params(model, seed=0), task,
            WarmStartConfig(steps=2), seed=0, accuracy=lambda params: 0.0,
        )  # fmt: skip


def test_digits_in_words():
    task = SumDigits(3, tiny_tokenizer())
    prompt = task.eval_prompts(1)[0]
    assert prompt.text.startswith("What is ")
    assert task.reward(prompt, f"That is {prompt.answer}.") == {"correct": 1.0}
    assert task.reward(prompt, f"{prompt.answer} or 99") == {"correct": 0.0}


def test_many_digits_are_held_out_without_looking_at_all():
    found = SumDigits(9).eval_prompts(200)
    assert len(set(found)) == 200
    assert SumDigits(9).eval_prompts(200) == found


def test_countdown_refuses_what_has_no_puzzles():
    tokenizer = tiny_tokenizer()
    for name in ("countdown:x", "countdown:-2", "sum_digits:3.5", "calculator:a"):
        with pytest.raises(ValueError, match=f"^load .*--task {name}"):
            load(name, tokenizer)
    for options in ({"count": 0}, {"count": 30}, {"largest": 1}, {"largest": 0}):
        with pytest.raises(ValueError, match=f"^Countdown expects .*{min(options)}"):
            Countdown(tokenizer, **options)
    with pytest.raises(ValueError, match="^Countdown .*hold out"):
        Countdown(tokenizer, count=2, largest=2).eval_prompts(1)


def test_tasks_that_cannot_be_are_refused():
    for name in ("gsm8k", "math", "countdown", "reasoning_gym:chain_sum"):
        with pytest.raises(ValueError, match=f"^load .*--task {name.split(':')[0]}.*--model"):
            load(name)
    with pytest.raises(ValueError, match="^reasoning_gym .*generators, got 'x'"):
        ReasoningGym("x", tiny_tokenizer())
    with pytest.raises(ValueError, match="^load .*--task .*'gsm9k'"):
        load("gsm9k")


# --- tokenizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>"), ("llama", "<|eot|>"), ("none", "</s>")]
)
def test_a_prompt_is_the_template_around_the_text(template, end):
    tokenizer = tiny_tokenizer(TEMPLATES[template])
    inner = tokenizer._tokenizer
    assert tokenizer.end == inner.convert_tokens_to_ids(end)
    tokens = tokenizer.encode("4 + 7?")
    if template == "none":
        assert inner.decode(tokens) == "4 + 7?"
    else:
        wanted = inner.apply_chat_template(
            [{"role": "user", "content": "4 + 7?"}], add_generation_prompt=True, tokenize=False
        )
        assert inner.decode(tokens) == wanted
        assert tokens == inner(wanted, add_special_tokens=False)["input_ids"]
        asked = ChatTokenizer(inner, system="Be brief.").encode("4 + 7?")
        assert "Be brief." in inner.decode(asked)
    assert tokenizer.decode([*inner.encode("11", add_special_tokens=False), tokenizer.end]) == "11"


def test_every_end_ends_an_answer(tmp_path):
    """The template's, the tokenizer's, and those of the model's generation_config.json."""
    folder, _ = pretrained(tmp_path / "model")
    inner = load_tokenizer(folder)._tokenizer
    ids = inner.convert_tokens_to_ids
    assert load_tokenizer(folder).ends == (ids("<|im_end|>"), ids("</s>"))
    for found in (ids("<|eot|>"), [ids("<|eot|>"), ids("</s>")]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
        tokenizer = load_tokenizer(folder)
        assert set(tokenizer.ends) == {ids("<|im_end|>"), ids("</s>"), ids("<|eot|>")}
    tokens = [*inner.encode("11", add_special_tokens=False), ids("</s>")]
    assert tokenizer.decode(tokens) == "11"

    class Asked:
        context_length = 9
        push = score = close = None

        def generate(self, prompts, sampling, seed):
            self.sampling = sampling
            raise StopIteration

    asked, task = Asked(), SumDigits(3, tokenizer)
    with pytest.raises(StopIteration):
        funcrl.rollouts.complete(task, asked, task.prompts(0, 0, 1), Sampling(), seed=0)
    assert asked.sampling.stop_tokens == tokenizer.ends


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}'])
def test_ends_that_are_no_tokens_are_refused_by_their_file(tmp_path, text):
    folder, _ = pretrained(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^load_tokenizer expects .*generation_config.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "llama"])
@pytest.mark.parametrize("has_config", [True, False])
def test_weights_without_a_tokenizer_are_not_given_an_empty_one(tmp_path, kind, has_config):
    """Transformers makes a tokenizer of a folder that has none, for some kinds of model."""
    folder, _ = pretrained(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    if not has_config:
        (folder / "tokenizer_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(FileNotFoundError, match=r"^load_tokenizer .* got none; .*--tokenizer"):
        load_tokenizer(folder)


def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path):
    import gguf

    model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=20))
    plain = funcrl.save_params(tmp_path / "m.gguf", model, funcrl.init_params(model, seed=0))
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for file in (plain, tmp_path / "none.gguf"):
        with pytest.raises(ValueError, match=r"^load_tokenizer .* got none; .*--tokenizer"):
            load_tokenizer(file)
        with pytest.raises(ValueError, match=r"^save_params .* got none"):
            funcrl.save_params(tmp_path / "x", model, funcrl.init_params(model, 0), tokenizer=file)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 12345.", ["It", "'s", "_12345", "."]),
        ("smollm", "It's 123.", ["It", "'s", "_", "1", "2", "3", "."]),
        ("llama-bpe", "It'S 12345.", ["It", "'S", "_", "123", "45", "."]),
        ("qwen2", "It's 12.", ["It", "'s", "_", "1", "2", "."]),
        ("default", "A-12345", ["A", "-", "123", "45"]),
    ],
)
def test_a_gguf_file_says_how_text_is_split(tmp_path, name, text, pieces):
    splits = gguf_tokenizer(tmp_path / "model.gguf", name)._tokenizer.backend_tokenizer
    found = splits.pre_tokenizer.pre_tokenize_str(text)
    assert [piece.replace("\u0120", "_") for piece, _ in found] == pieces


def test_a_gguf_file_that_splits_in_an_unknown_way_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^load_tokenizer .*tokenizer.ggml.pre .*'viking'"):
        gguf_tokenizer(tmp_path / "model.gguf", "viking")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_has_the_tokenizer_that_transformers_finds(tmp_path, architecture):
    found = gguf_tokenizer(tmp_path / "model.gguf", "smollm", architecture)._tokenizer
    wanted = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert found.special_tokens_map == wanted.special_tokens_map
    assert found.get_vocab() == wanted.get_vocab()
    for text in ("abba  12\n", "It's</s> \u6f22"):
        assert found.encode(text) == wanted.encode(text)


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        ("llama", "smollm", {"qk_norm": False}),
        ("llama", "default", {"qk_norm": False}),
        ("llama", "llama-bpe", {"qk_norm": False}),
        ("qwen2", "qwen2", {"qk_norm": False, "qkv_bias": True}),
        ("qwen3", "qwen2", {"qk_norm": True}),
    ],
)
def test_what_is_saved_from_a_gguf_file_splits_text_as_it(tmp_path, architecture, name, shape):
    source = tmp_path / "model.gguf"
    wanted = gguf_tokenizer(source, name, architecture)._tokenizer
    model = tiny_model(vocab_size=258, **shape)
    params = funcrl.init_params(model, seed=0)
    folder = funcrl.save_params(tmp_path / "saved", model, params, tokenizer=source)
    saved = load_tokenizer(folder)._tokenizer
    for text in ("x  12345 It'S", "A-1\n\n 2ab"):
        assert saved.encode(text) == wanted.encode(text)
        pieces = [
            each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) for each in (saved, wanted)
        ]
        assert pieces[0] == pieces[1]


def gguf_tokenizer(path, name, architecture="llama"):
    import gguf
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "</s>"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(path)


def test_a_systems_message_without_a_template_is_refused():
    with pytest.raises(ValueError, match="^ChatTokenizer .*system.*'Be brief.'"):
        ChatTokenizer(tiny_tokenizer(None)._tokenizer, system="Be brief.")
    with pytest.raises(ValueError, match="^train .*--system-prompt "):
        funcrl.build(TrainConfig(system_prompt="Be brief."))


@pytest.mark.parametrize("template", ["chatml", "llama", "none"])
def test_the_mask_covers_exactly_the_sampled_tokens(template):
    """The rollout's rows are the prompt's tokens and then the sampler's, none encoded again."""
    tokenizer = tiny_tokenizer(TEMPLATES[template])
    task = SumDigits(3, tokenizer)
    model = funcrl.models.Transformer(funcrl.models.shape("micro", tokenizer.vocab_size))
    sampler = funcrl.generators.Sampler(model)
    sampler.push(funcrl.init_params(model, seed=0))
    prompts = task.prompts(0, 0, 3)
    completed = funcrl.rollouts.complete(task, sampler, prompts, Sampling(2, max_tokens=9), seed=0)
    rollout = funcrl.rollouts.to_rollout(completed, torch.zeros(6))
    for row in range(6):
        asked = tokenizer.encode(prompts[row // 2].text)
        count = int(completed.samples.mask[row].sum())
        mask = rollout.mask[row]
        assert mask.nonzero().squeeze(1).tolist() == list(range(len(asked), len(asked) + count))
        assert rollout.tokens[row, : len(asked)].tolist() == asked
        assert torch.equal(rollout.tokens[row][mask], completed.samples.tokens[row, :count])


def pretrained(folder):
    return tiny_pretrained(folder, TEMPLATES["chatml"])


def run_config(folder, run, **options):
    return TrainConfig(
        **{
            "run_dir": run,
            "model": str(folder),
            "steps": 2,
            "num_prompts": 2,
            "num_generations": 2,
            "sampling": Sampling(max_tokens=3),
            "warm_start": WarmStartConfig(steps=0),
            "evaluation": EvaluationConfig(num_prompts=3),
            "optimizer": OptimizerConfig(learning_rate=1e-3),
            **options,
        }
    )


@pytest.mark.slow
def test_a_run_begins_with_the_weights_and_the_tokenizer_of_a_folder(tmp_path):
    folder, params = pretrained(tmp_path / "model")
    trained = funcrl.train(run_config(folder, tmp_path / "run"))
    first = funcrl.runs.read_lines(tmp_path / "run" / "completions.jsonl")[0]
    assert first["prompt"].startswith("What is")
    like = trained.state.params
    reference, _ = funcrl.restore(tmp_path / "run" / "reference", like)  # the policy of step 0
    assert all(torch.equal(reference[name], leaf) for name, leaf in params.items())
    assert load_tokenizer(folder).encode("4")[0] == first_token(folder)
    again = funcrl.train(run_config(folder, tmp_path / "again"))
    assert all(torch.equal(again.state.params[name], leaf) for name, leaf in like.items())


def first_token(folder):
    return load_tokenizer(folder)._tokenizer.convert_tokens_to_ids("<|im_start|>")


class Loud(SumDigits):
    """One's own, for a pretrained model."""

    name = "loud"

    def __init__(self, tokenizer):
        super().__init__(2, tokenizer)


def test_ones_own_task_takes_the_models_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer()
    assert load(f"{__file__}:Loud", tokenizer).tokenizer is tokenizer
    with pytest.raises(ValueError, match="^load .*--task .*Fixed .*`tokenizer`"):
        load(f"{__file__}:Fixed", tokenizer)
    folder, _ = pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="^train .*tokenizer .*--model"):
        funcrl.train(run_config(folder, tmp_path / "run"), task=Wide())


class Fixed(SumDigits):
    """One's own, with a tokenizer that the model does not have."""

    def __init__(self):
        super().__init__()


class Wide(Fixed):
    def __init__(self):
        super().__init__()
        self.tokenizer = funcrl.tasks.CharTokenizer("".join(chr(0x4E00 + n) for n in range(999)))

    def prompts(self, seed, start, count):
        return [Prompt("\u4e00", "\u4e01")] * count

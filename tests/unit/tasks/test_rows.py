"""Tasks from rows: files and objects in memory, wrong ones, the split, and the order of prompts."""

import json
import random
from collections import Counter

import numpy as np
import pytest

import funcrl
from funcrl.tasks import ByteTokenizer, CharTokenizer, from_rows, load
from funcrl.tasks.rows import hold_out

ROWS = [
    {"prompt": "1+1=", "answer": 2, "level": 1},
    {"prompt": 'a "b", c\nd', "answer": 3, "level": 2},
    {"prompt": "ä?", "answer": 4.5, "level": 3},
]


def jsonl(folder, rows, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_list(folder, rows):
    path = folder / "data.json"
    path.write_text(json.dumps(rows, indent=1))
    return path


def lines_of_json(folder, rows):
    return jsonl(folder, rows, "data.json")


def csv(folder, rows):
    path = folder / "data.csv"
    quoted = (
        ",".join(f'"{str(v).replace(chr(34), chr(34) * 2)}"' for v in r.values()) for r in rows
    )
    path.write_text(",".join(rows[0]) + "\r\n" + "\r\n".join(quoted), encoding="utf-8-sig")
    return path


def parquet(folder, rows):
    import pyarrow
    from pyarrow import parquet

    rows = [{**row, "answer": float(row["answer"])} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    return folder / "data.parquet"


class Dataset:
    """What `datasets.Dataset` has: len and [i], and no end of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index % len(self.rows)]


def texts(task):
    return {prompt.text: prompt.data for prompt in task.prompts(0, 0, 3)}


@pytest.mark.parametrize("write", [jsonl, as_list, lines_of_json, csv, parquet])
def test_every_kind_of_file_has_the_same_prompts(tmp_path, write):
    task = load(str(write(tmp_path, ROWS)), held_out=0.0)
    assert task.name == "data"
    assert set(texts(task)) == {row["prompt"] for row in ROWS}
    assert {int(row["level"]) for row in texts(task).values()} == {1, 2, 3}
    prompt = next(each for each in task.prompts(0, 0, 3) if each.text == "ä?")
    assert task.reward(prompt, " 4.50\n") == {"correct": 1.0}
    assert task.reward(prompt, "4.5 or 5") == {"correct": 0.0}
    assert task.extract("4.50") == task.extract("4.5")
    assert task.demonstrate(prompt) == "4.5"


@pytest.mark.parametrize("made", [Dataset, iter, tuple])
def test_rows_in_memory_are_a_data_set_or_anything_with_mappings(made):
    assert texts(from_rows(made(ROWS), held_out=0.0)) == {row["prompt"]: row for row in ROWS}


def test_a_task_without_a_models_tokenizer_has_one_of_bytes():
    tokenizer = from_rows(ROWS).tokenizer
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)
    text = "ä€😀\x00a"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ä") == [195, 164]
    assert ByteTokenizer().decode([195, 65, 256]) == "\ufffdA"
    for own in (ByteTokenizer(), CharTokenizer("ab")):
        assert json.loads(own.files()["tokenizer.json"])["added_tokens"][0]["id"] == own.end


WRONG = {
    '{"prompt": "a"}\n{"prompt": 5}': "text as prompt, got 5 in line 2 of ",
    '{"prompt": "a"}\n\n{"prompt": ""}': "text as prompt, got '' in line 3 of ",
    '{"prompt": "a"}\n{"prompt": "b"': "one JSON object a line.* in line 2 of ",
    '{"prompt": "a"}\n[1]': "one JSON object a line.* in line 2 of ",
    '{"prompt": "a"}\n{"text": "b"}': "got no 'prompt' in line 2 of ",
    '{"prompt": "a"}\n{"prompt": "b", "more": 1}': "got 'more' besides in line 2 of ",
    '{"question": "a"}': "column prompt or a column messages in .*, got question",
    '{"prompt": "a", "messages": []}': "either a column prompt or a column messages",
    '{"prompt": "a", "answer": [1]}': r"text or a number as answer, got \[1\] in line 1 of ",
    '{"prompt": "a", "answer": true}': "text or a number as answer, got True in line 1 of ",
    '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": null}': "--reward, .* in line 2 of ",
    '{"messages": [{"role": "user", "content": "a"}]}': "pretrained model, whose chat template",
    "\n": "rows in .*, got none",
    "[" * 100_000: "one JSON object a line.* in line 1 of ",
    '{"prompt": "' + "x" * 100_000: "one JSON object a line.* in line 1 of ",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:50])
def test_wrong_rows_are_refused_by_file_and_line(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^load expects .*{WRONG[text]}") as found:
        load(str(path))
    assert str(path) in str(found.value)
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,1\nb\n", "1 fields for 2 columns in line 3 of "),
        (b'prompt,answer\n"a\nb",1\n"c"d,1\n', "in line 4 of "),
        (b"prompt,prompt\na,1\n", "one twice.* in line 1 of "),
        (b"prompt,answer\n\xff,1\n", "UTF-8.* in line 2 of "),
    ],
)
def test_wrong_csv_is_refused_by_file_and_line(tmp_path, content, message):
    (tmp_path / "data.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"^load expects .*{message}.*data.csv"):
        load(str(tmp_path / "data.csv"))


def test_what_is_no_file_of_rows_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^load expects .*no\.jsonl, got no such file"):
        load(str(tmp_path / "no.jsonl"))
    (tmp_path / "data.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="^load expects parquet in "):
        load(str(tmp_path / "data.parquet"))
    for text, message in (
        ("[1]", r"each row to be a mapping .*, got 1 as rows\[0\]"),
        ('[{"prompt": "a"', "JSON in "),
        ("[" * 9000, "JSON in "),
        ("[]", "expects rows in "),
        ('"a"', "one JSON object a line"),
    ):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises((ValueError, TypeError), match=f"^load expects .*{message}|{message}"):
            load(str(tmp_path / "data.json"))
    with pytest.raises(ValueError, match=r"--task to be .*\.jsonl, \.json, \.csv.*'data\.tsv'"):
        load("data.tsv")
    with pytest.raises(
        ValueError, match="--held-out 0.5 with a file of rows or a data set, got --task sum_dig"
    ):
        load("sum_digits", held_out=0.5)
    for rows in ("abc", {"prompt": ["a"]}, 5, ["a"], [{1: 2}]):
        with pytest.raises(TypeError, match="^from_rows expects .*mapping"):
            from_rows(rows)


def filled(template, row=None):
    row = row or {"question": "1+1?", "level": 2, "prompt": "p", "answer": "2"}
    return from_rows([row], prompt_template=template, held_out=0.0).prompts(0, 0, 1)[0].text


def test_a_template_writes_prompts_from_any_columns():
    assert filled("Q: {question}\nA ({level}):") == "Q: 1+1?\nA (2):"
    assert filled("{{{question}}} {{}}") == "{1+1?} {}"
    assert filled("> {a b}", {"a b": "c", "answer": 1}) == "> c"
    for value in (True, None, ["a"], {"b": 1}):
        with pytest.raises(ValueError, match="text or a number in the column 'a' of --prompt-temp"):
            filled("{a}", {"a": value, "answer": 1})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{nothing}", "column 'nothing' .*got question, level, prompt, answer in row 0 of rows"),
        ("{}", "names of columns in braces"),
        ("{question.upper}", "names of columns in braces"),
        ("{question[0]}", "names of columns in braces"),
        ("{question!r}", "names of columns in braces"),
        ("{level:05d}", "names of columns in braces"),
        ("{question", "other braces doubled"),
        ("", "text as prompt, got ''"),
    ],
)
def test_a_wrong_template_is_refused(template, message):
    with pytest.raises(ValueError, match=f"^from_rows expects .*{message}"):
        filled(template)


class Chat(ByteTokenizer):
    """A tokenizer with a chat template; `encode` would write it around a text."""

    def render(self, messages):
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"

    def encode(self, text):
        return self.encode_answer(f"<user>{text}<assistant>")

    def encode_answer(self, text):
        return ByteTokenizer().encode(text)


TALK = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_are_written_by_the_models_template_once(column):
    task = from_rows([{column: TALK, "answer": "2"}], tokenizer=Chat(), held_out=0.0)
    (prompt,) = task.prompts(0, 0, 1)
    assert prompt.text == "<system>Add.<user>1+1?<assistant>"
    assert bytes(task.tokenizer.encode(prompt.text)).decode() == prompt.text
    plain = from_rows([{"prompt": "1+1?", "answer": "2"}], tokenizer=Chat(), held_out=0.0)
    tokens = plain.tokenizer.encode(plain.prompts(0, 0, 1)[0].text)
    assert bytes(tokens).decode() == "<user>1+1?<assistant>"


@pytest.mark.parametrize(
    "value",
    [[], ["a"], [{"role": "user"}], [*TALK, {"role": "assistant", "content": "2"}]],
    ids=str,
)
def test_wrong_messages_are_refused_by_row(value):
    rows = [{"messages": TALK, "answer": "2"}, {"messages": value, "answer": "2"}]
    with pytest.raises(ValueError, match="^from_rows expects messages .* in row 1 of rows"):
        from_rows(rows, tokenizer=Chat())


SAID = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TALK, SAID]},
        {"prompt": [*TALK, SAID]},
        {"prompt": TALK, "completion": [SAID]},
        {"messages": TALK, "completion": "2"},
        {"messages": TALK, "answer": "2"},
    ],
    ids=["messages", "prompt", "messages of both", "text", "answer"],
)
def test_data_for_supervised_training_are_read_as_they_are(row):
    def asked(prompt, completion):
        return float(len(prompt.data.get("messages", prompt.data.get("prompt"))))

    task = from_rows([row], tokenizer=Chat(), held_out=0.0)
    (prompt,) = task.prompts(0, 0, 1)
    assert prompt.text == "<system>Add.<user>1+1?<assistant>"
    assert prompt.answer == task.demonstrate(prompt) == "2"
    assert task.reward(prompt, "2") == {"correct": 1.0}
    seen = from_rows([row], asked, tokenizer=Chat(), held_out=0.0)
    assert seen.reward(seen.prompts(0, 0, 1)[0], "2") == {"asked": 2.0}
    before = [dict(each) for each in TALK]
    assert before == TALK


def test_a_completion_is_the_answer_of_a_text():
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    task = from_rows(rows, held_out=0.0)
    assert {prompt.answer for prompt in task.prompts(0, 0, 2)} == {"2", "3"}
    both = from_rows([{**rows[0], "answer": "4"}], held_out=0.0)
    assert both.prompts(0, 0, 1)[0].answer == "4"


def test_the_split_depends_on_each_content_alone():
    contents = [f"problem {n}" for n in range(2000)]
    sides = dict(zip(contents, hold_out(contents, 0.1), strict=True))
    assert 140 < sum(sides.values()) < 260  # 200 expected, with a deviation of 13.4
    for seed in range(20):
        some = random.Random(seed).choices(contents, k=500)  # another order, repeats, gaps
        assert hold_out(some, 0.1) == [sides[each] for each in some]
    more = dict(zip(contents, hold_out(contents, 0.3), strict=True))
    assert all(more[each] for each in contents if sides[each])
    # SHA-256 of "problem 0" begins with 0x20, 32 of 256, on every machine.
    assert hold_out(["problem 0"] * 2, 33 / 256) == [True, True]
    assert hold_out(["problem 0"] * 2, 32 / 256) == [False, False]


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_neither_side_of_a_split_is_empty(share):
    for count in range(2, 12):
        sides = hold_out([str(n) for n in range(count)], share)
        assert {*sides} == {True, False}
    assert hold_out(["a", "b"], 0.0) == [False, False]
    assert hold_out(["a", "b"], 1.0) == [True, True]


def test_the_split_of_messages_and_of_templates_does_not_depend_on_the_tokenizer():
    class Other(Chat):
        def render(self, messages):
            return "other" + super().render(messages)

    rows = [{"messages": [{"role": "user", "content": str(n)}], "answer": n} for n in range(50)]
    asked = [
        {prompt.answer for prompt in from_rows(rows, tokenizer=each).eval_prompts(50)}
        for each in (Chat(), Other())
    ]
    assert asked[0] == asked[1] != set()


def test_rows_whose_prompt_is_too_long_are_left_out_of_both_sides():
    rows = [{"prompt": "x" * n, "answer": n} for n in range(1, 41)]
    whole, task = from_rows(rows, held_out=0.3), from_rows(rows, held_out=0.3, max_prompt_length=25)
    assert (whole.num_left_out, task.num_left_out) == (0, 15)
    sides = [
        [
            {len(prompt.text) for prompt in found}
            for found in (each.prompts(0, 0, each.num_train), each.eval_prompts(40))
        ]
        for each in (whole, task)
    ]
    assert set.union(*sides[1]) == {*range(1, 26)}
    assert sides[1] == [{n for n in side if n <= 25} for side in sides[0]]
    with pytest.raises(
        ValueError, match="^from_rows expects --max-prompt-length .* shortest .* 3 "
    ):
        from_rows(rows[2:], max_prompt_length=2)


def test_the_length_of_a_conversation_is_that_which_the_template_writes():
    rows = [{"messages": [{"role": "user", "content": "x" * n}], "answer": n} for n in (1, 9)]
    task = from_rows(rows, tokenizer=Chat(), held_out=0.0)
    short, long = sorted(
        len(task.tokenizer.encode(prompt.text)) for prompt in task.prompts(0, 0, 2)
    )
    for longest, left_out in ((short, 1), (long - 1, 1), (long, 0)):
        asked = from_rows(rows, tokenizer=Chat(), held_out=0.0, max_prompt_length=longest)
        assert asked.num_left_out == left_out


@pytest.mark.parametrize("count", [2, 7, 40])
def test_every_epoch_is_another_permutation_of_the_rows_that_are_not_held_out(count):
    task = from_rows([{"prompt": f"{n}?", "answer": n} for n in range(count)])
    held = {prompt.text for prompt in task.eval_prompts(count)}
    train = {f"{n}?" for n in range(count)} - held
    size = len(train)
    for seed in range(5):
        stream = [prompt.text for prompt in task.prompts(seed, 0, 3 * size)]
        for epoch in range(3):
            assert {*stream[epoch * size : (epoch + 1) * size]} == train
        assert Counter(stream) == dict.fromkeys(train, 3)
        cut = [task.prompts(seed, start, 2) for start in range(0, 2 * size, 2)]
        assert [prompt.text for part in cut for prompt in part] == stream[: 2 * size]
    assert len(task.eval_prompts(1)) == 1
    assert task.eval_prompts(count) == task.eval_prompts(count)


def test_a_wrong_row_of_many_is_found_without_showing_them():
    rows = [{"prompt": "x" * 10_000, "answer": 1} for _ in range(100)] + [{"answer": "x" * 10_000}]
    with pytest.raises(ValueError, match="got no 'prompt' in row 100 of rows") as found:
        from_rows(rows)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("answer", [["1", "2"], {"is": "1"}, True], ids=["list", "dict", "bool"])
def test_a_reward_gets_an_answer_of_any_kind_as_it_is(answer):
    seen = []

    def score(completion, answer):
        seen.append(answer)
        return float(bool(completion))

    rows = [{"prompt": "a", "answer": answer}]
    task = from_rows(rows, score, held_out=0.0)
    prompt = task.prompts(0, 0, 1)[0]
    assert prompt.answer == ""
    assert task.reward_batch([prompt], ["1"]) == [{"score": 1.0}]
    assert seen == [answer]
    with pytest.raises(
        ValueError, match="--reward, or a text or a number as answer, got .* in row 0"
    ):
        from_rows(rows)


def test_the_numbers_of_numpy_are_numbers():
    rows = [{"n": kind(3), "answer": kind(4)} for kind in (np.int64, np.float32, np.float64)]
    task = from_rows(rows, prompt_template="{n}?", held_out=0.0)
    found = {(prompt.text, prompt.answer) for prompt in task.prompts(0, 0, 3)}
    assert found == {("3?", "4"), ("3.0?", "4.0")}


def test_rows_are_the_users_own_and_stay_as_they_are():
    rows = [{"prompt": "a", "answer": 1}]
    task = from_rows(rows, held_out=0.0)
    task.prompts(0, 0, 1)[0].data["prompt"] = "b"
    assert rows == [{"prompt": "a", "answer": 1}]
    with pytest.raises(ValueError, match="weights with rewards, got 'a' alone"):
        from_rows(rows, weights={"a": 1.0})
    assert funcrl.tasks.from_rows is from_rows

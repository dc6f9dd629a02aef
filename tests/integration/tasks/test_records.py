"""Problems that are drawn from files, and the split of those that are made."""

import json

import pytest

from funcrl.tasks import Prompt
from funcrl.tasks.builtin.generated import check_apart, is_held_out
from funcrl.tasks.read_rows import read_records
from funcrl.tasks.rows import epochs, spread

PROBLEMS = [Prompt(text) for text in "abcde"]


def test_every_epoch_is_a_permutation_wherever_it_is_cut():
    stream = epochs(PROBLEMS, seed=3, start=0, count=15)
    orders = [stream[at : at + 5] for at in (0, 5, 10)]
    assert all(sorted(order) == PROBLEMS for order in orders)
    assert orders[0] != orders[1]
    assert [epochs(PROBLEMS, 3, n, 1)[0] for n in range(15)] == stream
    assert epochs(PROBLEMS, seed=4, start=0, count=15) != stream


def test_problems_are_spread_over_all_of_them_and_always_the_same():
    assert sorted(spread(PROBLEMS, 9)) == PROBLEMS
    assert spread(PROBLEMS, 2) == spread(PROBLEMS, 5)[:2]


def test_a_problem_in_both_splits_is_refused():
    check_apart("mine", PROBLEMS[:2], PROBLEMS[2:])
    with pytest.raises(ValueError, match="^mine .*train and test, got 'b"):
        check_apart("mine", PROBLEMS[:2], PROBLEMS[1:])


def test_the_rows_of_a_file_of_json_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "ä"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_records("mine", path) == rows
    path.write_text('{"question": "1+1?"}\n[1]\n')
    with pytest.raises(ValueError, match=r"^mine .*line 2"):
        read_records("mine", path)


def test_a_tenth_is_held_out():
    assert sum(is_held_out(number) for number in range(1000)) == 100

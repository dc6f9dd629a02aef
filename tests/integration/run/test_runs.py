"""Lines of a run's files: written, read, cut off, broken; and counts that a run recorded."""

import json

import pytest

from funcrl import runs
from funcrl.run.runs import check_given, each_line, keep_until, recorded_count, step_of


def test_a_line_that_is_no_object_is_refused_by_its_number(tmp_path):
    path = tmp_path / runs.METRICS
    for text in ("[2]", "x", '{"a": '):
        path.write_text('{"step": 1}\n' + text + "\n")
        with pytest.raises(ValueError, match=f"^report expects .* line 2 of {path}"):
            list(each_line("report", path))


@pytest.mark.parametrize("step", ["7", -1, 1.0, True, None, 2**54])
def test_a_step_is_an_integer_from_0_on(tmp_path, step):
    assert step_of("report", tmp_path, 3, {"step": 7}) == 7
    with pytest.raises(ValueError, match=f"^report expects step .* line 3 of {tmp_path}"):
        step_of("report", tmp_path, 3, {"step": step})


def test_rows_after_a_step_are_dropped_and_a_torn_last_line_too(tmp_path):
    path = tmp_path / runs.METRICS
    assert keep_until(path, 1) is None
    runs.append_lines(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert (keep_until(path, 2), runs.read_lines(path)) == (2, [{"step": 1}, {"step": 2}])
    assert (keep_until(path, 1), runs.read_lines(path)) == (1, [{"step": 1}])


def test_what_a_run_recorded_about_its_task(tmp_path):
    check_given("evaluate", tmp_path, {"task"})
    (tmp_path / runs.ENVIRONMENT).write_text('{"vocab_size": "13", "task_object": "mine"}')
    assert recorded_count(tmp_path, "vocab_size") == 13
    assert recorded_count(tmp_path, "max_turns") is None
    with pytest.raises(ValueError, match="^evaluate expects task=.* 'mine'"):
        check_given("evaluate", tmp_path, {"task"})
    for count in ("", "-1", "1.5", "\u0661", "9" * 10):
        (tmp_path / runs.ENVIRONMENT).write_text(json.dumps({"vocab_size": count}))
        with pytest.raises(ValueError, match="^export expects .*vocab_size"):
            recorded_count(tmp_path, "vocab_size", "export")

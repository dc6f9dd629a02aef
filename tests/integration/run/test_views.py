"""What a run shows: the numbers that it was given, never wider than the terminal."""

import io
import os
import re
import subprocess
import sys
import unicodedata
import warnings

import pytest
from rich.console import Console

import funcrl
from funcrl import runs
from funcrl.core import files
from funcrl.core.printing import print_safely, printable, safe_warnings, warn_safely
from funcrl.run import trackers
from funcrl.run.runs import Completion
from funcrl.run.terminal import LiveView, sparkline
from funcrl.run.trackers import tracker
from funcrl.run.views import PlainView, view_for

ROW = {
    "step": 3, "reward": 0.4375, "eval/accuracy": 0.61, "completions/mean_length": 2.84,
    "entropy": 0.215, "kl": None, "grad_norm": 1.5, "num_tokens": 1500, "step_time": 0.25,
}  # fmt: skip
EVIL = Completion(3, "1+2=", "[red]x[/red]\x1b[2J\n" + "y" * 5000, "3", 0.5, {}, "stop", 2)


def plain_lines(rows, every=0.0):
    stream = io.StringIO()
    view = PlainView(stream, every)
    view.start("a run", 100, 0)
    for row in rows:
        view.step(row, None)
    view.note("saved")
    view.close()
    return stream.getvalue().splitlines()


def test_plain_lines_are_aligned_and_without_control_characters():
    row = {**ROW, "step": 40, "reward": float("nan"), "grad_norm": 12345.0}
    lines = plain_lines([{**ROW, "step": 2}, row, {**ROW, "step": 100}])
    assert lines[0] == "a run"
    assert lines[-1] == "saved"
    assert re.match(r"step   2/100  reward  0.438  accuracy   0.61  length   2.84 ", lines[1])
    assert lines[1].endswith("left ?")  # two steps say little
    assert lines[3].endswith("left 0:00")
    assert "reward      -" in lines[2]
    assert "12,345" in lines[2]
    assert "left " in lines[2]
    assert all(char.isprintable() for line in lines for char in line)


HOSTILE = "a\x1b]0;owned\x07b\r\x9b31mc\u202ed\u2066e\x7f\ud800"
ESCAPED = r"a\x1b]0;owned\x07b\r\x9b31mc\u202ed\u2066e\x7f\ud800"


@pytest.mark.slow
def test_whatever_could_drive_a_terminal_is_escaped_and_nothing_else():
    assert printable(HOSTILE) == ESCAPED
    bidi = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    for char in map(chr, range(0x110000)):
        unsafe = unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"
        assert (printable(char) != char) == (unsafe or ord(char) in bidi), ascii(char)


@pytest.mark.parametrize("live", [False, True])
def test_a_view_shows_titles_notes_and_completions_without_driving_the_terminal(live):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200, height=40)
    view = LiveView(console) if live else PlainView(stream, every=0.0)
    view.start(HOSTILE, 10, 0)
    view.step(ROW, Completion(3, HOSTILE, HOSTILE, "3", 0.5, {}, "stop", 2))
    view.note(HOSTILE)
    view.close()
    shown = stream.getvalue()
    assert shown.count(ESCAPED) >= 2
    own = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown) if live else shown  # rich's colours
    assert printable(own.replace("\r", "")) == own.replace("\r", "")
    assert "\x1b]0" not in shown


@pytest.mark.parametrize("live", [False, True])
def test_a_step_without_an_update_says_so(live):
    dropped = {"step": 4, "reward": 0.0, "frac_reward_zero_std": 1.0, "num_tokens": 0.0}
    shown = []
    for row in (dropped, {**dropped, "num_tokens": 12.0}):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=80, height=40)
        view = LiveView(console) if live else PlainView(stream, every=0.0)
        view.start("a run", 10, 0)
        view.step(row, None)
        view.close()
        shown.append("no update: the rewards of each group are equal" in stream.getvalue())
    assert shown == [True, False]


def test_plain_lines_come_at_their_pace_but_the_ends_always():
    rows = [{"step": step, "reward": 0.1} for step in range(1, 101)]
    rows[49]["eval/accuracy"] = 0.5
    steps = [line.split("/")[0] for line in plain_lines(rows, every=1000.0) if "/100" in line]
    assert steps == ["step   1", "step  50", "step 100"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_view_shows_its_numbers_within_the_terminal(width):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=40)
    view = LiveView(console)
    view.start("sum_digits in runs/a", 10, 0)
    view.step({**ROW, "step": 2, "eval/accuracy": 0.61}, None)
    view.step({name: value for name, value in ROW.items() if "eval" not in name}, EVIL)
    view.note("saved [bold]here")
    view.close()
    text = stream.getvalue()
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert max(len(line) for line in bare.replace("\r", "\n").splitlines()) <= width
    assert "\x1b[2J" not in text  # the completion's own
    assert "[red]x[/red]" in bare
    assert "saved [bold]here" in bare
    assert "…" in bare
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text  # the cursor is back
    if width >= 80:
        for number in ("0.438", "0.61", "2.84", "0.215", "6,000"):
            assert number in bare


def test_the_view_fits_the_stream():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(view_for(io.StringIO()), PlainView)
    assert isinstance(view_for(Terminal()), LiveView)


def test_sparklines_scale_between_lowest_and_highest():
    assert sparkline([3.0, 3.0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert sparkline([float("nan"), 0.0, 7.0, 3.5], 2) == "█▁"


def read_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_every_number_once_also_after_a_resume(tmp_path):
    board = tracker("tensorboard", tmp_path, {"steps": 3})
    for step in (1, 2, 3):
        board.log({**ROW, "step": step, "reward": step / 4})
    board.completions([EVIL])
    board.close()
    again = tracker("tensorboard", tmp_path, {"steps": 3}, first_step=2)
    again.log({**ROW, "step": 3, "reward": 9.0})
    again.close()
    numbers = read_board(tmp_path)
    assert numbers["reward"] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert "kl" not in numbers


def test_the_policy_before_the_first_step_is_tracked_too(tmp_path):
    from funcrl.config import EvaluationConfig, LogConfig, TrainConfig, WarmStartConfig

    config = TrainConfig(
        run_dir=tmp_path / "run", steps=2, num_prompts=2, num_generations=2,
        warm_start=WarmStartConfig(steps=1), log=LogConfig(trackers=("tensorboard",)),
        evaluation=EvaluationConfig(every=1, num_prompts=4),
    )  # fmt: skip
    history = funcrl.train(config).history
    found = read_board(tmp_path / "run")["eval/accuracy"]
    assert found == [(row["step"], row["eval/accuracy"]) for row in history]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself does for a missing module
    with pytest.raises(ModuleNotFoundError, match=f"--log.trackers {name}: pip install {name}"):
        tracker(name, tmp_path, {})


def test_a_tracker_that_fails_is_told_once_and_training_goes_on():
    class Broken:
        def log(self, row):
            raise ConnectionError("no network")

        def close(self):
            pass

    said = []
    careful = trackers._Careful("wandb", Broken(), said.append)
    for _ in range(3):
        careful.log(ROW)
    careful.close()
    assert said == [
        "wandb failed (ConnectionError: no network); training goes on, and metrics.jsonl has "
        "every number.",
        "wandb failed 3 times.",
    ]


def test_lines_survive_a_crash(tmp_path):
    path = tmp_path / "metrics.jsonl"
    runs.append_lines(path, [{"step": 1, "a": float("inf")}, {"step": 2, "a": [float("nan"), "é"]}])
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert len(runs.read_lines(path)) == whole[:cut].count(b"\n")
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=f"^read_lines .* line 2 of {path}"):
        runs.read_lines(path)
    assert runs.read_lines(tmp_path / "none") == []


def test_whole_files_replace_and_leave_no_draft(tmp_path):
    path = tmp_path / "x"
    files.write_whole(path, "one")
    files.write_whole(path, "two")
    assert path.read_text() == "two"
    with pytest.raises(TypeError):
        files.write_whole(path, None)
    assert path.read_text() == "two"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_trackers_failure_and_pythons_warnings_drive_no_terminal(tmp_path, capsys, monkeypatch):
    class Broken:
        def __init__(self, *_):
            pass

        def log(self, row):
            raise ConnectionError(HOSTILE)

    monkeypatch.setattr(trackers, "_TensorBoard", Broken)
    tracker("tensorboard", tmp_path, {}).log(ROW)
    assert ESCAPED in capsys.readouterr().out
    with pytest.warns(UserWarning, match="owned") as caught:
        warn_safely(HOSTILE, stacklevel=2)
    assert str(caught[0].message) == ESCAPED
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with safe_warnings(sys.stderr):
            warnings.warn_explicit(HOSTILE, UserWarning, "task.py", 3)
    assert f"task.py:3: UserWarning: {ESCAPED}" in capsys.readouterr().err
    print_safely(HOSTILE)
    assert capsys.readouterr().out == ESCAPED + "\n"


@pytest.mark.slow
def test_the_command_line_prints_a_tasks_warnings_safely(tmp_path):
    """In a process of its own: here warnings are errors."""
    (tmp_path / "warning.py").write_text(
        "import warnings\nfrom funcrl.tasks import SumDigits\n"
        "class Warning_(SumDigits):\n"
        "    def reward(self, prompt, completion):\n"
        "        warnings.warn('\\x1b[2J' + prompt.text)\n"
        "        raise RuntimeError('the end')\n"
    )
    args = ["train", "--task", f"{tmp_path / 'warning.py'}:Warning_", "--run-dir", tmp_path / "run"]
    command = [sys.executable, "-m", "funcrl", *map(str, args)]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert r"UserWarning: \x1b[2J" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "the end" in done.stderr

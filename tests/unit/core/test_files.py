"""Files are written whole and read within bounds; text and arrays are shown as what they are."""

import contextlib
import os

import pytest
import torch

from funcrl.core import arrays, files, printing, rows


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    files.write_whole(path, "steps: 3")
    with contextlib.suppress(KeyboardInterrupt), files.whole_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert files.read_yaml("train", path) == {"steps": 3}


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    text, pipe = tmp_path / "text", tmp_path / "pipe"
    files.write_whole(text, "twelve bytes")
    os.mkfifo(pipe)
    assert files.read_text("report", text, most=12) == "twelve bytes"
    with pytest.raises(ValueError, match="report .* 11 bytes"):
        files.read_text("report", text, most=11)
    for path in (tmp_path, pipe):
        with pytest.raises(OSError, match="report .*file"):
            files.open_file("report", path)


def test_json_has_a_bounded_depth(tmp_path):
    for depth in (65, 100_000):
        with pytest.raises(ValueError, match="nested"):
            files.parse_json("[" * depth + "]" * depth)
    files.write_whole(tmp_path / "a.json", '{"vocab_size": 13}')
    assert files.read_json("load_params", tmp_path / "a.json", most=100) == {"vocab_size": 13}


def test_values_are_shown_briefly_and_without_control_characters():
    assert files.brief("ab") == "'ab'"
    assert files.brief(list(range(1000))) == "[0, 1, 2, 3, 4, 5, ...]"
    assert len(files.brief("x" * 1_000_000)) == 100
    assert printing.escaped("\a\n") == r"\x07\n"
    assert printing.escaped("\a\n", keep="\n") == "\\x07\n"
    assert printing.printable("a \x1b[2J") == r"a \x1b[2J"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_arrays_hold_the_bits_of_any_dtype(dtype):
    tensor = torch.tensor([[1.0, -2.0, 0.0]]).to(dtype)
    array = arrays.to_array(tensor)
    back = arrays.to_tensor(array, like=torch.zeros_like(tensor))
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_rows_are_split_in_order():
    parts = list(rows.split_rows("score", torch.arange(5), 2))
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    double = rows.over_rows("score", lambda params, x: params["w"] * x.sum())
    assert double({"w": torch.tensor(2.0)}, torch.eye(2)).tolist() == [2.0, 2.0]

"""Checkpoints: equal to the bit, whole or not there, whatever kills the process and when."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zlib
from typing import NamedTuple

import pytest
import torch
from bounded import bounded

import funcrl
from funcrl import tree
from funcrl.run import checkpoint, storage
from funcrl.run.checkpoint import CheckpointError, Checkpoints
from funcrl.run.storage import encode


class Moments(NamedTuple):
    first: dict
    count: torch.Tensor


def example(seed=0, size=7):
    values = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed))
    params = {
        "layer.0.float": values, "double": values.double(), "half": values.half(),
        "bfloat": values.bfloat16(), "bool": values > 0, "byte": values.byte(),
        "int": values.int(), "special": torch.tensor([float("nan"), -0.0, float("inf")]),
        "turned": values.t(), "empty": torch.zeros(0, 3),
        "empty_bfloat": torch.zeros(2, 0).bfloat16(),
    }  # fmt: skip
    moments = Moments({"m": values.bfloat16()}, torch.tensor(2**62 + seed))
    return funcrl.TrainState(
        params, ((), (moments,)), torch.tensor(seed), torch.tensor(2.5).bfloat16()
    )


def small_and_large():
    """Leaves that are written together, and one between them that is written by itself."""
    state = example(size=40)
    large = torch.randn(2**18, generator=torch.Generator().manual_seed(1))
    return state._replace(params=state.params | {"half": large, "last": torch.ones(3)})


def bits(state):
    return [
        (leaf.dtype, tuple(leaf.shape), leaf.contiguous().reshape(-1).view(torch.uint8).tolist())
        for leaf in tree.leaves(state)
    ]


def number(value):
    return {"w": torch.full((3,), float(value))}


def files_of(path):
    return [each for each in sorted(path.rglob("*")) if each.is_file()]


def test_every_dtype_and_structure_comes_back_to_the_bit(tmp_path):
    state, extra = example(), {"step": 3, "names": ["é", None], "loss": 0.1}
    checkpoint.save(tmp_path / "one", state, extra)
    restored, facts = checkpoint.restore(str(tmp_path / "one"), tree.map(torch.ones_like, state))
    assert bits(restored) == bits(state)
    assert facts == extra
    assert type(restored) is funcrl.TrainState
    assert type(restored.opt_state[1][0]) is Moments
    restored.params["layer.0.float"].add_(1)  # owned and writable


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def of_any_bits(dtype, count=6):
    """Numbers made of random bytes, so that NaN of all kinds is among them."""
    drawn = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(count, generator=drawn) > 0.5
    drawn_bytes = torch.randint(0, 256, (count * dtype.itemsize,), generator=drawn)
    return drawn_bytes.to(torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental:UserWarning")
def test_every_dtype_of_torch_comes_back_to_the_bit(tmp_path):
    """All of them but those whose scales are no part of their bytes, which are refused by name."""
    known = [dtype for dtype in DTYPES if not re.match(r"torch\.qu?int", str(dtype))]
    assert {"float8_e4m3fn", "float8_e8m0fnu", "uint16", "complex32", "float4_e2m1fn_x2"} <= {
        str(dtype).removeprefix("torch.") for dtype in known
    }
    state = {}
    for dtype in known:
        values = of_any_bits(dtype)
        state[str(dtype)] = {"matrix": values.view(2, 3), "scalar": values[0], "none": values[:0]}
    state["conjugate"] = of_any_bits(torch.complex64).conj()
    state["negative"] = of_any_bits(torch.complex128).conj().imag
    checkpoint.save(tmp_path / "all", state)
    restored, _ = checkpoint.restore(tmp_path / "all", tree.map(torch.empty_like, state))
    assert bits(restored) == bits(tree.map(lambda leaf: leaf.resolve_conj().resolve_neg(), state))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("make", [
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    lambda: torch.eye(2).to_sparse(), lambda: torch.ones(2, device="meta"),
], ids=["quantized", "sparse", "meta"])  # fmt: skip
def test_a_tensor_whose_bytes_are_not_all_of_it_is_refused(tmp_path, make):
    with pytest.raises(TypeError, match=r"^save expects a\.w "):
        checkpoint.save(tmp_path / "one", {"a": {"w": make()}})
    checkpoint.save(tmp_path / "one", {"w": torch.ones(2)})
    with pytest.raises(TypeError, match="^restore expects w "):
        checkpoint.restore(tmp_path / "one", {"w": make()})


def test_a_tree_without_elements_is_kept_too(tmp_path):
    for name, state in (("nothing", ()), ("empty", {"e": torch.zeros(0, 2)})):
        checkpoint.save(tmp_path / name, state)
        assert bits(checkpoint.restore(tmp_path / name, state)[0]) == bits(state)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": torch.zeros(2)}, r"float32 .*\[2\] for 'w', .*float32 .*\[3\]"),
        ({"w": torch.zeros(3).double()}, r"float64 .*\[3\] for 'w', .*float32 .*\[3\]"),
        ({**number(0), "v": torch.zeros(1)}, r"float32 .*\[1\] for 'v', .*nothing"),
        ({}, r"nothing for 'w', .*float32 .*\[3\]"),
    ],
)
def test_another_tree_is_refused_before_a_tensor_is_read(tmp_path, like, message):
    checkpoint.save(tmp_path / "x", number(1))
    shutil.rmtree(tmp_path / "x" / "state")  # so that a read would fail in another way
    with pytest.raises(ValueError, match=f"^restore expects .*{message}") as caught:
        checkpoint.restore(tmp_path / "x", like)
    assert not isinstance(caught.value, CheckpointError)


def test_two_leaves_of_one_path_are_not_mixed_up(tmp_path):
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    checkpoint.save(tmp_path / "x", state)
    assert bits(checkpoint.restore(tmp_path / "x", state)[0]) == bits(state)


@pytest.mark.slow
def test_any_torn_changed_or_missing_file_is_told(tmp_path):
    state = small_and_large()
    checkpoint.save(tmp_path / "x", state, {"step": 1})
    dice = random.Random(0)
    for file in files_of(tmp_path / "x"):
        whole = file.read_bytes()
        places = {0, len(whole) // 2, len(whole) - 1, dice.randrange(len(whole))}
        flipped = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in sorted(places)]
        for broken in (b"", whole[: len(whole) // 2], whole[:-1], *flipped):
            file.write_bytes(broken)
            with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
                checkpoint.restore(tmp_path / "x", state)
        file.unlink()
        with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
            checkpoint.restore(tmp_path / "x", state)
        file.write_bytes(whole)
    assert bits(checkpoint.restore(tmp_path / "x", state)[0]) == bits(state)


def test_small_leaves_are_in_one_file(tmp_path):
    state = small_and_large()
    checkpoint.save(tmp_path / "x", state)
    large = next(at for at, leaf in enumerate(tree.leaves(state)) if leaf.numel() == 2**18)
    found = {each.parent.name for each in files_of(tmp_path / "x" / "state")}
    assert found == {"state", "together", str(large)}


def test_one_with_a_folder_for_each_leaf_as_they_were_once_written_can_be_read(tmp_path):
    state = small_and_large()
    arrays = storage.to_arrays(state)
    storage.write_arrays(
        tmp_path / "state", {name: array for name, array in arrays.items() if array.size}
    )
    manifest = storage.describe(state, {"step": 1}, None) | {
        "format": "funcrl checkpoint 2",
        "checksums": [storage.array_checksum(array) for array in arrays.values()],
        "files": storage.file_checksums(tmp_path, "state"),
    }
    (tmp_path / "manifest.json").write_text(encode(manifest))
    restored, extra = checkpoint.restore(tmp_path, tree.map(torch.zeros_like, state))
    assert bits(restored) == bits(state)
    assert extra == {"step": 1}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": 3}', "[" * 10**5, "\xff"])
def test_a_foreign_folder_is_told(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"^restore .*manifest.json"):
        checkpoint.restore(tmp_path, {})


def test_another_format_is_told_by_its_name(tmp_path):
    checkpoint.save(tmp_path / "x", {})
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())["checkpoint"]
    text = encode(manifest | {"format": "funcrl checkpoint 99"})
    (tmp_path / "x" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="^restore .*'funcrl checkpoint 99'"):
        checkpoint.restore(tmp_path / "x", {})


def test_the_newest_good_one_is_read_and_the_broken_ones_are_told(tmp_path):
    folder = Checkpoints(tmp_path, keep_last=5)
    assert folder.restore_latest(number(0)) is None
    for step in (2, 9, 10):
        folder.save(step, number(step), {"step": step})
    folder.close()
    (tmp_path / "10" / "manifest.json").write_text("{}")
    (tmp_path / "77").mkdir()
    told = []
    found = folder.restore_latest(number(0), told.append)
    assert (found.step, found.extra, bits(found.state)) == (9, {"step": 9}, bits(number(9)))
    assert [str(tmp_path / "77") in told[0], str(tmp_path / "10") in told[1]] == [True, True]
    with pytest.warns(UserWarning, match=f"^restore .*{tmp_path}") as warned:
        state, _ = checkpoint.restore(tmp_path, number(0))
    assert len(warned) == 2
    assert bits(state) == bits(number(9))
    for step in (2, 9):
        shutil.rmtree(tmp_path / str(step) / "state")
    with pytest.raises(CheckpointError, match=f"^restore .*{tmp_path}") as caught:
        folder.restore_latest(number(0))
    assert all(f"{tmp_path / str(step)}," in str(caught.value) for step in (2, 9, 10, 77))


def test_trees_beside_a_state_come_back_to_those_who_ask_for_them(tmp_path):
    folder = Checkpoints(tmp_path)
    older = [{"w": torch.full((2, 3), value)} for value in (-0.0, 5.0)]
    folder.save(3, number(3), {"step": 3}, beside=older)
    folder.save(4, number(4))
    folder.close()
    one = {"w": torch.zeros(2, 3)}
    assert folder.restore_latest(number(0), beside=one).beside == ()
    shutil.rmtree(tmp_path / "4")
    found = folder.restore_latest(number(0), beside=one)
    assert [bits(each) for each in found.beside] == [bits(each) for each in older]
    assert bits(found.state) == bits(number(3))
    state, extra = checkpoint.restore(tmp_path, number(0))  # which knows of the state alone
    assert (bits(state), extra) == (bits(number(3)), {"step": 3})
    assert folder.restore_latest(number(0)).beside == ()
    field, _ = checkpoint.restore_field(tmp_path, "w", number(0)["w"])
    assert bits(field) == bits(number(3)["w"])
    with pytest.raises(ValueError, match=r"^restore expects torch.float32 of shape \[1\] for 'w'"):
        folder.restore_latest(number(0), beside={"w": torch.zeros(1)})
    path = tmp_path / "3" / "manifest.json"
    inner = json.loads(path.read_text())["checkpoint"]
    inner["checksums"][2] += 1  # of the second tree beside
    path.write_text(encode(inner))
    with pytest.raises(CheckpointError, match="whose 'w' is not what was saved"):
        folder.restore_latest(number(0), beside=one)
    assert bits(checkpoint.restore(tmp_path, number(0))[0]) == bits(number(3))


def test_the_last_and_the_best_stay(tmp_path):
    folder = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    for step, score in enumerate([0.1, 0.9, 0.5, float("nan"), 0.9, None, 0.2, float("inf")]):
        folder.save(step, number(step), score=score)
    folder.close()
    assert folder.steps() == [1, 4, 6, 7]


def test_what_is_just_saved_stays_below_broken_ones_of_a_former_life(tmp_path):
    folder = Checkpoints(tmp_path, keep_last=2, keep_best=0)
    for step in (5, 8, 9):
        folder.save(step, number(step))
    folder.wait()
    for step in (8, 9):
        files_of(tmp_path / str(step) / "state")[0].write_bytes(b"")
    folder.save(6, number(6))
    folder.close()
    assert folder.restore_latest(number(0)).step == 6


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = Checkpoints(tmp_path)
    for value in (1, 2):
        folder.save(4, number(value))
    folder.close()
    assert bits(folder.restore_latest(number(0)).state) == bits(number(2))
    assert [each.name for each in tmp_path.iterdir()] == ["4"]


def test_a_replacement_that_was_cut_off_is_still_there_and_is_put_back(tmp_path):
    folder = Checkpoints(tmp_path)
    folder.save(4, number(4))
    folder.wait()
    (tmp_path / "4").rename(tmp_path / ".4.old")  # the moment between the two renames
    assert folder.steps() == [4]
    assert bits(checkpoint.restore(tmp_path / "4", number(0))[0]) == bits(number(4))
    assert folder.restore_latest(number(0)).step == 4
    folder.save(5, number(5))
    folder.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["4", "5"]


def test_only_our_own_leftovers_are_removed(tmp_path):
    for name in (".3.123.draft", ".3.gone", ".git", ".mine.old"):
        (tmp_path / name).mkdir()
    folder = Checkpoints(tmp_path)
    folder.save(1, number(1))
    folder.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [".git", ".mine.old", "1"]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years")
    with pytest.raises(OSError, match="^save .*thesis: a folder"):
        checkpoint.save(tmp_path / "thesis", number(1))
    assert (tmp_path / "thesis" / "chapter").read_text() == "years"


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    folder = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match="^save expects w .*float"):
        folder.save(1, {"w": 3.0})
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.save(1, number(1), {"f": torch.ones(1)})
    for step in (-1, 2.5):
        with pytest.raises(ValueError, match=r"^Checkpoints\.save expects step "):
            folder.save(step, number(1))
    folder.close()
    assert not list(tmp_path.iterdir())


def test_an_impossible_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="^Checkpoints .*file/below"):
        Checkpoints(tmp_path / "file" / "below")


@pytest.mark.parametrize("again", ["wait", "save", "close"])
def test_an_error_in_the_background_surfaces_once(tmp_path, again):
    folder = Checkpoints(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    (tmp_path / "x").write_text("")  # the folder has become a file
    folder.save(1, number(1))
    call = {"wait": folder.wait, "close": folder.close, "save": lambda: folder.save(2, number(2))}
    with pytest.raises(OSError):  # noqa: PT011 (the system's own words)
        call[again]()
    folder.close()


def script(text, *args):
    command = [sys.executable, "-c", text, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


FULL_DISK = """
import resource, sys, pathlib, torch
from funcrl.run.checkpoint import Checkpoints
from funcrl.run.checkpoint import CheckpointError
folder = Checkpoints(pathlib.Path(sys.argv[1]))
folder.save(1, {"w": torch.arange(1000.0)})
folder.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
folder.save(2, {"w": torch.rand(100_000)})
try:
    folder.wait()
except OSError as error:
    print(error)
print([path.name for path in folder.folder.iterdir()])
print(folder.restore_latest({"w": torch.zeros(1000)}).state["w"].sum().item())
"""


@pytest.mark.slow
def test_a_full_disk_harms_nothing(tmp_path):
    done = script(FULL_DISK, tmp_path)
    said, *rest = done.stdout.splitlines()
    assert f"save could not write {tmp_path / '2'}: " in said
    assert "File too large" in said
    assert rest == ["['1']", "499500.0"]


QUIET = """
import sys, torch, funcrl
assert not {"jax", "orbax", "triton"} & sys.modules.keys()
print(bool(funcrl.restore(sys.argv[1], {"w": torch.zeros(3)})[0]["w"].eq(1).all()))
import jax
print(jax.config.jax_platforms)
"""


@pytest.mark.slow
def test_a_fresh_process_restores_quietly_with_jax_on_the_cpu(tmp_path):
    checkpoint.save(tmp_path / "x", number(1))
    done = script(QUIET, tmp_path / "x")
    assert (done.stdout, done.stderr) == ("True\ncpu\n", "")


KILLED = """
import os, random, signal, sys, time, torch
import jax, orbax.checkpoint  # once for all children; neither has started a thread yet
from funcrl.run.checkpoint import Checkpoints
dice = random.Random(0)
for life in range(24):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        folder, step = Checkpoints(sys.argv[1], keep_last=3), 100 * life
        while True:
            step += 1
            state = {"a": torch.full((300, 300), float(step)), "b": torch.full((9,), step)}
            for _ in range(1 + step % 2):  # every other one is replaced as well
                folder.save(step, state, {"step": step}, score=float(step % 7))
                folder.wait()
                os.write(writer, b"%d\\n" % step)
    os.close(writer)
    time.sleep(0.15)
    with open(reader, "rb") as pipe:
        first = pipe.readline()  # it has begun
        time.sleep(dice.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print((pipe.read().split() or [first])[-1].decode().strip(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_of_saves(tmp_path):
    like = {"a": torch.zeros(300, 300), "b": torch.zeros(9, dtype=torch.int64)}
    torn = 0
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        for _ in range(24):
            reported = int(parent.stdout.readline())
            steps = Checkpoints(tmp_path).steps()
            assert steps[-1] >= reported
            for step in steps:
                state, extra = checkpoint.restore(tmp_path / str(step), like)
                assert extra == {"step": step}
                assert bits(state) == bits(
                    {"a": torch.full((300, 300), float(step)), "b": torch.full((9,), step)}
                )
            torn += any(each.name.startswith(".") for each in tmp_path.iterdir())
            parent.stdin.write("\n")
            parent.stdin.flush()
    assert parent.returncode == 0
    assert torn >= 5  # the kills did fall into the middle of saves


def test_a_save_does_not_wait_for_the_disk(tmp_path):
    folder = Checkpoints(tmp_path)
    folder.save(1, number(1))  # loads orbax
    folder.wait()
    state = {"w": torch.rand(1000, 1000)}
    start = time.perf_counter()
    folder.save(2, state)
    returned = time.perf_counter() - start
    folder.close()
    assert returned < (time.perf_counter() - start) / 2


FORGED = {
    "no leaves": {"leaves": None}, "leaves of text": {"leaves": ["x"]}, "files": {"files": [1]},
    "a leaf without a shape": {"leaves": [{"path": "w"}]}, "no sums": {"checksums": []},
    "beside a number": {"beside": 5}, "beside numbers": {"beside": [5]},
    "leaves beside of text": {"beside": [["x"]], "checksums": [1, 2]},
    "sums of text": {"checksums": ["x"]}, "sizes": {"together": [12]},
    "sizes of text": {"together": {"0": "x"}}, "facts": {"extra": 5}, "a score": {"score": "x"},
}  # fmt: skip


@pytest.mark.parametrize("row", FORGED)
def test_a_manifest_of_other_fields_is_refused_though_its_checksum_is_right(tmp_path, row):
    path = tmp_path / "1" / "manifest.json"
    checkpoint.save(tmp_path / "1", number(1))
    inner = json.loads(path.read_text())["checkpoint"] | FORGED[row]
    sum_of_it = zlib.crc32(json.dumps(inner).encode())
    path.write_text(json.dumps({"checksum": sum_of_it, "checkpoint": inner}) + "\n")
    with pytest.raises(CheckpointError, match=r"^restore .*manifest.json has other fields"):
        checkpoint.restore(tmp_path / "1", number(0))


@pytest.mark.parametrize("size", [-5, 11, 10**30])
def test_a_manifest_of_other_sizes_is_refused_though_its_checksum_is_right(tmp_path, size):
    path = tmp_path / "1" / "manifest.json"
    checkpoint.save(tmp_path / "1", number(1))
    inner = json.loads(path.read_text())["checkpoint"]
    assert inner["together"] == {"0": 12}
    path.write_text(encode(inner | {"together": {"0": size}}))
    with pytest.raises(CheckpointError, match="^restore "):
        checkpoint.restore(tmp_path / "1", number(0))


def test_a_leaf_of_another_kind_is_a_short_error(tmp_path):
    path = tmp_path / "1" / "manifest.json"
    checkpoint.save(tmp_path / "1", number(1))
    inner = json.loads(path.read_text())["checkpoint"]
    inner["leaves"][0] |= {"dtype": "x" * 5000, "shape": [1] * 5000}
    sum_of_it = zlib.crc32(json.dumps(inner).encode())
    path.write_text(json.dumps({"checksum": sum_of_it, "checkpoint": inner}) + "\n")
    with pytest.raises(ValueError, match="^restore .* for 'w'") as caught:
        checkpoint.restore(tmp_path / "1", number(0))
    assert len(str(caught.value)) < 1000


def test_a_manifest_that_is_a_pipe_is_refused(tmp_path):
    checkpoint.save(tmp_path / "1", number(1))
    (tmp_path / "1" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "1" / "manifest.json")
    with bounded(5.0), pytest.raises(CheckpointError, match=r"^restore .*manifest.json"):
        checkpoint.restore(tmp_path / "1", number(0))

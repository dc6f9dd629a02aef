"""Sums of digits, and the tokenizer of characters that they are written with."""

import pytest

from funcrl.tasks import CharTokenizer, SumDigits


def test_sum_digits_keeps_its_splits_apart():
    task = SumDigits()
    trained = {prompt.text for prompt in task.prompts(0, 0, 5000)}
    held_out = {prompt.text for prompt in task.eval_prompts(1000)}
    assert not trained & held_out
    assert 80 <= len(held_out) <= 120
    assert len(trained) + len(held_out) >= 990
    assert task.prompts(0, 7, 3) == task.prompts(0, 0, 10)[7:]
    assert task.prompts(0, 0, 5) != task.prompts(1, 0, 5)
    for prompt in task.prompts(2, 0, 50):
        digits = [int(digit) for digit in prompt.text[:-1].split("+")]
        assert task.reward(prompt, str(sum(digits))) == {"correct": 1.0}
        for wrong in (str(sum(digits) + 1), f"{sum(digits)}=", "", "1+1"):
            assert task.reward(prompt, wrong) == {"correct": 0.0}


def test_the_character_tokenizer_refuses_what_it_does_not_know():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"
    with pytest.raises(ValueError, match=r"CharTokenizer\.encode expects.*'c'"):
        tokenizer.encode("abc")
    with pytest.raises(ValueError, match="CharTokenizer expects.*'a' twice"):
        CharTokenizer("aba")

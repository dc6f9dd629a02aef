"""Estimates from counts, against counting every case."""

import itertools
import math

import pytest
import torch

from funcrl.loop.evaluate import interval, majority, pass_at


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_the_interval_is_wilsons_for_single_samples():
    """p = 0.3, n = 50, from the formula by hand: (0.3 + 0.03842 +- 0.1296...) / 1.07683."""
    z, n, p = 1.959963984540054, 50, 0.3
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = interval([1.0] * 15 + [0.0] * 35)
    assert low == pytest.approx(center - half, abs=1e-12)
    assert high == pytest.approx(center + half, abs=1e-12)


def test_the_interval_covers_and_narrows():
    low, high = interval([0.0] * 20)
    assert low == 0.0
    assert 0.1 < high < 0.2
    wide, narrow = interval([0.0, 1.0] * 10, 5), interval([0.4, 0.6] * 10, 5)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert narrow == pytest.approx(interval([0.0, 1.0] * 50))  # as 20 * 5 single samples
    assert wide == pytest.approx(interval([0.0, 1.0] * 10))  # as 20: each prompt's five are one
    assert interval([0.5] * 20, 8) == pytest.approx(interval([0.0, 1.0] * 10))


def test_the_interval_holds_the_truth_95_times_in_100():
    """The exact coverage at n = 60, p = 0.4: the chance of the counts whose interval holds p."""
    n, p = 60, 0.4
    covered = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c)
        for c in range(n + 1)
        if interval([1.0] * c + [0.0] * (n - c))[0] <= p <= interval([1.0] * c + [0.0] * (n - c))[1]
    )
    assert 0.93 <= covered <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m", "rates"),
    [
        (100, 8, (0.01,)),
        (100, 8, (0.002,)),
        (30, 16, (0.99,)),
        (100, 8, (0.5,)),
        (100, 8, (0.2, *[0.0] * 19)),
        (200, 4, (0.0, 1.0)),
        (50, 8, (0.05, 0.5, 0.9)),
    ],
)
def test_the_interval_holds_the_truth_with_several_samples_of_a_prompt(n, m, rates):
    """Prompts are drawn from a mixture of rates, and m samples of each; 1500 evaluations."""
    generator = torch.Generator().manual_seed(0)
    truth = sum(rates) / len(rates)
    drawn = torch.tensor(rates)[torch.randint(0, len(rates), (1500, n), generator=generator)]
    coins = torch.rand(1500, n, m, generator=generator) < drawn[..., None]
    shares = coins.double().mean(dim=2).tolist()
    covered = [low - 1e-9 <= truth <= high + 1e-9 for low, high in (interval(v, m) for v in shares)]
    assert 0.9 <= sum(covered) / 1500 <= 0.995
    if rates == (0.0, 1.0):  # where all samples of a prompt are one, they must not count as m
        flat = [interval(row, 1) for row in coins[:300].double().flatten(1).tolist()]
        assert sum(low <= truth <= high for low, high in flat) / 300 < 0.8


def test_majority():
    assert majority(["7", "7", "3"], [True, False, False]) == 0.5  # not the last judgement
    assert majority(["7", "7", "3"], [False, True, False]) == 0.5
    assert majority(["1", "2", "2"], [True, False, False]) == 0.0
    assert majority(["", "", "2"], [False, False, True]) == 1.0
    assert majority(["", ""], [False, False]) == 0.0


@pytest.mark.parametrize(("call", "named"), [
    (lambda: pass_at(3, 4, 1), "pass_at expects.*num_right"),
    (lambda: pass_at(3, 1, 4), r"pass_at expects.*\bk\b"),
    (lambda: interval([]), "interval expects the number of values"),
    (lambda: interval([2.0]), "interval expects.*a value"),
    (lambda: interval([0.5], 0), "interval expects num_samples"),
    (lambda: majority(["1"], []), "majority expects"),
])  # fmt: skip
def test_bad_input_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()

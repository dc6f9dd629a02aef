"""Jobs are done in their order, and whoever asks for a result waits for it."""

import threading

import pytest

from funcrl.serve.jobs import Failure, Jobs


@pytest.fixture
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


def doubled(arguments):
    return [2 * each for each in arguments]


class Held:
    """Work that goes on once it may, and keeps which arguments came in which call."""

    def __init__(self):
        self.calls, self.began, self.may = [], threading.Event(), threading.Event()

    def __call__(self, arguments):
        self.calls.append([*arguments])
        self.began.set()
        assert self.may.wait(30)
        return doubled(arguments)


def test_a_result_is_waited_for_until_the_time_is_over(jobs):
    held = Held()
    number = jobs.add(held, 1, name=None)
    assert held.began.wait(30)
    assert jobs.result(number, timeout=0.01) is None
    threading.Timer(0.05, held.may.set).start()
    assert jobs.result(number, timeout=30) == 2


def test_waiting_jobs_of_one_kind_are_one_call(jobs):
    held = Held()
    numbers = [jobs.add(held, 0, name=None)]
    assert held.began.wait(30)
    kinds = ["a", "a", "b", "a", None, None]
    numbers += [jobs.add(held, at, name=None, joins=kind) for at, kind in enumerate(kinds, 1)]
    held.may.set()
    assert [jobs.result(number, timeout=30) for number in numbers] == [0, 2, 4, 6, 8, 10, 12]
    assert held.calls == [[0], [1, 2], [3], [4], [5], [6]]


def test_a_name_is_one_job_and_what_is_not_kept_is_given_once(jobs):
    first = jobs.add(doubled, 1, name="x")
    assert jobs.add(doubled, 5, name="x") == first
    assert jobs.add(doubled, 5, name=None) == jobs.add(doubled, 5, name="y") - 1 == first + 1
    assert jobs.result(first, timeout=30) == jobs.result(first, timeout=30) == 2
    assert jobs.result(first + 1, timeout=30, keep=False) == 10
    assert jobs.result(first + 1, timeout=0) is None
    for unknown in (0, -1, first + 3):
        with pytest.raises(KeyError):
            jobs.result(unknown, timeout=0)


@pytest.mark.parametrize(("error", "is_of_user"), [(ValueError, True), (RuntimeError, False)])
def test_a_failure_says_whose_it_is_and_the_next_job_is_done(jobs, error, is_of_user):
    def fails(arguments):
        raise error(f"not {arguments[0]}")

    found = jobs.result(jobs.add(fails, 3, name=None), timeout=30)
    assert isinstance(found, Failure)
    assert found.is_of_user == is_of_user
    assert "not 3" in found.message
    assert jobs.result(jobs.add(doubled, 2, name=None), timeout=30) == 4


def test_closing_waits_for_the_job_that_is_under_way_and_begins_none(jobs):
    held = Held()
    numbers = [jobs.add(held, each, name=None) for each in (1, 2)]
    assert held.began.wait(30)
    threading.Timer(0.05, held.may.set).start()
    jobs.close()
    assert jobs.is_closed
    assert [jobs.result(number, timeout=30) for number in numbers] == [2, None]

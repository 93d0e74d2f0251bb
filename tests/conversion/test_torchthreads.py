"""torch's number of threads is one inside, and is restored when the last thread leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shardio.conversion.task import one_torch_thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_inside_there_is_one_and_afterwards_what_there_was() -> None:
    def fail() -> None:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == 3


def test_threads_that_are_inside_together_leave_the_number_as_it_was() -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def work() -> None:
        with one_torch_thread():
            entered.set()
            leave.wait(30)
            seen.append(torch.get_num_threads())

    with one_torch_thread():
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(30)
    leave.set()
    thread.join(30)
    assert seen == [1]
    assert torch.get_num_threads() == 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join(30)
    assert later == [3]

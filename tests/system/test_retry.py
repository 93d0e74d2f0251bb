"""The moments at which a request is made again."""

from __future__ import annotations

from shardio.system.retry import RETRY_SECONDS, Attempts


def test_an_attempt_follows_each_pause_and_then_none(no_pauses: list[float]) -> None:
    attempts = Attempts()
    assert [attempts.again() for _ in range(5)] == [True, True, True, False, False]
    assert attempts.failed == 5
    assert no_pauses == list(RETRY_SECONDS)


def test_an_error_that_does_not_pass_ends_the_attempts_at_once(no_pauses: list[float]) -> None:
    attempts = Attempts()
    assert attempts.again()
    assert not attempts.again(may_pass=False)
    assert (attempts.failed, no_pauses) == (2, [RETRY_SECONDS[0]])


def test_pauses_and_the_way_to_wait_may_be_others() -> None:
    waits: list[float] = []
    attempts = Attempts(iter([0.0, 3.0]), waits.append)
    assert [attempts.again() for _ in range(3)] == [True, True, False]
    assert waits == [0.0, 3.0]

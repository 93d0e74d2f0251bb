"""Values that change at given batches or epochs."""

from __future__ import annotations

from typing import Any

import pytest

from shardio.order.schedule import Schedule, as_schedule


@pytest.mark.parametrize("values", [{0: "a"}, {0: "a", 1: "b"}, {7: "c", 0: "a", 3: "b", 4: "d"}])
def test_a_value_holds_from_its_start_to_the_next(values: dict[int, str]) -> None:
    schedule = Schedule(values)
    expected = [values[max(start for start in values if start <= place)] for place in range(20)]
    assert [schedule.at(place) for place in range(20)] == expected
    for first in range(10):
        for stop in range(20):
            parts = list(schedule.parts(first, stop))
            assert [value for count, value in parts for _ in range(count)] == expected[first:stop]
    assert schedule.map(str.upper) == Schedule({start: value.upper() for start, value in values.items()})


def test_epochs_become_batches_where_there_are_epochs_of_batches() -> None:
    by_epoch = Schedule({0: "a", 3: "b"}, by="epoch")
    assert as_schedule("size", by_epoch, 100) == Schedule({0: "a", 300: "b"})
    assert as_schedule("size", by_epoch, None) is by_epoch
    assert as_schedule("size", {0: "a", 3: "b"}, 100) == Schedule({0: "a", 3: "b"})
    assert as_schedule("size", "a", 100) == Schedule({0: "a"})
    with pytest.raises(ValueError, match="size: a schedule by batch needs epoch_batches="):
        as_schedule("size", {0: "a", 3: "b"}, None)


@pytest.mark.parametrize("values", [{}, {1: "a"}, {0: "a", -1: "b"}, {0: "a", 2.0: "b"}, {0: "a", "1": "b"}])
def test_schedules_without_a_beginning_are_refused(values: dict[Any, str]) -> None:
    with pytest.raises(ValueError, match="0 among them"):
        Schedule(values)


def test_another_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="by must be one of batch, epoch"):
        Schedule({0: 1}, "step")  # type: ignore[arg-type]

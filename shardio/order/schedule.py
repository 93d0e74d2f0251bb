"""Values that change at given batches or epochs: batch sizes, transforms and shares, known before reading."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeAlias, TypeVar

from shardio.errors import check_choice

T = TypeVar("T")
U = TypeVar("U")

By = Literal["batch", "epoch"]


@dataclass(frozen=True)
class Schedule(Generic[T]):
    """A value from each of some global batches on, or epochs: `Schedule({0: 128, 30: 224}, by="epoch")`.

    Batches are counted over all epochs, from 0, and are those of all ranks together. A schedule by batch needs
    `epoch_batches`. Where a Schedule may be given, so may a dict by batch.
    """

    values: Mapping[int, T]
    by: By = "batch"

    def __post_init__(self) -> None:
        check_choice("by", self.by, By)
        starts = list(self.values)
        if not all(type(start) is int and start >= 0 for start in starts) or 0 not in starts:
            raise ValueError(
                f"a schedule must have numbers of a {self.by} as keys, and 0 among them; found {starts!r:.80}"
            )
        object.__setattr__(self, "values", dict(sorted(self.values.items())))

    def at(self, place: int) -> T:
        """Returns the value at a batch or epoch."""
        starts = list(self.values)
        return self.values[starts[bisect_right(starts, place) - 1]]

    def parts(self, first: int, stop: int) -> Iterator[tuple[int, T]]:
        """Yields (how many, value) of the batches or epochs from `first` to before `stop`."""
        cuts = [first, *(start for start in self.values if first < start < stop), max(first, stop)]
        yield from ((after - start, self.at(start)) for start, after in pairwise(cuts))

    def map(self, function: Callable[[T], U]) -> Schedule[U]:
        return Schedule({start: function(value) for start, value in self.values.items()}, self.by)


Scheduled: TypeAlias = T | Mapping[int, T] | Schedule[T]
"""A value, or several, by batch or by epoch."""


def as_schedule(name: str, value: Scheduled[T], epoch_batches: int | None) -> Schedule[T]:
    """Returns the schedule that an argument of this name is: by batch if there are `epoch_batches`, or else by epoch.

    Raises ValueError for a schedule by batch without `epoch_batches`.
    """
    if isinstance(value, Mapping):
        value = Schedule(value)
    if not isinstance(value, Schedule):
        return Schedule({0: value}, "epoch" if epoch_batches is None else "batch")
    if epoch_batches is None and value.by == "batch":
        raise ValueError(
            f"{name}: a schedule by batch needs epoch_batches=, and one by epoch is Schedule(..., by='epoch')"
        )
    if epoch_batches is None or value.by == "batch":
        return value
    return Schedule({epoch * epoch_batches: one for epoch, one in value.values.items()})

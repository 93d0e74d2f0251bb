"""A conversion in parts: processes that know nothing of each other make shards of one plan, and the last one publishes.

What ties them is OUT alone. A part is done when its shards have records there; the set is, when all shards have. Of two
parts that end at the same moment at least one finds all records, for each looks after it has written its own; if both
do, both publish the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, from 1 to count. Part 1 of 1 is everything.

    `count` calls, on any machines and in any order, make the set, and the last of them publishes it; the report of the
    others says what is `unfinished`. `max_bad` is that of the whole set: beside the images that a part itself refuses,
    those count that are refused in shards that others had finished before it began.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not (type(self.number) is type(self.count) is int and 1 <= self.number <= self.count):
            raise ValueError(f"part must be (K, N) with K from 1 to N; found ({self.number!r}, {self.count!r})")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Dealt out like cards, so that all parts are of about equal size."""
        return items[self.number - 1 :: self.count]


@dataclass(frozen=True)
class Unfinished:
    """What is there when a part is done and the set is not."""

    num_shards: int
    """Of the whole set."""
    num_finished: int
    parts: tuple[int, ...]
    """Those parts, of the same count, that have still to finish or must be run again."""

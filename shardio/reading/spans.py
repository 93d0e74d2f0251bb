"""Plans which bytes are read for samples: arithmetic on numbers of files, offsets and sectors, without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""The first of some samples in order of file and offset, and the one after the last."""


def distinct(
    indices: NDArray[np.int64],
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.int64]] | None]:
    """Returns where each index stands first, in ascending order of the indices, which is also that of files and
    offsets. If any stands again: where, and where the same one stands first."""
    order = np.argsort(indices, kind="stable")
    ascending = indices[order]
    again = np.zeros(len(order), bool)
    np.equal(ascending[1:], ascending[:-1], out=again[1:])
    if not again.any():
        return order, None
    firsts = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    return order[~again], (order[again], order[firsts[again]])


def stretches(apart: NDArray[np.bool_]) -> Iterator[Span]:
    """Returns the spans between the samples i and i + 1 for which apart[i] is true."""
    return pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1])


def requests(shards: NDArray[np.int64], offsets: NDArray[np.int64], nbytes: int, grain: int, most: int) -> list[Span]:
    """Returns the spans of at most `most` samples of `nbytes` bytes that are read in one request: they lie in one file,
    and less than `grain` bytes apart."""
    apart = (offsets[1:] - (offsets[:-1] + nbytes) >= grain) | (shards[1:] != shards[:-1])
    cuts = [cut for first, stop in stretches(apart) for cut in range(first, stop, most)]
    return list(pairwise([*cuts, len(offsets)]))


def sector_of(offset: int, alignment: int) -> int:
    """Returns the first byte of the sector that holds a byte."""
    return offset // alignment * alignment


def pieces(start: int, stop: int, alignment: int, room: int) -> Iterator[tuple[int, int, int]]:
    """Yields the parts that O_DIRECT can read of the bytes from `start` to `stop`, as (offset, stop, length): whole
    sectors, at most `room` bytes from `offset` on, of which those before `stop` are wanted."""
    for offset in range(sector_of(start, alignment), stop, room):
        end = min(offset + room, stop)
        yield offset, end, sector_of(end - offset + alignment - 1, alignment)


def behind(buffers: Sequence[NDArray[np.uint8]], done: int) -> list[memoryview]:
    """Returns what is left of the buffers when the first `done` bytes are filled."""
    rests = []
    for buffer in buffers:
        if done < len(buffer):
            rests.append(buffer[done:].data)
        done = max(0, done - len(buffer))
    return rests

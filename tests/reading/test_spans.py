"""The plan of requests, against its plainest definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardio.reading.file_reader import _behind as behind
from shardio.reading.file_reader import _distinct as distinct
from shardio.reading.file_reader import _pieces as pieces
from shardio.reading.file_reader import _requests as requests


@pytest.mark.parametrize("length", range(5))
def test_repeated_samples_are_read_once_and_copied(length: int) -> None:
    for wanted in itertools.product(range(3), repeat=length):
        indices = np.array(wanted, np.int64)
        chosen, again = distinct(indices)
        assert indices[chosen].tolist() == sorted(set(wanted))
        out = np.full(length, -1)
        out[chosen] = indices[chosen]
        if again is not None:
            to, first = again
            out[to] = out[first]
        assert out.tolist() == list(wanted)
        assert (again is None) == (len(set(wanted)) == length)


@pytest.mark.parametrize("grain", [1, 4])
@pytest.mark.parametrize("most", [1, 2, 100])
def test_samples_of_a_request_lie_in_one_file_near_each_other(grain: int, most: int) -> None:
    nbytes = 3
    for kept in itertools.product([False, True], repeat=8):
        places = [place for place, there in enumerate(kept) if there]
        if not places:
            continue
        shards = np.array([place // 5 for place in places])
        offsets = np.array([place % 5 * nbytes for place in places])
        spans = requests(shards, offsets, nbytes, grain, most)
        assert [i for first, stop in spans for i in range(first, stop)] == list(range(len(places)))
        assert all(0 < stop - first <= most for first, stop in spans)
        for i in range(1, len(places)):
            near = shards[i] == shards[i - 1] and offsets[i] - offsets[i - 1] - nbytes < grain
            begins = i in [first for first, _ in spans]
            assert near or begins
            if begins and near:
                assert (i - max(first for first, _ in spans if first < i)) == most


def test_pieces_are_whole_sectors_around_all_bytes() -> None:
    for start, nbytes, alignment, room in itertools.product(range(9), range(1, 20), (1, 4), (4, 8)):
        stop = start + nbytes
        found = list(pieces(start, stop, alignment, room))
        assert all(offset % alignment == length % alignment == 0 and length <= room for offset, _, length in found)
        offsets, stops, _ = zip(*found, strict=True)
        assert offsets[0] <= start
        assert stops[-1] == stop
        assert stops[:-1] == offsets[1:]
        assert all(offset + length >= stop for offset, stop, length in found)


def test_what_is_left_of_buffers_is_behind_the_bytes_that_are_done() -> None:
    data = np.arange(10, dtype=np.uint8)
    buffers = [data[:3], data[3:4], data[4:10]]
    for done in range(11):
        assert b"".join(behind(buffers, done)) == bytes(range(done, 10))

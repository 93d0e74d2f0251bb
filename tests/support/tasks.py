"""A shard task whose sources are held in memory, and what counts its reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from pictures import random_picture

from shardio.conversion.sources.collection import Source
from shardio.system.threads import Stop

SIDE = 16
BAD = {3, 4, 11, 17, 18, 19, 20, 39}
"""Some of 40 sources: one alone, neighbors, a whole block of three, the last."""


@dataclass(frozen=True)
class Memory:
    """Sources that are held in memory, by their numbers."""

    images: Sequence[bytes]

    def read(self, source: Source) -> bytes:
        return self.images[int(source.key)]

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        return [""] * len(sources)


def jpeg(i: int) -> bytes:
    rng = np.random.default_rng(i)
    height, width = (int(n) for n in rng.integers(SIDE, 4 * SIDE, 2))
    data: bytes = simplejpeg.encode_jpeg(random_picture(rng, height, width))
    return data


class Reports:
    """Counts what a task reports, and raises Stop when `stop_after` sources are done."""

    def __init__(self, stop_after: int = 1 << 30) -> None:
        self.done = self.refused = 0
        self._stop_after = stop_after

    def __call__(self, done: int, refused: int, /) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.done += done
        self.refused += refused
        if self.done >= self._stop_after:
            raise Stop

"""The samples of each batch: (order, epoch, rank, world_size, batch_size) -> batches of sample indices.

Pure arithmetic; no data is read. Step s of an epoch has the positions [s * G, (s + 1) * G) of the epoch's order, with G
= batch_size * world_size, and each rank reads a fixed part of these positions. So the samples of a step do not depend
on the number of ranks, as long as G is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import check_choice
from shardio.order.orders import Order
from shardio.order.permutation import divide

Tail = Literal["drop", "pad", "short"]

# Positions permuted at once: the cost of a numpy call is spread over so many, and the arrays stay in the L2 cache.
_CHUNK = 1 << 15
# Positions permuted at first, as the first batch waits for them; then twice as many each time, up to _CHUNK.
_FIRST_CHUNK = 1 << 11


@dataclass(frozen=True)
class Sampler:
    """The batches of one rank, as sample indices. Immutable; any number of threads may use a sampler.

    - `tail`: what happens to a last global batch of fewer than batch_size * world_size samples. "drop" skips it. "pad"
      fills it from the beginning of the epoch's order. "short" splits it as evenly as possible: each sample comes
      exactly once, and a rank's last batch may be smaller or empty. Every rank has the same number of batches.
    - `start`: how many positions of the epoch were read before, by any number of ranks with any batch size. Steps count
      from `start`.
    - `length`: the number of batches from `start` on, if `order` is endless
    - `repeats`: how many times each sample comes in its global batch, each time on another rank if world_size is at
      least `repeats`. More than 1 needs tail="drop" and a global batch size that is a multiple of it.
    """

    order: Order
    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "drop"
    start: int = 0
    length: int | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; found {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1; found {self.rank} of {self.world_size}")
        check_choice("tail", self.tail, Tail)
        if not 0 <= self.start <= self.num_samples:
            raise ValueError(f"`start` must be from 0 to {self.num_samples}; found {self.start}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1; found {self.repeats}")
        if self.repeats > 1 and self.tail != "drop":
            raise ValueError(f'repeats={self.repeats} needs tail="drop"; found tail={self.tail!r}')
        if self.global_batch_size % self.repeats:
            found = f"{self.batch_size} * {self.world_size}"
            raise ValueError(f"batch_size * world_size must be a multiple of repeats={self.repeats}; found {found}")
        if self.start % self.repeats:
            raise ValueError(f"the samples consumed must be a multiple of repeats={self.repeats}; found {self.start}")

    @property
    def num_samples(self) -> int:
        """The number of positions in a whole epoch, for all ranks together."""
        return self.order.num_samples

    @cached_property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @cached_property
    def num_batches(self) -> int:
        """The number of batches from `start` to the end of the epoch, the same on every rank."""
        if self.length is not None:
            return self.length
        full, rest = divmod(self.num_samples - self.start, self.global_batch_size)
        return full if self.tail == "drop" or not rest else full + 1

    def bounds(self, step: int) -> tuple[int, int]:
        """Returns (start, stop): this rank's batch at `step` has the positions from `start` to `stop` - 1.

        With tail="pad", positions from num_samples on stand for the first positions of the epoch. Raises IndexError if
        the epoch has no such step.
        """
        if not 0 <= step < self.num_batches:
            raise IndexError(f"step must be from 0 to {self.num_batches - 1}; found {step}")
        first = self.start + step * self.global_batch_size
        size = self.global_batch_size
        if self.tail == "short":
            size = min(size, self.num_samples - first)
        return first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size

    def num_padded(self, step: int) -> int:
        """Returns how many samples at the end of this rank's batch at `step` came earlier in the same epoch. The number
        is more than 0 only with tail="pad", at the last step."""
        start, stop = self.bounds(step)
        return max(0, stop - max(start, self.num_samples))

    @property
    def num_read(self) -> int:
        """The number of samples in this rank's batches, from `start` to the end of the epoch."""
        if not self.num_batches:
            return 0
        start, stop = self.bounds(self.num_batches - 1)  # those before it are full
        return (self.num_batches - 1) * self.batch_size + stop - start

    def batches(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Yields the sample indices (int64) of this rank's batches, from `start` to the end of the epoch."""
        done, count = 0, _FIRST_CHUNK
        while done < self.num_batches:
            steps = range(done, min(done + max(1, count // self.batch_size), self.num_batches))
            bounds = [self.bounds(step) for step in steps]
            positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in bounds])
            indices = self.order(epoch, self._draws(positions) % self.num_samples)
            taken = 0
            for start, stop in bounds:
                yield indices[taken : (taken := taken + stop - start)]
            done, count = steps.stop, min(2 * count, _CHUNK)

    def _draws(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the position in `order` for each position of the epoch. They differ only with `repeats`."""
        if self.repeats == 1:
            return positions
        batch, place = divide(positions - self.start, np.int64(self.global_batch_size))
        distinct = self.global_batch_size // self.repeats
        return self.start // self.repeats + batch * distinct + place % distinct

"""Reads several splits as one, for mixtures: the samples of each split are numbered after those of the split before."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import SampleShape
from shardio.reading.choose import SplitSource
from shardio.reading.reader import BatchMemory, ReadCounts, Reader, Request
from shardio.reading.shardset import ShardSet

SOURCE = "source"
"""The name of an entry in a mixture's batches: the number of the set that each sample comes from, counted from 0."""


class MixedSet:
    """The samples of several splits, one split after the other, with what a loader uses of ShardSet. Thread safe.

    relabel[k][label] is the mixture's label for a label of split k. If relabel[k] is None, stored labels are kept.
    """

    def __init__(
        self,
        sets: Sequence[ShardSet],
        classes: tuple[str, ...],
        class_names: tuple[str, ...],
        relabel: Sequence[NDArray[np.int64] | None],
    ) -> None:
        self.sets = tuple(sets)
        self.has_pixels = sets[0].has_pixels
        self.label_row = sets[0].label_row
        self.classes = classes
        self.class_names = class_names or classes
        self.relabel = tuple(relabel)
        self.starts = np.array([0, *accumulate(map(len, sets))])
        self.path = " + ".join(str(one.path) for one in sets)
        self.split = " + ".join(dict.fromkeys(one.split for one in sets))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def sample_shape(self) -> SampleShape:
        return self.sets[0].sample_shape

    def parts_of(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yields (k, positions, local) for each set k that has some of the samples `indices`. `positions` are the
        positions of the set's samples in `indices`; `local` are the samples' indices in the set."""
        which = self.sources_of(indices)
        for number in np.flatnonzero(np.bincount(which, minlength=len(self.sets))).tolist():
            some = np.flatnonzero(which == number)
            yield number, some, indices[some] - self.starts[number]

    def sources_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of the set that each sample belongs to, from 0, int64."""
        return np.searchsorted(self.starts, indices, side="right") - 1

    def from_each(
        self, indices: NDArray[np.int64], get: Callable[[int, NDArray[np.int64]], NDArray[Any]]
    ) -> NDArray[Any]:
        """Returns the value of each sample, in the order of `indices`. get(k, local) returns the values of samples of
        set k, by their indices in the set."""
        found = [(some, get(number, local)) for number, some, local in self.parts_of(indices)]
        if not found:
            return get(0, indices)
        out = np.empty((len(indices), *found[0][1].shape[1:]), np.result_type(*(values for _, values in found)))
        for some, values in found:
            out[some] = values
        return out

    def joined(self, number: int, labels: NDArray[Any]) -> NDArray[Any]:
        """Returns the mixture's labels for labels that are stored in set `number`."""
        table = self.relabel[number]
        return labels if table is None else table[labels]

    def labels_of(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the labels of samples. See `ShardSet.labels_of`."""
        return self.from_each(indices, lambda number, some: self.joined(number, self.sets[number].labels_of(some)))

    @cached_property
    def labels(self) -> NDArray[Any]:
        """The labels of all samples, in order."""
        return self.labels_of(np.arange(len(self)))

    def values_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns the values of an array. See `ShardSet.values_of`."""
        return self.from_each(indices, lambda number, some: self.sets[number].values_of(name, some))

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a column of the index. See `ShardSet.column_of`."""
        return self.from_each(indices, lambda number, some: self.sets[number].column_of(name, some))

    def gather(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copies samples into `out`. See `ShardSet.gather`."""
        for number, some, local in self.parts_of(indices):
            pixels = np.empty((len(some), *self.sample_shape), np.uint8)
            self.sets[number].gather(local, pixels)
            out[some] = pixels

    def source_sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the height and width of each source image, int64 (B, 2); None if no set is squashed. See
        `ShardSet.source_sizes`. In a set that is not squashed, an image counts as having the stored size."""
        if not any(one.content.squashed for one in self.sets):
            return None

        def sizes(number: int, some: NDArray[np.int64]) -> NDArray[np.int64]:
            found = self.sets[number].source_sizes(some)
            return np.tile(np.array(self.sample_shape[:2]), (len(some), 1)) if found is None else found

        return self.from_each(indices, sizes)


AnySet: TypeAlias = ShardSet | MixedSet


class MixedReader(Reader):
    """Reads the samples of a MixedSet, by `readers`, one for each of its sets. Thread safe."""

    def __init__(self, shards: MixedSet, readers: Sequence[Reader]) -> None:
        super().__init__()
        self._shards = shards
        self._readers = tuple(readers)
        self.num_threads = max(reader.num_threads for reader in readers)

    @property
    def name(self) -> str:  # type: ignore[override]
        return ", ".join(dict.fromkeys(reader.name for reader in self._readers))

    @property
    def min_part_nbytes(self) -> int:  # type: ignore[override]
        return min(reader.min_part_nbytes for reader in self._readers)

    @property
    def whole_lines(self) -> int:
        return max(reader.whole_lines for reader in self._readers)

    def read(self, request: Request, memory: BatchMemory, part: slice) -> None:
        """Reads the samples at the positions request.order[part] of the batch: `request.order` sorts the batch by set,
        so a part has samples of few sets. Each sample is still written to its own position in `memory`."""
        assert request.order is not None
        numbers = request.order[part]
        indices = request.indices[numbers]
        for number, some, local in self._shards.parts_of(indices):
            mine = numbers[some]
            self._readers[number].read_samples(request, memory, mine, local)
            if request.label:
                memory.labels[mine] = self._shards.joined(number, memory.labels[mine])
            memory.more[SOURCE][mine] = number
        memory.indices[numbers] = indices

    def begin_epoch(self) -> bool:
        announced = [reader.begin_epoch() for reader in self._readers]  # of each, and not only up to the first
        return any(announced)

    def will_read(self, request: Request) -> None:
        for number, some, local in self._shards.parts_of(request.indices):
            windows = None if request.windows is None else request.windows[some]
            self._readers[number].will_read(replace(request, indices=local, windows=windows))

    def counts(self) -> ReadCounts:
        return ReadCounts(*map(sum, zip(*(reader.counts() for reader in self._readers), strict=True)))

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for reader in self._readers:
                stack.callback(reader.close)


class MixedSource:
    """The sources of a mixture's splits. Opens, describes and closes all of them, like a SplitSource. `join` makes a
    MixedSet of the opened splits."""

    def __init__(self, sources: Sequence[SplitSource], join: Callable[[Sequence[ShardSet]], MixedSet]) -> None:
        self.sources = tuple(sources)
        self._join = join

    def open(self, batches: Iterable[NDArray[np.int64]]) -> MixedSet:
        ends = [*accumulate(source.num_samples for source in self.sources)]
        sets = []
        for source, end, some in zip(self.sources, ends, itertools.tee(batches, len(ends)), strict=True):
            start = end - source.num_samples
            mine = (batch[(batch >= start) & (batch < end)] - start for batch in some)
            sets.append(source.open(mine))
        return self._join(sets)

    def describe(self) -> dict[str, Any]:
        """Returns `io_reason` and `staging`, as SplitSource does. `staging` is a list with an entry for each set, or
        None if no set has a cache."""
        told = [source.describe() for source in self.sources]
        staging = [one["staging"] for one in told]
        reasons = dict.fromkeys(one["io_reason"] for one in told)
        return {"io_reason": "; ".join(reasons), "staging": staging if any(staging) else None}

    def stop(self) -> None:
        for source in self.sources:
            source.stop()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for source in self.sources:
                stack.callback(source.close)

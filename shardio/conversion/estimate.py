"""Estimates a conversion before anything is written: counts, bytes, shards, disk space, and time."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from shardio.conversion.collect import check, collect
from shardio.conversion.engine import THREADS_PER_PROCESS
from shardio.conversion.options import ConvertOptions, Pixels, count_bad, count_workers
from shardio.conversion.plan import ShardTask, make_plan
from shardio.conversion.records import Reject
from shardio.conversion.report import describe, describe_facts
from shardio.conversion.sources.collection import DatasetItem, Source
from shardio.conversion.task import PreparedSample, prepare
from shardio.errors import ConvertError
from shardio.sets.names import check_local

# Images that are read beforehand to measure with, where each costs a row group of parquet.
_MOST_READ_AHEAD = 128


@dataclass(frozen=True)
class Estimate:
    """The expected outcome of a conversion. Sizes are in bytes, and assume that no source is refused."""

    source: str
    """The kind of storage in SRC."""
    num_sources: int
    num_classes: int
    splits: Mapping[str, int]
    """The number of sources of each split."""
    notes: tuple[str, ...]
    """In words, what the conversion has understood or guessed of SRC, such as classes and the column of the labels."""
    ignored: Mapping[str, int]
    """Entries of SRC that would not be converted, per reason."""
    source_nbytes: int | None
    """Size of the encoded images, approximate for parquet; None if it is unknown without reading them."""
    num_shards: int
    nbytes: int
    """Size of all shards, arrays and indexes."""
    nbytes_as: Mapping[str, int]
    """`nbytes` for each value of `pixels` that suits the samples' size; empty if samples have no pixels."""
    spool_nbytes: int
    """Approximate size of the copies of images or arrays that a conversion from parquet files or compressed NPZ files
    keeps until the set is published; 0 for other kinds of storage."""
    free_nbytes: int | None
    """Free bytes on the filesystem of OUT; None without OUT."""
    facts: Mapping[str, int]
    """As `ConvertReport.facts`, but only for the sources that were measured."""
    num_measured: int
    """Sources that were read, decoded and resized to measure the rate, chosen at random."""
    refused: Mapping[str, int]
    """Measured sources that would be refused, per reason."""
    short_sides: tuple[int, ...]
    """The 10%, 50% and 90% quantiles of the shorter sides of measured images that were not refused, in pixels; () if
    there are no such images."""
    max_bad: int | float
    """The refused sources that the conversion would accept, as a count or a share."""
    workers: int
    images_per_second: float
    """The rate of all workers together. It leaves out writing, which happens at the same time, and the copying that
    `spool_nbytes` is about."""
    seconds: float
    """The duration of the conversion at this rate."""

    @property
    def most_bad(self) -> int:
        """The number of the `num_sources` sources that may be refused, by `max_bad`."""
        return count_bad(self.max_bad, self.num_sources)

    @property
    def expected_bad(self) -> int:
        """The number of the `num_sources` sources that would be refused if the measured sources are typical."""
        return round(sum(self.refused.values()) / self.num_measured * self.num_sources)

    @property
    def fits(self) -> bool | None:
        """Whether the set and the temporary copies fit into the free bytes; None without OUT."""
        return None if self.free_nbytes is None else self.nbytes + self.spool_nbytes <= self.free_nbytes


def estimate(
    src: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, seconds: float = 2.0, **given: Any
) -> Estimate:
    """Returns an estimate of what `convert` would do with the options `given`. Writes nothing; `out` need not exist.

    The rate is measured for about `seconds`. Raises the errors that `convert` would raise before its first image, for
    example if it cannot use `out`.
    """
    # The order of the samples decides about neither counts nor sizes, and hashing every key is slow.
    options = replace(ConvertOptions(**given), order="source")
    workers = count_workers(options.workers)
    if out is not None:
        check_local(out, ConvertError, "a conversion needs a folder here")
        out = Path(os.path.abspath(out))
    check(src, out, options)
    collection = collect(src, options)
    plan = make_plan(Path(os.devnull), collection, options)
    free_nbytes = None
    if out is not None:
        free_nbytes = shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.is_dir())).free
    nbytes_as = {}
    if (fit := plan.tasks[0].fit) is not None:
        for pixels in get_args(Pixels):
            with contextlib.suppress(ValueError):  # an odd size
                row = replace(fit, pixels=pixels).row
                nbytes_as[pixels] = plan.nbytes + collection.num_sources * (row.nbytes - fit.row.nbytes)
    listed = list(itertools.chain.from_iterable(collection.splits.values()))
    task = replace(plan.tasks[0], origin=collection.origin)  # one that reads without copies
    rate, outcomes = _measure(task, listed, workers, seconds)
    reasons = Counter(one.reason for one in outcomes if isinstance(one, Reject))
    samples = [one for one in outcomes if isinstance(one, PreparedSample)]
    sizes = np.array([one.source_size for one in samples], np.int64).reshape(-1, 2)
    facts = Counter(fact for one in samples for fact in one.facts)
    if fit is not None:
        facts.update(fit.count_enlarged(*sizes.T))
    sides = sizes.min(1) if fit is not None else sizes[:0, 0]
    return Estimate(
        source=collection.kind,
        num_sources=len(listed),
        num_classes=len(collection.classes),
        splits={name: len(some) for name, some in collection.splits.items()},
        notes=(*describe(collection), *describe_facts(facts, f" (of {len(outcomes):,} that were tried)")),
        ignored=dict(collection.ignored),
        source_nbytes=collection.origin.nbytes(listed),
        num_shards=len(plan.tasks),
        nbytes=plan.nbytes,
        nbytes_as=nbytes_as,
        spool_nbytes=collection.origin.copies_nbytes(),
        free_nbytes=free_nbytes,
        facts=dict(+facts),
        num_measured=len(outcomes),
        refused=dict(reasons.most_common()),
        short_sides=tuple(np.quantile(sides, [0.1, 0.5, 0.9], method="lower").tolist()) if len(sides) else (),
        max_bad=options.max_bad,
        workers=workers,
        images_per_second=rate,
        seconds=len(listed) / rate,
    )


def _measure(
    task: ShardTask, sources: Sequence[Source], workers: int, seconds: float
) -> tuple[float, list[PreparedSample | Reject]]:
    """Measures the rate of a conversion for about `seconds`, on some of `sources`, in a fixed random order. Returns
    (images per second of all `workers` together; a PreparedSample without arrays, or a Reject, for each source that was
    measured). `task` is any task of the conversion; the sources of `task` are not used."""
    order = np.random.default_rng(0).permutation(len(sources))
    found: dict[Source, Future[bytes | DatasetItem]] = {}
    if task.origin.copies_nbytes():  # a conversion reads copies instead, so reading is not timed
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(1, "shardio-measure") as pool:
            for source in (sources[number] for number in order[:_MOST_READ_AHEAD]):
                found[source] = pool.submit(task.origin.read, source)
                found[source].exception()
                if time.monotonic() > deadline:
                    break
        order = order[: len(found)]
    threads = min(workers, THREADS_PER_PROCESS)  # one process of a conversion; the others are taken to be as fast

    def outcome(source: Source) -> PreparedSample | Reject:
        pixels = np.empty(0 if task.pixels_row is None else task.pixels_row.shape, np.uint8)
        result = prepare(task, source, pixels, found.get(source))
        return result if isinstance(result, Reject) else result._replace(arrays={})

    def work(first: int) -> list[PreparedSample | Reject]:
        outcomes = []
        for number in order[first::threads]:
            outcomes.append(outcome(sources[number]))
            if time.monotonic() > deadline:
                break
        return outcomes

    with ThreadPoolExecutor(threads, "shardio-measure") as pool:
        outcome(sources[0])  # what is done once, at the first image, does not count
        start = time.monotonic()
        deadline = start + seconds
        outcomes = list(itertools.chain.from_iterable(pool.map(work, range(threads))))
        elapsed = time.monotonic() - start
    return len(outcomes) / elapsed * workers / threads, outcomes

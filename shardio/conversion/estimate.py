"""What a conversion would do, before anything is written: counts, bytes, shards, room, and the time it would take."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.amounts import (
    DEFAULT_MAX_BAD,
    check_workers,
    given,
    most_bad,
    parse_max_bad,
    parse_nbytes,
)
from shardio.conversion.engines.processes import THREADS_PER_PROCESS
from shardio.conversion.engines.torchthreads import one_torch_thread
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.fit import FitMode, Resample
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ConvertOptions, Quality, make_fit, make_plan
from shardio.conversion.sources.collection import Collection, FileOrigin, Given, Source
from shardio.conversion.sources.columns import check_columns_file, read_columns
from shardio.conversion.sources.detect import EmptyClasses, SourceKind, check_images_local, scan_for
from shardio.conversion.sources.parquet import ParquetOrigin
from shardio.conversion.writing.set_writer import DEFAULT_SHARD_NBYTES
from shardio.errors import ConvertError, DecodeError
from shardio.sets.local import check_apart, check_local, check_usable
from shardio.system.machine import usable_cores
from shardio.system.threads import ThreadPool

DEFAULT_SECONDS = 2.0
# Asking a filesystem for sizes is waiting, on a network.
_STAT_THREADS = 16
# Images that are read out of parquet to measure with: each costs its row group.
_MOST_FROM_PARQUET = 128


class ClassCount(NamedTuple):
    name: str
    num_sources: int


@dataclass(frozen=True)
class SplitEstimate:
    num_sources: int
    num_shards: int
    smallest: ClassCount
    largest: ClassCount


@dataclass(frozen=True)
class Estimate:
    """What a conversion would do. Sizes are those of a set without refused sources."""

    source: str
    """The kind of storage that SRC is."""
    num_sources: int
    num_classes: int
    splits: Mapping[str, SplitEstimate]
    ignored: Mapping[str, int]
    source_nbytes: int | None
    """Size of the encoded images, of parquet by and large; None if their origin cannot tell without reading them."""
    num_shards: int
    nbytes: int
    """Of all shards and indexes."""
    spool_nbytes: int
    """Of the images' copies beside them, by and large, which a conversion of parquet needs until the set is published;
    0 for any other kind."""
    free_nbytes: int | None
    """On the filesystem of OUT, if there is an OUT."""
    num_measured: int
    """Sources that were read, decoded and resized to measure the rate, evenly spaced."""
    refused: Mapping[str, int]
    """Of those, the ones that would be refused, per reason."""
    max_bad: int | float
    """How many the conversion would accept, as a count or a share."""
    workers: int
    images_per_second: float
    """Of so many workers. Writing goes on beside that, and is not measured; nor is copying out of parquet and reading
    the copies."""
    seconds: float
    """That the conversion would take at this rate."""

    @property
    def most_bad(self) -> int:
        """Of all sources, how many may be refused."""
        return most_bad(self.max_bad, self.num_sources)

    @property
    def expected_bad(self) -> int:
        """Of all sources, how many would be refused if those that were not tried are as those that were."""
        return round(sum(self.refused.values()) / self.num_measured * self.num_sources)

    @property
    def fits(self) -> bool | None:
        return None if self.free_nbytes is None else self.nbytes + self.spool_nbytes <= self.free_nbytes


def estimate(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    source: SourceKind = "auto",
    accept_layout: bool = False,
    empty_classes: EmptyClasses = "refuse",
    size: int | tuple[int, int] | str = 256,
    fit: FitMode = "crop",
    resample: Resample = "bicubic",
    quality: Quality = "exact",
    shard_size: int | str = DEFAULT_SHARD_NBYTES,
    max_bad: int | float | str = DEFAULT_MAX_BAD,
    columns: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> Estimate:
    """Say what `convert` would do with these arguments. Nothing is written, and `out` need not exist.

    The rate is measured for about `seconds`. Errors are those of `convert`, also if it could not have `out`.
    """
    check_images_local(src)
    src = Path(os.path.abspath(src))
    # The order of the samples decides about neither counts nor sizes, and hashing every key is slow.
    options = ConvertOptions(
        make_fit(size, fit, resample), given("shard_size", shard_size, parse_nbytes), "source", quality=quality
    )
    check_workers(workers)
    workers = usable_cores() if workers is None else workers
    max_bad = given("max_bad", max_bad, parse_max_bad)
    most_bad(max_bad, 0)  # before anything that takes time
    if out is not None:
        check_local(out, ConvertError, "a conversion needs a folder here")
        out = Path(os.path.abspath(out))
        check_apart(src, out)
        check_usable(out)
    if columns is not None:
        check_columns_file(Path(columns))
    collection = scan_for(out, src, source, accept_layout=accept_layout, empty_classes=empty_classes)
    table = None if columns is None else read_columns(Path(columns), collection.splits)
    plan = make_plan(Path(os.devnull), collection, options, table)
    shards = Counter(task.split for task in plan.tasks)
    rate, measured, refused = _measure(collection, options, workers, seconds)
    return Estimate(
        source=collection.kind,
        num_sources=collection.num_sources,
        num_classes=len(collection.classes),
        splits={
            name: _describe(sources, collection.classes, shards[name]) for name, sources in collection.splits.items()
        },
        ignored=dict(collection.ignored),
        source_nbytes=_source_nbytes(collection),
        num_shards=len(plan.tasks),
        nbytes=plan.nbytes,
        spool_nbytes=_spool_nbytes(collection),
        free_nbytes=None if out is None else _free_nbytes(out),
        num_measured=measured,
        refused=refused,
        max_bad=max_bad,
        workers=workers,
        images_per_second=rate,
        seconds=collection.num_sources / rate,
    )


def _describe(sources: Sequence[Source], classes: Sequence[str], num_shards: int) -> SplitEstimate:
    counts = np.bincount([source.label for source in sources], minlength=len(classes))
    smallest, largest = (ClassCount(classes[int(i)], int(counts[i])) for i in (counts.argmin(), counts.argmax()))
    return SplitEstimate(len(sources), num_shards, smallest, largest)


def _spool_nbytes(collection: Collection) -> int:
    return collection.origin.missing_nbytes() if isinstance(collection.origin, ParquetOrigin) else 0


def _source_nbytes(collection: Collection) -> int | None:
    origin = collection.origin
    if isinstance(origin, ParquetOrigin):
        return origin.missing_nbytes()
    if not isinstance(origin, FileOrigin):
        return None
    sources = list(itertools.chain.from_iterable(collection.splits.values()))

    def total(start: int) -> int:
        return sum(map(origin.nbytes, sources[start::_STAT_THREADS]))

    with ThreadPool(_STAT_THREADS, "shardio-stat") as pool:
        return sum(pool.map(total, range(_STAT_THREADS)))


def _free_nbytes(out: Path) -> int:
    return shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.is_dir())).free


# --- the rate ---------------------------------------------------------------------------------------------------------


def _measure(
    collection: Collection, options: ConvertOptions, workers: int, seconds: float
) -> tuple[float, int, Mapping[str, int]]:
    """(images per second of so many workers, sources tried, how many of them were refused, per reason)."""
    fit = options.fit
    least_size = fit.least_size if options.quality == "fast" else None
    sources = list(itertools.chain.from_iterable(collection.splits.values()))
    order = spread(len(sources))
    read: Callable[[Source], bytes | Given] = collection.origin.read
    if isinstance(collection.origin, ParquetOrigin):
        found = _read_ahead(collection.origin, (sources[number] for number in order[:_MOST_FROM_PARQUET]), seconds)
        order, read = order[: len(found)], partial(_get, found)
    threads = min(workers, THREADS_PER_PROCESS)  # one process of a conversion; the others are taken to be as fast

    def outcome(source: Source) -> str:
        with KeptWarnings():
            try:
                data = read(source)
                assert isinstance(data, bytes)  # a path is no dataset
                decoded = decode_image(data, least_size=least_size)
                fit.apply(decoded.pixels, decoded.source_size, decoded.reduction)
            except DecodeError as error:
                return error.reason
            return ""

    def work(first: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for number in order[first::threads]:
            outcomes[outcome(sources[number])] += 1
            if time.monotonic() > deadline:
                break
        return outcomes

    with one_torch_thread(), ThreadPool(threads, "shardio-measure") as pool:
        outcome(sources[0])  # what is done once, at the first image, does not count
        start = time.monotonic()
        deadline = start + seconds
        outcomes = sum(pool.map(work, range(threads)), Counter[str]())
        elapsed = time.monotonic() - start
    refused = {reason: count for reason, count in outcomes.most_common() if reason}
    return outcomes.total() / elapsed * workers / threads, outcomes.total(), refused


def _read_ahead(
    origin: ParquetOrigin, sources: Iterable[Source], seconds: float
) -> Mapping[Source, bytes | DecodeError]:
    """As many as can be read for so long, and at least one.

    A conversion reads copies of the images, one by one; here every read takes as long as that of a row group.
    """
    deadline = time.monotonic() + seconds
    found: dict[Source, bytes | DecodeError] = {}
    for source in sources:
        try:
            found[source] = origin.read(source)
        except DecodeError as error:
            found[source] = error
        if time.monotonic() > deadline:
            break
    return found


def _get(found: Mapping[Source, bytes | DecodeError], source: Source) -> bytes:
    data = found[source]
    if isinstance(data, DecodeError):
        raise data
    return data


def spread(count: int) -> NDArray[np.int64]:
    """The numbers below `count`, each once, in an order of which every first part is evenly spaced.

    Multiples of the golden section, modulo 1, fall where there was most room; their ranks are whole numbers.
    """
    ranks = (np.arange(count) * ((math.sqrt(5) - 1) / 2) % 1).argsort().argsort()
    return ranks.astype(np.int64)

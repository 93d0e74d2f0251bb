"""Plans a conversion before it begins: the order of the samples, the shards, and the task that makes each shard.

A plan, and so every byte of the set, depends only on the options and the list of sources, never on workers or machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardio.conversion.arrays import ArraySpec, check_specs, check_splits, label_array
from shardio.conversion.images.fit import Fit
from shardio.conversion.options import ConvertOptions
from shardio.conversion.sources.collection import Collection, Origin, Source
from shardio.conversion.writing.shard_file import samples_per_shard
from shardio.format.layout import (
    CRC32_ROW,
    HEADER_NBYTES,
    WORK_FOLDER,
    RowType,
    array_shard_name,
    index_dtype,
    key_field_nbytes,
    shard_name,
)
from shardio.format.manifest_file import check_names_fit
from shardio.sets.levels import chosen_samples, first_split
from shardio.version import __version__

MAX_SAMPLES = 16_384
"""The maximum number of samples in a shard. If a process is killed, the shard that it was making is lost. The limit
keeps that loss to seconds of work, with small images too."""


@dataclass(frozen=True)
class ShardTask:
    """The task to make the shard `number` of a split, and its arrays: the unit of work. Picklable, with everything that
    a worker needs. `key_nbytes` is the size of the keys in the split's index."""

    origin: Origin
    out: Path
    split: str
    number: int
    sources: tuple[Source, ...]
    key_nbytes: int
    fit: Fit | None
    """None if samples have no pixels."""
    arrays: tuple[ArraySpec, ...] = ()
    """The arrays that the task makes, other than the pixels."""
    measured: frozenset[int] = frozenset()
    """Indices in `sources` of the sources to measure for the mean and standard deviation of the set's pixels."""
    killed: Mapping[bytes, str] = field(default_factory=dict)
    """The sources to refuse because the kernel kills a process that decodes them: key -> detail of the refusal."""
    wanted: Mapping[str, str] | None = None
    """In a repair, the sha256 of each damaged file of the set, by file name: the task publishes only these files."""

    @property
    def has_label(self) -> bool:
        """Whether the samples of the split have integer labels, which are in the index."""
        return self.sources[0].indexed is not None

    @property
    def pixels_row(self) -> RowType | None:
        """The type of a stored sample's pixels; None if samples have no pixels."""
        return None if self.fit is None else self.fit.row

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def file_names(self) -> list[str]:
        """The file names of the shard, if samples have pixels, and of its arrays, except small arrays, which get their
        files when the set is published."""
        arrays = [self.array_name(spec) for spec in self.arrays if not spec.row.is_small]
        return [*([] if self.fit is None else [self.name]), *arrays]

    def array_name(self, spec: ArraySpec) -> str:
        """Returns the name of an array's file for the samples of this shard. Small arrays have no such file."""
        return array_shard_name(self.split, spec.name, self.number)

    @property
    def nbytes(self) -> int:
        """Size of the task's files in bytes if no source is refused."""
        rows = [spec.row for spec in self.arrays if not spec.row.is_small]
        return sum(row.file_nbytes(len(self.sources)) for row in (*rows, self.pixels_row) if row is not None)


@dataclass(frozen=True)
class Plan:
    """The tasks that make the set of a collection in the folder `out`."""

    out: Path
    collection: Collection
    options: ConvertOptions
    tasks: tuple[ShardTask, ...]

    @property
    def nbytes(self) -> int:
        """Size of all shards, arrays and indexes in bytes if no source is refused."""
        total = sum(task.nbytes for task in self.tasks)
        for task in {task.split: task for task in self.tasks}.values():
            count = len(self.collection.splits[task.split])
            total += HEADER_NBYTES + count * index_dtype(task.key_nbytes, has_label=task.has_label).itemsize
            for spec in self.arrays_of(task.split):
                total += CRC32_ROW.file_nbytes(count) + (spec.row.file_nbytes(count) if spec.row.is_small else 0)
        return total

    def arrays_of(self, split: str) -> tuple[ArraySpec, ...]:
        """Returns the arrays of a split: the arrays that its tasks make, and the columns of tables."""
        columns = self.collection.columns
        return (*next(task.arrays for task in self.tasks if task.split == split), *(columns.specs if columns else ()))

    def describe(self) -> dict[str, Any]:
        """Returns the options, the sources and the arrays as JSON values. Equal descriptions give equal plans."""
        collection, columns, names = self.collection, self.collection.columns, self.collection.class_names
        keys = ([source.key for source in sources] for sources in collection.splits.values())
        specs = collection.arrays
        given = {one.name: [one.kind, one.row.dtype, list(one.row.shape)] for one in specs if one.source == "item"}
        masks = [spec.dtype.name for spec in specs if spec.source == "file"]
        sha256 = _hash(repr(collection.classes) + collection.identity)
        for split, sources in collection.splits.items():
            sha256.update(f"\0{split}\0{len(sources)}\0".encode())
            for source in sources:
                sha256.update(b"%s %s\0" % (str(source.label).encode(), source.key))
        return {
            **self.options.describe(),
            "num_sources": collection.num_sources,
            "sources_sha256": sha256.hexdigest(),
            **({"class_names_sha256": _hash(repr(names)).hexdigest()} if names else {}),
            **({"columns_sha256": columns.sha256(keys)} if columns else {}),
            **({"tables": list(collection.tables)} if collection.tables else {}),
            **({"arrays": given} if given else {}),
            **({"masks": masks[0]} if masks else {}),
        }


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries whose decoders and kernels decide the pixels, by name of the library."""
    return {"shardio": __version__, **{name: version(name) for name in ("pillow", "simplejpeg")}}


def make_plan(out: Path, collection: Collection, options: ConvertOptions) -> Plan:
    """Returns the plan of a conversion into `out`. Raises ConvertError if the names of classes and files do not fit in
    a manifest. Raises ValueError if the names of arrays clash, if samples have no pixels and an option of images is
    set, or if samples have pixels and `size` is None."""
    if not collection.has_pixels:
        options = options.without_pixels()
    elif options.size is None:
        raise ValueError("size must be a number of pixels or (height, width), as SRC has images; found None")
    specs = collection.arrays
    stored = (*specs, *(collection.columns.specs if collection.columns else ()))
    check_specs(stored)
    check_splits(collection.splits, stored)
    collection = replace(collection, origin=replace(collection.origin, spool=out / WORK_FOLDER))
    tasks: list[ShardTask] = []
    fit = None if options.size is None else Fit.of(options)
    rows = [spec.row for spec in specs] if fit is None else [fit.row]
    most = min(MAX_SAMPLES, samples_per_shard(options.shard_size, max(row.nbytes for row in rows)))
    for split, sources in collection.splits.items():
        ordered = order_sources(sources, options)
        mine = (*specs, *label_array(ordered[0].label))
        key_nbytes = key_field_nbytes(max(len(source.key) for source in sources))
        # As few shards as the size allows, all about the same size, so no worker ends with a long shard.
        num_shards = -(-len(ordered) // most)
        bounds = [len(ordered) * i // num_shards for i in range(num_shards + 1)]
        measured = chosen_samples(len(ordered)) if split == first_split(collection.splits) else np.zeros(0, np.int64)
        tasks += [
            ShardTask(
                collection.origin,
                out,
                split,
                number,
                tuple(ordered[start:stop]),
                key_nbytes,
                fit,
                mine,
                frozenset((measured[(measured >= start) & (measured < stop)] - start).tolist()),
            )
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]
    names = [name for task in tasks for name in task.file_names]
    check_names_fit(collection.classes, collection.class_names, names)
    return Plan(out, collection, options, tuple(tasks))


def order_sources(sources: Iterable[Source], options: ConvertOptions) -> list[Source]:
    """Returns the sources in the order of the set. "shuffled" sorts them by a hash of the seed and the key, so this
    order does not depend on versions of libraries."""
    if options.order == "source":
        return list(sources)
    secret = options.seed.to_bytes(8, "little")
    return sorted(sources, key=lambda source: hashlib.blake2b(source.key, digest_size=16, key=secret).digest())


def _hash(text: str) -> hashlib._Hash:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape"))


_HASHED = {
    "sources_sha256": "the list of sources",
    "class_names_sha256": "the readable names of the classes",
    "columns_sha256": "the columns",
}


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Returns in words which values differ, such as "seed 1, here 2"; "" if none differs. `there` and `here` are both
    results of `Plan.describe`, or both results of `library_versions`."""
    parts = []
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            what = f"{name.replace('num_', 'number of ')} {there.get(name)!r}, here {here.get(name)!r}"
            parts.append(f"{_HASHED[name]} changed" if name in _HASHED else what)
    return "; ".join(parts)

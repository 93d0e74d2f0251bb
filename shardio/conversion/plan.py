"""What a conversion will do, before it does any of it: the order of the samples, the shards, and who needs what.

A plan depends on the options and on the list of sources alone, never on workers or machines, and so do the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from shardio.conversion.amounts import given, parse_size
from shardio.conversion.images.decode import DecodeOptions
from shardio.conversion.images.fit import Fit, FitMode, Resample
from shardio.conversion.sources.collection import Collection, Origin, Source
from shardio.conversion.sources.columns import ColumnTable
from shardio.conversion.writing.set_writer import DEFAULT_SHARD_NBYTES, samples_per_shard
from shardio.format.layout import SampleShape, index_nbytes, key_field_nbytes, shard_name, shard_nbytes
from shardio.format.manifest import check_names_fit
from shardio.version import __version__

Order = Literal["shuffled", "source"]
Quality = Literal["exact", "fast"]

# What conversions did before there was a choice, so that the sets of earlier versions are still recognised.
_BEFORE_THERE_WERE: Mapping[str, Any] = {"exif_rotate": False, "background": [255, 255, 255], "quality": "exact"}


@dataclass(frozen=True)
class ConvertOptions:
    """Everything about a conversion that the bytes of the set depend on."""

    fit: Fit = field(default_factory=Fit)
    shard_nbytes: int = DEFAULT_SHARD_NBYTES
    order: Order = "shuffled"
    seed: int = 0
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    quality: Quality = "exact"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(get_args(Order))}; found {self.order!r}")
        if self.quality not in get_args(Quality):
            raise ValueError(f"quality must be one of {', '.join(get_args(Quality))}; found {self.quality!r}")
        if not isinstance(self.shard_nbytes, int) or self.shard_nbytes <= 0:
            raise ValueError(f"shard size must be positive, an integer of bytes; found {self.shard_nbytes!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1; found {self.seed!r}")

    @property
    def sample_shape(self) -> SampleShape:
        return (*self.fit.size, 3)


@dataclass(frozen=True)
class ShardTask:
    """One shard to make: the unit of work. Picklable and complete: nothing else is needed to do it."""

    origin: Origin
    out: Path
    split: str
    number: int
    sources: tuple[Source, ...]
    key_nbytes: int
    fit: Fit
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    quality: Quality = "exact"
    hash_sources: bool = False
    """Whether the record shall tell which sources have the same bytes."""
    expected_sha256: str | None = None
    """The task repairs a published set: it publishes nothing but the very shard that has this checksum."""

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def nbytes(self) -> int:
        """Size of the shard if no source is refused."""
        return shard_nbytes(len(self.sources), (*self.fit.size, 3))


@dataclass(frozen=True)
class Plan:
    collection: Collection
    options: ConvertOptions
    tasks: tuple[ShardTask, ...]
    columns: ColumnTable | None = None

    @property
    def nbytes(self) -> int:
        """Size of all shards and indexes if no source is refused."""
        indexes = {task.split: task.key_nbytes for task in self.tasks}
        columns = self.columns.columns if self.columns else ()
        return sum(task.nbytes for task in self.tasks) + sum(
            index_nbytes(len(self.collection.splits[split]), key_nbytes, columns)
            for split, key_nbytes in indexes.items()
        )

    def describe(self) -> dict[str, Any]:
        """The options and sources as JSON values. Equal descriptions give equal plans."""
        options = self.options
        return {
            "size": list(options.fit.size),
            "fit": options.fit.mode,
            "resample": options.fit.resample,
            "quality": options.quality,
            "shard_nbytes": options.shard_nbytes,
            "order": options.order,
            "seed": options.seed,
            "exif_rotate": options.decode.exif_rotate,
            "background": list(options.decode.background),
            "num_sources": self.collection.num_sources,
            "sources_sha256": _hash_sources(self.collection),
            **({"class_names_sha256": _hash_names(self.collection)} if self.collection.class_names else {}),
            **({"columns_sha256": self.columns.sha256} if self.columns else {}),
        }


def make_fit(size: int | tuple[int, int] | str, mode: FitMode, resample: Resample) -> Fit:
    """The fit for samples of `size`, as callers give it."""
    sides = size if isinstance(size, int) else given("size", size, parse_size)
    return Fit((sides, sides) if isinstance(sides, int) else sides, mode, resample)


def library_versions() -> dict[str, str]:
    """Those whose decoders and kernels decide about pixels."""
    return {"shardio": __version__, **{name: version(name) for name in ("torch", "pillow", "simplejpeg")}}


def make_plan(
    out: Path,
    collection: Collection,
    options: ConvertOptions,
    columns: ColumnTable | None = None,
    *,
    hash_sources: bool = False,
) -> Plan:
    """The plan of a conversion into `out`. ConvertError if its set could not be described by a manifest."""
    tasks: list[ShardTask] = []
    most = samples_per_shard(options.shard_nbytes, options.sample_shape)
    for split, sources in collection.splits.items():
        ordered = order_sources(sources, options)
        key_nbytes = key_field_nbytes(max(len(source.key) for source in sources))
        # As few shards as the size allows, and all of about the same size, so that no worker ends with a long one.
        num_shards = -(-len(ordered) // most)
        bounds = [len(ordered) * i // num_shards for i in range(num_shards + 1)]
        tasks += [
            ShardTask(
                collection.origin,
                out,
                split,
                number,
                tuple(ordered[start:stop]),
                key_nbytes,
                options.fit,
                options.decode,
                options.quality,
                hash_sources,
            )
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]
    check_names_fit(collection.classes, collection.class_names, [task.name for task in tasks])
    return Plan(collection, options, tuple(tasks), columns)


def read_options(description: Mapping[str, Any]) -> ConvertOptions:
    """The options that `Plan.describe` has described. ValueError if these are none."""
    values = {**_BEFORE_THERE_WERE, **description}
    try:
        options = ConvertOptions(
            Fit(tuple(values["size"]), values["fit"], values["resample"]),
            values["shard_nbytes"],
            values["order"],
            values["seed"],
            DecodeOptions(values["exif_rotate"], tuple(values["background"])),
            values["quality"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the options of a conversion, found {dict(description)}: {error!r}") from None
    if not type(options.shard_nbytes) is type(options.seed) is int:
        raise ValueError(f"shard size and seed must be integers; found {options.shard_nbytes!r} and {options.seed!r}")
    return options


def order_sources(sources: Iterable[Source], options: ConvertOptions) -> list[Source]:
    """Shuffled: sorted by a keyed hash of the key, which no version of any library can change."""
    if options.order == "source":
        return list(sources)
    secret = options.seed.to_bytes(8, "little")
    return sorted(sources, key=lambda source: hashlib.blake2b(source.key, digest_size=16, key=secret).digest())


def _hash_sources(collection: Collection) -> str:
    sha256 = hashlib.sha256((repr(collection.classes) + collection.identity).encode("utf-8", "surrogateescape"))
    for split, sources in collection.splits.items():
        sha256.update(f"\0{split}\0{len(sources)}\0".encode())
        for source in sources:
            sha256.update(b"%d %s\0" % (source.label, source.key))
    return sha256.hexdigest()


def _hash_names(collection: Collection) -> str:
    return hashlib.sha256(repr(collection.class_names).encode("utf-8", "surrogateescape")).hexdigest()


_HASHED = {
    "sources_sha256": "the list of sources",
    "class_names_sha256": "what the classes are called",
    "columns_sha256": "the columns",
}


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In words, what distinguishes two descriptions; empty if nothing does."""
    there, here = {**_BEFORE_THERE_WERE, **there}, {**_BEFORE_THERE_WERE, **here}
    parts = []
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            what = _HASHED.get(name, f"{name} {there.get(name)!r}")
            found = "changed since" if name in _HASHED else f"here {here.get(name)!r}"
            parts.append(f"{what}, {found}")
    return "; ".join(parts)

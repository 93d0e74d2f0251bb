"""Makes a collection of SRC, as the options of a conversion describe it: with labels, splits, columns and masks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from shardio.conversion.arrays import ArraySpec, declare
from shardio.conversion.images.fit import Pictures
from shardio.conversion.images.mask import read_dtype
from shardio.conversion.options import ConvertOptions, EmptyClasses
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.datasets import Dataset, list_datasets
from shardio.conversion.sources.detect import list_source
from shardio.conversion.sources.listed import describe
from shardio.conversion.sources.names import by_split
from shardio.conversion.sources.table import Contents, Table, read_table
from shardio.errors import DecodeError, SourceError
from shardio.format.layout import RowType, check_split_name
from shardio.sets.names import check_apart, check_local, check_usable, looks_like_a_set

Src = str | os.PathLike[str] | Dataset | Mapping[str, Dataset]

# Pictures whose masks are looked for before the folder counts as a wrong one.
_MOST_TRIED = 1000

MASK = "mask"
"""The name of the array with the masks from a folder of masks."""


def check(src: Src, out: Path | None, options: ConvertOptions) -> None:
    """Checks the arguments as far as possible without scanning SRC. Raises an error for the first wrong one."""
    if isinstance(src, (str, os.PathLike)):
        check_local(src, SourceError, "images are read from files, so copy or mount them here first")
        if out is not None:
            check_apart(Path(os.path.abspath(src)), out)
        if options.arrays:
            raise ValueError("arrays is for the items of a dataset, and `src` is a path: leave `arrays` out")
    elif options.source != "auto":
        raise ValueError(
            f"source names the kind of a path, and `src` is a dataset: leave `source` out; found {options.source!r}"
        )
    elif options.masks is not None:
        raise ValueError("masks is for images in files, and `src` is a dataset: put the masks into its items")
    elif options.labels or options.empty_classes != "refuse":
        raise ValueError("labels and empty_classes are about files, and `src` is a dataset: leave them out")
    if out is not None:
        check_usable(out)
    if options.table is not None and isinstance(src, Table):
        raise ValueError("SRC is a table, and `table` describes the images of another SRC: leave one out")
    if any(table.root is not None for table in _tables(options).values()):
        raise ValueError("root is for a table that is SRC, and paths in `table` are relative to SRC: leave root out")
    if options.size is not None:
        Pictures.of(options)
    _declared(options)
    if options.masks is not None:
        check_local(options.masks, SourceError, "masks are read from files, so copy or mount them here first")
        if not os.path.isdir(options.masks):
            raise SourceError(f"{options.masks}: expected a folder of masks, found none")
        if out is not None:
            check_apart(Path(os.path.abspath(options.masks)), out)


def _declared(options: ConvertOptions) -> tuple[ArraySpec, ...]:
    """Returns the arrays declared for a dataset's items."""
    return declare(options.arrays or {}, options.sample_shape, ("image", "label"))


def collect(src: Src, options: ConvertOptions) -> Collection:
    """Scans SRC."""
    if isinstance(src, (str, os.PathLike)):
        try:
            return annotate(read(src, options), options)
        except SourceError as error:
            if looks_like_a_set(Path(src)):
                raise SourceError(f"{error}. SRC is a shard set: SRC, the images, comes first; OUT second") from None
            raise
    collection = list_datasets(src, _declared(options)).collect("folders")
    contents = _read_tables(options, unlabeled=False)
    if any(content.labels for content in contents.values()):
        raise ValueError("a table of the items of a dataset adds columns of numbers alone: items have their labels")
    return describe(collection, contents) if contents else collection


def read(src: str | os.PathLike[str], options: ConvertOptions) -> Collection:
    """Returns the images in SRC, as its tables describe them."""
    return next(readings(src, options, options.empty_classes))


def readings(src: str | os.PathLike[str], options: ConvertOptions, *ways: EmptyClasses) -> Iterator[Collection]:
    """Yields what `read` returns for each way to treat empty classes. Lists SRC once."""
    contents = _read_tables(options, unlabeled=options.labels == "none")
    labels = "none" if any(content.labels for content in contents.values()) else options.labels
    listing = list_source(src, options.source, labels)
    for way in ways:
        collection = listing.collect(labels, way)
        yield describe(collection, contents) if contents else collection


def annotate(collection: Collection, options: ConvertOptions) -> Collection:
    """Returns the collection with its masks, of the dtype of the first readable mask, if there are `masks`."""
    if options.masks is None:
        return collection
    if not collection.has_pixels:
        raise ValueError("masks are for images, and SRC has arrays without images: leave them out")
    origin = replace(collection.origin, masks=Path(os.path.abspath(options.masks)))
    first: DecodeError | None = None
    for source in islice(chain.from_iterable(collection.splits.values()), _MOST_TRIED):
        try:
            dtype = read_dtype(origin.read_mask(source))
        except DecodeError as error:
            first = first or error
            continue
        masks = ArraySpec(MASK, "mask", RowType(dtype.str, Pictures.of(options).fit.size), "file")
        return replace(collection, origin=origin, arrays=(*collection.arrays, masks))
    raise SourceError(
        f"{origin.masks}: expected a mask for each picture, at the same path below this folder as below SRC; for "
        f"the first: {first.detail if first else 'no picture'}; and none for the others that were tried"
    )


def _tables(options: ConvertOptions) -> Mapping[str, Table]:
    """Returns the tables by split, or one by "".

    Raises ValueError for a word that cannot name a split, and SourceError for two words for one split.
    """
    given = options.table if isinstance(options.table, Mapping) else {"": options.table}
    tables = {word: one if isinstance(one, Table) else Table(one) for word, one in given.items() if one is not None}
    for word in filter(None, tables):
        check_split_name(word)
    return by_split("tables", tables)


def _read_tables(options: ConvertOptions, *, unlabeled: bool) -> Mapping[str, Contents]:
    return {split: read_table(table, unlabeled=unlabeled) for split, table in _tables(options).items()}

"""The options of a conversion: how to read SRC, and everything that decides the bytes of the set.

`convert`, `estimate` and `repair` share these arguments, which are described and checked here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from shardio.conversion.arrays import ArrayDeclaration, ArraySpec, declare
from shardio.conversion.images.decode import Color, DecodeOptions, parse_color
from shardio.conversion.images.fit import Fit, FitMode, Resample
from shardio.conversion.images.mask import read_dtype
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.datasets import Dataset, list_datasets
from shardio.conversion.sources.detect import SourceKind, list_source
from shardio.conversion.sources.listed import describe
from shardio.conversion.sources.listing import EmptyClasses, Labels
from shardio.conversion.sources.names import by_split
from shardio.conversion.sources.table import Contents, Table, Tables, read_table
from shardio.conversion.writing.publish import DEFAULT_SHARD_NBYTES
from shardio.errors import DecodeError, SourceError, check_choice, show
from shardio.format.layout import RowType, SampleShape, check_split_name
from shardio.sets.names import check_apart, check_local, check_usable, looks_like_a_set
from shardio.system.machine import usable_cores

StoredOrder = Literal["shuffled", "source"]
Quality = Literal["exact", "fast"]
Size = int | tuple[int, int]
Src = str | os.PathLike[str] | Dataset | Mapping[str, Dataset]

DEFAULT_MAX_BAD = 0.01
"""The share of a conversion's images that may be refused, by default."""

# The options that also matter to samples without pixels.
_OF_ARRAYS = ("shard_nbytes", "order", "seed")

# Pictures whose masks are looked for before the folder counts as a wrong one.
_MOST_TRIED = 1000

MASK = "mask"
"""The name of the array with the masks from a folder of masks."""


@dataclass(frozen=True)
class SourceOptions:
    """How to read SRC: a path, a Python dataset, or a dataset for each split."""

    source: SourceKind = "auto"
    """The kind of the path: a folder "tree" of classes, ImageNet's archives ("ilsvrc"), the "kaggle" layout, a "list"
    file, "webdataset" tars (a file, a folder or a pattern), "parquet" files (a file or a folder), or "arrays" without
    pictures (a folder tree of NPY files, an NPY file or an NPZ file). "auto" detects the kind, and the report names
    it."""
    labels: Labels | None = None
    """Whether folders are classes, where that is not clear: "folders" or "none". "none" takes the images of any kind of
    source without labels."""
    empty_classes: EmptyClasses = "refuse"
    """Class folders without images: "refuse" raises an error, "omit" leaves the class out and numbers the others,
    "keep" gives the class a label that no sample has."""
    table: Tables | None = None
    """A table that describes the images in SRC, or one for each split. If SRC is a table itself, it is a `Table` or the
    path of a file."""
    masks: str | os.PathLike[str] | None = None
    """A folder with a mask for each picture, at the same relative path: a PNG (gray of 8 or 16 bits, or a palette) or a
    lossless WebP. Masks become the array "mask"; a picture without a mask is refused."""
    arrays: Mapping[str, ArrayDeclaration] = field(default_factory=dict)
    """Entries of a dataset's items that become arrays: a dict from the name of an entry to (kind, dtype, shape of the
    stored value). Items must be dicts."""

    def check(self, src: Src, out: Path | None, options: ConvertOptions | None = None) -> None:
        """Checks the arguments as far as possible without scanning SRC. Raises an error for the first wrong one."""
        if isinstance(src, (str, os.PathLike)):
            check_local(src, SourceError, "images are read from files, so copy or mount them here first")
            if out is not None:
                check_apart(Path(os.path.abspath(src)), out)
        elif self.source != "auto":
            raise ValueError(
                f"source names the kind of a path, and `src` is a dataset: leave `source` out; found {self.source!r}"
            )
        elif self.masks is not None:
            raise ValueError("masks is for images in files, and `src` is a dataset: put the masks into its items")
        elif self.labels or self.empty_classes != "refuse":
            raise ValueError("labels and empty_classes are about files, and `src` is a dataset: leave them out")
        if out is not None:
            check_usable(out)
        if self.table is not None and isinstance(src, Table):
            raise ValueError("SRC is a table, and `table` describes the images of another SRC: leave one out")
        if any(table.root is not None for table in self.tables.values()):
            raise ValueError(
                "root is for a table that is SRC, and paths in `table` are relative to SRC: leave root out"
            )
        if isinstance(src, (str, os.PathLike)) and self.arrays:
            raise ValueError("arrays is for the items of a dataset, and `src` is a path: leave `arrays` out")
        if options is not None:
            self.declared(options.sample_shape)
        if self.masks is not None:
            check_local(self.masks, SourceError, "masks are read from files, so copy or mount them here first")
            if not os.path.isdir(self.masks):
                raise SourceError(f"{self.masks}: expected a folder of masks, found none")
            if out is not None:
                check_apart(Path(os.path.abspath(self.masks)), out)

    def declared(self, sample_shape: SampleShape | None) -> tuple[ArraySpec, ...]:
        """Returns the arrays declared for a dataset's items."""
        return declare(self.arrays, sample_shape, ("image", "label"))

    def collect(self, src: Src, options: ConvertOptions) -> Collection:
        """Scans SRC."""
        if not isinstance(src, (str, os.PathLike)):
            collection = list_datasets(src, self.declared(options.sample_shape)).collect("folders")
            contents = self._read_tables(unlabeled=False)
            if any(content.labels for content in contents.values()):
                raise ValueError(
                    "a table of the items of a dataset adds columns of numbers alone: items have their labels"
                )
            return describe(collection, contents) if contents else collection
        return self.annotate(self._collect(src), options)

    def annotate(self, collection: Collection, options: ConvertOptions) -> Collection:
        """Returns the collection with its masks, of the dtype of the first readable mask, if there are `masks`."""
        if self.masks is None:
            return collection
        if not collection.has_pixels:
            raise ValueError("masks are for images, and SRC has arrays without images: leave them out")
        origin = replace(collection.origin, masks=Path(os.path.abspath(self.masks)))
        first: DecodeError | None = None
        for source in islice(chain.from_iterable(collection.splits.values()), _MOST_TRIED):
            try:
                dtype = read_dtype(origin.read_mask(source))
            except DecodeError as error:
                first = first or error
                continue
            masks = ArraySpec(MASK, "mask", RowType(dtype.str, options.fitting.size), "file")
            return replace(collection, origin=origin, arrays=(*collection.arrays, masks))
        raise SourceError(
            f"{origin.masks}: expected a mask for each picture, at the same path below this folder as below SRC; for "
            f"the first: {first.detail if first else 'no picture'}; and none for the others that were tried"
        )

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by split, or one by "".

        Raises ValueError for a word that cannot name a split, and SourceError for two words for one split.
        """
        given = {} if self.table is None else self.table if isinstance(self.table, Mapping) else {"": self.table}
        for word in filter(None, given):
            check_split_name(word)
        return by_split("tables", {word: one if isinstance(one, Table) else Table(one) for word, one in given.items()})

    def read(self, src: str | os.PathLike[str], labels: Labels | None, empty_classes: EmptyClasses) -> Collection:
        """Returns the images in SRC, as its tables describe them."""
        return next(self.readings(src, labels, empty_classes))

    def readings(self, src: str | os.PathLike[str], labels: Labels | None, *ways: EmptyClasses) -> Iterator[Collection]:
        """Yields what `read` returns for each way to treat empty classes. Lists SRC once."""
        contents = self._read_tables(unlabeled=labels == "none")
        labels = "none" if any(content.labels for content in contents.values()) else labels
        listing = list_source(src, self.source, labels)
        for way in ways:
            collection = listing.collect(labels, way)
            yield describe(collection, contents) if contents else collection

    def _read_tables(self, *, unlabeled: bool) -> Mapping[str, Contents]:
        return {split: read_table(table, unlabeled=unlabeled) for split, table in self.tables.items()}

    def _collect(self, src: str | os.PathLike[str]) -> Collection:
        try:
            return self.read(src, self.labels, self.empty_classes)
        except SourceError as error:
            if looks_like_a_set(Path(src)):
                raise SourceError(f"{error}. SRC is a shard set: SRC, the images, comes first; OUT second") from None
            raise


@dataclass(frozen=True)
class ConvertOptions:
    """Everything that decides the bytes of the set, other than the sources. Raises ValueError if one is invalid."""

    size: Size | None = 256
    """The height and width of a sample in pixels, or one number for both. None: samples have no pixels, only arrays."""
    fit: FitMode = "crop"
    """"crop" (short side to size, then the center), "squash", "pad" (with black), or "adm" (as ADM, DiT, SiT and EDM2
    crop, to the pixel, so that FID statistics match)."""
    resample: Resample = "bicubic"
    """The filter that resizes pictures, always antialiased."""
    quality: Quality = "exact"
    """"fast" decodes a JPEG at 1/2, 1/4 or 1/8 of its size if that is at least twice the resized picture; such samples
    differ by about 50 dB PSNR."""
    shard_nbytes: int = DEFAULT_SHARD_NBYTES
    """The maximum size of a shard in bytes."""
    order: StoredOrder = "shuffled"
    """The order of the samples in the set: "shuffled" depends on `seed` and the names of the sources, "source" is the
    order in which the sources are listed."""
    seed: int = 0
    exif_rotate: bool = False
    """Apply the Exif orientation, except to pictures that a dataset has decoded."""
    background: Color | str = "white"
    """The color under transparent pixels: (red, green, blue), "#rrggbb", or a CSS name."""

    def __post_init__(self) -> None:
        size = self.size if self.size is None else self.fitting.size
        # However a caller writes them, equal options compare and are described as equal.
        for name, value in {"size": size, "background": self.decode.background}.items():
            object.__setattr__(self, name, value)
        check_choice("order", self.order, StoredOrder)
        check_choice("quality", self.quality, Quality)
        if (self.fit, self.quality) == ("adm", "fast"):
            raise ValueError("fit 'adm' gives the pixels of its source: it needs quality 'exact'; found 'fast'")
        if type(self.shard_nbytes) is not int or self.shard_nbytes <= 0:
            raise ValueError(f"shard size must be a positive integer, in bytes; found {self.shard_nbytes!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1; found {self.seed!r}")

    def without_pixels(self) -> ConvertOptions:
        """Returns the options for samples without pixels. Raises ValueError if an option of images has been chosen."""
        plain = ConvertOptions(None, **{name: getattr(self, name) for name in _OF_ARRAYS})
        usual = replace(plain, size=self.size and ConvertOptions.size)
        if given := [one.name for one in fields(self) if getattr(self, one.name) != getattr(usual, one.name)]:
            raise ValueError(
                f"{', '.join(given)}: expected no options of images, as SRC has only arrays: leave them out"
            )
        return plain

    @cached_property
    def fitting(self) -> Fit:
        """How pictures become samples. Only for samples with pixels."""
        assert self.size is not None
        return Fit(_sides(self.size), self.fit, self.resample)

    @cached_property
    def decode(self) -> DecodeOptions:
        background = parse_color(self.background) if isinstance(self.background, str) else self.background
        return DecodeOptions(self.exif_rotate, background)

    @property
    def needs_torch(self) -> bool:
        """Whether torch resizes the pictures, not the kernel."""
        return self.size is not None and self.fitting.needs_torch

    @property
    def sample_shape(self) -> SampleShape | None:
        """(height, width, channels); None if samples have no pixels."""
        return None if self.size is None else (*self.fitting.size, 3)

    @cached_property
    def least_size(self) -> Callable[[int, int], tuple[int, int]] | None:
        """A function from a picture's (height, width) to the minimum size to decode it at; None to decode at full
        size."""
        return self.fitting.least_size if self.size is not None and self.quality == "fast" else None

    def describe(self) -> dict[str, Any]:
        """Returns the options as JSON values."""
        described: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        if self.size is None:
            return {name: described[name] for name in ("size", *_OF_ARRAYS)}
        return described


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list) else size


def check_max_bad(max_bad: int | float, num_sources: int = 0) -> int:
    """Returns how many of `num_sources` may be refused. Raises ValueError unless `max_bad` is a count or a share."""
    if isinstance(max_bad, bool) or not isinstance(max_bad, Real):
        raise ValueError(f"max_bad must be a count such as 10, or a share such as 0.01; found {max_bad!r}")
    if isinstance(max_bad, Integral):
        if max_bad < 0:
            raise ValueError(f"max_bad must not be negative; found {max_bad}")
        return int(max_bad)
    if not 0 <= max_bad <= 1:
        raise ValueError(f"max_bad as a share must be from 0.0 to 1.0; found {max_bad}")
    return int(round(max_bad * num_sources, 6))  # 0.29 * 100 is a little less than 29


def count_workers(workers: int | None) -> int:
    """Returns the number of workers, one per core if None. Raises ValueError if it is not a positive integer."""
    if workers is None:
        return usable_cores()
    if not isinstance(workers, Integral):
        raise ValueError(f"workers must be an integer, or None for all cores; found {workers!r}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1; found {workers}")
    return workers


def read_options(values: Mapping[str, Any]) -> ConvertOptions:
    """Returns the options from the JSON values that `describe` has returned. Raises ValueError for other values."""
    try:
        if values["size"] is None:
            return ConvertOptions(None, **{name: values[name] for name in _OF_ARRAYS})
        given = {field.name: values[field.name] for field in fields(ConvertOptions)}
        given |= {name: tuple(given[name]) for name in ("size", "background")}
        return ConvertOptions(**given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the options of a conversion, found {show(dict(values))}: {show(error)}") from None

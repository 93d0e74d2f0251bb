"""Scans SRC and returns its Collection, with the labels, splits, columns and masks that the options describe.

The kind of storage is detected only by unambiguous signs: names that a copy of ImageNet has, the first bytes of a file,
or archives, parquet or NPY files without images next to them. Every other folder is a tree, and may have other files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from shardio.conversion.arrays import ArraySpec, declare
from shardio.conversion.images.fit import Fit
from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.options import ConvertOptions, EmptyClasses, Labels
from shardio.conversion.sources.archives import ZIP_MAGIC
from shardio.conversion.sources.collection import Collection, cut
from shardio.conversion.sources.containers import RECIPE, find_container
from shardio.conversion.sources.datasets import Dataset, list_datasets
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.imagenet import (
    DEVKIT_NAMES,
    TRAIN_NAME,
    VAL_NAME,
    holds_tars,
    images_folder,
    is_tiny_imagenet,
    list_ilsvrc,
    list_kaggle,
    list_tiny_imagenet,
)
from shardio.conversion.sources.listed import describe, list_table
from shardio.conversion.sources.listing import KINDS_OF_FOLDERS, Listing, hold_out
from shardio.conversion.sources.names import by_split, entries, split_name
from shardio.conversion.sources.npy import list_arrays
from shardio.conversion.sources.parquet import holds_images, is_parquet, list_parquet
from shardio.conversion.sources.rows import is_utf16
from shardio.conversion.sources.table import OF_TABLES, Contents, Table, read_tables
from shardio.conversion.sources.tar import BLOCK_NBYTES, check_plain, is_header, open_archive
from shardio.conversion.sources.tree import holds_only_arrays, list_tree
from shardio.conversion.sources.webdataset import ARCHIVES, is_pattern, list_webdataset
from shardio.errors import DecodeError, SourceError
from shardio.format.layout import RowType, check_split_name
from shardio.sets.names import check_apart, check_local, check_usable, looks_like_a_set

Src = str | os.PathLike[str] | Dataset | Mapping[str, Dataset]

# Images tried for a readable mask before the folder of masks is refused.
_MOST_TRIED = 1000

_CIFAR = {("data_batch_1", "batches.meta"): "CIFAR10", ("train", "test", "meta"): "CIFAR100"}
"""The pickle files that identify a CIFAR dataset, and the name of its class in torchvision."""

# Archives and pictures have a NUL among their first bytes, text has none.
_SNIFFED_NBYTES = 8192

MASK = "mask"
"""The name of the set's array of masks, if the option `masks` gives a folder of masks."""


def check(src: Src, out: Path | None, options: ConvertOptions) -> None:
    """Checks the arguments as far as possible without a scan of SRC, and raises an error for the first invalid one. If
    `out` is None, nothing about OUT is checked."""
    if isinstance(src, (str, os.PathLike)):
        check_local(src, SourceError, "images are read from files, so copy or mount them here first")
        if out is not None:
            check_apart(Path(os.path.abspath(src)), out)
        if options.arrays:
            raise ValueError("`arrays` declares arrays of a dataset's items, but `src` is a path: leave `arrays` out")
    else:
        for name in ("source", "masks", "labels", "unlabeled", "empty_classes"):
            if getattr(options, name) != getattr(ConvertOptions, name):
                raise ValueError(f"`{name}` is for images in files, but `src` is a dataset: leave `{name}` out")
    if out is not None:
        check_usable(out)
    if options.table is not None and isinstance(src, Table):
        raise ValueError("SRC is a table, so `table` cannot be another: leave `table` out, or pass the images as SRC")
    if any(table.root is not None and not table.prefix[0] for table in _tables(options).values()):
        way = "leave it out, or pass OLD=NEW to replace the beginning of paths"
        raise ValueError(f"`root` is for a table that is SRC, but paths in `table` are relative to SRC: {way}")
    _declared(options)
    if options.mask_suffix and options.masks is None:
        raise ValueError("`mask_suffix` is about names in the folder `masks`: pass `masks`, too")
    if options.masks is not None:
        check_local(options.masks, SourceError, "masks are read from files, so copy or mount them here first")
        if not os.path.isdir(options.masks):
            raise SourceError(f"{options.masks}: expected a folder of masks, found no folder")
        if out is not None:
            check_apart(Path(os.path.abspath(options.masks)), out)


def _declared(options: ConvertOptions) -> tuple[ArraySpec, ...]:
    return declare(options.arrays or {}, options.sample_shape, ("image", "label"))


def collect(src: Src, options: ConvertOptions) -> Collection:
    """Scans SRC, and returns its collection with the labels, splits, columns and masks of the options."""
    if isinstance(src, (str, os.PathLike)):
        try:
            return annotate(next(readings(src, options, options.empty_classes)), options)
        except DoubtError as error:
            raise error.with_args(_words(src, options)) from None
        except SourceError as error:
            if looks_like_a_set(Path(src)):
                raise SourceError(f"{error}. SRC is a shard set: pass the images as SRC, the set as OUT") from None
            raise
    collection = list_datasets(src, _declared(options)).collect("folders")
    contents = _read_tables(options)
    if any(content.label_names for content in contents.values()):
        raise ValueError("`table` has labels, but a dataset's items have their own: remove its column of labels")
    return hold_out("datasets", describe(collection, contents) if contents else collection, options.val)


def _words(src: str | os.PathLike[str], options: ConvertOptions) -> list[str]:
    """Returns the words of the command that converts SRC, such as ["convert", "photos/", "OUT", "--labels", "leaf"]. Of
    the options, it has those that a scan depends on, if they differ from their defaults."""
    words = ["convert", os.fspath(src), "OUT"]
    for name in ("source", "labels", "empty_classes", "unlabeled", "masks", "mask_suffix", "val"):
        if (value := getattr(options, name)) != getattr(ConvertOptions, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    tables = _tables(options)
    for split, table in tables.items():
        words += ["--table", f"{split}={table}" if split else str(table)]
    described = next(iter(tables.values()), src)
    return [*words, *(described.words() if isinstance(described, Table) else ())]


def readings(src: str | os.PathLike[str], options: ConvertOptions, *ways: EmptyClasses) -> Iterator[Collection]:
    """Yields a collection of SRC, without masks, for each value of `empty_classes` in `ways`, by one scan of SRC."""
    contents = _read_tables(options)
    told = {split for split, content in contents.items() if content.label_names}
    labels = "none" if "" in told else None if told and options.labels in OF_TABLES else options.labels
    listing = list_source(src, options, labels, told if contents else None)
    for way in ways:
        collection = listing.collect(labels, way)
        if contents:
            with contextlib.suppress(SourceError):  # `annotate` raises it, unless tables leave the split out
                collection = _without_masks(collection, options)  # which need no rows
            collection = describe(collection, contents, options.unlabeled == "skip")
        yield hold_out(src, collection, options.val)


def read_again(src: Path, keys: Set[bytes]) -> Collection:
    """Scans SRC again, for a set that was made from SRC, and returns a collection with the keys of the set's samples.
    `keys` are some of these keys. They matter only for parquet files, whose keys depend on the columns of labels and
    splits: columns are tried until one of `keys` is found."""
    tries: list[tuple[str | os.PathLike[str], Labels | None]] = [(src, "none"), (src, None)]
    for given, labels in tries:  # which grows
        try:
            found = collect(given, ConvertOptions(labels=labels))
            last: Collection | SourceError = found
            if found.kind != "parquet" or any(one.key in keys for one in chain(*found.splits.values())):
                break
        except SourceError as error:
            last = error
            table = given if isinstance(given, Table) else Table(src)
            for one in error.readings if isinstance(error, DoubtError) else ():
                if isinstance(column := one.options.get("--label-column"), str):
                    tries.append((replace(table, label_columns=[column]), labels))
                elif isinstance(column := one.options.get("--split-column"), str):
                    tries.append((replace(table, split_column=column), labels))
    if isinstance(last, SourceError):
        raise last
    return last


def annotate(collection: Collection, options: ConvertOptions) -> Collection:
    """Returns the collection with an array of masks if `options.masks` is given; otherwise unchanged.

    The array has the dtype of the first readable mask. If `options.masks` is SRC itself, the masks are taken out of the
    images. Raises SourceError if none of the first 1,000 images has a readable mask, and ValueError if the collection
    has no images or the masks cannot be told from the images.
    """
    if options.masks is None:
        return collection
    if not collection.has_pixels:
        raise ValueError("`masks` is for images, but SRC has only arrays: leave `masks` out")
    collection = _without_masks(collection, options)
    folder = Path(os.path.abspath(options.masks))
    origin = replace(collection.origin, masks=folder, mask_suffix=options.mask_suffix)
    first: DecodeError | None = None
    for source in islice(chain.from_iterable(collection.splits.values()), _MOST_TRIED):
        try:
            dtype = decode_mask(origin.read_mask(source)).dtype
        except DecodeError as error:
            first = first or error
            continue
        masks = ArraySpec(MASK, "mask", RowType(dtype.str, Fit.of(options).size), "file")
        return replace(collection, origin=origin, arrays=(*collection.arrays, masks))
    tried = min(_MOST_TRIED, collection.num_sources)
    raise SourceError(
        f"{folder}: expected a mask in this folder for each image, with the image's path in SRC; found no readable "
        f"mask for the first {tried:,} images. The first image: {first.detail if first else 'none'}. If masks have "
        "other names, as 1_mask.png for 1.jpg, pass `--mask-suffix _mask`; `--mask-suffix OLD=NEW` replaces an ending"
    )


def _without_masks(collection: Collection, options: ConvertOptions) -> Collection:
    """Returns the collection without the masks among its images if `options.masks` is SRC itself; otherwise unchanged.
    Raises SourceError if a split would have no images left, and ValueError if masks cannot be told from images."""
    if options.masks is None or not collection.has_pixels:
        return collection
    folder, suffix = os.path.abspath(options.masks), options.mask_suffix
    if os.path.realpath(getattr(collection.origin, "folder", os.devnull)) != os.path.realpath(folder):
        return collection
    old, _, new = suffix.rpartition("=")
    if not new:
        raise ValueError(f"{folder}: each picture would be its own mask: pass `mask_suffix`, such as _mask")
    found = {
        source.key
        for source in chain.from_iterable(collection.splits.values())
        if cut(stem := os.path.splitext(os.fsdecode(source.key))[0], new) or ("/" in old and not cut(stem, old))
    }
    splits = {split: tuple(one for one in some if one.key not in found) for split, some in collection.splits.items()}
    if not all(splits.values()):
        raise SourceError(
            f"{folder}: expected pictures in each split, found only masks by `--mask-suffix {suffix}`: correct that"
        )
    if found:
        reason = f"mask, or not in {os.path.dirname(old)!r}" if "/" in old else "mask of another picture"
        collection.ignored.add(reason, min(found), len(found))
    return replace(collection, splits=splits)


def _tables(options: ConvertOptions) -> Mapping[str, Table]:
    """Returns the tables in `options.table`, by split, or {"": table} for one table of all splits. Raises SourceError
    if two words name one split, such as val and dev."""
    given = options.table if isinstance(options.table, Mapping) else {"": options.table}
    tables = {word: one if isinstance(one, Table) else Table(one) for word, one in given.items() if one is not None}
    for word in filter(None, tables):
        check_split_name(word)
    return by_split("tables", tables)


def _read_tables(options: ConvertOptions) -> Mapping[str, Contents]:
    return read_tables(_tables(options), options.labels)


# --- kinds of storage -------------------------------------------------------------------------------------------------


def list_source(
    src: str | os.PathLike[str], options: ConvertOptions, labels: Labels | None, told: Set[str] | None = None
) -> Listing:
    """Scans SRC, and returns the Listing of its images or arrays.

    `labels` is used in place of the option: it decides if folders may or may not be classes, and "none" says that
    images need no labels. `told` are the splits whose labels come from `options.table`: their images get no labels
    here. It is None without tables. Raises SourceError if SRC cannot be converted, or could be of two kinds.
    """
    table, path = src if isinstance(src, Table) else Table(src), Path(os.path.abspath(src))
    kind: str = options.source
    if isinstance(src, Table):
        is_inside = is_parquet(path) and (path.is_dir() or holds_images(path))
        kind = "parquet" if is_inside or kind == "parquet" else "list"
    elif kind == "auto":
        kind = find_kind(path)
    may_be_folders = kind == "webdataset" or (kind in KINDS_OF_FOLDERS and not path.is_file())
    if labels in ("folders", "leaf") and not may_be_folders:
        raise SourceError(f"{path}: `--labels {labels}` needs a folder tree, found the kind {kind!r}")
    if labels in OF_TABLES and kind != "list":
        raise SourceError(f"{path}: `--labels {labels}` needs a table with labels, found the kind {kind!r}")
    skips_unlabeled = options.unlabeled == "skip"
    has_masks = options.masks is not None and os.path.abspath(options.masks) == str(path)
    lists: Mapping[str, Callable[[], Listing]] = {
        "tree": partial(list_tree, path, labels, told=told, has_masks=has_masks),
        "arrays": partial(list_arrays, path, labels, told),
        "list": partial(list_table, table, labels),
        "parquet": partial(list_parquet, table, labels),
        "ilsvrc": partial(list_ilsvrc, path),
        "kaggle": partial(list_kaggle, path),
        "tiny-imagenet": partial(list_tiny_imagenet, path),
        "webdataset": partial(list_webdataset, path, labels, told, skips_unlabeled=skips_unlabeled),
    }
    listing = lists[kind]()
    listing.skips_unlabeled = skips_unlabeled
    if told:
        listing.found = {
            word: [one._replace(label=None) for one in some] if not word or split_name(word) in told else some
            for word, some in listing.found.items()
        }
    return listing


def find_kind(src: Path) -> str:
    """Returns the kind of storage in SRC, such as "tree". Raises SourceError if SRC may be of two kinds, or of none."""
    if src.is_file():
        return _kind_of_file(src)
    if not src.is_dir():
        return "webdataset" if is_pattern(src) else "tree"  # which says that nothing is there
    for names, dataset in _CIFAR.items():
        if all((src / name).is_file() for name in names):
            way = f'shardio.convert({{"train": torchvision.datasets.{dataset}(ROOT), "val": ...}}, OUT, size=32)'
            raise SourceError(f"{src}: expected images, found the pickles of {dataset}: convert them by `{way}`")
    if images_folder(src) is not None:
        return "kaggle"
    if is_tiny_imagenet(src):
        return "tiny-imagenet"
    try:
        is_folder = {entry.name: entry.is_dir() for entry in entries(src)}
        folders = sorted(name for name in is_folder if is_folder[name] and name not in DEVKIT_NAMES)
        files = sorted(name for name in is_folder if not is_folder[name])
        tars = [name for name in files if name.endswith(".tar")]
        archives = [name for name in files if name.endswith(ARCHIVES)]
        if TRAIN_NAME in tars or VAL_NAME in tars:
            if folders:
                raise _two_kinds(src, ("ilsvrc", tars[0]), ("tree", folders[0]))
            return "ilsvrc"
        if (archives or folders) and all(_holds_archives(src / name) for name in folders):
            others = [("tree", name) for name in files if has_image_suffix(name)]
            others += [("parquet", name) for name in _alone(files)]
            if not others:
                return "webdataset"
            if tars or folders:
                raise _two_kinds(src, ("webdataset", (tars or folders)[0]), others[0])
        beside = _alone(files) if any(map(has_image_suffix, files)) else []  # may be tables of these pictures
        if is_parquet(src) and (not beside or any(holds_images(src / name) for name in beside)):
            return "parquet"
        return "arrays" if holds_only_arrays(src) else "tree"
    except OSError:
        return "tree"  # whose scan names what cannot be read


def _two_kinds(src: Path, *found: tuple[str, str]) -> SourceError:
    kinds, names = zip(*found, strict=True)
    ways = " or ".join(f"`--source {kind}`" for kind in kinds)
    return SourceError(f"{src}: expected one kind of source, found {' and '.join(map(repr, names))}: pass {ways}")


def _holds_archives(folder: Path) -> bool:
    """Whether a folder has archives, no folders or images, and no parquet files except those that describe a tar."""
    names = []
    for entry in entries(folder):
        if entry.is_dir() or has_image_suffix(entry.name):
            return False
        names.append(entry.name)
    return any(name.endswith(ARCHIVES) for name in names) and not _alone(names)


def _alone(names: Sequence[str]) -> list[str]:
    """Returns the parquet files in `names` without a tar of the same name. img2dataset writes one about each tar."""
    return [name for name in names if name.endswith(".parquet") and f"{name[:-8]}.tar" not in names]


def _kind_of_file(src: Path) -> str:
    if is_parquet(src):
        return "parquet"
    with open(src, "rb") as file:
        first = file.read(_SNIFFED_NBYTES)
    if first.startswith(b"\x93NUMPY") or (src.suffix == ".npz" and first.startswith(b"PK")):
        return "arrays"
    if inside := find_container(src):
        raise SourceError(f"{src}: expected images, found {inside}: {RECIPE}")
    if first.startswith(ZIP_MAGIC):
        return "webdataset"
    check_plain(str(src), first)
    if is_header(first[:BLOCK_NBYTES]):
        with open_archive(src) as archive:
            return "ilsvrc" if src.name == VAL_NAME or holds_tars(archive) else "webdataset"
    if b"\0" not in first or is_utf16(first):
        return "list"
    expected = "a folder, a tar, a parquet file, arrays or a list of images"
    raise SourceError(f"{src}: expected {expected}, found another file: see docs/guide/sources.md")

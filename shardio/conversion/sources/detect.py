"""Detects the kind of SRC, and scans the collection in it.

A kind is detected only by unambiguous signs: the names of ImageNet's archives, Kaggle's folders, the first bytes of a
file, files named parquet. Every other folder is a tree, and may have any files next to its class folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from functools import partial
from itertools import chain
from pathlib import Path

from shardio.conversion.options import EmptyClasses, Labels, SourceKind
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.ilsvrc import DEVKIT_NAMES, TRAIN_NAME, VAL_NAME, holds_tars, list_ilsvrc
from shardio.conversion.sources.imagenet import images_folder, is_tiny_imagenet, list_kaggle, list_tiny_imagenet
from shardio.conversion.sources.listed import list_table
from shardio.conversion.sources.listing import KINDS_OF_FOLDERS, Listing
from shardio.conversion.sources.names import entries
from shardio.conversion.sources.npy import list_arrays
from shardio.conversion.sources.parquet import is_parquet, list_parquet
from shardio.conversion.sources.table import Table
from shardio.conversion.sources.tar import BLOCK_NBYTES, check_plain, is_header, open_archive
from shardio.conversion.sources.tree import holds_only_arrays, list_tree
from shardio.conversion.sources.webdataset import is_pattern, list_webdataset
from shardio.errors import SourceError, check_choice

_CIFAR = {("data_batch_1", "batches.meta"): "CIFAR10", ("train", "test", "meta"): "CIFAR100"}
"""The files by which the datasets are known, which are pickles."""

# Archives and pictures have a NUL among their first bytes, text has none.
_SNIFFED_NBYTES = 8192


def list_source(src: str | os.PathLike[str], kind: SourceKind = "auto", labels: Labels | None = None) -> Listing:
    """Returns the images, or the arrays, in SRC as it lists them.

    `labels` says whether folders are classes, where a tree could be understood in two ways; "none" takes the images of
    any kind of SRC without their labels. Raises SourceError if SRC cannot be converted, or matches two kinds.
    """
    check_choice("source", kind, SourceKind)
    if labels is not None:
        check_choice("labels", labels, Labels)
    table, path = src if isinstance(src, Table) else Table(src), Path(os.path.abspath(src))
    found = "list" if isinstance(src, Table) else find_kind(path) if kind == "auto" else kind
    if labels == "folders" and found not in KINDS_OF_FOLDERS:
        raise SourceError(f"{path}: expected a tree, for labels from folders; found {found}")
    unlabeled = labels == "none"
    lists: Mapping[str, Callable[[], Listing]] = {
        "tree": partial(list_tree, path, labels),
        "arrays": partial(list_arrays, path, labels),
        "list": partial(list_table, table, unlabeled=unlabeled),
        "parquet": partial(list_parquet, path, unlabeled=unlabeled),
        "ilsvrc": partial(list_ilsvrc, path),
        "kaggle": partial(list_kaggle, path),
        "tiny-imagenet": partial(list_tiny_imagenet, path),
        "webdataset": partial(list_webdataset, path, unlabeled=unlabeled),
    }
    return lists[found]()


def scan(
    src: str | os.PathLike[str],
    kind: SourceKind = "auto",
    *,
    labels: Labels | None = None,
    empty_classes: EmptyClasses = "refuse",
) -> Collection:
    """Returns the images, or the arrays, in SRC as a collection. See `list_source` and `Listing.collect`."""
    check_choice("empty_classes", empty_classes, EmptyClasses)
    return list_source(src, kind, labels).collect(labels, empty_classes)


def scan_again(src: Path, keys: Set[bytes]) -> Collection:
    """Returns the images of SRC with the keys that they have in a set, of whose keys `keys` are some.

    Raises SourceError as `scan` does.
    """
    collection = scan(src, labels="none")
    if collection.kind != "parquet" or any(one.key in keys for one in chain.from_iterable(collection.splits.values())):
        return collection
    return scan(src)  # keys begin with the class, if the images were converted with labels


def find_kind(src: Path) -> str:
    """Returns the kind of SRC, never "auto". Reads only a little of SRC. Raises SourceError as `scan` does."""
    if src.is_dir():
        return _kind_of_folder(src)
    if src.is_file():
        return _kind_of_file(src)
    return "webdataset" if is_pattern(src) else "tree"  # which says that nothing is there


def _kind_of_folder(src: Path) -> str:
    for names, dataset in _CIFAR.items():
        if all((src / name).is_file() for name in names):
            way = f'shardio.convert({{"train": torchvision.datasets.{dataset}(ROOT), "val": ...}}, OUT, size=32)'
            raise SourceError(f"{src}: expected images, found the pickles of {dataset}: from Python, `{way}`")
    if images_folder(src) is not None:
        return "kaggle"
    if is_tiny_imagenet(src):
        return "tiny-imagenet"
    if is_parquet(src):
        return "parquet"
    try:
        is_folder = {entry.name: entry.is_dir() for entry in entries(src)}
        folders = sorted(name for name in is_folder if is_folder[name] and name not in DEVKIT_NAMES)
        tars = [name for name in is_folder if name.endswith(".tar") and not is_folder[name]]
        if TRAIN_NAME in tars or VAL_NAME in tars:
            if folders:
                both = f"{min(tars)!r} and {folders[0]!r}: pass `--source ilsvrc` or `--source tree`"
                raise SourceError(f"{src}: expected ImageNet's archives or a folder tree, found both: {both}")
            return "ilsvrc"
        if all(_holds_only_tars(src / name) for name in folders) and (folders or tars):
            return "webdataset"
        return "arrays" if holds_only_arrays(src) else "tree"
    except OSError:
        return "tree"  # whose scan names what cannot be read


def _holds_only_tars(folder: Path) -> bool:
    """Whether a folder holds only tars, and at least one. Stops reading at the first entry that is not a tar."""
    are_tars = (entry.name.endswith(".tar") and not entry.is_dir() for entry in entries(folder))
    return next(are_tars, False) and all(are_tars)


def _kind_of_file(src: Path) -> str:
    if is_parquet(src):
        return "parquet"
    with open(src, "rb") as file:
        first = file.read(_SNIFFED_NBYTES)
    if first.startswith(b"\x93NUMPY") or (src.suffix == ".npz" and first.startswith(b"PK")):
        return "arrays"
    check_plain(str(src), first)
    if is_header(first[:BLOCK_NBYTES]):
        with open_archive(src) as archive:
            return "ilsvrc" if src.name == VAL_NAME or holds_tars(archive) else "webdataset"
    if b"\0" not in first:
        return "list"
    expected = "a folder, a tar, a parquet file, arrays or a list of images"
    raise SourceError(f"{src}: expected {expected}, found a file that begins with {first[:8].hex(' ')}")

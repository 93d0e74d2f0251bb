"""Detects the kind of SRC, and scans the collection in it.

A kind is detected only by unambiguous signs: the names of ImageNet's archives, Kaggle's folders, the first bytes of a
file, files named parquet. Every other folder is a tree, and may have any files next to its class folders.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from shardio.conversion.sources.collection import Collection, Source
from shardio.conversion.sources.ilsvrc import DEVKIT_NAMES, TRAIN_NAME, VAL_NAME, holds_tars, scan_ilsvrc
from shardio.conversion.sources.kaggle import images_folder, scan_kaggle
from shardio.conversion.sources.listed import scan_table
from shardio.conversion.sources.names import entries, known_split
from shardio.conversion.sources.npy import scan_arrays
from shardio.conversion.sources.parquet import is_parquet, scan_parquet
from shardio.conversion.sources.table import Table
from shardio.conversion.sources.tar import BLOCK_NBYTES, check_plain, is_header, open_archive
from shardio.conversion.sources.tiny_imagenet import is_tiny_imagenet, scan_tiny_imagenet
from shardio.conversion.sources.tree import Labels, holds_only_arrays, scan_tree
from shardio.conversion.sources.webdataset import is_pattern, scan_webdataset
from shardio.errors import SourceError, check_choice
from shardio.format.layout import LABELS_NAME

SourceKind = Literal["auto", "tree", "ilsvrc", "kaggle", "tiny-imagenet", "list", "webdataset", "parquet", "arrays"]
EmptyClasses = Literal["refuse", "omit", "keep"]

_TREES = ("tree", "arrays")

# A class is a folder or an archive in these kinds, and may be empty. Elsewhere it is the label of an image, or a name
# from a list for all labels, in use or not.
_KINDS_WITH_FOLDERS = ("tree", "arrays", "kaggle", "ilsvrc", "tiny-imagenet")
_MOST_NAMED = 5

# All rows of an index are as wide as the longest key. Names that people give are never so unequal.
_MOST_PADDING_NBYTES = 256 << 20
_MOST_PADDING = 15
"""Times the bytes of the keys themselves."""

_CIFAR = {("data_batch_1", "batches.meta"): "CIFAR10", ("train", "test", "meta"): "CIFAR100"}
"""The files by which the datasets are known, which are pickles."""

# Archives and pictures have a NUL among their first bytes, text has none.
_SNIFFED_NBYTES = 8192


def scan(
    src: str | os.PathLike[str],
    kind: SourceKind = "auto",
    *,
    labels: Labels | None = None,
    empty_classes: EmptyClasses = "refuse",
) -> Collection:
    """Returns the images, or the arrays, in SRC as a collection.

    - `labels` says whether folders are classes, where a tree could be understood in two ways; "none" takes the images
      of any kind of SRC without their labels.
    - `empty_classes` says what to do with class folders without images.

    Raises SourceError if SRC cannot be converted, or matches two kinds. Raises ValueError for an unknown `kind`,
    `labels` or `empty_classes`.
    """
    check_choice("source", kind, SourceKind)
    check_choice("empty_classes", empty_classes, EmptyClasses)
    if labels is not None:
        check_choice("labels", labels, Labels)
    is_table = isinstance(src, Table)
    table, src = src if isinstance(src, Table) else Table(src), Path(os.path.abspath(src))
    found = "list" if is_table else find_kind(src) if kind == "auto" else kind
    if labels == "folders" and found not in _TREES:
        raise SourceError(f"{src}: expected a tree of folders, as labels are to be the names of folders; found {found}")
    unlabeled = labels == "none"
    scans: Mapping[str, Callable[[], Collection]] = {
        "tree": partial(scan_tree, src, labels),
        "arrays": partial(scan_arrays, src, labels),
        "list": partial(scan_table, table, unlabeled=unlabeled),
        "parquet": partial(scan_parquet, src, unlabeled=unlabeled),
        "ilsvrc": partial(scan_ilsvrc, src),
        "kaggle": partial(scan_kaggle, src),
        "tiny-imagenet": partial(scan_tiny_imagenet, src),
        "webdataset": partial(scan_webdataset, src, unlabeled=unlabeled),
    }
    collection = scans[found]()
    _check_keys(src, collection)
    if unlabeled:
        return _without_labels(collection)
    if empty_classes != "keep" and (empty := find_empty(collection)):
        if empty_classes == "refuse":
            named = ", ".join(map(repr, empty[:_MOST_NAMED])) + (", ..." if len(empty) > _MOST_NAMED else "")
            raise SourceError(
                f"{src}: expected images in every class folder, found none in {len(empty):,}: {named}. Complete or "
                "remove them; or pass `--empty-classes omit`, so labels number only the other classes, or "
                "`--empty-classes keep`, so their labels have no sample"
            )
        collection = without_classes(collection, empty)
    doubts = (*collection.doubts, *_doubt_words(collection))
    if doubts and labels is None:
        command = f"shardio convert {shlex.quote(str(src))} OUT --labels"
        ways = f"If the first folders are classes, run `{command} folders`. To take all images without labels, run "
        raise SourceError(
            f"{src}: {'; '.join(doubts)}. {ways}`{command} none` (from Python, `labels='folders'` or `labels='none'`)"
            if found in _TREES
            else f"{src}: {'; '.join(doubts)}. Rename them, or take the images without labels: `{command} none`"
        )
    return collection


def scan_again(src: Path, keys: Set[bytes]) -> Collection:
    """Returns the images of SRC with the keys that they have in a set, of whose keys `keys` are some.

    Raises SourceError as `scan` does.
    """
    collection = scan(src, labels="none")
    if collection.kind != "parquet" or any(one.key in keys for one in chain.from_iterable(collection.splits.values())):
        return collection
    return scan(src)  # keys begin with the class, if the images were converted with labels


def _without_labels(collection: Collection) -> Collection:
    splits = {
        split: tuple(replace(source, label=None) for source in sources) for split, sources in collection.splits.items()
    }
    arrays = tuple(spec for spec in collection.arrays if spec.name != LABELS_NAME)
    return replace(collection, classes=(), class_names=(), splits=splits, doubts=(), arrays=arrays)


def _doubt_words(collection: Collection) -> Iterator[str]:
    words = [name for name in collection.classes if known_split(name)]
    # One class may have such a name: many collections have trains.
    if len(words) == len(collection.classes) > 0 or len(set(map(known_split, words))) > 1:
        yield f"expected classes, found names of splits ({', '.join(map(repr, words))}), which would become classes"


def _check_keys(src: Path, collection: Collection) -> None:
    for split, sources in collection.splits.items():
        longest = max((source.key for source in sources), key=len)
        total, padded = sum(len(source.key) for source in sources), len(longest) * len(sources)
        if padded - total > max(_MOST_PADDING_NBYTES, _MOST_PADDING * total):
            raise SourceError(
                f"{src}: expected keys of similar length in {split!r}, found one of {len(longest):,} bytes, "
                f"{os.fsdecode(longest)[:80]!r}...: all {len(sources):,} rows of the index would be as wide, "
                f"{padded:,} bytes in all. Move it to a shorter path"
            )


def find_empty(collection: Collection) -> list[str]:
    """Returns the classes without an image in the first split, which decides the classes of all splits."""
    if collection.kind not in _KINDS_WITH_FOLDERS:
        return []
    labels = (
        {source.label for source in sources} for sources in collection.splits.values() if sources[0].label is not None
    )
    full = next(labels, set())
    return [name for label, name in enumerate(collection.classes) if label not in full]


def without_classes(collection: Collection, names: Sequence[str]) -> Collection:
    """Returns the collection without the named classes; the other classes are renumbered.

    Raises SourceError if an image belongs to one of the named classes.
    """
    left_out = frozenset(names)
    kept = [label for label, name in enumerate(collection.classes) if name not in left_out]
    labels = {label: number for number, label in enumerate(kept)}

    def numbered(source: Source) -> Source:
        if not isinstance(source.label, int):
            return source
        if source.label not in labels:
            raise SourceError(
                f"{os.fsdecode(source.key)}: expected the class {collection.classes[source.label]!r} to have images in "
                f"{next(iter(collection.splits))!r} too, found none. Add some, or pass `--empty-classes keep`"
            )
        return replace(source, label=labels[source.label])

    return replace(
        collection,
        classes=tuple(collection.classes[label] for label in kept),
        class_names=tuple(collection.class_names[label] for label in kept if collection.class_names),
        splits={split: tuple(map(numbered, sources)) for split, sources in collection.splits.items()},
    )


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
            raise SourceError(
                f"{src}: expected images or arrays, found the pickled batches of {dataset}, which could run code. "
                f'Convert them from Python: `shardio.convert({{"train": torchvision.datasets.{dataset}(ROOT), "val": '
                f"torchvision.datasets.{dataset}(ROOT, train=False)}}, OUT, size=32)`"
            )
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
                raise SourceError(
                    f"{src}: expected ImageNet's archives or a folder tree, found both: {min(tars)!r} and "
                    f"{folders[0]!r}. Pass `--source ilsvrc` or `--source tree`"
                )
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
    raise SourceError(
        f"{src}: expected a folder, a tar, a parquet file, arrays or a list of images, found a file that begins with "
        f"{first[:8].hex(' ')}"
    )

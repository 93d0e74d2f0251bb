"""Lists ImageNet in its original archives or in Kaggle's layout, and Tiny ImageNet.

The archives are not unpacked: only their headers are read, and every image is an extent of one of the two archives.
For the archives and for Kaggle, keys are the paths in the folder tree that unpacking the archives would give:
train/n01440764/n01440764_10026.JPEG and val/n01751748/ILSVRC2012_val_00000001.JPEG.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from shardio.conversion.sources.collection import Collection, Extent, Fault, FileOrigin, read_file
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import Ignored, clutter
from shardio.conversion.sources.table import Table, read_table
from shardio.conversion.sources.tar import GZIP_MAGIC, Archive, drain, members, open_archive
from shardio.conversion.sources.tree import list_tree
from shardio.errors import DecodeError, SourceError, counted
from shardio.format.layout import is_safe_name

TRAIN_NAME = "ILSVRC2012_img_train.tar"
VAL_NAME = "ILSVRC2012_img_val.tar"
DEVKIT_NAMES = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
"""Names of the devkit: as downloaded, as some browsers decompress it, and unpacked."""

_SYNSETS_NAME = "data/meta.mat"
_TRUTH_NAME = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_DEVKIT_NBYTES = 64 << 20  # unpacked; the real one has a few MB

_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.ASCII)


def list_ilsvrc(src: Path) -> Listing:
    """Returns the images of the original archives in the folder `src`, or of the archive `src`.

    The devkit in the same folder has the labels of validation images. For training images it is optional.
    """
    ignored = Ignored(src)
    if src.is_dir():
        folder = src
        train, val = (path if path.exists() else None for path in (src / TRAIN_NAME, src / VAL_NAME))
        if train is None and val is None:
            raise SourceError(f"{src}: expected {TRAIN_NAME} or {VAL_NAME}, found neither")
        for name in sorted(set(os.listdir(src)) - {TRAIN_NAME, VAL_NAME, *DEVKIT_NAMES}):
            ignored.add(clutter(name) or "other file", name)
    else:
        folder = src.parent
        with open_archive(src) as archive:
            train, val = (src, None) if holds_tars(archive) else (None, src)
    devkit = _read_devkit(folder)
    if val is not None and not devkit.truth:
        if devkit.path != folder:
            raise SourceError(f"{devkit.path}: {_TRUTH_NAME}: expected labels, found none: download the devkit again")
        way = f"put it there, or pass {TRAIN_NAME} alone as SRC"
        raise SourceError(f"{folder}: expected {DEVKIT_NAMES[0]}, which has the labels, next to {val.name}: {way}")
    tars = {} if train is None else _class_tars(train, ignored)
    classes = sorted(set(devkit.truth) if train is None else tars)
    if devkit.words and (unknown := [name for name in classes if name not in devkit.words]):
        raise SourceError(
            f"{devkit.path}: {_SYNSETS_NAME}: expected every class, found no {unknown[0]!r}: download the devkit again"
        )
    found: dict[str, list[Found]] = {}
    if train is not None:
        # One by one, as sorting takes as much memory as what is sorted.
        by_class = map(_in_tree_order, drain(_walk_class(train, name, tars[name], ignored) for name in classes))
        found["train"] = list(chain.from_iterable(by_class))
    if val is not None:
        found["val"] = _in_tree_order(*drain([_walk_val(val, devkit, ignored)]))
        if missing := set(range(1, len(devkit.truth) + 1)) - {_number(os.fsdecode(one.key)) for one in found["val"]}:
            found_none = f"found none with number {min(missing)} ({len(missing):,} missing): download it again"
            raise SourceError(f"{val}: expected {len(devkit.truth):,} images, one for each label, {found_none}")
    known = Collection(FileOrigin(folder), ignored=ignored, kind="ilsvrc")
    return Listing(src, found, known, classes, devkit.words, has_class_folders=True)


def holds_tars(archive: Archive) -> bool:
    """Whether the first member of an archive is a tar, as in the archive of training images."""
    return next((name for name, _ in members(archive)), "").endswith(".tar")


# --- the archives -----------------------------------------------------------------------------------------------------


def _class_tars(train: Path, ignored: Ignored) -> dict[str, Extent]:
    """Returns the place of each class's tar in the archive of training images, by class."""
    tars: dict[str, Extent] = {}
    with open_archive(train) as archive:
        for name, place in members(archive, ignored=ignored):
            stem, _, suffix = os.path.basename(name).rpartition(".")
            if suffix != "tar":
                ignored.add("outside of class archives", name)
            elif stem in tars:
                raise archive.error(place.offset, "only one archive of each class", f"a second archive of {stem!r}")
            else:
                tars[stem] = place
    return tars


def _walk_class(train: Path, name: str, tar: Extent, ignored: Ignored) -> Generator[Found, None, None]:
    what = f"{train}: {f'{name}.tar'!r} in it"
    with open_archive(train, tar.offset, tar.offset + tar.nbytes, what) as archive:
        for path, place in members(archive, os.fsencode(train.name), ignored):
            yield Found(os.fsencode(f"train/{name}/{path}"), name, place)


def _walk_val(val: Path, devkit: _Devkit, ignored: Ignored) -> Generator[Found, None, None]:
    with open_archive(val) as archive:
        for path, place in members(archive, os.fsencode(val.name), ignored):
            number = _number(path)
            if not 0 < number <= len(devkit.truth):
                expected = f"only images ILSVRC2012_val_NUMBER.JPEG, numbered from 1 to {len(devkit.truth):,},"
                raise archive.error(place.offset, expected, repr(path))
            wnid = devkit.truth[number - 1]
            yield Found(os.fsencode(f"val/{wnid}/{os.path.basename(path)}"), wnid, place)


def _number(path: str) -> int:
    match = _VAL_IMAGE.fullmatch(os.path.basename(path))
    return int(match[1]) if match else 0


def _in_tree_order(found: list[Found]) -> list[Found]:
    """Returns the images of a class, or of val, in the order of a folder tree: by folder, then name."""
    return sorted(found, key=lambda one: os.fsdecode(one.key).rpartition("/")[::2])


# --- the devkit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Devkit:
    path: Path
    words: dict[str, str]
    """The words of each class, such as "tench, Tinca tinca", by WordNet id. Classes are synsets without children."""
    truth: Sequence[str]
    """The WordNet id of each validation image, in the order of the numbers of the images."""


def _read_devkit(folder: Path) -> _Devkit:
    """Returns the devkit in a folder; a _Devkit of the folder itself, without words and labels, if there is none."""
    path = next((folder / name for name in DEVKIT_NAMES if (folder / name).exists()), None)
    if path is None:
        return _Devkit(folder, {}, ())
    wanted = (_SYNSETS_NAME, _TRUTH_NAME)
    try:
        if path.is_dir():
            files = {name: read_file(path / name) for name in wanted}
        else:
            data = read_file(path)
            if data.startswith(GZIP_MAGIC):
                with gzip.open(io.BytesIO(data)) as file:
                    data = file.read(_MAX_DEVKIT_NBYTES + 1)
                if len(data) > _MAX_DEVKIT_NBYTES:
                    most = f"a devkit of at most {_MAX_DEVKIT_NBYTES:,} unpacked bytes"
                    raise SourceError(f"{path}: expected {most}, found more")
            archive = Archive(str(path), io.BytesIO(data), 0, len(data))
            files = {
                name: archive.read_at(place.offset, place.nbytes)
                for path_in_it, place in members(archive)
                for name in wanted
                if path_in_it.endswith("/" + name)
            }
    except (DecodeError, OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: cannot read {' and '.join(wanted)} in the devkit: {error}") from None
    if missing := [name for name in wanted if name not in files]:
        raise SourceError(f"{path}: the devkit has no {missing[0]}: download the devkit again")
    leaves, words = _read_synsets(path, files[_SYNSETS_NAME])
    truth = []
    for line, text in enumerate(files[_TRUTH_NAME].split(), start=1):
        number = int(text) if re.fullmatch(rb"\d{1,9}", text) else None
        if number not in leaves:
            found = f"found {os.fsdecode(text)!r:.80}: download the devkit again"
            raise SourceError(f"{path}: {_TRUTH_NAME}: line {line}: expected the number of a class, {found}")
        truth.append(leaves[number])
    return _Devkit(path, words, truth)


def _read_synsets(path: Path, data: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Returns (WordNet id by number, words by WordNet id) of the classes, which are the synsets without children."""
    try:
        from scipy.io import loadmat
    except ImportError:
        way = "run `pip install 'shardio[ilsvrc]'`, or move the devkit elsewhere to convert only training images"
        raise SourceError(f"{path}: reading {_SYNSETS_NAME} needs scipy: {way}") from None
    try:
        synsets = np.atleast_1d(loadmat(io.BytesIO(data), squeeze_me=True, variable_names=["synsets"])["synsets"])
        classes = synsets[synsets["num_children"] == 0]
        columns = (classes[name] for name in ("ILSVRC2012_ID", "WNID", "words"))
        rows = [(int(number), str(wnid), str(words)) for number, wnid, words in zip(*columns, strict=True)]
    except Exception as error:  # a dozen kinds on damaged files
        raise SourceError(
            f"{path}: cannot read the synsets in {_SYNSETS_NAME} ({type(error).__name__}: {error}): download it again"
        ) from None
    leaves = {number: wnid for number, wnid, _ in rows}
    words = {wnid: name for _, wnid, name in rows}
    if not len(rows) == len(leaves) == len(words) > 0 or not all(map(is_safe_name, words)):
        raise SourceError(
            f"{path}: expected classes with distinct numbers and valid WordNet ids in {_SYNSETS_NAME}, found "
            f"{counted(len(rows), 'class')}, not all of them so: download the devkit again"
        )
    return leaves, words


_IMAGES = ("ILSVRC", "Data", "CLS-LOC")
_SOLUTION_NAME = "LOC_val_solution.csv"
_MAPPING_NAME = "LOC_synset_mapping.txt"

_CLASSES_NAME, _WORDS_NAME = "wnids.txt", "words.txt"
_ANNOTATIONS_NAME = "val/val_annotations.txt"


# --- Kaggle: ILSVRC/Data/CLS-LOC/{train,val,test}, LOC_val_solution.csv, LOC_synset_mapping.txt -----------------------


def images_folder(src: Path) -> Path | None:
    """Returns the folder CLS-LOC of Kaggle's layout, which holds train and val: `src` or a folder below; or None."""
    for depth in range(len(_IMAGES)):
        # Unlike Path.is_dir, this raises nothing for a folder that may not be entered: the scan names it.
        if os.path.isdir(src.joinpath(*_IMAGES[depth:])):
            return src.joinpath(*_IMAGES[depth:])
    return src if src.name == _IMAGES[-1] and src.is_dir() else None


def list_kaggle(src: Path) -> Listing:
    """Returns the images of Kaggle's layout. `src` is the folder that holds ILSVRC, or a folder below, down to CLS-LOC.

    The LOC_ files may be in any of these folders. The images in test, which have no labels, are ignored. An image that
    only LOC_val_solution.csv lists becomes a source that the conversion refuses.
    """
    if (images := images_folder(src)) is None:
        raise SourceError(f"{src}: expected the folder {'/'.join(_IMAGES)} in it, found none")
    tree = list_tree(images)
    found = {split: some for split, some in tree.found.items() if split in ("train", "val")}
    if empty := [split for split in ("train", "val") if (images / split).is_dir() and split not in found]:
        raise SourceError(f"{images / empty[0]}: expected images, found none")
    if not found:
        raise SourceError(f"{images}: expected a folder train or val in it, found neither")
    ignored = tree.known.ignored
    if test := tree.found.get("test"):
        ignored.add("unlabeled test image", test[0].key, len(test))
    if "val" in found and found["val"][0].label is None:
        found["val"] = _solved(images, {os.path.splitext(one.key[4:])[0]: one for one in found["val"]})
    if ignored["outside of class folders"] or any(some[0].label is None for some in found.values()):
        raise SourceError(f"{images}: expected images in class folders, found other images: unpack the download again")
    classes = tree.classes or sorted({str(one.label) for one in found["val"]})
    names: Mapping[str, str] = {}
    if (path := _find(images, _MAPPING_NAME)) is not None:
        names = dict(line.partition(" ")[::2] for line in _lines(path))
        if missing := [name for name in classes if not names.get(name)]:
            raise SourceError(f"{path}: expected a line for the class {missing[0]!r}, found none: download it again")
    known = replace(tree.known, kind="kaggle")
    return replace(tree, src=src, known=known, found=found, classes=classes, class_names=names, doubts=())


def _solved(images: Path, files: dict[bytes, Found]) -> list[Found]:
    """Returns the images of a val without class folders, with the labels in LOC_val_solution.csv, sorted by key.
    `files` has these images, by their names without suffix, and is emptied; `images` is the folder CLS-LOC."""
    if (path := _find(images, _SOLUTION_NAME)) is None:
        raise SourceError(
            f"{images / 'val'}: expected {_SOLUTION_NAME}, with the labels, next to ILSVRC, found none: put it there"
        )
    content = read_table(Table(path, path_column="ImageId", label_columns=["PredictionString"]))
    solution: dict[str, str] = {}
    for row in content.rows:
        classes = set(str(row.label or "").split()[::5])  # five words for each object, and the first is the class
        if len(classes) != 1 or row.path in solution or not all(map(is_safe_name, (row.path, *classes))):
            row.refuse("an image that is in no other line, and boxes of one class", (row.path, row.label))
        else:
            (solution[row.path],) = classes
    content.faults.check()
    found = []
    for name, wnid in solution.items():
        there = files.pop(os.fsencode(name), None)
        file = f"{name}.JPEG".encode() if there is None else there.key[4:]
        found.append(Found(b"val/%s/%s" % (os.fsencode(wnid), file), wnid, b"val/" + file))
    if files:
        found_none = f"found none for {os.fsdecode(min(files))!r} ({len(files):,} missing): download it again"
        raise SourceError(f"{path}: expected a line for each image in {images / 'val'}, {found_none}")
    return sorted(found, key=lambda one: os.fsdecode(one.key))


def _find(images: Path, name: str) -> Path | None:
    """Returns the file `name` next to the images or in a folder above, up to the folder with ILSVRC in it; or None."""
    return next((folder / name for folder in (images, *images.parents[:3]) if (folder / name).is_file()), None)


def _lines(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    yield from (line.strip() for line in text.splitlines() if line.strip())


# --- Tiny ImageNet: train/CLASS/images, val/images, val/val_annotations.txt, test/images, wnids.txt, words.txt --------


def is_tiny_imagenet(src: Path) -> bool:
    return (src / _CLASSES_NAME).is_file() and (src / _ANNOTATIONS_NAME).is_file() and (src / "train").is_dir()


def list_tiny_imagenet(src: Path) -> Listing:
    """Returns the images of Tiny ImageNet, with their paths below `src` as keys. The split test has no labels.

    A missing image that val_annotations.txt lists becomes a source that the conversion refuses.
    """
    tree = list_tree(src, "none")
    classes = sorted(set(_lines(src / _CLASSES_NAME)))
    lines = [line.split("\t")[:2] for line in _lines(src / _ANNOTATIONS_NAME) if "\t" in line]
    truth = dict(lines)
    if twice := [name for name, wnid in lines if truth[name] != wnid]:
        found = f"found two for {twice[0]!r}: download it again"
        raise SourceError(f"{src / _ANNOTATIONS_NAME}: expected one class for each image, {found}")
    if unknown := set(truth.values()) - set(classes):
        raise SourceError(f"{src / _ANNOTATIONS_NAME}: expected classes of {_CLASSES_NAME}, found {min(unknown)!r}")
    if absent := [split for split in ("train", "val") if split not in tree.found]:
        raise SourceError(f"{src / absent[0]}: expected images, found none: complete the download")
    missing = Fault(f"expected an image at this path, as {_ANNOTATIONS_NAME} lists it, found none")
    train = [one._replace(label=os.fsdecode(one.key).split("/")[1]) for one in tree.found["train"]]
    val = [one._replace(label=truth.pop(os.path.basename(os.fsdecode(one.key)), "")) for one in tree.found["val"]]
    val += [Found(f"val/images/{name}".encode(), wnid, missing) for name, wnid in truth.items()]
    note = f"{src.name}: Tiny ImageNet, {len(classes):,} classes"
    words = dict(line.split("\t", 1) for line in _lines(src / _WORDS_NAME) if "\t" in line)
    return replace(
        tree,
        found={**tree.found, "train": train, "val": val},
        known=replace(tree.known, kind="tiny-imagenet", notes=(*tree.known.notes, note)),
        classes=classes,
        class_names=words if words.keys() >= set(classes) else {},
        doubts=(),
    )

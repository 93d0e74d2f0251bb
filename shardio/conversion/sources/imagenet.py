"""ImageNet as Kaggle has it, and Tiny ImageNet: a folder tree, and labels of its validation images in a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardio.conversion.sources.collection import Fault
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.rows import read_rows
from shardio.conversion.sources.tree import list_tree
from shardio.errors import SourceError
from shardio.format.layout import is_safe_name

_IMAGES = ("ILSVRC", "Data", "CLS-LOC")
_SOLUTION_NAME = "LOC_val_solution.csv"
_SOLUTION_COLUMNS = ["ImageId", "PredictionString"]
_MAPPING_NAME = "LOC_synset_mapping.txt"

_CLASSES_NAME, _WORDS_NAME = "wnids.txt", "words.txt"
_ANNOTATIONS_NAME = "val/val_annotations.txt"


# --- Kaggle: ILSVRC/Data/CLS-LOC/{train,val,test}, LOC_val_solution.csv, LOC_synset_mapping.txt -----------------------


def images_folder(src: Path) -> Path | None:
    """Returns the folder with train and val in Kaggle's layout: `src` or a folder below. None for other layouts."""
    for depth in range(len(_IMAGES)):
        # Unlike Path.is_dir, this raises nothing for a folder that may not be entered: the scan names it.
        if os.path.isdir(src.joinpath(*_IMAGES[depth:])):
            return src.joinpath(*_IMAGES[depth:])
    return src if src.name == _IMAGES[-1] and src.is_dir() else None


def list_kaggle(src: Path) -> Listing:
    """Returns the images of Kaggle's layout. `src` is the folder with ILSVRC in it, or ILSVRC, or CLS-LOC.

    The LOC_ files may be in any of these folders. Keys are paths in the usual tree, where validation images are in
    class folders too. The unlabeled images in test are ignored. An image of the solution that is missing is a source
    that will be refused.
    """
    if (images := images_folder(src)) is None:
        raise SourceError(f"{src}: expected {'/'.join(_IMAGES)} in it, found none")
    tree = list_tree(images)
    found = {split: some for split, some in tree.found.items() if split in ("train", "val")}
    if empty := [split for split in ("train", "val") if (images / split).is_dir() and split not in found]:
        raise SourceError(f"{images / empty[0]}: expected images, found none")
    if not found:
        raise SourceError(f"{images}: expected a folder train or val in it, found neither")
    ignored = tree.ignored + Counter({"unlabeled test image": len(tree.found.get("test", ()))})
    if "val" in found and found["val"][0].label is None:
        found["val"] = _solved(images, {os.path.splitext(one.key[4:])[0]: one for one in found["val"]})
    if ignored["outside of class folders"] or any(some[0].label is None for some in found.values()):
        raise SourceError(f"{images}: expected each image in a class folder, as others are, found some outside")
    classes = tree.classes or sorted({str(one.label) for one in found["val"]})
    names: Mapping[str, str] = {}
    if (path := _find(images, _MAPPING_NAME)) is not None:
        names = dict(line.partition(" ")[::2] for line in _lines(path))
        if missing := [name for name in classes if not names.get(name)]:
            raise SourceError(f"{path}: expected a line for the class {missing[0]!r}, found none")
    return replace(
        tree, src=src, kind="kaggle", found=found, classes=classes, class_names=names, ignored=ignored, doubts=()
    )


def _solved(images: Path, files: dict[bytes, Found]) -> list[Found]:
    """Returns the images of a flat val, which are `files` by name, with their labels, in the order of a tree."""
    if (path := _find(images, _SOLUTION_NAME)) is None:
        raise SourceError(
            f"{images / 'val'}: expected {_SOLUTION_NAME}, which has its labels, next to ILSVRC, found none"
        )
    names, rows, faults = read_rows(path, ())
    if names != _SOLUTION_COLUMNS:
        raise SourceError(f"{path}: line 1: expected {_SOLUTION_COLUMNS}, found {names!r:.80}")
    solution: dict[str, str] = {}
    for line, cells in rows:
        name, boxes = map(str, cells)
        classes = set(boxes.split()[::5])  # five words for each object, and the first is the class
        if len(classes) != 1 or name in solution or not all(map(is_safe_name, (name, *classes))):
            faults.add(line, "an image that is in no other line, and boxes of one class", cells)
        else:
            (solution[name],) = classes
    faults.check()
    found = []
    for name, wnid in solution.items():
        there = files.pop(os.fsencode(name), None)
        file = f"{name}.JPEG".encode() if there is None else there.key[4:]
        found.append(Found(b"val/%s/%s" % (os.fsencode(wnid), file), wnid, b"val/" + file))
    if files:
        found_none = f"found none for {os.fsdecode(min(files))!r} ({len(files):,} in all)"
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
    """Returns the images of Tiny ImageNet, with the names of their files as keys. The split test has no labels.

    An image of val that is listed but missing is a source that will be refused.
    """
    tree = list_tree(src, "none")
    classes = sorted(set(_lines(src / _CLASSES_NAME)))
    truth = dict(line.split("\t")[:2] for line in _lines(src / _ANNOTATIONS_NAME) if "\t" in line)
    if unknown := set(truth.values()) - set(classes):
        raise SourceError(f"{src / _ANNOTATIONS_NAME}: expected classes of {_CLASSES_NAME}, found {min(unknown)!r}")
    if absent := [split for split in ("train", "val") if split not in tree.found]:
        raise SourceError(f"{src / absent[0]}: expected images, found none: complete the download")
    missing = Fault(f"expected the image, as in {_ANNOTATIONS_NAME}, found none")
    train, val = ([(one, os.fsdecode(one.key)) for one in tree.found[split]] for split in ("train", "val"))
    found = {
        **tree.found,
        "train": [one._replace(label=path.split("/")[1]) for one, path in train],
        "val": [
            *[one._replace(label=truth.pop(path.rpartition("/")[2], "")) for one, path in val],
            *(Found(f"val/images/{name}".encode(), wnid, missing) for name, wnid in truth.items()),
        ],
    }
    words = dict(line.split("\t", 1) for line in _lines(src / _WORDS_NAME) if "\t" in line)
    return replace(
        tree,
        kind="tiny-imagenet",
        found=found,
        classes=classes,
        class_names=words if words.keys() >= set(classes) else {},
        notes=(f"{src.name}: Tiny ImageNet, {len(classes):,} classes",),
        doubts=(),
    )

"""Tiny ImageNet as it is shipped: images of train in `train/CLASS/images`, labels of val in a file, none of test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardio.conversion.sources.collection import Collection, Fault, Source
from shardio.conversion.sources.tree import scan_tree
from shardio.errors import SourceError

_CLASSES_NAME, _WORDS_NAME = "wnids.txt", "words.txt"
_ANNOTATIONS_NAME = "val/val_annotations.txt"


def is_tiny_imagenet(src: Path) -> bool:
    return (src / _CLASSES_NAME).is_file() and (src / _ANNOTATIONS_NAME).is_file() and (src / "train").is_dir()


def scan_tiny_imagenet(src: Path) -> Collection:
    """Returns the images of Tiny ImageNet, with the names of their files as keys. The split test has no labels.

    An image of val that is listed but missing is a source that will be refused. Raises SourceError if a class is not in
    wnids.txt, or an image has no label.
    """
    tree = scan_tree(src, "none")
    classes = tuple(sorted(set(_lines(src / _CLASSES_NAME))))
    labels = {name: label for label, name in enumerate(classes)}
    listed = dict(line.split("\t")[:2] for line in _lines(src / _ANNOTATIONS_NAME) if line.count("\t") >= 1)
    splits = {}
    for split, sources in tree.splits.items():
        if split == "test":
            splits[split] = sources
            continue
        labeled = []
        for source in sources:
            key = os.fsdecode(source.key)
            wnid = listed.pop(key.rpartition("/")[2], "") if split == "val" else key.split("/")[1]
            if wnid not in labels:
                expected = f"a line in {_ANNOTATIONS_NAME}" if split == "val" else "a class folder"
                raise SourceError(f"{src / key}: expected {expected} with a class of {_CLASSES_NAME}, found {wnid!r}")
            labeled.append(replace(source, label=labels[wnid]))
        splits[split] = tuple(labeled)
    missing = Fault(f"expected the image, as in {_ANNOTATIONS_NAME}, found none")
    if unknown := [wnid for wnid in listed.values() if wnid not in labels]:
        raise SourceError(f"{src / _ANNOTATIONS_NAME}: expected classes of {_CLASSES_NAME}, found {unknown[0]!r}")
    if absent := [split for split in ("train", "val") if split not in splits]:
        raise SourceError(f"{src / absent[0]}: expected images, found none: complete the download")
    splits["val"] += tuple(
        Source(f"val/images/{name}".encode(), labels[wnid], missing) for name, wnid in listed.items()
    )
    names = dict(line.split("\t", 1) for line in _lines(src / _WORDS_NAME) if "\t" in line)
    class_names = tuple(names[name] for name in classes) if all(name in names for name in classes) else ()
    note = f"{src.name}: Tiny ImageNet, {len(classes):,} classes"
    return replace(
        tree, classes=classes, class_names=class_names, splits=splits, kind="tiny-imagenet", notes=(note,), doubts=()
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    yield from (line.strip() for line in text.splitlines() if line.strip())

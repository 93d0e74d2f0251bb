"""ImageNet in Kaggle's layout: training images in class folders, validation images in one folder, unlabeled test
images.

    ILSVRC/Data/CLS-LOC/{train,val,test}    LOC_val_solution.csv    LOC_synset_mapping.txt

Keys are paths in the usual folder tree, where validation images are in class folders too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardio.conversion.sources.collection import Collection, FileOrigin, Source, in_tree_order
from shardio.conversion.sources.names import entries
from shardio.conversion.sources.rows import read_rows
from shardio.conversion.sources.tree import scan_tree
from shardio.errors import SourceError
from shardio.format.layout import is_safe_name

_IMAGES = ("ILSVRC", "Data", "CLS-LOC")
_SOLUTION_NAME = "LOC_val_solution.csv"
_SOLUTION_COLUMNS = ["ImageId", "PredictionString"]
_MAPPING_NAME = "LOC_synset_mapping.txt"


def images_folder(src: Path) -> Path | None:
    """Returns the folder with train and val in Kaggle's layout: `src` or a folder below. None for other layouts."""
    for depth in range(len(_IMAGES)):
        # Unlike Path.is_dir, this raises nothing for a folder that may not be entered: the scan names it.
        if os.path.isdir(src.joinpath(*_IMAGES[depth:])):
            return src.joinpath(*_IMAGES[depth:])
    return src if src.name == _IMAGES[-1] and src.is_dir() else None


def scan_kaggle(src: Path) -> Collection:
    """Returns the images of Kaggle's layout. `src` is the folder with ILSVRC in it, or ILSVRC, or CLS-LOC.

    The LOC_ files may be in any of these folders. The unlabeled images in test are counted as ignored. A validation
    image that is listed but missing is a source that will be refused. Raises SourceError if anything else is missing or
    wrong.
    """
    if (images := images_folder(src)) is None:
        raise SourceError(f"{src}: expected {'/'.join(_IMAGES)} in it, found none")
    ignored: Counter[str] = Counter()
    splits: dict[str, tuple[Source, ...]] = {}
    classes: tuple[str, ...] | None = None
    if (images / "train").is_dir():
        classes, splits["train"] = _class_folders(images, "train", ignored)
    if (images / "val").is_dir():
        if any(entry.is_dir() for entry in entries(images / "val")):  # a user has sorted the images
            found, sources = _class_folders(images, "val", ignored)
            truth = [(found[source.label if isinstance(source.label, int) else 0], source) for source in sources]
        else:
            truth = list(_solved(images, ignored))
        if classes is None:
            classes = tuple(sorted({wnid for wnid, _ in truth}))
        labels = {name: label for label, name in enumerate(classes)}
        for wnid, source in truth:
            if wnid not in labels:
                key = os.fsdecode(source.key)
                raise SourceError(f"{images}: expected the classes of train in val, found {wnid!r} for {key!r}")
        splits["val"] = in_tree_order(Source(source.key, labels[wnid], source.place) for wnid, source in truth)
    if classes is None:
        raise SourceError(f"{images}: expected a folder train or val in it, found neither")
    if (images / "test").is_dir():
        ignored["unlabeled test image"] += sum(1 for _ in entries(images / "test", ignored))
    return Collection(FileOrigin(images), classes, splits, ignored, _class_names(images, classes), "kaggle")


def _class_folders(images: Path, split: str, ignored: Counter[str]) -> tuple[tuple[str, ...], tuple[Source, ...]]:
    for entry in entries(images / split):
        if entry.name.endswith(".JPEG") and not entry.is_dir():
            raise SourceError(
                f"{images / split}: expected each image in a class folder, as others are, found {entry.name!r}"
            )
    tree = scan_tree(images / split)
    ignored.update(tree.ignored)
    prefix = split.encode() + b"/"
    (sources,) = tree.splits.values()
    return tree.classes, tuple(Source(prefix + source.key, source.label) for source in sources)


def _solved(images: Path, ignored: Counter[str]) -> Iterator[tuple[str, Source]]:
    """Yields (WordNet id, validation image). The images do not have their labels yet."""
    files = {}
    for entry in entries(images / "val", ignored):
        stem, _, suffix = entry.name.rpartition(".")
        if suffix == "JPEG":
            files[stem] = entry.name
        else:
            ignored["not a validation image"] += 1
    if (solution := _find(images, _SOLUTION_NAME)) is None:
        raise SourceError(
            f"{images / 'val'}: expected {_SOLUTION_NAME} next to ILSVRC, because it has the labels of the validation "
            "images; found none. Put it there, or convert only the folder train"
        )
    for name, wnid in _read_solution(solution).items():
        file = os.fsencode(files.pop(name, f"{name}.JPEG"))
        yield wnid, Source(b"val/%s/%s" % (os.fsencode(wnid), file), 0, b"val/" + file)
    if files:
        raise SourceError(
            f"{solution}: expected a line for each image in {images / 'val'}, found none for {min(files.values())!r} "
            f"({len(files):,} without one)"
        )


def _read_solution(path: Path) -> dict[str, str]:
    """Returns the WordNet id of the class of each image, by the name of the image, from LOC_val_solution.csv.

    A prediction string has five words for each object, and the first word is the class.
    """
    names, rows, faults = read_rows(path, ())
    if names != _SOLUTION_COLUMNS:
        raise SourceError(f"{path}: line 1: expected {_SOLUTION_COLUMNS}, found {names!r:.80}")
    found: dict[str, str] = {}
    for line, cells in rows:
        name, boxes = map(str, cells)
        classes = set(boxes.split()[::5])
        if len(classes) != 1 or name in found or not all(map(is_safe_name, (name, *classes))):
            faults.add(line, "an image that is in no other line, and boxes of one class", cells)
        else:
            (found[name],) = classes
    faults.check()
    return found


def _class_names(images: Path, classes: tuple[str, ...]) -> tuple[str, ...]:
    if (path := _find(images, _MAPPING_NAME)) is None:
        return ()
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    words = {wnid: name for wnid, _, name in (line.strip().partition(" ") for line in lines)}
    for name in classes:
        if not words.get(name):
            raise SourceError(f"{path}: expected a line for the class {name!r}, found none")
    return tuple(words[name] for name in classes)


def _find(images: Path, name: str) -> Path | None:
    """Returns the file `name` next to the images or in a folder above, up to the folder with ILSVRC in it; or None."""
    return next((folder / name for folder in (images, *images.parents[:3]) if (folder / name).is_file()), None)

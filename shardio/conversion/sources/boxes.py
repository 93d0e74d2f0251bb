"""Boxes in pictures, from files of annotations: the JSON of COCO, the XML of Pascal VOC, or the text of YOLO.

A JSON file is a table of images, so it joins the collection as tables do. XML and text files lie in a folder, one for
each picture, as masks do.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from shardio.conversion.arrays import ArraySpec, SourceBoxes
from shardio.conversion.sources.collection import Collection, Fault, Source, find_beside, read_file, stems_of
from shardio.conversion.sources.listed import describe
from shardio.conversion.sources.names import parse_number
from shardio.conversion.sources.table import Contents, Faults, Table
from shardio.errors import DecodeError, SourceError, counted, show
from shardio.format.layout import MAX_CLASSES, RowType
from shardio.format.parse import first_repeated

BOXES = "boxes"
"""The name of the array with the boxes from files of annotations."""

_READ_THREADS = 16  # reading small files is waiting, on a network
_MAX_FILE_NBYTES = 1 << 24
"""Of an XML or text file, which has a picture's boxes. The largest of VOC has 10 kB."""
_NAMES_FILE = "classes.txt"

_SIDES = {int, float, type(None)}
"""The types of the height and the width of an image in JSON."""

Box = tuple[float, float, float, float, int | str]
"""Left, top, right, bottom, and the number or the name of the category."""


def add_boxes(collection: Collection, places: Mapping[str, Path], max_boxes: int | None) -> Collection:
    """Returns the collection with the boxes in `places`: JSON files by split, or one file or folder by "".

    A picture may have `max_boxes` boxes, by default as many as the picture with the most boxes has. Raises SourceError
    if a picture has more, or a file cannot be used.
    """
    where = next(iter(places.values()))
    if places.keys() == {""} and where.is_dir():
        found, names, note = _from_folder(collection, where)
    else:
        found, names, note = _from_json(collection, places)
    counts = [(s.boxes.count, s.key) for sources in found.splits.values() for s in sources if s.boxes is not None]
    count, fullest = max(counts)
    if max_boxes is not None and count > max_boxes:
        raise SourceError(
            f"{where}: expected at most {max_boxes} boxes in a picture, found {count} in {os.fsdecode(fullest)!r}: "
            f"pass `--max-boxes {count}`, from Python `max_boxes={count}`"
        )
    text = f"{where.name}: {counted(sum(count for count, _ in counts), 'box')}, at most {count} in a picture{note}"
    spec = ArraySpec(BOXES, "boxes", RowType("<f4", (max_boxes or max(count, 1), 5)), "boxes", names)
    return replace(found, arrays=(*found.arrays, spec), notes=(*collection.notes, text))


# --- COCO -------------------------------------------------------------------------------------------------------------


def _from_json(collection: Collection, places: Mapping[str, Path]) -> tuple[Collection, tuple[str, ...], str]:
    read = [_read_json(path) for path in places.values()]
    (first, *others), paths = read, list(places.values())
    for path, other in zip(paths[1:], others, strict=True):
        if list(other.categories.items()) != list(first.categories.items()):
            raise SourceError(
                f"{path}: expected the categories of {paths[0]}, in the same order, found "
                f"{show(list(other.categories.values()))}"
            )
    tables = {split: Table(path) for split, path in places.items()}
    found = describe(collection, tables, [one.contents for one in read])
    crowds = sum(one.num_crowds for one in read)
    note = f"; {counted(crowds, 'crowd box')} left out" if crowds else ""
    return found, tuple(first.categories.values()), f", {counted(len(first.categories), 'class')}{note}"


@dataclass(frozen=True)
class _Document:
    """The content of a JSON file in the format of COCO."""

    contents: Contents
    """A row for each image, with its boxes."""
    categories: Mapping[int, str]
    """Names by id, in the order of the file."""
    num_crowds: int


def _read_json(path: Path) -> _Document:
    images, annotations, categories = _lists(path, _load(path))
    names = _read_categories(path, categories)
    contents = Contents(Table(path), Faults(path, "image"))
    sizes: dict[object, tuple[float, float] | None] = {}
    for number, one in enumerate(images):
        match one:
            case {"id": int() | str() as key, "file_name": str(name)} if (
                _is_name(name) and key not in sizes and {type(one.get(side)) for side in ("height", "width")} <= _SIDES
            ):
                sizes[key] = _size(one.get("height"), one.get("width"))
                contents.lines.append(number)
                contents.paths.append(name)
                contents.splits.append("")
            case _:
                contents.faults.add(number, "a new `id`, a `file_name`, and numbers as `height` and `width`", one)
    contents.faults.check()
    boxes, num_crowds = _read_annotations(path, annotations, sizes.keys(), list(names))
    found = [_boxes(boxes[key], size) for key, size in sizes.items()]
    return _Document(replace(contents, boxes=found), names, num_crowds)


def _read_categories(path: Path, categories: Sequence[Any]) -> dict[int, str]:
    faults = Faults(path, "category")
    names: dict[int, str] = {}
    seen = set()
    for number, one in enumerate(categories):
        match one:
            case {"id": int(key), "name": str(name)} if _is_name(name) and key not in names and name not in seen:
                names[key] = name
                seen.add(name)
            case _:
                faults.add(number, "a new integer `id` and a new `name`", one)
    faults.check()
    if not names:
        raise SourceError(f"{path}: expected at least one category, found none")
    return names


def _read_annotations(
    path: Path, annotations: Sequence[Any], images: Set[object], categories: Sequence[int]
) -> tuple[Mapping[object, Sequence[Box]], int]:
    """Returns (the boxes of each image by id, the number of crowd boxes, which are left out)."""
    faults = Faults(path, "annotation")
    numbers = {key: number for number, key in enumerate(categories)}
    boxes: defaultdict[object, list[Box]] = defaultdict(list)
    num_crowds = 0
    for number, one in enumerate(annotations):
        match one:
            case {"image_id": int() | str() as image, "category_id": int(category), "bbox": [*sides]} if (
                image in images and category in numbers and _is_box(sides)
            ):
                if one.get("iscrowd"):
                    num_crowds += 1
                else:
                    left, top, width, height = sides
                    boxes[image].append((left, top, left + width, top + height, numbers[category]))
            case _:
                expected = "an `image_id` and a `category_id` of the file, and a `bbox` of left, top, width and height"
                faults.add(number, expected, one)
    faults.check()
    return boxes, num_crowds


def _is_name(text: str) -> bool:
    """Whether a file, or a class in a manifest, can have this name."""
    try:
        return bool(text) and "\0" not in text and bool(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


def _is_box(sides: Sequence[Any]) -> bool:
    """Whether JSON values are left, top, width and height, in numbers that float32 can hold."""
    return (
        len(sides) == 4
        and all(type(side) in (int, float) and abs(side) < 1e30 for side in sides)
        and min(sides[2:]) >= 0
    )


def _load(path: Path) -> Any:
    def without_shapes(value: dict[str, Any]) -> dict[str, Any]:
        value.pop("segmentation", None)  # most of the file
        return value

    try:
        return json.loads(path.read_bytes(), object_hook=without_shapes)
    except OSError as error:
        raise SourceError(f"{path}: expected a readable file, found: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: expected boxes: a JSON file in the format of COCO, or a folder with an XML file of VOC or a text "
            f"file of YOLO for each picture; found no JSON: {error}"
        ) from None


def _lists(path: Path, document: Any) -> list[list[Any]]:
    """Returns the lists of images, annotations and categories in a document."""
    names = ("images", "annotations", "categories")
    found = [document.get(name) if isinstance(document, dict) else None for name in names]
    lists = [one for one in found if isinstance(one, list)]
    if len(lists) == len(names):
        return lists
    raise SourceError(
        f"{path}: expected lists {', '.join(names)}, as COCO's instances_*.json have, found {show(document)}"
    )


def _size(height: float | None, width: float | None) -> tuple[float, float] | None:
    """Returns (height, width) if a file has stated them; None if they are missing, or 0 as some programs write."""
    return (height, width) if height and width else None


def _boxes(boxes: Sequence[Box], size: tuple[float, float] | None, *, relative: bool = False) -> SourceBoxes:
    return SourceBoxes(np.array(boxes, np.float64).tobytes(), size, relative)


# --- a file for each picture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Annotation:
    """The boxes in the file of one picture."""

    boxes: Sequence[Box] = ()
    size: tuple[float, float] | None = None
    fault: Fault | None = None
    """The reason to refuse the picture; None if its file is sound."""
    is_missing: bool = False


def _from_folder(collection: Collection, folder: Path) -> tuple[Collection, tuple[str, ...], str]:
    sources = list(chain.from_iterable(collection.splits.values()))
    suffix = _suffix(folder, sources)
    names = _read_names(folder) if suffix == ".txt" else ()

    def read(source: Source) -> _Annotation:
        path = _find(folder, source, suffix)
        if path is None:
            missing = Fault(f"boxes: expected {folder / next(stems_of(source), '')}.xml, found none")
            return _Annotation(fault=missing if suffix == ".xml" else None, is_missing=True)
        try:
            data = read_file(path)
            if len(data) > _MAX_FILE_NBYTES:
                raise ValueError(f"expected at most {_MAX_FILE_NBYTES:,} bytes, found {len(data):,}")
            return _parse_xml(data) if suffix == ".xml" else _Annotation(list(_parse_text(data, len(names))))
        except (DecodeError, ValueError) as error:
            return _Annotation(fault=Fault(f"boxes: {path}: {error}"))

    with ThreadPoolExecutor(_READ_THREADS, "shardio-boxes") as pool:
        read_ahead = list(pool.map(read, sources))
    note = ""
    if suffix == ".xml":
        everything = list(chain.from_iterable(one.boxes for one in read_ahead))
        names = tuple(sorted({str(name) for *_, name in everything}))
        # VOC counts pixels from 1, and the right and bottom pixels are in the box. Many programs count from 0.
        start = int(all(min(left, top) > 0 for left, top, *_ in everything))
        numbers = {name: number for number, name in enumerate(names)}
        read_ahead = [
            replace(
                one,
                boxes=[(x - start, y - start, right, bottom, numbers[str(n)]) for x, y, right, bottom, n in one.boxes],
            )
            for one in read_ahead
        ]
        note = f", {counted(len(names), 'class')}; pixels count from {start}"
    else:
        note = f", {counted(len(names), 'class')}" if names else f"; no {_NAMES_FILE}, so classes have no names"
        if missing := sum(one.is_missing for one in read_ahead):
            note += f"; {counted(missing, 'picture')} without a file and so without boxes"
    found = iter(read_ahead)

    def boxed(source: Source) -> Source:
        one = next(found)
        return replace(
            source,
            place=one.fault or source.place,
            boxes=_boxes(one.boxes, one.size, relative=suffix == ".txt"),
        )

    splits = {split: tuple(map(boxed, sources)) for split, sources in collection.splits.items()}
    return replace(collection, splits=splits), names, note


def _suffix(folder: Path, sources: Sequence[Source]) -> Literal[".xml", ".txt"]:
    """Returns the suffix of the first file for a picture in the folder. Raises SourceError if there is none, or two."""
    for source in sources:
        xml, text = _find(folder, source, ".xml"), _find(folder, source, ".txt")
        if xml and text:
            raise SourceError(f"{folder}: expected XML or text files, found both: {xml} and {text}. Move one kind away")
        if xml or text:
            return ".xml" if xml else ".txt"
    raise SourceError(
        f"{folder}: expected an XML file of VOC or a text file of YOLO for each picture, at the same path below this "
        f"folder as below SRC, found none for {os.fsdecode(sources[0].key)!r} and the others"
    )


def _find(folder: Path, source: Source, suffix: str) -> str | None:
    """Returns the file about a source: at its path, or in a folder `labels` next to its folder `images`, as in YOLO."""
    if (path := find_beside(folder, source, (suffix,))) is not None:
        return path
    image = source.place if isinstance(source.place, bytes) else source.key
    head, images, name = image.rpartition(b"images/")
    return find_beside(folder, Source(head + b"labels/" + name, None), (suffix,)) if images else None


class _Tree(ElementTree.TreeBuilder):
    """Refuses documents with a DOCTYPE, which could define entities: some are files, others fill the memory."""

    def doctype(self, name: str, pubid: str, system: str) -> None:
        raise ValueError("expected XML without a DOCTYPE, found one")


def _parse_xml(data: bytes) -> _Annotation:
    """Returns the boxes in a file of VOC. Raises ValueError if it is not such a file."""
    try:
        root = ElementTree.fromstring(data, ElementTree.XMLParser(target=_Tree()))
    except (ElementTree.ParseError, LookupError) as error:  # LookupError: of an unknown encoding
        raise ValueError(f"expected XML, found: {error}") from None
    if root.tag != "annotation":
        raise ValueError(f"expected an element `annotation`, as in VOC, found {root.tag!r:.80}")
    boxes: list[Box] = []
    for number, one in enumerate(root.findall("object")):
        name = (one.findtext("name") or "").strip()
        left, top, right, bottom = (
            parse_number(one.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
        )
        if not name or not (left <= right and top <= bottom):
            raise ValueError(f"object {number}: expected a name, and xmin <= xmax and ymin <= ymax, found {name!r:.80}")
        boxes.append((left, top, right, bottom, name))
    height, width = (parse_number(root.findtext(f"size/{side}", "0")) for side in ("height", "width"))
    return _Annotation(boxes, _size(height, width))


def _parse_text(data: bytes, num_names: int) -> Iterator[Box]:
    """Yields the boxes in a file of YOLO. Raises ValueError if it is not such a file."""
    for number, line in enumerate(data.decode("utf-8-sig").splitlines(), start=1):
        if not (cells := line.split()):
            continue
        if len(cells) != 5:
            raise ValueError(f"line {number}: expected a class and 4 numbers, found {len(cells)} cells: {line!r:.80}")
        label, x, y, width, height = map(parse_number, cells)
        if not (label == int(label) and 0 <= label < (num_names or MAX_CLASSES)):
            expected = f"from 0 to {num_names - 1}, as in {_NAMES_FILE}" if num_names else "an integer"
            raise ValueError(f"line {number}: expected a class {expected}, found {cells[0]!r:.80}")
        if min(width, height) < 0:
            raise ValueError(f"line {number}: expected a width and a height, found {line!r:.80}")
        yield x - width / 2, y - height / 2, x + width / 2, y + height / 2, int(label)


def _read_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of categories in the folder of text files, or next to it; () if there are none."""
    for path in (folder / _NAMES_FILE, folder.parent / _NAMES_FILE):
        if path.is_file():
            text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
            names = tuple(map(str.strip, text.rstrip().split("\n")))
            if not all(map(_is_name, names)):
                raise SourceError(f"{path}: expected a name in each line, found an empty line or a NUL")
            if (repeated := first_repeated(names)) is not None:
                raise SourceError(f"{path}: expected distinct names, found {repeated!r} twice")
            return names
    return ()

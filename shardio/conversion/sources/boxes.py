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
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from shardio.conversion.arrays import ArraySpec, SourceBoxes
from shardio.conversion.sources.collection import Collection, Fault, Source, find_beside, read_file, stems_of
from shardio.conversion.sources.listed import describe
from shardio.conversion.sources.names import parse_number
from shardio.conversion.sources.rows import Faults
from shardio.conversion.sources.table import Contents
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

Size = tuple[float, float] | None
"""(height, width) of a picture, if a file states it."""


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
    sources = chain.from_iterable(found.splits.values())
    counts = [(len(s.boxes.rows) // (5 * 8), s.key) for s in sources if s.boxes is not None]  # 5 float64 each
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
    contents: dict[str, Contents] = {}
    first: dict[int, str] = {}
    num_crowds = 0
    for split, path in places.items():
        contents[split], categories, crowds = _read_json(path)
        first, num_crowds = first or categories, num_crowds + crowds
        if list(categories.items()) != list(first.items()):
            raise SourceError(
                f"{path}: expected the categories of {next(iter(places.values()))}, in the same order, found "
                f"{show(list(categories.values()))}"
            )
    note = f"; {counted(num_crowds, 'crowd box')} left out" if num_crowds else ""
    return describe(collection, contents), tuple(first.values()), f", {counted(len(first), 'class')}{note}"


def _read_json(path: Path) -> tuple[Contents, dict[int, str], int]:
    """Returns (a row with its boxes for each image, the names of categories by id, the number of crowd boxes)."""
    match document := _load(path):
        case {"images": list() as images, "annotations": list() as annotations, "categories": list() as categories}:
            names = _read_categories(path, categories)
        case _:
            raise SourceError(
                f"{path}: expected lists images, annotations, categories, as COCO's instances_*.json have, found "
                f"{show(document)}"
            )
    contents = Contents(Faults(path, "image"))
    sizes: dict[object, Size] = {}
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
    found = [SourceBoxes(np.array(boxes[key], np.float64).tobytes(), size) for key, size in sizes.items()]
    return replace(contents, boxes=found), names, num_crowds


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


def _size(height: float | None, width: float | None) -> Size:
    """Returns (height, width) if a file has stated them; None if they are missing, or 0 as some programs write."""
    return (height, width) if height and width else None


# --- a file for each picture ------------------------------------------------------------------------------------------


def _from_folder(collection: Collection, folder: Path) -> tuple[Collection, tuple[str, ...], str]:
    sources = list(chain.from_iterable(collection.splits.values()))
    suffix = _suffix(folder, sources)
    names = _read_names(folder) if suffix == ".txt" else ()
    missing: list[Source] = []

    def read(source: Source) -> tuple[Sequence[Box], Size, Fault | None]:
        """Returns (boxes, the size in the file, the reason to refuse the picture, or None if its file is sound)."""
        path = _find(folder, source, suffix)
        if path is None:
            missing.append(source)
            fault = Fault(f"boxes: expected {folder / next(stems_of(source), '')}.xml, found none")
            return (), None, fault if suffix == ".xml" else None
        try:
            data = read_file(path)
            if len(data) > _MAX_FILE_NBYTES:
                raise ValueError(f"expected at most {_MAX_FILE_NBYTES:,} bytes, found {len(data):,}")
            boxes, size = _parse_xml(data) if suffix == ".xml" else (list(_parse_text(data, len(names))), None)
            return boxes, size, None
        except (DecodeError, ValueError) as error:
            return (), None, Fault(f"boxes: {path}: {error}")

    with ThreadPoolExecutor(_READ_THREADS, "shardio-boxes") as pool:
        found = list(pool.map(read, sources))
    note = ""
    if suffix == ".xml":
        everything = list(chain.from_iterable(boxes for boxes, _, _ in found))
        names = tuple(sorted({str(name) for *_, name in everything}))
        # VOC counts pixels from 1, and the right and bottom pixels are in the box. Many programs count from 0.
        start = int(all(min(left, top) > 0 for left, top, *_ in everything))
        numbers = {name: number for number, name in enumerate(names)}
        found = [
            ([(x - start, y - start, right, bottom, numbers[str(n)]) for x, y, right, bottom, n in boxes], size, fault)
            for boxes, size, fault in found
        ]
        note = f", {counted(len(names), 'class')}; pixels count from {start}"
    else:
        note = f", {counted(len(names), 'class')}" if names else f"; no {_NAMES_FILE}, so classes have no names"
        if missing:
            note += f"; {counted(len(missing), 'picture')} without a file and so without boxes"
    in_order = iter(found)

    def boxed(source: Source) -> Source:
        boxes, size, fault = next(in_order)
        rows = np.array(boxes, np.float64).tobytes()
        return replace(source, place=fault or source.place, boxes=SourceBoxes(rows, size, suffix == ".txt"))

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


def _parse_xml(data: bytes) -> tuple[list[Box], Size]:
    """Returns the boxes in a file of VOC, and the picture's size. Raises ValueError if it is not such a file."""
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
    return boxes, _size(height, width)


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

"""Samples of a set as files for other programs: a PNG of each, its arrays, and a table."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.errors import FormatError
from shardio.format.layout import crc32
from shardio.reading.shardset import ShardSet
from shardio.system.files import make_folder, sweep_temporaries, target_of, write_atomic

LABELS_FILE = "labels.csv"

# A name made from a key must not be a folder, a hidden file, or special to a shell or another system.
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_STEM = 80
# The files that `extract` writes. Temporary files of other commands in the same folder stay.
_OWN = re.compile(r"[0-9]+(-.*)?\.(png|npy)|" + re.escape(LABELS_FILE))


def extract(
    shards: ShardSet,
    indices: Sequence[int],
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes the samples `indices` of a split as files into `folder`, then a labels.csv that describes each file.

    Pixels, masks and images become PNGs; other arrays, and pictures that PNG cannot hold, become NPY files. Returns the
    number of files. Raises ValueError if the folder has a labels.csv already or is inside the set's folder, and
    FormatError for a damaged sample.
    """
    if os.path.lexists(folder / LABELS_FILE):
        raise ValueError(f"{folder}: expected no {LABELS_FILE}, found one: choose another folder")
    own = Path(os.path.realpath(shards.folder))
    if own in (real := Path(os.path.realpath(folder)), *real.parents):
        raise ValueError(f"{folder}: the folder must be outside of the set {shards.folder}")
    make_folder(folder)
    sweep_temporaries(folder, lambda name: not _OWN.fullmatch(target_of(name)))
    arrays = list(shards.arrays)
    digits = len(str(len(shards) - 1))
    main = ["file"] if shards.has_pixels else []
    fixed = ["file", "index", "key", "label", "class", "class_name"]
    # No array can have a colon in its name.
    headings = [f"array:{name}" if name in fixed else name for name in arrays]
    lines: list[Sequence[object]] = [[*fixed[1 - len(main) :], *headings]]
    num_files = 1
    for done, index in enumerate(indices):
        row = _row(shards, index)
        key, label = bytes(row["key"]), row.get("label")
        stem = f"{index:0{digits}d}-{_stem(key)}".rstrip("-")
        values = {
            **({"": _pixels(shards, index, int(row["crc32"]))} if shards.has_pixels else {}),
            **{name: _value(shards, name, index) for name in arrays},
        }
        files = []
        for name, value in values.items():
            is_picture = not name or shards.array(name).kind == "mask"
            png = png_of(value) if is_picture else None
            files.append(f"{stem}{name and '.'}{name}.{'npy' if png is None else 'png'}")
            write_atomic(folder / files[-1], _npy(value) if png is None else png)
        num_files += len(files)
        lists = (shards.manifest.classes, shards.manifest.class_names)
        classes = [names[label] if names and label is not None else "" for names in lists]
        name = key.decode("utf-8", "surrogateescape")
        lines.append([*files[: len(main)], index, name, label, *classes, *files[len(main) :]])
        on_progress(done + 1, len(indices))
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_atomic(folder / LABELS_FILE, text.getvalue().encode("utf-8", "surrogateescape"))
    return num_files


def _row(shards: ShardSet, index: int) -> dict[str, Any]:
    """Returns a copy of a sample's row of the index. Reading it in place would end the process if storage fails."""
    one = np.array([index])
    names = ("label", "key", "crc32") if shards.content.index.has_label else ("key", "crc32")
    return {name: shards.column_of(name, one)[0] for name in names}


def _pixels(shards: ShardSet, index: int, expected: int) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = np.empty(shards.sample_shape, np.uint8)
    shards.gather(np.array([index]), pixels[None])
    if (found := crc32(pixels.reshape(-1))) != expected:
        raise FormatError(
            f"{shards.path}: sample {index}: crc32: expected {expected}, found {found}: `shardio verify` lists all "
            "damage and says how to repair it"
        )
    return pixels


def _value(shards: ShardSet, name: str, index: int) -> NDArray[Any]:
    row = shards.array(name).row
    value: NDArray[Any] = np.empty(row.shape, row.dtype)
    shards.gather_array(name, np.array([index]), value[None])
    return value


def _stem(key: bytes) -> str:
    """Returns the last part of a key without its extension, with only characters that are safe in file names."""
    name = os.fsdecode(key).rpartition("/")[2]
    return _UNSAFE.sub("_", name.rpartition(".")[0] or name)[:_MAX_STEM]


def png_of(picture: NDArray[Any]) -> bytes | None:
    """Returns a picture (height, width[, channels]) as a PNG with the same numbers; None if PNG cannot hold them.

    PNG holds uint8 of one to four channels, uint16 of one channel, and bool as 0 and 1.
    """
    if picture.dtype == np.bool_:
        picture = picture.view(np.uint8)
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[:, :, 0]
    is_gray = picture.ndim == 2 and picture.dtype in (np.uint8, np.uint16)
    is_color = picture.ndim == 3 and picture.dtype == np.uint8 and picture.shape[2] in (2, 3, 4)
    if not (is_gray or is_color):
        return None
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, "PNG")
    return buffer.getvalue()


def _npy(value: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    return buffer.getvalue()

"""Writes samples of a set as files for other programs: PNGs, NPY files of arrays, and a CSV table."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.format.layout import LABELS_NAME
from shardio.reading.shardset import ShardSet
from shardio.system.files import make_folder, sweep_temporaries, target_of, write_atomic
from shardio.system.opening import read_untrusted
from shardio.viewing.pictures import check_crc32, keys_of, read_pictures

LABELS_FILE = "labels.csv"
_FACTS = ("index", "key", "label", "class", "class_name")

# A name made from a key must not be a folder, a hidden file, or special to a shell or another system.
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_STEM = 80
# The files that `extract` writes. Temporary files of other commands in the same folder stay.
_OWN = re.compile(r"[0-9]+(-.*)?\.(png|npy)|" + re.escape(LABELS_FILE))


def extract(shards: ShardSet, indices: NDArray[np.int64], folder: Path, on_progress: Callable[[int, int], None]) -> int:
    """Writes the samples `indices` of a split as files into `folder`, and returns the number of files.

    Pixels and masks become PNGs; other arrays, and pictures that PNG cannot hold, become NPY files. The last file is
    labels.csv, with a line per sample, which also has the values of arrays of single numbers. `on_progress` is called
    with (samples written, samples in all). Raises ValueError if the folder has a labels.csv already or is inside the
    set's folder, FormatError for a damaged sample.
    """
    if os.path.lexists(folder / LABELS_FILE):
        raise ValueError(f"{folder}: the folder already has a {LABELS_FILE}: choose another folder")
    own = Path(os.path.realpath(shards.folder))
    if own in (real := Path(os.path.realpath(folder)), *real.parents):
        raise ValueError(f"{folder}: the folder is inside the set {shards.folder}: choose a folder outside of it")
    make_folder(folder)
    sweep_temporaries(folder, lambda name: not _OWN.fullmatch(target_of(name)))
    digits = len(str(len(shards) - 1))
    # No array can have a colon in its name.
    headings = {name: f"array:{name}" if name in ("file", *_FACTS) else name for name in shards.arrays}
    columns = [*_FACTS, *headings.values()]
    if shards.has_pixels:
        headings[""] = "file"
        columns.insert(0, "file")
    lines: list[dict[str, object]] = []
    num_files = 1
    pictures = read_pictures(shards, indices, check=True) if shards.has_pixels else None
    for done, (index, key) in enumerate(zip(indices.tolist(), keys_of(shards, indices), strict=True)):
        sample = indices[done : done + 1]
        label = shards.labels_of(sample)[0] if shards.content.index.has_label else None
        stem = f"{index:0{digits}d}-{_stem(key)}".rstrip("-")
        values = {} if pictures is None else {"": next(pictures)}
        for name in shards.arrays:
            rows = shards.values_of(name, sample)
            check_crc32(shards, name, index, rows, int(shards.copy_crc32s(name, sample)[0]))
            values[name] = rows[0]
        lists = (shards.manifest.classes, shards.manifest.class_names)
        classes = [names[label] if names and label is not None else "" for names in lists]
        line: dict[str, object] = dict(zip(_FACTS, (index, key, label, *classes), strict=True))
        for name, value in values.items():
            if not value.ndim:
                line[headings[name]] = value.item()
                if name == LABELS_NAME:
                    line["label"] = value.item()
                continue
            is_picture = not name or shards.array(name).kind == "mask"
            png = png_of(value) if is_picture else None
            line[headings[name]] = file = f"{stem}{name and '.'}{name}.{'npy' if png is None else 'png'}"
            _write_new(folder / file, _npy(value) if png is None else png)
            num_files += 1
        lines.append(line)
        on_progress(done + 1, len(indices))
    text = io.StringIO(newline="")
    # Quoted, as a key may have any of the characters that end a line.
    table = csv.DictWriter(text, columns, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    table.writeheader()
    table.writerows(lines)
    write_atomic(folder / LABELS_FILE, text.getvalue().encode("utf-8", "surrogateescape"))
    return num_files


def _write_new(path: Path, data: bytes) -> None:
    """Writes a file. Raises ValueError if there is another one; the same one is of a call that was killed."""
    with contextlib.suppress(FileNotFoundError):
        if read_untrusted(path) != data:
            raise ValueError(f"{path}: expected no such file, found another one: choose another folder")
    write_atomic(path, data)


def _stem(key: str) -> str:
    """Returns the file name in a key without its extension. `_` replaces characters that are unsafe in file names."""
    name = key.rpartition("/")[2]
    return _UNSAFE.sub("_", name.rpartition(".")[0] or name)[:_MAX_STEM]


def png_of(picture: NDArray[Any]) -> bytes | None:
    """Returns a PNG, as bytes, of the values of a picture (height, width[, channels]); None if PNG cannot hold them.

    PNG can hold uint8 with one to four channels, uint16 with one channel, and bool as 0 and 1.
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

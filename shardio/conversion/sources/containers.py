"""Recognizes containers of images that only Python opens, so that an error says what SRC is and what to do with it."""

from __future__ import annotations

import contextlib
import os
import re
from itertools import islice
from pathlib import Path

from shardio.system.opening import open_file

RECIPE = "hand its images over as a Python dataset; docs/guide/collections.md has the lines"

# (description, the end of its name in any case, its first bytes) of each kind.
_CONTAINERS = (
    ("an Arrow file, as save_to_disk of Hugging Face writes", r"\.(arrow|feather)", rb"ARROW1|\xff{4}"),
    ("a MATLAB file", r"\.mat", rb"MATLAB [57]\."),
    ("an HDF5 file", r"\.(h5|hdf5?)", rb"\x89HDF\r\n"),
    ("a TFRecord file", r"[-.]tfrec(ords?)?([-.]\d.*|\.gz)?", rb"(?!)"),
    ("an LMDB database", r"/(data|lock)\.mdb|\.lmdb", rb".{16}\xde\xc0\xef\xbe"),
    ("a RecordIO file of MXNet", r"\.rec", rb"\x0a\x23\xd7\xce"),
    ("an idx file, as of MNIST", r"[-.]idx[1-4]-ubyte(\.gz)?", rb"\0\0[\x08-\x0e][\x01-\x04]"),
    ("a shard of MosaicML Streaming", r"\.mds(\.\w+)?", rb"(?!)"),
    ("a file of FFCV", r"\.beton", rb"(?!)"),
    ("a DICOM file", r"\.(dcm|dicom)", rb".{128}DICM"),
    ("a pickle", r"\.(pkl|pickle)", rb"\x80[\x02-\x05]"),
    ("an NPZ file", r"\.npz", rb"(?!)"),
)
_FIRST_NBYTES = 132
# Files of a folder without images that are looked at.
_MOST_LOOKED_AT = 1000


def find_container(path: Path) -> str:
    """Returns the kind and name of the container file at `path`, such as "an HDF5 file, 'a.h5'"; "" if it is none. If
    `path` is a folder, returns this for the first container in or below the folder."""
    folders = os.walk(path) if path.is_dir() else [(str(path.parent), (), [path.name])]
    files = (os.path.join(folder, name) for folder, _, names in folders for name in sorted(names))
    for file in islice(files, _MOST_LOOKED_AT):
        first = b""
        with contextlib.suppress(OSError), open_file(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as opened:
            first = opened.read(_FIRST_NBYTES)
        for what, name, magic in _CONTAINERS:
            if re.search(f"({name})$", file, re.IGNORECASE) or re.match(magic, first, re.DOTALL):
                return f"{what}, {os.path.relpath(file, path.parent)!r}"
    return ""

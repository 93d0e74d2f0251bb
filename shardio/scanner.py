"""What SRC is, and the collection in it.

A kind is chosen where nothing else could be meant: by the names of ImageNet's archives, by Kaggle's folders, by what a
file begins with, by files that are named parquet. Every other folder is a tree, whatever files lie beside its class
folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from shardio.errors import SourceError
from shardio.ilsvrc import DEVKIT_NAMES, TRAIN_NAME, VAL_NAME, holds_tars, scan_ilsvrc
from shardio.kaggle import images_folder, scan_kaggle
from shardio.listfile import scan_list
from shardio.local import check_local
from shardio.parquet import is_parquet, scan_parquet
from shardio.sources import Collection
from shardio.tar import BLOCK_NBYTES, compressed, compression, is_header, open_archive
from shardio.tree import scan_tree
from shardio.webdataset import is_pattern, scan_webdataset

SourceKind = Literal["auto", "tree", "ilsvrc", "kaggle", "list", "webdataset", "parquet"]

_SCANS: Mapping[str, Callable[[Path], Collection]] = {
    "tree": scan_tree,
    "ilsvrc": scan_ilsvrc,
    "kaggle": scan_kaggle,
    "list": scan_list,
    "webdataset": scan_webdataset,
    "parquet": scan_parquet,
}

# Archives and pictures have a NUL among their first bytes, text has none.
_SNIFFED_NBYTES = 8192


def check_images_local(src: str | os.PathLike[str]) -> None:
    """SourceError if SRC is a URL."""
    check_local(src, SourceError, "images are read from files, so copy or mount them here first")


def scan(src: Path, kind: SourceKind = "auto") -> Collection:
    """List the images in SRC, whatever they are stored in; `kind` of the collection says what that was taken to be.

    SourceError if SRC is nothing that can be converted, or might be two things. ValueError for an unknown `kind`.
    """
    if kind not in get_args(SourceKind):
        raise ValueError(f"source must be one of {', '.join(get_args(SourceKind))}; found {kind!r}")
    return _SCANS[find_kind(src) if kind == "auto" else kind](src)


def find_kind(src: Path) -> str:
    """The kind of SRC, any but "auto". Little of it is looked at. SourceError as `scan`."""
    if src.is_dir():
        return _kind_of_folder(src)
    if src.is_file():
        return _kind_of_file(src)
    return "webdataset" if is_pattern(src) else "tree"  # which says that nothing is there


def _kind_of_folder(src: Path) -> str:
    if images_folder(src) is not None:
        return "kaggle"
    if is_parquet(src):
        return "parquet"
    try:
        with os.scandir(src) as entries:
            is_folder = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith(".")}
        folders = sorted(name for name in is_folder if is_folder[name] and name not in DEVKIT_NAMES)
        tars = [name for name in is_folder if name.endswith(".tar") and not is_folder[name]]
        if TRAIN_NAME in tars or VAL_NAME in tars:
            if folders:
                raise SourceError(
                    f"{src}: expected ImageNet's archives or a folder tree, found both: {min(tars)!r} and "
                    f"{folders[0]!r}. Say which is meant with `--source ilsvrc` or `--source tree`"
                )
            return "ilsvrc"
        if all(_holds_only_tars(src / name) for name in folders) and (folders or tars):
            return "webdataset"
    except OSError:
        pass  # scan_tree names what cannot be read
    return "tree"


def _holds_only_tars(folder: Path) -> bool:
    """Whether there are tars in a folder, and nothing else. Of any other folder, little is read."""
    found = False
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                if not entry.name.endswith(".tar") or entry.is_dir():
                    return False
                found = True
    return found


def _kind_of_file(src: Path) -> str:
    if is_parquet(src):
        return "parquet"
    with open(src, "rb") as file:
        first = file.read(_SNIFFED_NBYTES)
    if (method := compression(first)) is not None:
        raise compressed(str(src), method)
    if is_header(first[:BLOCK_NBYTES]):
        with open_archive(src) as archive:
            return "ilsvrc" if src.name == VAL_NAME or holds_tars(archive) else "webdataset"
    if b"\0" not in first:
        return "list"
    raise SourceError(
        f"{src}: expected a folder, a tar, a parquet file or a list of images, found a file that begins with "
        f"{first[:8].hex(' ')}"
    )

"""Reads manifest.json, checks it against a pinned digest, and publishes it as the last file of a set."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from shardio.errors import ConvertError, FormatError, SetNotFoundError, did_you_mean, first_of, show
from shardio.format.layout import MANIFEST_NAME, MAX_MANIFEST_NBYTES, WORK_FOLDER
from shardio.format.manifest import Manifest, parse_manifest
from shardio.system.files import AtomicFile, write_all
from shardio.system.opening import FileAt, FolderHandle, naming, open_regular

# Bytes of a shard in manifest.json in addition to its name.
_SHARD_TEXT_NBYTES = 176

# 48 bits: no site has so many sets that two digests would begin alike.
_PINNED = re.compile(r"[0-9a-f]{12,64}", re.ASCII)


def check_manifest_nbytes(path: str | Path | FileAt, nbytes: int) -> None:
    """Raises FormatError if a file of `nbytes` bytes is too large for a manifest. Call it before reading the file."""
    if nbytes > MAX_MANIFEST_NBYTES:
        raise FormatError(
            f"{path}: expected a manifest of at most {MAX_MANIFEST_NBYTES:,} bytes, found {nbytes:,} bytes"
        )


def load_manifest(folder: str | os.PathLike[str], digest: str | None = None) -> Manifest:
    """Returns the manifest of the set in `folder`. With `digest`, it must have this digest: see `check_digest`.

    Raises SetNotFoundError if the folder has no manifest, FormatError if the manifest is invalid or has another digest.
    """
    path = Path(folder) / MANIFEST_NAME
    if not os.path.lexists(path):
        raise SetNotFoundError(f"{path}: not found: {_what_is_there(Path(folder))}")
    return read_manifest(path, digest)


def read_manifest(path: Path | FileAt, digest: str | None = None) -> Manifest:
    """Returns the manifest in the file `path`. `digest` is as for `load_manifest`.

    Raises FormatError if the file is missing, is invalid, or has another digest.
    """
    opened, nbytes = open_regular(path)
    with naming(path), io.BufferedReader(opened) as file:
        check_manifest_nbytes(path, nbytes)
        # One byte more than allowed: the file may have grown since.
        return manifest_of(path, file.read(MAX_MANIFEST_NBYTES + 1), digest)


def manifest_of(path: str | Path | FileAt, data: bytes, digest: str | None) -> Manifest:
    """Returns the manifest in `data`, the content of the file `path`. `digest` is as for `load_manifest`.

    Raises FormatError, which names the file, if the manifest is invalid or has another digest.
    """
    try:
        manifest = parse_manifest(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    check_digest(path, manifest, digest)
    return manifest


def check_digest(path: str | Path | FileAt, manifest: Manifest, digest: str | None) -> None:
    """Raises FormatError if the manifest in the file `path` has another digest than `digest`; None is any digest.

    The first 12 digits or more are enough. Raises ValueError if `digest` is not 12 to 64 lower-case hexadecimal digits.
    """
    if digest is None:
        return
    if not isinstance(digest, str) or not _PINNED.fullmatch(digest):
        raise ValueError(
            "digest must be the 64 lower-case hexadecimal digits that `shardio info` prints, or the first 12 or more "
            f"of them; found {show(digest)}"
        )
    if not manifest.digest.startswith(digest):
        raise FormatError(
            f"{path}: digest: expected {digest}, found {manifest.digest}: this is not the pinned set; "
            "open the folder of the pinned set, or pin the digest that `shardio info` prints for this set"
        )


def check_split(place: object, manifest: Manifest, split: str) -> None:
    """Raises SetNotFoundError if the set has no split of this name. `place`, its folder or URL, is for the message."""
    if not isinstance(split, str) or split not in manifest.splits:
        found = ", ".join(sorted(manifest.splits))
        hint = did_you_mean(str(split), manifest.splits)
        raise SetNotFoundError(f"{place}: expected a split {split!r}, found {found}{hint}")


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir() and (folder.parent / MANIFEST_NAME).exists():
        split = "" if folder.exists() else f", and its split {folder.name!r}"
        return f"{folder.parent} is a set: did you mean this folder{split}?"
    if not folder.exists():
        return f"the folder {folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if (folder / WORK_FOLDER).exists():
        return "a conversion into this folder was not finished; the same `shardio convert` command resumes it"
    if below := sorted(path.parent for path in folder.glob(f"[!.]*/{MANIFEST_NAME}")):
        found = first_of(below, 3, lambda path: f"{path.name}/")
        return f"this folder holds no shard set; found {found} here: did you mean {first_of(below, 3)}?"
    return "this folder holds no shard set; `shardio convert SRC OUT` makes one"


def commit_manifest(folder: Path | FolderHandle, manifest: Manifest, file: AtomicFile | None = None) -> None:
    """Publishes the set: makes its files durable, whoever has written them, and then writes its manifest, into `file`
    if the caller has begun it.

    Publishes nothing, and raises FormatError, if the manifest is invalid; ConvertError, if it is too large for readers;
    OSError, if a file cannot be synced. That file is removed, as another sync would succeed without writing it.
    """
    path, data = folder / MANIFEST_NAME, manifest.dumps()
    _check_room(len(data), len(manifest.classes), sum(len(split.shards) for split in manifest.splits.values()))
    try:
        parse_manifest(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}; nothing is published") from None
    for entry in manifest.files:
        place = folder / entry.file
        with contextlib.suppress(FormatError), naming(place), open_regular(place)[0] as made:  # if there is such a file
            try:
                os.fsync(made.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    place.unlink()
                raise
    with file or AtomicFile(path) as begun, naming(path):
        write_all(begun.descriptor, data)
        begun.commit()


def check_names_fit(classes: Sequence[str], class_names: Sequence[str] = (), shards: Sequence[str] = ()) -> None:
    """Raises ConvertError if the manifest of a set with these names would be too large for readers.

    `shards` are the file names of all shards.
    """
    names = len(json.dumps([*classes, *class_names])) + 2 * (len(classes) + len(class_names))  # an indent for each
    _check_room(names + sum(map(len, shards)) + _SHARD_TEXT_NBYTES * len(shards), len(classes), len(shards))


def _check_room(nbytes: int, num_classes: int, num_shards: int) -> None:
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ConvertError(
            f"{MANIFEST_NAME}: expected at most {MAX_MANIFEST_NBYTES:,} bytes, found {nbytes:,} for {num_classes:,} "
            f"classes and {num_shards:,} shards: shorten the names of the classes, or make fewer shards with a "
            "larger `--shard-size`, from Python `shard_size=`"
        )
